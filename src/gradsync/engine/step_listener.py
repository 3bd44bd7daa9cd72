"""A listener to the steps of all engines in this process, and the block in which it is active."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

L = TypeVar("L", bound="StepListener")


class RecordingDone(BaseException):  # noqa: N818 (no error; and no `except Exception` of a script may stop it)
    """Ends a script at the end of the backward of the last step that was to be recorded, on every rank alike."""


class StepListener:
    """Sees the steps of all engines while it is active, see `recording`; called by the thread that runs backward."""

    def forward_began(self, engine: Any) -> None:
        """The model's forward runs, to be followed by a backward."""

    def began(self, engine: Any) -> bool:
        """A step begins. True sets it apart: nothing is exchanged before backward has ended, and the plan stays."""
        return False

    def take(self, engine: Any, name: str, gradient: Tensor | None, shape: tuple[int, ...]) -> None:
        """A gradient of this rank is ready; None: it did not use the parameter."""

    def backward_ended(self, engine: Any) -> None:
        """All gradients were taken."""

    def step_ended(self, engine: Any, names: Iterable[str]) -> None:
        """All gradients are synchronised; `names` are the parameters'. May end the script, by `RecordingDone`."""


_active: StepListener | None = None


def active() -> StepListener | None:
    """Whom engines tell of their steps."""
    return _active


@contextmanager
def recording(listener: L) -> Iterator[L]:
    """Inside, the listener is active; `RecordingDone` ends the block and is not raised any further.

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
