"""`StoreClient`: a connection to the store of `torch.distributed` whose calls have a time limit.

The store outlives a broken connection between two ranks, and answers while a collective hangs. But its host may be a
process that stopped or died, and then a call blocks for minutes. Others may write there too, so what is read is held to
types.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import distributed_c10d

from ..inputs.settings import shown
from .errors import GroupError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

ANSWER_S = 1.0  # the longest wait for the store
LEAST_S = 0.05  # for a question also when patience is over: a sound store answers in milliseconds
ABSENT = "(no value)"  # stands for a key that does not exist
# Seconds that this thread still waits for the store in all, inside `patience`.
_left_s: ContextVar[float | None] = ContextVar("left_s", default=None)
NO_STORE = "the store of torch.distributed does not answer: where torchrun does not keep it, it ends with rank 0"


class StoreClient:
    """A connection of gradsync's own to torch.distributed's default store, whose calls have a time limit.

    The user's connection is left alone, as a call that blocks on it would block the user's calls, too.
    """

    def __init__(self) -> None:
        self._store = distributed_c10d._get_default_store()
        self._own: distributed_c10d.Store | None = None
        self._asking: threading.Thread | None = None
        self._turn = threading.RLock()  # a collection of garbage inside of a question may close a group, and ask
        self._closed = False

    def ask(self, question: Callable[[distributed_c10d.Store], T], *, urgent: bool = False) -> T | None:
        """Calls `question` with the store in a thread, and returns its result; None if it takes longer than `ANSWER_S`.

        `urgent`: whether to wait for an earlier question that is unanswered; else None is returned then.
        """
        with self._turn:
            if self._asking is not None:
                _join(self._asking, ANSWER_S if urgent else 0.0)
                if self._asking.is_alive():
                    return None
            return self._answer(question)

    def _answer(self, question: Callable[[distributed_c10d.Store], T]) -> T | None:
        answers: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError):
                if self._own is None and not self._closed:
                    self._own = self._store.clone()  # type: ignore[attr-defined]  # torch does not declare it
                if self._own is not None:
                    answers.append(question(self._own))

        self._asking = asking = threading.Thread(target=ask, name="gradsync store", daemon=True)
        asking.start()
        _join(asking, ANSWER_S)
        return answers[0] if answers else None

    def read(self, key: str) -> str | None:
        """Returns the value of `key` in the store; None if there is none, or the store does not answer in time."""
        text = self.ask(lambda store: value(store, key))
        return text or None

    def append(self, key: str, text: str) -> bool:
        """Appends `text` to the value of `key` in the store, and returns whether the store answered in time.

        All ranks append to one key, so that a reader asks once, however many ranks there are.
        """

        def append(store: distributed_c10d.Store) -> bool:
            store.append(key, text)  # type: ignore[attr-defined]  # torch does not declare it
            return True

        return self.ask(append, urgent=True) is not None

    def delete(self, *keys: str) -> None:
        """Deletes these keys from the store; one that does not exist is no error."""
        self.ask(lambda store: [store.delete_key(key) for key in keys], urgent=True)

    def close(self) -> None:
        """Closes the connection to the store; later questions have no answer."""
        self._closed, self._own = True, None


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Limits how long this thread waits for the store inside the `with` block, over all calls of any `StoreClient`.

    A block inside another has no more than is left there. If the process stands still, the question of that time counts
    with its limit only.
    """
    outer_s = _left_s.get()
    granted_s = seconds if outer_s is None else min(seconds, outer_s)
    token = _left_s.set(granted_s)
    try:
        yield
    finally:
        left_s = _left_s.get()
        _left_s.reset(token)
        if outer_s is not None and left_s is not None:
            _left_s.set(outer_s - (granted_s - left_s))


def _join(asking: threading.Thread, seconds: float) -> None:
    """Waits for the thread for so long, and hardly longer than the patience of this thread lasts."""
    left_s = _left_s.get()
    if left_s is None:
        asking.join(seconds)
        return
    seconds = min(seconds, max(left_s, LEAST_S))
    began_s = time.monotonic()
    asking.join(seconds)
    _left_s.set(max(left_s - min(time.monotonic() - began_s, seconds), 0.0))


def value(store: distributed_c10d.Store, key: str) -> str:
    """Returns the value of `key` in the store, or "" if there is none; `Store.get` would wait for one."""
    found = store.compare_set(key, ABSENT, ABSENT).decode(errors="replace")
    return "" if found == ABSENT else found


def by_rank(key: str, text: str | None, read: Callable[..., T]) -> dict[int, T]:
    """Returns the last entry that each rank has appended to `key` in the store, by rank.

    Args:
        key: the key, for errors.
        text: its value, made of entries `"rank:field:field "`; None, if the store did not answer, has no entries.
        read: makes a result of the texts of an entry's fields; raises ValueError or TypeError where it cannot.

    Raises:
        GroupError: where an entry is of another form.
    """
    with reading(key, text):
        last = {int(rank): fields for rank, *fields in (each.split(":") for each in (text or "").split())}
        return {rank: read(*fields) for rank, fields in last.items()}


def from_json(kind: Any, text: str | bytes) -> Any:
    """Returns the data in a JSON text, checked strictly to be of the type `kind`, which may be a tuple for a list.

    Raises:
        ValueError: for text that is no JSON, or of another type.
    """
    return _reader(kind).validate_json(text, strict=True)


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


@contextmanager
def reading(key: str, text: str | None) -> Iterator[None]:
    """Turns a ValueError or TypeError inside the `with` block into a GroupError that names `key` and its value `text`.

    Use it around code that parses what was read from the store.
    """
    try:
        yield
    except (ValueError, TypeError):
        raise GroupError(
            f"the entry {key!r} in the store of torch.distributed cannot be read: another version of gradsync or "
            f"another program wrote {shown(text)} there; install one version on all nodes, and give each job a store "
            "of its own"
        ) from None
