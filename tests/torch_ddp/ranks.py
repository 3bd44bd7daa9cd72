"""Runs one of torch's DDP tests on ranks as processes, forked from one that has torch and its tests loaded."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

GRACE_S = 10.0  # for the other ranks, once one has failed
LIMIT_S = 100.0
_SUITE = "tests.torch_ddp.suite"


def set_environment(size: int) -> None:
    """Sets the environment that torch's tests read when they are imported; called before the first test."""
    os.environ.update(
        BACKEND="gloo", WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""
    )


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test: passed on all ranks, skipped with a reason, or the failures of its ranks."""

    passed: bool
    skipped: str = ""
    failures: str = ""


def run(way: str, name: str, size: int) -> Outcome:
    """Runs the test `name` of torch's module with the class of this `way`, see `suite.WAYS`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_SUITE])
    with tempfile.TemporaryDirectory(prefix="torch-ddp-") as folder:
        for each in ("barrier", "test_dir", "init_dir"):
            Path(folder, each).mkdir()
        processes, pipes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(way, name, rank, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        hung = _wait(processes, folder)
        return _outcome([process.exitcode for process in processes], pipes, hung, folder)


def _rank(way: str, name: str, rank: int, folder: str, pipe: Connection) -> None:
    trace = Path(folder, f"{rank}.trace").open("w")  # until the process ends
    faulthandler.register(signal.SIGUSR1, trace, all_threads=True)
    from tests.torch_ddp import suite

    suite.run(way, name, rank, folder, pipe)


def _wait(processes: list[Any], folder: str) -> list[int]:
    """Waits until all processes have ended; kills the others, and returns their ranks."""
    deadline, failed = time.monotonic() + LIMIT_S, False
    while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
        if not failed and any(process.exitcode not in (None, 0) for process in processes):
            failed, deadline = True, time.monotonic() + GRACE_S
        next((p for p in processes if p.exitcode is None), processes[0]).join(0.02)
    hung = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for rank in hung:
        os.kill(processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.2)
        processes[rank].kill()
        processes[rank].join()
    return hung


def _outcome(codes: list[int], pipes: list[Connection], hung: list[int], folder: str) -> Outcome:
    if not any(codes):
        return Outcome(passed=True)
    skips = sorted(Path(folder).glob("*.skip"))
    if len(skips) == len(codes):
        return Outcome(passed=False, skipped=skips[0].read_text())
    parts = []
    for rank, (code, pipe) in enumerate(zip(codes, pipes, strict=True)):
        told = ""
        try:
            told = pipe.recv() if pipe.poll() else ""
        except EOFError:
            pass
        if rank in hung:
            told = f"did not end, at\n{Path(folder, f'{rank}.trace').read_text()[-6000:]}"
        output = Path(folder, f"{rank}.out")
        written = output.read_text()[-3000:] if output.exists() else ""
        parts.append(f"--- rank {rank}, exit code {code}: {told}\n{written}")
    return Outcome(passed=False, failures="\n".join(parts))
