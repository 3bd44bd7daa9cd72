"""Python programs as forks of a process that has torch loaded: each starts in milliseconds, not after its imports.

Of `subprocess.Popen` there is what tests and `gradsync.bench.launch` use. A program sees the environment, arguments and
output it is given, and as its parent the process that started it; it ends as an interpreter does, `atexit` included.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO

from gradsync.bench import launch
from gradsync.bench.launch import Loopback
from tests.world import PRELOADED


class Forked:
    """`python -m MODULE ...` or `python FILE ...`; stderr goes to a file that is open."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], stdout: int = subprocess.DEVNULL, stderr: IO[bytes]
    ) -> None:
        assert argv[0] == sys.executable
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        read, write = context.Pipe(duplex=False)
        output = write if stdout == subprocess.PIPE else None
        process = context.Process(
            target=_main,
            args=(list(argv[1:]), dict(env), os.getpid(), str(Path.cwd()), output, stderr.name),
            daemon=True,
        )
        process.start()
        write.close()
        self.args = argv
        self.pid = process.pid
        self.stdout = os.fdopen(os.dup(read.fileno()), "rb") if output else None
        read.close()
        self.returncode: int | None = None
        self._process = process
        self._reaper = threading.Thread(target=self._reap, daemon=True)  # several threads may wait for it
        self._reaper.start()

    def wait(self, timeout: float | None = None) -> int:
        self._reaper.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        self._process.kill()

    def _reap(self) -> None:
        self._process.join()
        self.returncode = self._process.exitcode


def _main(
    argv: list[str], env: dict[str, str], parent: int, folder: str, output: Connection | None, errors: str
) -> None:
    """The program's process: as the interpreter would, from its command line on."""
    out = output.fileno() if output else os.open(os.devnull, os.O_WRONLY)
    err = os.open(errors, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    os.getppid = lambda: parent
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    module = argv[0] == "-m"
    sys.argv = argv[module:]
    try:
        if module:
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()


_USED = ("PIPE", "DEVNULL", "TimeoutExpired")
AS_SUBPROCESS = SimpleNamespace(Popen=Forked, **{name: getattr(subprocess, name) for name in _USED})


def run_on_two_ranks(argv: Sequence[str], folder: Path, limit_s: float) -> list[str]:
    """What each rank of a program prints; with the fixture `forked_ranks`. Both end well."""
    where, ranks, errors = Loopback(2), [], [folder / f"{rank}.err" for rank in range(2)]
    for rank, path in enumerate(errors):
        with path.open("wb") as file:
            ranks.append(where.spawn(rank, argv, {}, stdout=subprocess.PIPE, stderr=file))
    try:
        failed = launch.first_failure(ranks, limit_s)
        said = "".join(path.read_text(encoding="utf-8") for path in errors)
        assert failed is None and all(rank.returncode == 0 for rank in ranks), said[-3000:]
        return [rank.stdout.read().decode() for rank in ranks]
    finally:
        for rank in ranks:
            launch.end(rank)
            rank.stdout.close()
