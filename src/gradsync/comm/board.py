"""The notice board: ranks leave notices for each other in the store of `torch.distributed`, without a collective.

The store outlives a broken connection between two ranks, and answers while a collective hangs. Notices number a group's
operations: all members issue the same operations in the same order, so the numbers show which members are behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from torch.distributed import distributed_c10d

ANSWER_S = 1.0  # the longest wait for the store: its host may be the process that stopped or died


class Came(NamedTuple):
    """A member's arrival at a barrier: the number of operations issued before, the barrier's purpose, and details."""

    operations: int
    what: str
    detail: str

    def __str__(self) -> str:
        return purpose(self.what, self.detail)


def purpose(what: str, detail: str) -> str:
    """Returns the text by which messages name a barrier's purpose: `what`, with any detail in brackets."""
    return f"{what} ({detail})" if detail else what


class Board:
    """Notices in the store, under `name`: which members of a group failed, wait, are at a barrier, or closed it."""

    def __init__(self, store: distributed_c10d.Store, name: str) -> None:
        self._store = store
        self._name = name
        self._own: distributed_c10d.Store | None = None
        self._asking: threading.Thread | None = None

    def announce_failure(self, text: str) -> bool:
        """Writes why a member cannot go on, and returns whether the store answered.

        Only the first failure is kept: later ones are its consequences.
        """
        return self._ask(lambda store: store.compare_set("failure", "", text), urgent=True) is not None

    def failure(self) -> str | None:
        """Returns the text of the announced failure; None if there is none, or the store does not answer."""
        return self._read("failure")

    def note_waiting(self, rank: int, operation: int) -> None:
        """Writes that member `rank` is waiting for the other members in the operation of this number."""
        self._append("waiting", rank, operation)

    def note_left(self, rank: int, operations: int) -> None:
        """Writes that member `rank` closed its group after having issued so many operations."""
        self._append("left", rank, operations)

    def behind(self, ranks: Sequence[int], operation: int) -> list[int]:
        """Returns those of `ranks` that have left no `note_waiting` for this operation or a later one."""
        here = {rank for rank, number in self._numbers("waiting") if number >= operation}
        return [rank for rank in ranks if rank not in here]

    def left_before(self, operation: int) -> list[int]:
        """Returns the members that closed their group before they issued this operation, ascending."""
        return sorted(rank for rank, operations in self._numbers("left") if operations <= operation)

    def note_arrival(self, barrier: int, rank: int, operations: int, what: str, detail: str) -> None:
        """Writes that member `rank` came to barrier number `barrier`, for purpose `what`, after so many operations."""
        entry = f"{rank}:{operations}:{what.encode().hex()}:{detail.encode().hex()} "
        self._ask(lambda store: store.append(f"barrier {barrier}", entry))  # type: ignore[attr-defined]  # see `_append`

    def arrivals(self, barrier: int) -> dict[int, Came]:
        """Returns the arrivals at the barrier of this number, by rank; empty where the store does not answer."""
        entries = (entry.split(":") for entry in (self._read(f"barrier {barrier}") or "").split())
        return {
            int(rank): Came(int(number), *(bytes.fromhex(text).decode() for text in texts))
            for rank, number, *texts in entries
        }

    def _append(self, key: str, rank: int, number: int) -> None:
        # One key for all members: a reader asks once, however many there are.
        self._ask(lambda store: store.append(key, f"{rank}:{number} "))  # type: ignore[attr-defined]  # torch does not declare it

    def _numbers(self, key: str) -> list[tuple[int, int]]:
        entries = (entry.split(":") for entry in (self._read(key) or "").split())
        return [(int(rank), int(number)) for rank, number in entries]

    def _read(self, key: str) -> str | None:
        text = self._ask(lambda store: store.get(key) if store.check([key]) else None)
        return text.decode() if text is not None else None

    def _ask(self, question: Callable[[distributed_c10d.Store], bytes | None], *, urgent: bool = False) -> bytes | None:
        """Calls `question` with the store in a thread, and returns its answer; None if none comes within `ANSWER_S`.

        A question that is not urgent is dropped while an earlier one is unanswered.
        """
        if self._asking is not None:
            self._asking.join(ANSWER_S if urgent else 0.0)
            if self._asking.is_alive():
                return None
        answers: list[bytes | None] = []

        def ask() -> None:
            with suppress(RuntimeError):
                if self._own is None:
                    # Not the user's connection to the store: a call on either may block.
                    store = self._store.clone()  # type: ignore[attr-defined]  # torch does not declare it
                    self._own = distributed_c10d.PrefixStore(self._name, store)
                answers.append(question(self._own))

        self._asking = threading.Thread(target=ask, name="gradsync board", daemon=True)
        self._asking.start()
        self._asking.join(ANSWER_S)
        return answers[0] if answers else None
