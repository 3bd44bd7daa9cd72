"""Kernels that select elements by their magnitude, section by section, in plain torch operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync.kernels.checks import (
    Sections,
    check_dtype,
    check_flat,
    check_floating,
    check_index_out,
    check_indices,
    check_residuals,
    check_shape,
    section_counts,
    section_lengths,
)
from gradsync.kernels.choice import dispatched
from gradsync.kernels.reference.rows import accumulation_dtype, magnitudes


@dataclass(frozen=True)
class SelectionArguments:
    """The checked arguments of `top_k` and `select_above`, which write the largest elements of each section."""

    x: Tensor
    indices: Tensor
    values: Tensor
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    residual: Tensor | None
    next_residual: Tensor | None

    @classmethod
    def of(
        cls,
        x: Tensor,
        indices: Tensor,
        values: Tensor,
        sections: Sections | None,
        counts: Sequence[int] | None,
        residual: Tensor | None,
        next_residual: Tensor | None,
    ) -> SelectionArguments:
        """Checks shapes and dtypes of the arguments of `top_k`, raising its errors, and returns them as one object."""
        check_floating("x", x)
        check_flat("x", x)
        check_indices("indices", indices)
        lengths = section_lengths(x, sections)
        wanted = section_counts(indices, lengths, counts)
        check_index_out("indices", indices, sum(wanted), len(x))
        check_floating("values", values)
        check_shape("values", values, sum(wanted))
        check_residuals(x, residual, next_residual, accumulation_dtype(x.dtype))
        return cls(x, indices, values, lengths, wanted, residual, next_residual)

    def elements(self) -> Tensor:
        """Returns p = x + residual, (numel,), in the memory of `next_residual`; without a residual, x itself."""
        if self.residual is None or self.next_residual is None:
            return self.x
        return torch.add(self.residual, self.x, out=self.next_residual)

    def parts(self, p: Tensor) -> Iterator[tuple[int, Tensor, int]]:
        """Yields for each section of `p`, (numel,): its offset, its elements, (length,), and how many to select."""
        offset = 0
        for length, count in zip(self.lengths, self.counts, strict=True):
            yield offset, p[offset : offset + length], count
            offset += length

    def take(self, p: Tensor, chosen: Tensor) -> int:
        """Writes the elements of `p`, (numel,), at indices `chosen`, (n,) int64, to the outputs, and returns n."""
        count, exact = len(chosen), p[chosen]
        values = rounded_to(self.values[:count], exact)
        self.indices[:count] = chosen
        if self.next_residual is not None:
            self.next_residual[chosen] = exact - values.to(exact.dtype)
        return count


def rounded_to(values: Tensor, exact: Tensor) -> Tensor:
    """Copies `exact` to `values`, of the same shape, rounded to its dtype, and returns it; finite stays finite."""
    exact = exact.to(accumulation_dtype(exact.dtype))
    if values.itemsize < exact.itemsize:
        most = torch.finfo(values.dtype).max
        exact = torch.where(exact.isinf(), exact, exact.clamp(-most, most))
    return values.copy_(exact)


@dispatched("x", "indices", "values", "residual", "next_residual", entries="x")
@torch.no_grad()
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
    """Writes the elements of p = x + residual with the largest magnitudes, in the order of their indices.

    Exact. Magnitudes compare by their bits: a NaN is larger than infinity. Of equal elements, those with the smallest
    indices are taken. With a residual, one pass over memory adds it, selects the elements and keeps the rest.

    Args:
        x: (numel,) floating.
        indices: (k,) int64, or int32 for up to 2^31 elements: indices into the whole `x`. Overwritten.
        values: (k,) floating: p rounded to this dtype; finite numbers stay finite. Overwritten.
        sections: the largest are taken of each section; by default all of `x` is one section.
        counts: how many to take of each section, together k.
        residual: (numel,), in the accumulation dtype of `x`, added first; None: zero.
        next_residual: as `residual`, in other memory: p less the taken values, as rounded. Overwritten.

    Raises:
        ValueError: a count above the elements of a section; shapes that do not fit; native: more than 2^34 elements.
        TypeError: other or different dtypes.
    """
    arguments = SelectionArguments.of(x, indices, values, sections, counts, residual, next_residual)
    p = arguments.elements()
    chosen = [offset + largest(magnitudes(part), count) for offset, part, count in arguments.parts(p)]
    arguments.take(p, torch.cat([indices.new_empty(0, dtype=torch.int64), *chosen]))


@dispatched("x", "thresholds", "indices", "values", "residual", "next_residual", entries="x")
@torch.no_grad()
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
    """Writes the elements of p = x + residual whose magnitude exceeds their section's threshold; returns how many.

    If a section has more of them than its count, the largest are taken, as in `top_k`. They are written to the
    beginning of the outputs in the order of their indices; the rest of the outputs is unspecified. A NaN is above every
    threshold, and all elements are above a threshold that is NaN or negative.

    Args:
        thresholds: (sections,), in the accumulation dtype of `x`.
        indices: (most,), otherwise as in `top_k`.
        values: (most,), otherwise as in `top_k`.
        counts: how many to take at most of each section, together `most`.
        x, sections, residual, next_residual: as in `top_k`.

    Raises:
        ValueError, TypeError: as `top_k`.
    """
    arguments = SelectionArguments.of(x, indices, values, sections, counts, residual, next_residual)
    check_thresholds(x, thresholds, len(arguments.lengths))
    p = arguments.elements()
    chosen = [indices.new_empty(0, dtype=torch.int64)]
    for threshold, (offset, part, most) in zip(thresholds, arguments.parts(p), strict=True):
        found = is_above(part, threshold).nonzero().flatten()
        chosen.append(offset + found[largest(magnitudes(part[found]), min(most, len(found)))])
    return arguments.take(p, torch.cat(chosen))


@dispatched("x", "thresholds", "counts", entries="x")
@torch.no_grad()
def count_above(x: Tensor, thresholds: Tensor, counts: Tensor, *, sections: Sections | None = None) -> None:
    """Writes to `counts` how many elements of each section have a magnitude above its threshold, or are NaN.

    Args:
        x: (numel,) floating.
        thresholds: (sections,), in the accumulation dtype of `x`.
        counts: (sections,) int64.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: other dtypes.
    """
    check_floating("x", x)
    check_flat("x", x)
    lengths = section_lengths(x, sections)
    check_thresholds(x, thresholds, len(lengths))
    check_dtype("counts", counts, torch.int64)
    check_shape("counts", counts, len(lengths))
    for number, part in enumerate(x.split(lengths)):
        counts[number] = is_above(part, thresholds[number]).sum()


def check_thresholds(x: Tensor, thresholds: Tensor, sections: int) -> None:
    """Raises unless `thresholds` is (sections,), in float64 if `x` is, else float32; `sections` is their number."""
    check_floating("thresholds", thresholds, accumulation_dtype(x.dtype))
    check_shape("thresholds", thresholds, sections)


def is_above(part: Tensor, threshold: Tensor) -> Tensor:
    """Returns which elements of `part`, (length,), are NaN or exceed the 0-D threshold in magnitude, as bool.

    All elements do if the threshold is NaN.
    """
    return ~(part.abs().to(threshold.dtype) <= threshold)


def largest(keys: Tensor, k: int) -> Tensor:
    """Returns the indices of the k largest keys, 1-D integers, ascending, (k,) int64; of equal keys the first ones."""
    if k == 0:
        return keys.new_empty(0, dtype=torch.int64)
    least = torch.topk(keys, k, sorted=False).values.min()
    above, equal = (keys > least).nonzero().flatten(), (keys == least).nonzero().flatten()
    chosen: Tensor = torch.cat([above, equal[: k - len(above)]]).sort().values
    return chosen
