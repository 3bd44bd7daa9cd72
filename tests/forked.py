"""Python programs as forks of a process that has torch loaded: each starts in milliseconds.

`Forked` has the members of `subprocess.Popen` that tests use. A program sees the environment, arguments and output that
it is given, and as its parent the process that started it; it ends as an interpreter does, `atexit` included.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO

from tests.world import PRELOADED


class Forked:
    """A forked process that runs `python -m MODULE ...` or `python FILE ...`; stderr goes to an open file."""

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
    """Runs the program from its command line on, as the interpreter would."""
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
    """Runs a program on two ranks, with the environment that torchrun gives, and returns what each rank prints.

    Both must end well within `limit_s` seconds; stderr goes to files in `folder`.
    """
    ranks, errors = [], [folder / f"{rank}.err" for rank in range(2)]
    usual = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
    usual |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    for rank, path in enumerate(errors):
        env = {**os.environ, **usual, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with path.open("wb") as file:
            ranks.append(Forked(argv, env=env, stdout=subprocess.PIPE, stderr=file))
    ends = time.monotonic() + limit_s
    try:
        while any(rank.returncode is None for rank in ranks) and not any(rank.returncode for rank in ranks):
            assert time.monotonic() < ends, f"still running after {limit_s} s"
            time.sleep(0.02)
        said = "".join(path.read_text(encoding="utf-8") for path in errors)
        assert all(rank.returncode == 0 for rank in ranks), said[-3000:]
        return [rank.stdout.read().decode() for rank in ranks if rank.stdout]
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
                rank.wait(10)
            if rank.stdout:
                rank.stdout.close()


def free_port() -> int:
    """Returns a TCP port that was free on this machine a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
