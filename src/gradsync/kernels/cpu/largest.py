"""Native choice of elements by their magnitude."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from gradsync.kernels.checks import Sections, section_counts, section_lengths
from gradsync.kernels.cpu.boundary import plain, threads_for
from gradsync.kernels.native import load


def top_k(
    x: Tensor,
    indices: Tensor,
    values: Tensor,
    *,
    sections: Sections | None = None,
    counts: Sequence[int] | None = None,
    residual: Tensor | None = None,
    next_residual: Tensor | None = None,
    threads: int | None = None,
    module: ModuleType | None = None,
) -> None:
    """See `gradsync.kernels.top_k`."""
    lengths = section_lengths(x, sections)
    (module or load()).top_k(
        plain("x", x),
        plain("indices", indices),
        plain("values", values),
        lengths,
        section_counts(indices, lengths, counts),
        None if residual is None else plain("residual", residual),
        None if next_residual is None else plain("next_residual", next_residual),
        threads_for(threads, x.numel()),
    )


def select_above(
    x: Tensor,
    thresholds: Tensor,
    indices: Tensor,
    values: Tensor,
    *,
    sections: Sections | None = None,
    counts: Sequence[int] | None = None,
    residual: Tensor | None = None,
    next_residual: Tensor | None = None,
    threads: int | None = None,
    module: ModuleType | None = None,
) -> int:
    """See `gradsync.kernels.select_above`."""
    lengths = section_lengths(x, sections)
    written: int = (module or load()).select_above(
        plain("x", x),
        plain("thresholds", thresholds),
        plain("indices", indices),
        plain("values", values),
        lengths,
        section_counts(indices, lengths, counts),
        None if residual is None else plain("residual", residual),
        None if next_residual is None else plain("next_residual", next_residual),
        threads_for(threads, x.numel()),
    )
    return written


def count_above(
    x: Tensor,
    thresholds: Tensor,
    counts: Tensor,
    *,
    sections: Sections | None = None,
    threads: int | None = None,
    module: ModuleType | None = None,
) -> None:
    """See `gradsync.kernels.count_above`."""
    lengths = section_lengths(x, sections)
    (module or load()).count_above(
        plain("x", x),
        plain("thresholds", thresholds),
        plain("counts", counts),
        lengths,
        threads_for(threads, x.numel()),
    )
