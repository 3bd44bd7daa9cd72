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
from typing import Any, NamedTuple

from .errors import GroupError
from .rendezvous import WARNING_S
from .threads import ended_with
from .whereabouts import Whereabouts

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the operations under way; younger ones are left alone


class _Operation(NamedTuple):
    work: Any  # of torch.distributed
    whereabouts: Whereabouts
    number: int  # of the operation in its group
    place: str  # such as a bucket, stage and step
    since_s: float


class Monitor:
    """A thread that watches operations of a group and its subgroups on streams, for which no thread of the host waits.

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
        """The error of an operation that cannot end, or did not end in time; None if there is none."""
        return self._state.error

    def watch(self, work: Any, whereabouts: Whereabouts, number: int, place: str) -> None:
        """Watches an operation until it has ended; call it when a stream was made to wait for the operation.

        If the operation cannot end, or does not end in time, the monitor's `error` says so; nothing is raised here.

        Args:
            work: torch's handle of the operation.
            whereabouts: says which ranks are missing if the operation does not end.
            number: the operation's number in its group, by which ranks tell how far they are.
            place: what the operation is a part of, for error messages.
        """
        if not self._state.ended.is_set():
            self._state.oldest()  # so that ended works, and the memory that they hold, go soon
            self._state.operations.append(_Operation(work, whereabouts, number, place, time.monotonic()))

    def stop(self) -> None:
        """Ends the thread that watches operations; later ones are not watched."""
        self._end()


class _State:
    """The data that a `Monitor` shares with its thread, which must not keep the `Monitor` alive."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.ended = threading.Event()
        self.operations: deque[_Operation] = deque()
        self.error: GroupError | None = None
        self.warned: _Operation | None = None  # that somebody waits long for it
        self._looking = threading.Lock()

    def oldest(self) -> _Operation | None:
        """Drops operations that have ended, and returns the first that has not."""
        with self._looking:
            while self.operations and self.operations[0].work.is_completed():
                self.operations.popleft()
            return self.operations[0] if self.operations else None


def _watch(state: _State) -> None:
    try:
        while state.error is None and not state.ended.wait(LOOK_S):
            state.error = _look(state)
        if state.error is not None:
            logger.error("%s", state.error)
    except GroupError as error:  # notices that cannot be read
        state.error = error
    except Exception as error:  # of the device, for instance: whoever waits for it gets that error
        logger.warning("operations that do not end are not noticed any more: %s", error)
    finally:
        state.ended.set()
        state.operations.clear()


def _look(state: _State) -> GroupError | None:
    """Returns why the oldest operation cannot end, or did not in time; tells the other ranks where they do not know."""
    late = state.oldest()
    waited_s = time.monotonic() - late.since_s if late else 0.0
    if late is None or waited_s < LOOK_S:
        return None
    if told := late.whereabouts.told(late.number):
        return told.at(late.place)
    if waited_s >= state.timeout_s:
        error = late.whereabouts.why_broken(late.number, f"no answer within {state.timeout_s:.0f} s").at(late.place)
        late.whereabouts.announce_failure(str(error), error.ranks)
        return error
    if waited_s >= WARNING_S and state.warned is not late:
        logger.warning("%s: waiting for %.0f s by now", late.place, waited_s)
        state.warned = late
    return None
