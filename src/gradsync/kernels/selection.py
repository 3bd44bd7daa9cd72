"""Kernels that select elements by magnitude."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradsync.kernels.checks import Sections
from gradsync.kernels.choice import given, pick


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
    """Writes the elements of the largest magnitude of p = x + residual, in the order of their indices.

    Exact. Magnitudes compare by their bits: a NaN is larger than infinity. Of equal ones, those with the smallest
    indices are taken. With a residual, one pass over memory adds it, finds what to take and keeps the rest.

    Args:
        x: (numel,) floating.
        indices: (k,) int64, or int32 for up to 2^31 elements; of the whole `x`.
        values: (k,) floating: p rounded to its dtype; what is finite stays finite.
        sections: of each, its own largest are taken; by default all of `x` is one.
        counts: how many of each section, together k.
        residual: (numel,), in the accumulation dtype of `x`: added to it first.
        next_residual: as `residual`, and not its memory: p without what was taken, as rounded.

    Raises:
        ValueError: more than a section has; shapes that do not fit; native: more than 2^34 elements.
        TypeError: other or different dtypes.
    """
    tensors = given(x, indices, values, residual, next_residual)
    options = {"sections": sections, "counts": counts, "residual": residual, "next_residual": next_residual}
    pick("top_k", tensors, x.numel())(x, indices, values, **options)


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
    """Writes the elements of p = x + residual that are not within the threshold of their section; returns how many.

    Where there are more than its count, the largest of them, as `top_k` takes them. They are written one behind the
    other, in the order of their indices; what is behind the last is unspecified. A NaN is within no threshold, and
    nothing is within one that is NaN or negative.

    Args:
        thresholds: (sections,), in the accumulation dtype of `x`.
        indices: (most,) as of `top_k`.
        values: (most,) as of `top_k`.
        counts: at most how many of each section, together `most`.
        x, sections, residual, next_residual: as of `top_k`.

    Raises:
        ValueError, TypeError: as `top_k`.
    """
    tensors = given(x, thresholds, indices, values, residual, next_residual)
    options = {"sections": sections, "counts": counts, "residual": residual, "next_residual": next_residual}
    written: int = pick("select_above", tensors, x.numel())(x, thresholds, indices, values, **options)
    return written


def count_above(x: Tensor, thresholds: Tensor, counts: Tensor, *, sections: Sections | None = None) -> None:
    """Counts the elements of each section that are not within its threshold, as `select_above` finds them.

    Args:
        x: (numel,) floating.
        thresholds: (sections,), in the accumulation dtype of `x`.
        counts: (sections,) int64.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: other dtypes.
    """
    pick("count_above", [x, thresholds, counts], x.numel())(x, thresholds, counts, sections=sections)


def squared_norms(x: Tensor, sections: Sections, norms: Tensor, *, block: int) -> None:
    """The squares of the Euclidean norms of blocks, in float64, which those of float32 neither leave nor vanish from.

    They are added in an order that every implementation keeps, that of `reference.blocks.ordered_sum`. (Roots are not
    taken: torch does not round them alike everywhere.)

    Args:
        x: (numel,) floating.
        sections: of x; none of their blocks has elements of two.
        norms: (blocks,) float64. Overwritten.
        block: elements of a block; the last one of a section may be shorter. 0: a section is one block.

    Raises:
        ValueError: a negative block, shapes that do not fit.
        TypeError: other dtypes.
    """
    pick("squared_norms", [x, norms], x.numel())(x, sections, norms, block=block)
