"""`RollCall`: asks the ranks of a group through the store how far they are; a rank that does not answer is lost.

A failed collective does not show who is lost: a broken connection says nothing of third ranks, and a rank in a long
computation is as silent as a dead one. So a thread of each rank looks for calls in the store and answers them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from torch.distributed import distributed_c10d

from .store import ANSWER_S, StoreClient, by_rank, from_json, patience, value
from .threads import ended_with

logger = logging.getLogger(__name__)

LOOK_S = 0.4  # between two looks of the thread for a call
CALL_S = 2.0  # of a call: a rank that has not answered by then has died, was stopped, or is blocked
HEARD_S = 1.0  # of a call: if the store is silent from then on, a rank without an answer may have given one
LAST_LOOK_S = 0.2  # for the store, when the time of a call is over
LONG = 0.8  # of the timeout: the others give up on a rank that stands still for so long
POLL_S = 0.05  # between the first two looks of the caller for answers; later ones are up to LOOK_S apart

Progress = dict[str, int]  # the number of operations that a rank has issued, by the name of the group


class RollCall:
    """A roll call of ranks through the store: a rank asks all how far they are, and a thread on each rank answers.

    Args:
        store: the connection for calling; the thread has one of its own.
        name: the prefix of the keys in the store: the same on all ranks, used by nothing else.
        rank: this process's global rank.
        progress: the bound method that returns what this rank answers: the number of its operations, by group.
    """

    def __init__(self, store: StoreClient, name: str, rank: int, progress: Callable[[], Progress]) -> None:
        self._store, self._name = store, name
        self._state = _State()
        self.silent: frozenset[int] = frozenset()  # ranks that did not answer the last call, whose answers were heard
        self._thread = threading.Thread(
            target=_answer_calls,
            args=(self._state, name, rank, weakref.WeakMethod(progress)),
            name="gradsync roll call",
            daemon=True,
        )
        self._thread.start()
        self._end = ended_with(self, self._thread, self._state.ended)

    def answers(self, ranks: Sequence[int]) -> dict[int, Progress]:
        """Asks all ranks through the store how far they are; returns the answers of `ranks` within `CALL_S`, by rank.

        An answer is the number of operations issued, by group. Time in which this process stood still, perhaps with its
        machine and so with others, hardly counts. The result is empty if the store does not take the call within
        `CALL_S`, or has then been silent for so long that ranks may have answered in vain. Else `self.silent` has the
        ranks without an answer.
        """
        number, pause_s, found = self._state.calls, POLL_S, dict[int, Progress]()
        waited_s, until_s, heard_s, has_called = 0.0, CALL_S, 0.0, False
        key = _answers(self._name, number)
        while True:
            began_s, look_s = time.monotonic(), min(ANSWER_S, max(until_s - waited_s, LAST_LOOK_S))
            with patience(look_s):
                if not has_called and self._call(number):
                    until_s, has_called = waited_s + min(time.monotonic() - began_s, look_s) + CALL_S, True
                text = self._store.ask(lambda store: value(store, key))
            heard_s = heard_s if text is None else waited_s
            answers = by_rank(key, text, _progress)
            found |= {rank: answers[rank] for rank in ranks if rank in answers}
            if len(found) == len(ranks) or waited_s >= until_s:
                if len(found) < len(ranks) and heard_s < until_s - CALL_S + HEARD_S:
                    found = {}
                self.silent = frozenset(ranks) - found.keys() if found else frozenset()
                return found
            time.sleep(pause_s)
            waited_s += min(time.monotonic() - began_s, look_s + pause_s)
            pause_s = min(2 * pause_s, LOOK_S)

    def stood_still_s(self, timeout_s: float) -> float:
        """Returns for how long this process stood still, if the other ranks must have given up waiting for it; else 0.

        The others wait `timeout_s` for it, of which they may have waited a part already when this process stopped. This
        rank has then waited in vain for as long.
        """
        since_s = time.monotonic() - 2 * timeout_s - CALL_S
        stood_s = max((seconds for resumed_s, seconds in self._state.stood_still if resumed_s > since_s), default=0.0)
        return stood_s if stood_s >= LONG * timeout_s else 0.0

    def _call(self, number: int) -> bool:
        """Writes the call into the store; returns whether the store answered."""

        def call(store: distributed_c10d.Store) -> bool:
            store.set(_call(self._name, number), "1")
            return True

        return self._store.ask(call, urgent=True) is not None

    def close(self, *, clear: bool) -> None:
        """Ends this rank's thread that answers calls; `clear` also deletes all calls and answers from the store."""
        self._end()
        if clear:
            numbers = range(self._state.calls + 1)
            keys = [key(self._name, number) for number in numbers for key in (_call, _answers)]
            self._store.delete(*keys)


class _State:
    """The data that a `RollCall` shares with its thread, which must not keep the `RollCall` alive."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.calls = 0  # the number of calls that the thread has answered
        # The last times that the process was stopped or blocked: when each ended, and its seconds.
        self.stood_still: deque[tuple[float, float]] = deque(maxlen=8)

    def wait(self) -> bool:
        """Waits until the next look at the store; returns whether there is one. Notes if it came far too late."""
        began_s = time.monotonic()
        ended = self.ended.wait(LOOK_S)
        now_s = time.monotonic()
        if now_s - began_s >= CALL_S:
            self.stood_still.append((now_s, now_s - began_s))
        return not ended


def _answer_calls(state: _State, name: str, rank: int, progress: weakref.WeakMethod[Callable[[], Progress]]) -> None:
    try:
        store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # torch does not declare it
        while state.wait():
            while store.check([_call(name, state.calls)]):
                said = progress()
                answer = json.dumps({} if said is None else said()).encode().hex()
                store.append(_answers(name, state.calls), f"{rank}:{answer} ")
                state.calls += 1
                del said  # it would keep the group alive
    except (RuntimeError, ValueError) as error:  # the store is lost, or the process group was destroyed
        logger.info("this rank answers no call of the roll any more: %s", error)


def _progress(answer: str) -> Progress:
    found: Progress = from_json(Progress, bytes.fromhex(answer))
    return found


def _call(name: str, number: int) -> str:
    return f"{name}/call {number}"


def _answers(name: str, number: int) -> str:
    return f"{name}/answers {number}"
