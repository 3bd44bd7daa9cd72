"""Native (C++) kernels that select elements by magnitude: the k largest, or all above a threshold."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradsync.kernels.checks import Sections, section_counts, section_lengths
from gradsync.kernels.cpu.boundary import plain, plain_or_none, threads_for
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
) -> None:
    lengths = section_lengths(x, sections)
    load().top_k(
        plain("x", x),
        plain("indices", indices),
        plain("values", values),
        lengths,
        section_counts(indices, lengths, counts),
        plain_or_none("residual", residual),
        plain_or_none("next_residual", next_residual),
        threads_for(x.numel()),
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
) -> int:
    lengths = section_lengths(x, sections)
    written: int = load().select_above(
        plain("x", x),
        plain("thresholds", thresholds),
        plain("indices", indices),
        plain("values", values),
        lengths,
        section_counts(indices, lengths, counts),
        plain_or_none("residual", residual),
        plain_or_none("next_residual", next_residual),
        threads_for(x.numel()),
    )
    return written


def count_above(x: Tensor, thresholds: Tensor, counts: Tensor, *, sections: Sections | None = None) -> None:
    lengths = section_lengths(x, sections)
    load().count_above(
        plain("x", x),
        plain("thresholds", thresholds),
        plain("counts", counts),
        lengths,
        threads_for(x.numel()),
    )
