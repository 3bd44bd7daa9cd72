"""Step listeners: objects that see the steps of all engines in this process while they are active."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

L = TypeVar("L", bound="StepListener")


class RecordingDone(BaseException):  # no Exception, as no `except Exception` of a script may stop it
    """Ends a script at the end of the backward of the last step that was to be recorded, on every rank alike."""


class StepListener:
    """Sees the steps of all engines while it is active, see `recording`; called by the thread that runs backward."""

    def forward_began(self, engine: Any) -> None:
        """Takes note that the model's forward runs, before a backward."""

    def began(self, engine: Any) -> bool:
        """Takes note that a step begins; True delays its exchange until backward has ended and keeps its plan."""
        return False

    def take(self, engine: Any, name: str, gradient: Tensor | None, shape: tuple[int, ...]) -> None:
        """Takes a ready gradient of this rank, of shape `shape`; None: this rank did not use the parameter."""

    def backward_ended(self, engine: Any) -> None:
        """Takes note that all gradients were taken."""

    def step_ended(self, engine: Any, names: Iterable[str]) -> None:
        """Takes note that all gradients are synchronised, by parameter name; may end the script by `RecordingDone`."""


_active: StepListener | None = None


def active() -> StepListener | None:
    """Returns the active listener, or None."""
    return _active


@contextmanager
def recording(listener: L) -> Iterator[L]:
    """Makes the listener active inside the block; `RecordingDone` ends the block and is not raised further.

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
