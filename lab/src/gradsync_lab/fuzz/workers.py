"""Standing processes that run cases, kept between cases; one that does not answer shows its stack and is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from torch._C._distributed_c10d import TCPStore

from ..cluster.store import new_store
from .case import Case
from .judge import RAISED, problems
from .trace import Trace
from .worker import ERROR, serve

MOST_RANKS = 5
LIMIT_S = 120.0  # of a case; operations among ranks have shorter limits
START_LIMIT_S = 300.0  # to load torch, on a busy machine
DUMP_S = 0.5  # to write a stack
MOST_CHARACTERS = 4000  # of what a process said, in a problem
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # ranks share the cores of this machine
PRELOADED = ["torch._dynamo", "torch.distributed", "scipy.optimize", "scipy.special", f"{__package__}.worker"]
HUNG = "hung"  # how the problem of a case begins that did not end


class Workers:
    """Up to `count` processes that run cases together, one for each rank; or one for cases in threads."""

    def __init__(self, count: int = MOST_RANKS) -> None:
        self._count = count
        self._folder = tempfile.TemporaryDirectory(prefix="gradsync-fuzz-")
        self._store: TCPStore | None = None
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._meetings = 0
        self._size = 0  # of the present process group

    def judged(self, case: Case) -> list[str]:
        """Runs a case and returns its problems; one that begins with "hung" or "died" is that of a process."""
        if not self._processes:
            self._start()
        told = self._told(case)
        answers = {rank: answer for rank, answer in told.items() if isinstance(answer, bytes)}
        if len(answers) < len(told):
            self._end()
            return [f"{answer}" for answer in told.values() if isinstance(answer, str)]
        if case.world == "threads":
            found: list[str] = json.loads(answers[0])
        else:
            found = problems(case, [Trace.from_bytes(answers[rank]) for rank in range(case.size)])
        if any(RAISED in problem for problem in found):  # ranks may be at different places, or threads be left
            self._end()
        return found

    def _told(self, case: Case) -> dict[int, bytes | str]:
        """Returns what each process answers, or the text of what is wrong with it."""
        threads = case.world == "threads"
        if not threads and case.size != self._size:
            self._meetings, self._size = self._meetings + 1, case.size
        order = {"case": case.to_json(), "size": case.size, "meeting": f"group{self._meetings}", "port": self._port}
        asked = range(1) if threads else range(self._count)
        for rank in asked:
            with suppress(ConnectionError):  # of a process that died, which shows below
                self._connections[rank].send_bytes(json.dumps({**order, "rank": rank}).encode())
        told: dict[int, bytes | str] = {}
        deadline = time.monotonic() + LIMIT_S
        while len(told) < len(asked) and time.monotonic() < deadline:
            waiting = {self._connections[rank]: rank for rank in asked if rank not in told}
            for connection in wait(list(waiting), max(deadline - time.monotonic(), 0.0)):
                assert isinstance(connection, Connection)
                told[waiting[connection]] = self._received(connection, waiting[connection])
        for rank in asked:
            if rank not in told:
                told[rank] = f"{HUNG}: rank {rank} did not answer within {LIMIT_S:.0f} s\n{self._where(rank)}"
        return told

    @property
    def _port(self) -> int:
        return 0 if self._store is None else self._store.port

    def _received(self, connection: Connection, rank: int) -> bytes | str:
        try:
            content = connection.recv_bytes()
        except (EOFError, ConnectionError):
            self._processes[rank].join()
            return f"died: rank {rank} ended with code {self._processes[rank].exitcode}\n{self._said(rank)}"
        if content[:1] == ERROR:
            return f"rank {rank} {RAISED}\n{content[1:].decode()[-MOST_CHARACTERS:]}"
        return content[1:]

    def _where(self, rank: int) -> str:
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(DUMP_S)
        return self._said(rank)

    def _said(self, rank: int) -> str:
        return self._errors(rank).read_text(encoding="utf-8", errors="replace")[-MOST_CHARACTERS:]

    def _errors(self, rank: int) -> Path:
        return Path(self._folder.name) / f"{rank}.err"

    def _start(self) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if self._count > 1:
            self._store = new_store()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(self._count):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, str(self._errors(rank))), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(mine)
        for rank, connection in enumerate(self._connections):
            if not connection.poll(START_LIMIT_S) or not isinstance(self._received(connection, rank), bytes):
                said = self._said(rank)
                self._end()
                raise RuntimeError(f"a process that runs cases did not start; it said\n{said}")

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._store, self._size = [], [], None, 0

    def close(self) -> None:
        """Ends the processes."""
        self._end()
        self._folder.cleanup()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
