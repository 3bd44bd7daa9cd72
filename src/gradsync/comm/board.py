"""The notice board: notices between ranks that need no collective, through the store of `torch.distributed`.

The store outlives a broken connection between two ranks, and answers while a collective hangs. Numbers count the
operations of a group: all members issue the same operations in the same order, so the numbers tell who is behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from torch.distributed import distributed_c10d

ANSWER_S = 1.0  # the longest wait for the store: its host may be the process that stopped or died


class Came(NamedTuple):
    """A member's arrival at a barrier: the number of its operations before, the barrier's purpose, and details."""

    operations: int
    what: str
    detail: str

    def __str__(self) -> str:
        return purpose(self.what, self.detail)


def purpose(what: str, detail: str) -> str:
    """Returns the purpose of a barrier as messages name it."""
    return f"{what} ({detail})" if detail else what


class Board:
    """Notices of one group's members, under a `name` that they share."""

    def __init__(self, store: distributed_c10d.Store, name: str) -> None:
        self._store = store
        self._name = name
        self._own: distributed_c10d.Store | None = None
        self._asking: threading.Thread | None = None

    def announce_failure(self, text: str) -> bool:
        """Notes why a member cannot go on, and returns whether the store answered.

        The first notice stays: later ones are its consequences.
        """
        return self._ask(lambda store: store.compare_set("failure", "", text), urgent=True) is not None

    def failure(self) -> str | None:
        """Returns the announced failure, if there is one."""
        return self._read("failure")

    def note_waiting(self, rank: int, operation: int) -> None:
        """Notes that a member waits for the others in this operation."""
        self._append("waiting", rank, operation)

    def note_left(self, rank: int, operations: int) -> None:
        """Notes that a member has left after so many operations."""
        self._append("left", rank, operations)

    def behind(self, ranks: Sequence[int], operation: int) -> list[int]:
        """Returns the ranks that have not noted that they wait in this operation or in a later one."""
        here = {rank for rank, number in self._numbers("waiting") if number >= operation}
        return [rank for rank in ranks if rank not in here]

    def left_before(self, operation: int) -> list[int]:
        """Returns the members that left before they issued this operation, ascending."""
        return sorted(rank for rank, operations in self._numbers("left") if operations <= operation)

    def note_arrival(self, barrier: int, rank: int, operations: int, what: str, detail: str) -> None:
        """Notes that a member has come to a barrier, for this purpose, after so many operations."""
        entry = f"{rank}:{operations}:{what.encode().hex()}:{detail.encode().hex()} "
        self._ask(lambda store: store.append(f"barrier {barrier}", entry))  # type: ignore[attr-defined]  # see `_append`

    def arrivals(self, barrier: int) -> dict[int, Came]:
        """Returns the members that have come to the barrier, by rank; none where the store does not answer."""
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
        """Returns the store's answer, or None when none comes in time.

        A question that is not urgent is dropped while the store still owes another answer.
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
