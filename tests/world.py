"""`World`: ranks as processes, for tests of what needs real process groups.

Processes are forked from a server that has torch loaded, wait for work, and are kept between tests: a call costs
milliseconds. A test sends a module-level function and plain arguments; what it returns comes back by rank, as does the
traceback of a rank that raised. A rank that does not answer is named, shows where it hangs, and is killed. Warnings are
errors in the ranks, as in the tests.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

GRACE_S = 15.0  # for the other ranks, once one has failed
COLLECTIVE_TIMEOUT_S = 20.0  # of the default process group
LIMIT_S = 100.0  # of a call, on a machine with other work; below the timeout of a test
# Modules that the forking server loads. Optimisers import dynamo when they are made, measurements scipy. Names of
# gradsync are imported when they are used; tests' modules import pytest; the lab may be missing.
PRELOADED = [
    *("torch", "torch.distributed", "torch.distributed.checkpoint", "torch.testing", "torch._dynamo"),
    *("scipy.optimize", "scipy.special", "pytest"),
    *("gradsync.frontends.attach", "gradsync.planner", "gradsync.tuning.auto", "gradsync_lab.bench.train_rank"),
]
ORACLE_BACKEND = "gloo_with_one_thread"


def on_all_ranks(tensors: Iterable[Tensor]) -> Tensor:
    """Returns the tensors' elements on all ranks, (ranks, elements). Collective."""
    mine = torch.cat([t.detach().reshape(-1) for t in tensors])
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a function on one rank: it returned, raised, hung, or its process is gone."""

    value: Any = None
    error: str | None = None
    died: bool = False


class World:
    """`size` processes that run functions; `run` is `start` and `outcomes`, for ranks that are meant to fail.

    `store_on_rank_0`: the ranks meet at rank 0's store, as without torchrun, else at one in this process.
    """

    def __init__(self, size: int, *, store_on_rank_0: bool = False) -> None:
        self.size = size
        self.store_on_rank_0 = store_on_rank_0
        self._store: dist.TCPStore | None = None
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._traces: list[Path] = []
        self._folder = tempfile.TemporaryDirectory(prefix="gradsync-world-")
        self._groups = 0
        self._initialised = 0  # size of the default process group the ranks have; 0: none
        self._busy = 0

    def run(
        self, function: Callable[..., Any], *arguments: Any, size: int | None = None, limit_s: float = LIMIT_S
    ) -> Any:
        """Calls `function(*arguments)` on `size` ranks, in a process group of these ranks; returns results by rank."""
        self.start(function, *arguments, size=size)
        outcomes = self.outcomes(limit_s)
        if failed := [f"--- rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.error is not None]:
            raise AssertionError(f"{len(failed)} of {len(outcomes)} ranks failed\n" + "\n".join(failed))
        return [outcome.value for outcome in outcomes]

    def start(self, function: Callable[..., Any], *arguments: Any, size: int | None = None) -> None:
        """Sends the function to the ranks and returns."""
        self._ensure_processes()
        size = size or self.size
        assert 1 <= size <= self.size and not self._busy
        join = None
        if size != self._initialised:
            self._groups += 1
            join = f"group{self._groups}"
        work = pickle.dumps((function.__module__, function.__qualname__, arguments, join, size))
        for connection in self._connections if join else self._connections[:size]:
            connection.send_bytes(work)
        self._initialised, self._busy = size, size

    def outcomes(self, limit_s: float, *, lost: Collection[int] = ()) -> list[Outcome]:
        """Waits for all ranks but `lost`; kills ranks that do not answer, and makes the processes anew."""
        size, self._busy = self._busy, 0
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            waiting = {self._connections[rank]: rank for rank in range(size) if rank not in {*found, *lost}}
            if not waiting:
                break
            for connection in wait(list(waiting), max(deadline - time.monotonic(), 0)):
                found[waiting[connection]] = self._receive(waiting[connection])
            if any(outcome.error for outcome in found.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        hung = [rank for rank in range(size) if rank not in found]
        for rank in hung:
            found[rank] = Outcome(error=f"hung, and was killed, at\n{self._where(rank)}", died=True)
        if any(outcome.error for outcome in found.values()):
            self._end_processes()
        return [found[rank] for rank in range(size)]

    def close(self) -> None:
        """Ends the processes for good."""
        self._end_processes()
        self._folder.cleanup()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end_processes(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._traces = [], [], []
        self._initialised, self._store = 0, None

    def _ensure_processes(self) -> None:
        if self._processes:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        port = 0
        if not self.store_on_rank_0:
            self._store = _store_server()
            port = self._store.port
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            trace = Path(self._folder.name) / f"rank{rank}.trace"
            process = context.Process(
                target=_rank_main, args=(rank, theirs, port, str(trace), str(Path.cwd())), daemon=True
            )
            process.start()
            theirs.close()
            if self.store_on_rank_0 and rank == 0:
                port = mine.recv()
            self._processes.append(process)
            self._connections.append(mine)
            self._traces.append(trace)

    def _receive(self, rank: int) -> Outcome:
        try:
            return Outcome(*pickle.loads(self._connections[rank].recv_bytes()))
        except (EOFError, ConnectionError):
            self._processes[rank].join()
            return Outcome(error=f"the process ended with exit code {self._processes[rank].exitcode}", died=True)

    def _where(self, rank: int) -> str:
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.2)
        return self._traces[rank].read_text() or "(it did not say where)"


def _rank_main(rank: int, connection: Connection, port: int, trace: str, folder: str) -> None:
    """Runs a rank's process: waits for functions, calls them and sends their outcomes."""
    gc.freeze()  # what is imported already is not looked at again
    sys.path.insert(0, folder)
    warnings.simplefilter("error")
    # As in pyproject.toml.
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled", UserWarning, "tests")
    with Path(trace).open("w") as trace_file:
        faulthandler.register(signal.SIGUSR1, trace_file)
        if port:
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
        else:
            store = _store_server()
            connection.send(store.port)
        while True:
            try:
                module, name, arguments, join, size = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            if join:
                _join_group(store, join, rank, size)
            if rank < size:
                connection.send_bytes(_call(module, name, arguments))
                _destroy_left_groups()


def _store_server() -> dist.TCPStore:
    """Returns a new store that listens here, at a free `port`.

    A store asks for the name of each client's address before it serves the next one. It listens on IPv4 alone, whose
    loopback is in the file of hosts: on IPv6 it would ask a name server, for whose silence it waits 5 s.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    # The store closes the listener.
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _join_group(store: dist.Store, prefix: str, rank: int, size: int) -> None:
    if dist.is_initialized():
        _destroy_groups([dist.group.WORLD])
    if rank < size:
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        own = dist.PrefixStore(prefix, store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timeout)


def _destroy_left_groups() -> None:
    """Destroys the groups that a test made and left, beside the default one and those of attachments.

    A thread of each wakes up 100 times a second. Hundreds of them, of tests gone by, would take most of the cores.
    """
    if left := _left_groups():
        _destroy_groups(left)
        gc.collect()  # attachments, and models in shards, are in cycles, and hold groups


def _left_groups() -> list[Any]:
    groups = dist.distributed_c10d._world.pg_map
    return [g for g in groups if g is not dist.group.WORLD and not g.group_name.startswith("gradsync/")]


def _destroy_groups(groups: Sequence[Any]) -> None:
    for group in groups:
        dist.destroy_process_group(group)
    if "torch.distributed.tensor" in sys.modules:  # what it caches names the groups, and keeps them alive
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def new_oracle_group() -> dist.ProcessGroup:
    """Returns a group of all ranks on a gloo with one thread, for oracles that sum sparse gradients.

    Two threads corrupt memory where torch sums sparse tensors (docs/concepts/semantics.md), and ranks outlive a test.
    """
    if ORACLE_BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(ORACLE_BACKEND, _gloo_with_one_thread, devices=["cpu"])
    group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S), backend=ORACLE_BACKEND)
    return group


def _gloo_with_one_thread(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._threads = 1
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _call(module: str, name: str, arguments: tuple[Any, ...]) -> bytes:
    try:
        function = getattr(importlib.import_module(module), name)
        return pickle.dumps((function(*arguments), None))
    except BaseException:  # shown by the test
        return pickle.dumps((None, traceback.format_exc()))


@dataclass(frozen=True)
class Ranks:
    """The first `size` ranks of a running world."""

    world: World
    size: int

    def run(self, function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> Any:
        """See `World.run`."""
        return self.world.run(function, *arguments, size=self.size, limit_s=limit_s)
