"""The rank and number of ranks that torchrun gives this process in its environment, checked before anything waits."""

from __future__ import annotations

import os
import re
import socket
import time
from typing import NamedTuple

from ..costs.cluster import MOST_RANKS
from .console import beside

RANK, WORLD_SIZE, ADDRESS, PORT = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # "True": torchrun listens, not rank 0
PROBE_S = 3.0  # for one attempt to connect
PATIENCE_S = 2.0  # until it is said that nobody listens yet


class Ranks(NamedTuple):
    """The rank of this process, and the number of ranks (`size`), as torchrun sets them."""

    rank: int
    size: int


def ranks_of_environment(*, joins: bool) -> Ranks:
    """Returns this process's rank and the number of ranks as torchrun's variables give them; 0 of 1 without torchrun.

    `joins`: whether the command itself joins the other ranks by MASTER_ADDR and MASTER_PORT. It then raises where rank
    0 cannot be reached; else it prints a note, as a user's script may find the others by other means.

    Raises:
        ValueError: for variables that are missing, no numbers or out of range, and a master that nobody can reach.
    """
    bounds = {WORLD_SIZE: (1, MOST_RANKS), RANK: (0, MOST_RANKS - 1)}
    given = {name: _number(name, *between) for name, between in bounds.items() if name in os.environ}
    if not given:
        return Ranks(0, 1)
    if len(given) == 1:
        raise ValueError(
            f"of {RANK} and {WORLD_SIZE} only {[*given][0]} is set: set both, as torchrun does, or neither"
        )
    ranks = Ranks(_number(RANK, 0, given[WORLD_SIZE] - 1), given[WORLD_SIZE])
    missing = [name for name in (ADDRESS, PORT) if not os.environ.get(name)]
    if missing and joins:
        raise ValueError(f"{missing[0]} is not set: it must name where rank 0 listens, as torchrun sets it")
    if not missing:
        try:
            _require_master(os.environ[ADDRESS], _number(PORT, 0, 65535), ranks.rank)
        except OSError as error:
            text = f"{ADDRESS}={os.environ[ADDRESS]}, where rank 0 should listen, cannot be reached: {error}"
            if joins:
                raise ValueError(text) from None
            beside.print(f"Note: {text}", style="yellow")
    return ranks


def _number(name: str, least: int, most: int) -> int:
    text = os.environ[name]
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise ValueError(f"the environment variable {name} must be a whole number from {least} to {most}, got {text!r}")
    return int(text)


def _require_master(address: str, port: int, rank: int) -> None:
    """Checks that rank 0 can listen at the address, and that others can connect, or says that they wait for it.

    Raises:
        OSError: if the address is none, not of this machine though rank 0 runs here, or not reached.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError as error:
        raise OSError(f"it is no name of a host ({error})") from None
    if rank == 0 and os.environ.get(AGENT) != "True":
        with socket.socket(family, socket.SOCK_STREAM) as here:
            here.bind((place[0], 0, *place[2:]))
        return
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            with socket.create_connection((address, port), timeout=PROBE_S):
                return
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                beside.print(f"Waiting for rank 0: nobody listens at {address}:{port} yet")
                return
            time.sleep(0.1)
