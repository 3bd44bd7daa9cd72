"""Forked processes, such as workers of a DataLoader: copies of a rank's objects are inert in them.

A child inherits the rank's sockets, which are the rank's: a message that the child took would be missing there. It does
not inherit threads, so that a communicator can neither work nor be destroyed.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Inherited(Protocol):
    """An object of a rank's that a forked process gets a copy of."""

    def forked(self) -> None:
        """Makes the object inert, as this process was forked from the rank's."""


_living: weakref.WeakSet[Inherited] = weakref.WeakSet()


def inert_in_children(thing: Inherited) -> None:
    """Lets `thing.forked()` be called in each process that is forked from this one while `thing` lives."""
    _living.add(thing)


def finalizer(owner: object, function: Callable[..., Any], *arguments: Any) -> weakref.finalize[..., Any]:
    """Returns a finalizer of `owner` that calls `function(*arguments)` in this process only, not in forked ones."""
    return weakref.finalize(owner, _call_in, os.getpid(), function, arguments)


def _call_in(process: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if os.getpid() == process:
        function(*arguments)


def _after_fork() -> None:
    for thing in list(_living):
        thing.forked()


os.register_at_fork(after_in_child=_after_fork)
