"""Work in pieces, which run between training steps, so that no step waits long for it.

Such work is a generator: each `next` runs a piece of some milliseconds, and the result is the generator's return value.
`at_once` runs all pieces. `tuning.pieces.after_steps` runs a few after each training step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Pieces = Generator[None, None, T]
"""Work in pieces: a generator that does a piece at each `next` and returns the result."""


def at_once(pieces: Pieces[T]) -> T:
    """Runs work to its end without pauses and returns its result.

    `pieces`: a generator that does a piece of the work at each `next`.
    """
    while True:
        try:
            next(pieces)
        except StopIteration as ended:
            found: T = ended.value
            return found


def around_each(pieces: Pieces[T], around: Callable[[], AbstractContextManager[object]]) -> Pieces[T]:
    """Runs each piece of work in a `with around()` of its own, so that time between pieces is outside of it.

    `pieces`: a generator that does a piece of the work at each `next`. The returned generator does so as well, and has
    its result.
    """
    while True:
        with around():
            try:
                next(pieces)
            except StopIteration as ended:
                found: T = ended.value
                return found
        yield


class InPieces(Generic[P, T]):
    """A function that does its work at once when it is called, or in pieces by the generator that `pieces` returns.

    It is a decorator of the generator function.

    Example:
        >>> @InPieces
        ... def total(numbers):
        ...     sum_ = 0
        ...     for number in numbers:
        ...         sum_ += number
        ...         yield
        ...     return sum_
        >>> total([1, 2, 3])
        6
        >>> len(list(total.pieces([1, 2, 3])))
        3
    """

    def __init__(self, pieces: Callable[P, Pieces[T]]) -> None:
        functools.update_wrapper(self, pieces)
        self.pieces = pieces

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return at_once(self.pieces(*args, **kwargs))

    def __reduce__(self) -> str:
        """Returns the function's name, by which it is pickled as functions are."""
        return self.pieces.__qualname__
