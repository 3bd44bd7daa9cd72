"""The notice board: ranks leave notices for each other in the store of `torch.distributed`, without a collective.

Notices number a group's operations: all members issue the same operations in the same order, so the numbers show which
members are behind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from torch.distributed import distributed_c10d

from .errors import GroupError
from .store import StoreClient, by_rank, from_json, reading


class Came(NamedTuple):
    """A rank's arrival at a barrier or a rendezvous: how many operations it had issued, its purpose, and details."""

    operations: int
    what: str
    detail: str

    def __str__(self) -> str:
        return purpose(self.what, self.detail)


class Failure(NamedTuple):
    """A failure that rank `by` announced through the store: why, which ranks are the cause, and which do not answer."""

    by: int
    ranks: tuple[int, ...]
    text: str
    lost: tuple[int, ...] = ()

    def error(self) -> GroupError:
        """Returns the error that the other members of the group raise because of this failure."""
        said = "" if self.by in self.ranks else " reports"
        return GroupError(f"rank {self.by}{said}: {self.text}", self.ranks)


def purpose(what: str, detail: str) -> str:
    """Returns the purpose of a barrier in words: `what`, followed by the detail in brackets if there is one."""
    return f"{what} ({detail})" if detail else what


def require_one_purpose(came: Mapping[int, Came]) -> None:
    """Checks that all ranks came to a barrier or rendezvous for the same purpose; `came` has the arrival of each rank.

    Raises:
        GroupError: if they did not, with each rank's purpose.
    """
    if len({each.what for each in came.values()}) > 1:
        found = ", ".join(f"{each} on rank {rank}" for rank, each in sorted(came.items()))
        raise GroupError(f"the ranks came to different things at the same time, all must come to the same: {found}")


class Board:
    """The notices that members of a group leave in the store: who failed, is at a barrier, or closed the group.

    `name`: the prefix of the group's keys in the store.
    """

    def __init__(self, store: StoreClient, name: str) -> None:
        self.name = name
        self._store = store

    def announce_failure(self, failure: Failure) -> bool:
        """Writes into the store why a member cannot go on, and returns whether the store answered.

        Only the first failure is kept: later ones are its consequences.
        """
        whole = failure._replace(text=failure.text.encode(errors="replace").decode())  # no halves of characters
        text, key = json.dumps(whole), self._key("failure")
        return self._store.ask(lambda store: store.compare_set(key, "", text), urgent=True) is not None

    def failure(self) -> Failure | None:
        """Returns the failure that a member has announced; None if there is none, or the store does not answer.

        Raises:
            GroupError: if the entry in the store is of another form.
        """
        key = self._key("failure")
        text = self._store.read(key)
        with reading(key, text):
            return from_json(Failure, text) if text else None

    def note_left(self, rank: int, operations: int) -> None:
        """Writes into the store that member `rank` closed its group after having issued so many `operations`."""
        self._store.append(self._key("left"), f"{rank}:{operations} ")

    def left(self) -> dict[int, int]:
        """Returns the members that closed their group, each with the number of operations it had issued.

        Raises:
            GroupError: if the entry in the store is of another form.
        """
        key = self._key("left")
        return by_rank(key, self._store.read(key), partial(from_json, int))

    def left_before(self, operation: int) -> list[int]:
        """Returns the members that closed their group before they issued operation number `operation`, ascending."""
        return sorted(rank for rank, operations in self.left().items() if operations <= operation)

    def note_arrival(self, barrier: int, rank: int, operations: int, what: str, detail: str) -> None:
        """Writes into the store that member `rank` came to barrier number `barrier`, for purpose `what`.

        The notices of the barrier before the previous one are deleted: all members have left it.

        Args:
            operations: the number of operations that the member had issued.
            detail: details for error messages.
        """
        entry = f"{rank}:{operations}:{what.encode().hex()}:{detail.encode().hex()} "
        key, former = self._key(f"barrier {barrier}"), self._key(f"barrier {barrier - 2}")

        def note(store: distributed_c10d.Store) -> None:
            store.append(key, entry)  # type: ignore[attr-defined]  # torch does not declare it
            if barrier >= 2:
                store.delete_key(former)

        self._store.ask(note, urgent=True)

    def arrivals(self, barrier: int) -> dict[int, Came]:
        """Returns who has come to the barrier of this number, by rank; empty where the store does not answer.

        Raises:
            GroupError: if the entry in the store is of another form.
        """
        key = self._key(f"barrier {barrier}")
        return by_rank(key, self._store.read(key), _came)

    def clear(self, barriers: int) -> None:
        """Deletes all notices of the group from the store; `barriers`: how many barriers this member has come to."""
        last = (self._key(f"barrier {number}") for number in (barriers - 2, barriers - 1, barriers))
        self._store.delete(*map(self._key, ("seen", "failure", "left")), *last)

    def _key(self, notice: str) -> str:
        return f"{self.name}/{notice}"


def _came(operations: str, *texts: str) -> Came:
    return Came(int(operations), *(bytes.fromhex(text).decode() for text in texts))
