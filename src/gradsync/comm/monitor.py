"""`Monitor`: notices operations on a device's streams that do not end, for which no thread of the host waits.

The backend's own watchdog ends the process some time after the timeout, without a word of who is missing. The monitor
says it before: it is the only one that looks at the notices of other ranks while the host goes on, or blocks in a call
of the user's that waits for the device.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import NamedTuple

from ..devices.streams import Event
from .errors import GroupError
from .rendezvous import WARNING_S
from .threads import ended_with
from .whereabouts import Whereabouts

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the operations under way; younger ones are left alone


class _Operation(NamedTuple):
    event: Event  # behind the operation, on a stream that waits for it
    whereabouts: Whereabouts
    number: int  # of the operation in its group
    place: str  # such as a bucket, stage and step
    since_s: float


class Monitor:
    """The operations of a group and its subgroups that are under way on streams, and a thread that watches them.

    Args:
        timeout_s: seconds that an operation may take from when streams are made to wait for it.
    """

    def __init__(self, timeout_s: float) -> None:
        self._state = _State(timeout_s)
        thread = threading.Thread(target=_watch, args=(self._state,), name="gradsync monitor", daemon=True)
        thread.start()
        self._end = ended_with(self, thread, self._state.ended)

    @property
    def error(self) -> GroupError | None:
        """The reason that an operation cannot end, or did not in time; None if there is none."""
        return self._state.error

    def watch(self, event: Event, whereabouts: Whereabouts, number: int, place: str) -> None:
        """Watches operation `number`, which streams wait for from now on, until `event` has passed.

        `place`: what the operation is a part of, for error messages.
        """
        self._state.operations.append(_Operation(event, whereabouts, number, place, time.monotonic()))

    def stop(self) -> None:
        """Ends the thread."""
        self._end()


class _State:
    """The data that a `Monitor` shares with its thread, which must not keep the `Monitor` alive."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.ended = threading.Event()
        self.operations: deque[_Operation] = deque()
        self.error: GroupError | None = None

    def oldest(self) -> _Operation | None:
        """Drops operations that have ended, and returns the first that has not."""
        while self.operations and self.operations[0].event.has_passed:
            self.operations.popleft()
        return self.operations[0] if self.operations else None


def _watch(state: _State) -> None:
    warned: _Operation | None = None
    while not state.ended.wait(LOOK_S):
        late = state.oldest()
        waited_s = time.monotonic() - late.since_s if late else 0.0
        if late is None or waited_s < LOOK_S:
            continue
        error = late.whereabouts.told(late.number)
        if error is None and waited_s >= state.timeout_s:
            error = late.whereabouts.why_broken(late.number, f"no answer within {state.timeout_s:.0f} s")
            late.whereabouts.announce_failure(str(error.at(late.place)), error.ranks or None)
        if error is not None:
            state.error = error.at(late.place)
            logger.error("%s; the backend will end this process", state.error)
            return
        if waited_s >= WARNING_S and warned is not late:
            logger.warning("%s: waiting for %.0f s by now", late.place, waited_s)
            warned = late
