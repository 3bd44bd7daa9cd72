"""Runs a case: forks its ranks on loopback or into an emulated cluster, and gathers the events that they write."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ..cluster import Lab, Scenario
from ..cluster.cluster import MASTER_PORT, free_port
from ..cluster.counters import NODE_INTERFACE
from .cases import LINK_DOWN_S, LINK_RATE, LOSS, LOW_RATE, PAUSE_S, Case, Fault
from .rank import Seat, keep_stores, run_rank

LIMIT_S = 100.0  # of a case, after which ranks count as hung
POLL_S = 0.05
TRACE_S = 0.3  # for a hung rank to write where it is
# Modules that the forking server loads: optimisers import dynamo when they are made, measurements scipy.
PRELOADED = [
    *("torch", "torch.distributed", "torch._dynamo", "scipy.optimize", "scipy.special"),
    *("gradsync", "gradsync_lab.faults.job"),
]
SUPERVISOR = -1  # the rank of events that no rank writes

Event = dict[str, Any]


class NotPossibleError(RuntimeError):
    """Raised where this machine cannot bring a fault about; says what was tried."""


def run_case(case: Case) -> list[Event]:
    """Runs a case to its end and returns its events, in order of time.

    Events of the supervisor have the rank `SUPERVISOR`. Such are `hung`, with the rank and its stacks, `ended`, with
    the ranks' exit codes, and `fault`, where a link was struck.

    Raises:
        NotPossibleError: for a link's fault that this machine cannot bring about.
        LabUnavailableError: for a link's fault where no cluster can be emulated.
    """
    with tempfile.TemporaryDirectory(prefix="gradsync-fault-") as folder:
        if not case.is_of_link:
            with _ranks(case, folder) as ranks:
                return _Run(case, folder, ranks).events()
        # The last node has the store that outlives the ranks.
        with Lab(Scenario(nodes=case.size + 1, link=LINK_RATE)) as lab, _ranks(case, folder, lab) as ranks:
            return _Run(case, folder, ranks, lab).events()


@contextmanager
def _ranks(case: Case, folder: str, lab: Lab | None = None) -> Iterator[list[BaseProcess]]:
    """Starts the store's process and the ranks; kills at the end what is left of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    mine, theirs = context.Pipe(duplex=False)
    doors = [None] * (case.size + 1) if lab is None else [lab.door(node) for node in range(case.size + 1)]
    hosts = ["127.0.0.1"] * (case.size + 1) if lab is None else lab.addresses
    keeper = context.Process(target=keep_stores, args=(theirs, doors[-1]), daemon=True)
    started: list[BaseProcess] = [keeper]
    try:
        keeper.start()
        theirs.close()
        ports = mine.recv()
        first_port = free_port() if lab is None else MASTER_PORT
        interface = "lo" if lab is None else NODE_INTERFACE
        for rank in range(case.size):
            seat = Seat(rank, hosts[-1], ports, hosts[0], first_port, interface, folder, doors[rank])
            process = context.Process(target=run_rank, args=(case.model_dump_json(), seat), daemon=True)
            process.start()
            started.append(process)
        yield started[1:]
    finally:
        for each in started:
            if each.pid is not None:
                each.kill()  # also one that is stopped
                each.join()
        mine.close()


class _Run:
    """The supervision of one case: strikes links, wakes paused ranks, and waits for the end."""

    def __init__(self, case: Case, folder: str, ranks: list[BaseProcess], lab: Lab | None = None) -> None:
        self.case, self.folder, self.ranks, self._lab = case, Path(folder), ranks, lab
        self._own: list[Event] = []

    def events(self) -> list[Event]:
        """Waits until all ranks have ended that can, and returns all events."""
        deadline = time.monotonic() + LIMIT_S
        waiting = self._waiting()
        while waiting and time.monotonic() < deadline:
            self._intervene()
            time.sleep(POLL_S)
            waiting = self._waiting()
        for rank in waiting:
            self._say("hung", of=rank, stacks=self._stacks(rank))
        self._say("ended", codes=[process.exitcode for process in self.ranks])
        return self._read()

    def _waiting(self) -> list[int]:
        """Returns the ranks that run and are not stopped for good."""
        stopped = self.case.victim if self.case.fault is Fault.STOP else None
        alive = [rank for rank, process in enumerate(self.ranks) if process.is_alive()]
        # A victim that was not struck yet is waited for: it may be struck only after the others have ended.
        return [] if alive == [stopped] and self._time_of("fault") is not None else alive

    def _intervene(self) -> None:
        """Wakes a rank that was stopped for a while; strikes a link once the case's step is over, and heals it."""
        case, struck = self.case, self._time_of("fault")
        if case.fault is Fault.PAUSE and struck is not None and time.monotonic() - struck >= PAUSE_S:
            with suppress(ProcessLookupError):
                os.kill(self.ranks[case.victim].pid or 0, signal.SIGCONT)
        if self._lab is None:
            return
        if struck is None and self._has_come(case.step):
            self._say("fault")
            _strike_link(self._lab, case)
        elif struck is not None and self._time_of("healed") is None and self._are_through():
            self._say("healed")
            _heal_link(self._lab, case)

    def _are_through(self) -> bool:
        """Whether all ranks have ended their training, well or by an error."""
        through = {event["rank"] for event in self._read() if event["what"] in ("error", "trained")}
        return len(through - {SUPERVISOR}) == self.case.size

    def _has_come(self, step: int) -> bool:
        return any(event["what"] == "step" and event["step"] >= step for event in self._read())

    def _time_of(self, what: str) -> float | None:
        return next((event["t"] for event in self._read() if event["what"] == what), None)

    def _say(self, what: str, **more: Any) -> None:
        self._own.append({"t": time.monotonic(), "rank": SUPERVISOR, "what": what, **more})

    def _stacks(self, rank: int) -> str:
        with suppress(ProcessLookupError):
            os.kill(self.ranks[rank].pid or 0, signal.SIGUSR1)
        time.sleep(TRACE_S)
        trace = self.folder / f"{rank}.trace"
        return trace.read_text()[-3000:] if trace.exists() else ""

    def _read(self) -> list[Event]:
        found = list(self._own)
        for path in self.folder.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                with suppress(json.JSONDecodeError):  # the rank is writing it, or was killed meanwhile
                    found.append(json.loads(line))
        return sorted(found, key=lambda event: event["t"])


def _strike_link(lab: Lab, case: Case) -> None:
    """Makes the link of the victim's node fail."""
    match case.fault:
        case Fault.LINK_PAUSE:
            lab.link_down(case.victim)
            time.sleep(LINK_DOWN_S)
            lab.link_up(case.victim)
        case Fault.LINK_DOWN:
            lab.link_down(case.victim)
        case Fault.LINK_RATE:
            lab.set_rate(case.victim, LOW_RATE)
        case Fault.LINK_LOSS:
            try:
                lab.set_loss(case.victim, LOSS)
            except RuntimeError as error:
                raise NotPossibleError(f"packets cannot be dropped at random: nftables for bridges: {error}") from None


def _heal_link(lab: Lab, case: Case) -> None:
    """Undoes what may hinder the ranks that start again; a link that is down for ever stays down."""
    if case.fault is Fault.LINK_RATE:
        lab.set_rate(case.victim, LINK_RATE)
    elif case.fault is Fault.LINK_LOSS:
        lab.set_loss(case.victim, 0.0)
