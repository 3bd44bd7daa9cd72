"""Step listeners: objects with methods that all engines in this process call at each training step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

L = TypeVar("L", bound="StepListener")


class RecordingDone(BaseException):  # no Exception, as no `except Exception` of a script may stop it
    """An exception that ends the user's script, on all ranks, when the last step to be recorded has ended."""


class StepListener:
    """An object whose methods engines call at each step inside a `recording` block.

    The calls come on the thread of forward or backward.
    """

    def forward_began(self, engine: Any) -> None:
        """Is called when a forward of the model begins that may be followed by a backward."""

    def began(self, engine: Any) -> bool:
        """Is called when a step begins, with its first gradient.

        If it returns True, nothing is exchanged until backward has ended, and the step does not count for the choice of
        plans.
        """
        return False

    def take(self, engine: Any, name: str, gradient: Tensor | None, shape: tuple[int, ...]) -> None:
        """Is called with each of this rank's gradients when it is ready.

        `gradient`: of shape `shape`, that of the parameter `name`; None if this rank did not use the parameter.
        """

    def backward_ended(self, engine: Any) -> None:
        """Is called once a step, after the last call of `take`, before the engine waits for the gradients' exchange."""

    def step_ended(self, engine: Any, names: Iterable[str]) -> None:
        """Is called when the gradients of all parameters, `names`, are synchronised; may raise `RecordingDone`."""


_active: StepListener | None = None


def active() -> StepListener | None:
    """Returns the listener that engines call now, inside a `recording` block; None outside."""
    return _active


@contextmanager
def recording(listener: L) -> Iterator[L]:
    """Makes engines call the methods of `listener` inside the `with` block, at each training step.

    A `RecordingDone` that the listener raises ends the block and is not raised further.

    Raises:
        RuntimeError: inside another such block.
    """
    global _active  # noqa: PLW0603 (what is attached inside the user's script must find it)
    if _active is not None:
        raise RuntimeError("gradients are being recorded or measured already; end that first")
    _active = listener
    try:
        yield listener
    except RecordingDone:
        pass
    finally:
        _active = None
