"""The standing process: it takes cases one after the other, as one rank of each, or with all ranks as its threads."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from .case import Case
from .models import FuzzModel
from .ranks import TIMEOUT_S, FrontendSubject, traced
from .settings import families
from .threads import judged

ANSWER, ERROR = b"a", b"e"  # the first byte of what is sent back


def serve(connection: Connection, said: str) -> None:
    """Answers orders, JSON, by bytes until the other side closes; `said`: the file for what is printed, and stacks."""
    with Path(said).open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # writes stacks to stderr
    torch.set_num_threads(1)
    families()  # what takes seconds to load is loaded before the first case, whose time is limited
    torch.optim.SGD([torch.zeros(1)])
    connection.send_bytes(ANSWER)
    stores = Stores()
    while True:
        try:
            order = json.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            connection.send_bytes(ANSWER + _answer(order, stores))
        except Exception:  # shown by the other side
            connection.send_bytes(ERROR + traceback.format_exc().encode())


class Stores:
    """The store at which the ranks meet, and the process group that this rank is in."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._meeting = ""

    def join(self, order: dict[str, Any]) -> None:
        """Joins the process group of an order, unless this rank is in it already."""
        if order["meeting"] == self._meeting:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        self._meeting = order["meeting"]
        if self._store is None:
            self._store = TCPStore("127.0.0.1", order["port"], is_master=False)
        if order["rank"] < order["size"]:
            own = PrefixStore(self._meeting, self._store)
            place: Any = {"rank": order["rank"], "world_size": order["size"]}
            dist.init_process_group("gloo", store=own, timeout=timedelta(seconds=TIMEOUT_S), **place)


def _answer(order: dict[str, Any], stores: Stores) -> bytes:
    case = Case.from_json(order["case"])
    if case.world == "threads":
        return json.dumps(judged(case)).encode()
    stores.join(order)
    rank = order["rank"]
    if rank >= case.size:
        return b""
    os.environ["WORLD_SIZE"] = str(case.size)
    os.environ["GROUP_RANK"] = str(rank // case.ranks_per_node)  # the node that the rank takes itself to be on
    model = FuzzModel(case)
    return traced(case, model, lambda: FrontendSubject(case, model), rank).to_bytes()
