"""The victim's side of a fault: strikes its own process at the phase and step of a case, once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from .cases import Case, Fault, Phase

SIGNALS = {
    Fault.KILL: signal.SIGKILL,
    Fault.STOP: signal.SIGSTOP,
    Fault.PAUSE: signal.SIGSTOP,
    Fault.INTERRUPT: signal.SIGINT,
}
ERRORS: dict[Fault, type[Exception]] = {Fault.EXCEPTION: ValueError, Fault.MEMORY: MemoryError}
SLOW_SHARE = 0.5  # of the timeout, for which a slow rank sleeps
STEPLESS = (Phase.BEFORE, Phase.ATTACH, Phase.DETACH)


class Striker:
    """Strikes this process as the case says; one of a rank that is no victim does nothing.

    `say` records an event, as `say("fault")`; it is called just before the process is struck.
    """

    def __init__(self, case: Case, *, is_victim: bool, say: Callable[[str], None]) -> None:
        self.case, self._say = case, say
        self.is_armed = is_victim
        self.step = -1
        self._looks = 0

    def at(self, phase: Phase) -> None:
        """Strikes if the case's fault comes in this phase, and in this step of training.

        Raises:
            ValueError, MemoryError: the fault, where it is an exception.
        """
        if phase is self.case.phase and (phase in STEPLESS or self.step == self.case.step):
            self._strike()

    def looked(self) -> None:
        """Counts a look at the model's parameters during attach; in the case's one an exception is raised."""
        if self.case.phase is Phase.ATTACH and self.case.fault in ERRORS:
            self._looks += 1
            if self._looks == self.case.call:
                self._strike()

    def later(self) -> None:
        """Strikes after the case's delay, by a signal, wherever this process then is."""
        if self.is_armed:
            timer = threading.Timer(self.case.delay_s, self._strike)
            timer.daemon, timer.name = True, "fault"
            timer.start()

    def came_about(self) -> None:
        """Records the fault, which another part of the job brings about; nothing strikes any more."""
        if self.is_armed:
            self.is_armed = False
            self._say("fault")

    def disarm(self) -> None:
        """Lets nothing strike any more; where nothing has, the case is none."""
        self.is_armed = False

    def _strike(self) -> None:
        if not self.is_armed:
            return
        self.came_about()
        fault = self.case.fault
        if fault in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault])
        elif fault in ERRORS:
            raise ERRORS[fault](f"{fault} (injected)")
        elif fault is Fault.SLOW:
            time.sleep(SLOW_SHARE * self.case.timeout_s)
