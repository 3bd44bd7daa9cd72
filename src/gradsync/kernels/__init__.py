"""The inner loops: one function a kernel, one table of implementations, chosen once for the process.

`reference` (plain torch) defines what a kernel does; `native` (C++, CPU) gives the same bits faster. `auto`, the
default, takes native where it is built and knows the dtype and device, and says in one log line that it is not built.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Literal

from gradsync.kernels import cpu, reference
from gradsync.kernels.reference import RowsPart

__all__ = ["Implementation", "RowsPart", "active", "sum_rows", "use"]

Implementation = Literal["native", "reference", "auto"]

_logger = logging.getLogger(__name__)
_TABLE: dict[str, dict[str, Callable[..., RowsPart]]] = {
    "reference": {"sum_rows": reference.sum_rows},
    "native": {"sum_rows": cpu.sum_rows},
}
_requested: Implementation = "auto"
_fallback_logged = False


def use(implementation: Implementation) -> ExitStack:
    """Chooses the implementation of every kernel, for the whole process; as a `with` block, until its end.

    Raises:
        ImportError: `native` was asked for and is not built.
        ValueError: an unknown name.
    """
    if implementation not in ("native", "reference", "auto"):
        raise ValueError(f"implementation must be native, reference or auto, got {implementation!r}")
    if implementation == "native":
        cpu.load()
    restore = ExitStack()
    restore.callback(_request, _requested)
    _request(implementation)
    return restore


def active() -> str:
    """The implementation in use: `native` or `reference` (a kernel may still run as reference, see `sum_rows`)."""
    if _requested != "auto":
        return _requested
    try:
        cpu.load()
    except ImportError as error:
        _log_fallback_once(error)
        return "reference"
    return "native"


def sum_rows(parts: Sequence[RowsPart], num_rows: int, *, scale: float = 1.0) -> RowsPart:
    """The sum of row-sparse parts of one (num_rows, dim) table, times `scale`; of one part, its coalesced form.

    Sums run in the order of the parts, then of occurrence within a part, in float32 (float64 for float64), and are
    rounded once: on the CPU the bits depend neither on the implementation nor on the number of threads. Under `auto`,
    float16 and tensors on other devices go to the reference.

    Args:
        parts: each indices (nnz,) int64 or int32, in any order, duplicates allowed; values (nnz, dim) floating.
        num_rows: all indices are in [0, num_rows).

    Returns:
        indices (u,) int64: the sorted union of all indices; values (u, dim) in the dtype of the parts.

    Raises:
        ValueError: an index out of range, no part, or shapes and devices that do not fit together.
        TypeError: dtypes other than said above.
    """
    implementation = active()
    if _requested == "auto" and not cpu.supports(parts):
        implementation = "reference"
    return _TABLE[implementation]["sum_rows"](parts, num_rows, scale=scale)


def _request(implementation: Implementation) -> None:
    global _requested  # noqa: PLW0603
    _requested = implementation


def _log_fallback_once(error: ImportError) -> None:
    global _fallback_logged  # noqa: PLW0603
    if not _fallback_logged:
        _logger.warning("gradsync.kernels: using the torch reference implementation: %s", error)
    _fallback_logged = True
