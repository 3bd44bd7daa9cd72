"""Starts the ranks of a run in emulated nodes (network namespaces) where possible, else on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from ..cluster import Lab, LabUnavailableError, Scenario
from ..cluster.awake import awake
from ..cluster.cluster import end, first_failure, free_port
from ..cluster.processors import confined, shares_of_nodes

RANK_ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1"}  # huge pages for large tensors: first writes are 4-5x faster
END_GRACE_S = 10.0  # after one rank failed, the others get this long to notice and say why
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)  # signals that end a process with corrupted memory

LOOPBACK = "loopback (not shaped)"  # in records, in place of a link's rate
START_OVER = "start over"  # the event before a run's second attempt

T = TypeVar("T")


class RankCrashedError(RuntimeError):
    """Raised where a rank process was ended by a signal in `CRASHES`, as when it crashes."""


class Launcher(Protocol):
    """The interface for starting rank processes on emulated nodes or on loopback."""

    def spawn(self, rank: int, argv: Sequence[str], env: Mapping[str, str], **popen: Any) -> subprocess.Popen[Any]: ...

    def describe(self) -> dict[str, Any]: ...


class Loopback:
    """Starts all ranks on this machine's loopback interface, without limits on rates; nodes only divide processors."""

    def __init__(self, world_size: int, ranks_per_node: int = 1, *, is_awake: bool = False) -> None:
        self.world_size = world_size
        self.ranks_per_node = ranks_per_node
        self.is_awake = is_awake
        self._processors = shares_of_nodes(world_size // ranks_per_node)
        self._port = free_port()

    def spawn(self, rank: int, argv: Sequence[str], env: Mapping[str, str], **popen: Any) -> subprocess.Popen[Any]:
        node = rank // self.ranks_per_node
        torchrun = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.ranks_per_node),
            "GROUP_RANK": str(node),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with confined(self._processors, node):
            return subprocess.Popen(list(argv), env={**os.environ, **torchrun, **env}, **popen)

    def describe(self) -> dict[str, Any]:
        return {
            "links": LOOPBACK,
            "processors_kept_awake": self.is_awake,
            "processors_of_nodes": self._processors,
        }


@contextmanager
def cluster(scenario: Scenario, notes: list[str], *, loopback: bool = False) -> Iterator[Launcher]:
    """Yields the emulated cluster of a scenario, or loopback if asked for or if emulation fails; `notes` says why."""
    world_size = scenario.nodes * scenario.ranks_per_node
    with ExitStack() as stack:
        if loopback:
            notes.append("ran on loopback, as asked for: links are not shaped and bytes cost nothing")
        else:
            try:
                yield stack.enter_context(Lab(scenario))
                return
            except LabUnavailableError as error:
                notes.append(f"ran on loopback, not on shaped links: {error}")
        yield Loopback(world_size, scenario.ranks_per_node, is_awake=stack.enter_context(awake()))


def run_ranks(
    where: Launcher,
    world_size: int,
    module: str,
    spec: str,
    on_event: Callable[[dict[str, Any]], None],
    env: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Runs `python -m module SPEC OUT PARENT` as every rank; returns the content of each rank's OUT, by rank.

    Rank 0 prints events, one JSON object a line. PARENT is this process; ranks end when it ends.

    Args:
        env: further variables of the ranks' environment.

    Raises:
        RuntimeError: a rank failed; has the last lines of the rank that failed first, and the last line of each later
            one. A `RankCrashedError` where the first one crashed.
    """
    with tempfile.TemporaryDirectory(prefix="gradsync-run-") as folder:
        place = Path(folder)
        (place / "spec.json").write_text(spec, encoding="utf-8")
        ranks = []
        for rank in range(world_size):
            paths = (str(place / "spec.json"), str(place / f"{rank}.json"))
            argv = [sys.executable, "-m", module, *paths, str(os.getpid())]
            with (place / f"{rank}.err").open("wb") as errors:
                output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                ranks.append(where.spawn(rank, argv, {**RANK_ENVIRONMENT, **env}, stdout=output, stderr=errors))
        try:
            failed = _follow(ranks, on_event)
        finally:
            for process in ranks:
                end(process)
            assert ranks[0].stdout is not None
            ranks[0].stdout.close()
        if failed is not None:
            crashed = -ranks[failed].returncode in CRASHES
            raise (RankCrashedError if crashed else RuntimeError)(_report(failed, ranks, place))
        return [json.loads((place / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(world_size)]


def once_more_after_crash(run: Callable[[], T], notes: list[str], on_event: Callable[[dict[str, Any]], None]) -> T:
    """Calls `run`, and once more if a rank crashed, with a note and an event; for runs with torch's sparse all-reduce.

    torch's own sparse all-reduce on gloo corrupts memory, rarely (docs/concepts/semantics.md). The note says that the
    run was repeated, as a crash may have another cause.
    """
    try:
        return run()
    except RankCrashedError as crash:
        what = str(crash).splitlines()[0].rstrip(":")
        cause = "torch's sparse all-reduce on gloo can do that (docs/concepts/semantics.md)"
        notes.append(f"began anew once: {what}; {cause}")
        on_event({"kind": START_OVER})
        return run()


def _follow(ranks: list[subprocess.Popen[Any]], on_event: Callable[[dict[str, Any]], None]) -> int | None:
    """Calls `on_event` with rank 0's events until all ranks have ended; returns the rank that failed first, if any.

    After a failure the other ranks are ended `END_GRACE_S` later: they may wait for the failed rank until their
    group's timeout.
    """
    failures: list[int | None] = []

    def watch() -> None:
        failures.append(first_failure(ranks))
        if failures[0] is not None:
            deadline = time.monotonic() + END_GRACE_S
            for process in ranks:
                end(process, patience_s=max(deadline - time.monotonic(), 0.0))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    assert ranks[0].stdout is not None
    for line in ranks[0].stdout:
        on_event(json.loads(line))
    watcher.join()
    return failures[0]


def _report(failed: int, ranks: list[subprocess.Popen[Any]], place: Path) -> str:
    """Returns the last lines of the rank that failed first, and the last line of each other failed rank."""

    def said(rank: int) -> list[str]:
        text = (place / f"{rank}.err").read_text(encoding="utf-8", errors="replace").strip()
        return text.splitlines() or ["(it said nothing)"]

    lines = [f"rank {failed} ended with code {ranks[failed].returncode}:", *said(failed)[-15:]]
    others = (rank for rank, process in enumerate(ranks) if rank != failed and process.returncode != 0)
    lines += [f"rank {rank} then ended with code {ranks[rank].returncode}: {said(rank)[-1]}" for rank in others]
    return "\n".join(lines)
