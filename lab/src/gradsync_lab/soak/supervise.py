"""The supervisor of a soak: runs the job without faults, then with them, strikes, and keeps the record."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..cluster import Lab
from ..faults.cases import LINK_DOWN_S, LINK_RATE, LOSS, LOW_RATE, PAUSE_S, Fault
from ..faults.record import Header, append, open_record
from .agent import Agent, agent
from .journal import Line, Outcome, Told, statuses
from .settings import Folder, Settings, Strike, replaced

POLL_S = 0.1
AGENT_CENSUS_S = 10.0
FRESH_S = 2.0  # a rank that has noted its step within this time trains
LINK_BAD_S = 10.0  # for which a link is slow, or loses packets
STEPS_ON = 5  # steps behind a fault by which the job counts as going on
LOST_S = 120.0  # after which a job that does not go on is given up
CLEAN_EVERY = 20  # a run without faults writes a checkpoint in so many times `every`

OnLine = Callable[[Line], None]


class SoakError(RuntimeError):
    """Raised where a soak cannot go on: torchrun has ended, or the job does not train any more."""


def run_soak(settings: Settings, path: Path, on_line: OnLine) -> list[Line]:
    """Runs what the record does not have yet, and returns all of its lines.

    Raises:
        ValueError: for a file that is no record, or one of other settings or of another engine.
        SoakError: where the job does not go on.
        LabUnavailableError: for faults of links, where no cluster can be emulated.
    """
    lines = [
        Line.model_validate_json(text)
        for text in open_record(path, Header.here("soak", **settings.model_dump(mode="json")))
    ]
    top = path.with_name(path.name + ".d")

    def keep(line: Line) -> None:
        append(path, line)
        lines.append(line)
        on_line(line)

    if not any(line.kind == "clean" for line in lines):
        _run_clean(settings, Folder(top / "clean"), keep)
    if not any(line.kind == "final" for line in lines):
        _Soak(settings, Folder(top / "faults"), lines, keep).run()
    return lines


def _run_clean(settings: Settings, folder: Folder, keep: OnLine) -> None:
    """Runs the job without faults and without pauses, on loopback."""
    folder.path.mkdir(parents=True, exist_ok=True)
    own = settings.model_copy(update={"every": CLEAN_EVERY * settings.every, "faults": 0})
    told = Told(folder, settings.ranks)
    began = time.monotonic()
    with agent(folder, own, pace_s=0.0, links=False) as running:
        code = running.process.wait()
    keep(
        Line(kind="clean", elapsed_s=time.monotonic() - began, step=settings.steps, digest=_common(told, code, folder))
    )


def _common(told: Told, code: int, folder: Folder, events: list[dict[str, Any]] | None = None) -> str:
    """Returns the digest that all ranks ended with.

    Raises:
        SoakError: if torchrun failed, or ranks differ.
    """
    found = {event["digest"] for event in [*(events or []), *told.new()] if event["what"] == "final"}
    if code != 0 or len(found) != 1:
        said = (folder.path / "output.txt").read_text(encoding="utf-8", errors="replace")[-2000:]
        raise SoakError(f"torchrun ended with code {code}, ranks with {len(found)} different results; it said: {said}")
    return str(found.pop())


class _Soak:
    """The run with faults: strikes at the steps of the schedule, one fault at a time."""

    def __init__(self, settings: Settings, folder: Folder, lines: list[Line], keep: OnLine) -> None:
        self.settings, self.folder, self._keep = settings, folder, keep
        folder.path.mkdir(parents=True, exist_ok=True)
        struck = {line.strike.number for line in lines if line.strike is not None}
        self._due = [strike for strike in settings.strikes if strike.number not in struck]
        self._before_s = max((line.elapsed_s for line in lines), default=0.0) if struck else 0.0
        self._attempt = len({line.life.partition(".")[0] for line in lines if line.life})
        self._told = Told(folder, settings.ranks)
        self._began = time.monotonic()
        self._sampled = 0.0
        self._events: list[dict[str, Any]] = []  # since the last fault

    def run(self) -> None:
        """Runs to the last step.

        Raises:
            SoakError: where the job does not go on.
        """
        settings = self.settings
        with agent(self.folder, settings, pace_s=settings.step_s, links=settings.links) as running:
            while running.process.poll() is None:
                self._watch(running)
                if self._due and (at := self._training()) is not None and at >= self._due[0].step:
                    self._bring_about(running, self._due.pop(0))
                time.sleep(POLL_S)
            self._drain(running)
            digest = _common(self._told, running.process.returncode, self.folder, self._events)
        text = f"{len(self._due)} faults never came" if self._due else ""
        self._say("final", step=settings.steps, digest=digest, text=text)

    def _say(self, kind: Any, **more: Any) -> None:
        self._keep(Line(kind=kind, elapsed_s=self._before_s + time.monotonic() - self._began, **more))

    def _watch(self, running: Agent) -> None:
        self._drain(running)
        if time.monotonic() - self._sampled >= AGENT_CENSUS_S:
            self._sampled = time.monotonic()
            self._say("census", life=str(self._attempt), counts=running.census())

    def _drain(self, running: Agent) -> None:
        """Reads what the ranks have said since the last time."""
        for event in self._told.new():
            self._events.append(event)
            life = f"{self._attempt}.{event['life']}"
            if event["what"] == "census":
                counts = {name: event[name] for name in ("rss_kib", "tasks", "fds", "keys", "own_keys")}
                self._say("census", life=life, rank=event["rank"], step=event["step"], counts=counts)
            elif event["what"] == "restored" and event["rank"] == 0:
                self._say("life", life=life, step=event["step"])

    def _training(self) -> int | None:
        """Returns the step that all ranks have reached; None unless all train, in one life."""
        found = statuses(self.folder, self.settings.ranks)
        fresh = [each for each in found if time.monotonic() - each["t"] < FRESH_S]
        if len(fresh) < self.settings.ranks or len({each["life"] for each in fresh}) > 1:
            return None
        return int(min(each["step"] for each in fresh))

    def _life(self) -> int:
        return max((each["life"] for each in statuses(self.folder, self.settings.ranks)), default=0)

    def _bring_about(self, running: Agent, strike: Strike) -> None:
        """Brings a fault about, waits until the job trains on, and records what came of it."""
        life, began = self._life(), time.monotonic()
        self._events.clear()
        at = self._training() or 0
        undo = self._strike(running, strike)
        while running.process.poll() is None:
            self._watch(running)
            restarted = self._life() > life
            now = self._training()
            bad_for = time.monotonic() - began
            if undo is not None and (restarted or self._has_failed() or bad_for >= undo[0]):
                undo[1]()
                undo = None
            is_pending = self.folder.order(strike.victim).exists() or self._has_failed()  # a rank that raises ends
            if undo is None and now is not None and (restarted or (now >= at + STEPS_ON and not is_pending)):
                break
            if bad_for > LOST_S:
                raise SoakError(f"the job did not go on within {LOST_S:.0f} s of fault {strike.number}, {strike.fault}")
            time.sleep(POLL_S)
        errors = {
            event["rank"]: f"{event['type']}: {event['text'][:300]}"
            for event in self._events
            if event["what"] == "error"
        }
        outcome = Outcome(restarted=self._life() > life, seconds=round(time.monotonic() - began, 1), errors=errors)
        self._say("struck", life=f"{self._attempt}.{life}", step=at, strike=strike, outcome=outcome)

    def _has_failed(self) -> bool:
        """Whether some rank has raised since the fault."""
        return any(event["what"] == "error" for event in self._events)

    def _strike(self, running: Agent, strike: Strike) -> tuple[float, Callable[[], None]] | None:
        """Strikes; returns after how many seconds, at most, something must be undone, and how."""
        fault, victim, lab = strike.fault, strike.victim, running.lab
        match fault:
            case Fault.KILL:
                self._signal(victim, signal.SIGKILL)
            case Fault.STOP:
                self._signal(victim, signal.SIGSTOP)
            case Fault.PAUSE:
                self._signal(victim, signal.SIGSTOP)
                return PAUSE_S, lambda: self._signal(victim, signal.SIGCONT)
            case Fault.SLOW | Fault.EXCEPTION | Fault.MEMORY:
                replaced(self.folder.order(victim), json.dumps({"fault": fault, "point": strike.point}))
            case _:
                assert lab is not None
                return self._strike_link(lab, fault, victim)
        return None

    def _strike_link(self, lab: Lab, fault: Fault, victim: int) -> tuple[float, Callable[[], None]]:
        """Makes a link fail; one that is down for ever comes back once the ranks have failed and start anew."""
        match fault:
            case Fault.LINK_RATE:
                lab.set_rate(victim, LOW_RATE)
                return LINK_BAD_S, lambda: lab.set_rate(victim, LINK_RATE)
            case Fault.LINK_LOSS:
                lab.set_loss(victim, LOSS)
                return LINK_BAD_S, lambda: lab.set_loss(victim, 0.0)
            case _:
                lab.link_down(victim)
                down_s = LINK_DOWN_S if fault is Fault.LINK_PAUSE else LOST_S
                return down_s, lambda: lab.link_up(victim)

    def _signal(self, rank: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, OSError, json.JSONDecodeError):
            os.kill(json.loads(self.folder.status(rank).read_text(encoding="utf-8"))["pid"], number)
