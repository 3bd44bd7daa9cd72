"""Named ranges of work in the traces of `torch.profiler`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

_NOTHING = nullcontext()


def in_trace(name: str) -> AbstractContextManager[Any]:
    """Returns a context that shows its block as the range `name` while a profiler of torch runs, else does nothing.

    `record_function` takes time where nobody records, too, which shows in small steps.
    """
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING
