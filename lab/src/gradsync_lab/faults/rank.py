"""The process of one rank of a case: finds its node and the others, runs the job, and writes down what happens.

Events are JSON lines, one each. Their times are those of the machine's monotonic clock, so that they can be compared
between ranks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not declare it

from ..cluster.keeper import die_with_parent, go_inside
from ..cluster.store import new_store
from .cases import Case

MEETING_S = 40.0  # for which a rank waits for the others at the start, and again before it starts again

Door = tuple[int, int] | None  # into a node of an emulated cluster (`Lab.door`); None: stay on loopback


@dataclass(frozen=True)
class Seat:
    """The place of a rank: where it runs, where it finds the others, and where it writes.

    Attributes:
        host, ports: the store that outlives the ranks, twice: for the job, and for the one that starts again.
        first_host, first_port: the store on rank 0.
    """

    rank: int
    host: str
    ports: tuple[int, int]
    first_host: str
    first_port: int
    interface: str
    folder: str
    door: Door = None

    def file(self, ending: str) -> Path:
        """Returns the path of the rank's file: `jsonl` for events, `trace` for stacks on SIGUSR1, `err` for output."""
        return Path(self.folder) / f"{self.rank}.{ending}"


def run_rank(text: str, seat: Seat) -> None:
    """Runs one rank of the case that `text` has as JSON; the entry of its process."""
    _enter(seat.door)
    os.environ["GLOO_SOCKET_IFNAME"] = seat.interface
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with (
        seat.file("trace").open("w") as trace,
        seat.file("err").open("w", buffering=1) as errors,
        seat.file("jsonl").open("w", buffering=1) as journal,
    ):
        faulthandler.register(signal.SIGUSR1, trace, all_threads=True)
        sys.stderr = sys.stdout = errors
        os.dup2(errors.fileno(), 2)  # warnings of C++

        def say(what: str, **more: Any) -> None:
            event = {"t": time.monotonic(), "rank": seat.rank, "what": what, **more}
            journal.write(json.dumps(event) + "\n")

        _run(Case.model_validate_json(text), seat, say)


def _run(case: Case, seat: Seat, say: Any) -> None:
    import torch

    from .job import Job  # whose libraries the forking server has loaded

    torch.set_num_threads(1)
    patience = timedelta(seconds=MEETING_S)
    # Both are made while all is well: connecting to a lost host takes minutes.
    later = TCPStore(seat.host, seat.ports[1], is_master=False, timeout=patience)
    if case.store_on_rank_0:
        is_host = seat.rank == 0
        store = TCPStore(seat.first_host, seat.first_port, None, is_host, patience, wait_for_workers=False)
    else:
        store = TCPStore(seat.host, seat.ports[0], is_master=False, timeout=patience)
    later.add("here", 1)
    while later.add("here", 0) < case.size:
        time.sleep(0.01)
    Job(case, seat.rank, say, store, later).run()


def keep_stores(connection: Connection, door: Door) -> None:
    """Hosts two stores until the process is killed, and sends their ports; the entry of a process."""
    _enter(door)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # ranks that die are no news
    stores = [new_store("0.0.0.0") for _ in range(2)]
    connection.send(tuple(store.port for store in stores))
    while True:
        signal.pause()


def _enter(door: Door) -> None:
    die_with_parent()
    if door is not None:
        go_inside(*door)
