"""The choice of elements by their magnitude, section by section, in plain torch operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync.kernels.checks import (
    Sections,
    check_flat,
    check_floating,
    check_index_out,
    check_indices,
    check_shape,
    describe,
    section_counts,
    section_lengths,
)
from gradsync.kernels.reference.rows import accumulation_dtype, magnitudes


@dataclass(frozen=True)
class SelectionArguments:
    """The arguments of `top_k` and `select_above`, checked: what is chosen from, and where to."""

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
        """
        Raises:
            ValueError, TypeError: as `gradsync.kernels.top_k`.
        """
        check_floating("x", x)
        check_flat("x", x)
        check_indices("indices", indices)
        lengths = section_lengths(x, sections)
        wanted = section_counts(indices, lengths, counts)
        check_index_out("indices", indices, sum(wanted), len(x))
        check_floating("values", values)
        check_shape("values", values, sum(wanted))
        if (residual is None) != (next_residual is None):
            raise ValueError("residual and next_residual belong together, got one of them")
        for name, tensor in (("residual", residual), ("next_residual", next_residual)):
            if tensor is not None:
                check_floating(name, tensor, accumulation_dtype(x.dtype))
                check_shape(name, tensor, len(x))
        return cls(x, indices, values, lengths, wanted, residual, next_residual)

    def elements(self) -> Tensor:
        """p: with a residual, in the memory of the next one."""
        if self.residual is None or self.next_residual is None:
            return self.x
        return torch.add(self.residual, self.x, out=self.next_residual)

    def parts(self, p: Tensor) -> Iterator[tuple[int, Tensor, int]]:
        """Of each section where it begins, its elements and how many are wanted."""
        offset = 0
        for length, count in zip(self.lengths, self.counts, strict=True):
            yield offset, p[offset : offset + length], count
            offset += length

    def take(self, p: Tensor, chosen: Tensor) -> int:
        """Writes the elements at these indices to the beginning of the outputs; returns how many."""
        count, exact = len(chosen), p[chosen]
        values = rounded_to(self.values[:count], exact)
        self.indices[:count] = chosen
        if self.next_residual is not None:
            self.next_residual[chosen] = exact - values.to(exact.dtype)
        return count


def rounded_to(values: Tensor, exact: Tensor) -> Tensor:
    """Writes `exact` in the dtype of `values`, which are returned; what is finite stays finite."""
    exact = exact.to(accumulation_dtype(exact.dtype))
    if values.itemsize < exact.itemsize:
        most = torch.finfo(values.dtype).max
        exact = torch.where(exact.isinf(), exact, exact.clamp(-most, most))
    return values.copy_(exact)


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
    """See `gradsync.kernels.top_k`."""
    arguments = SelectionArguments.of(x, indices, values, sections, counts, residual, next_residual)
    p = arguments.elements()
    chosen = [offset + largest(magnitudes(part), count) for offset, part, count in arguments.parts(p)]
    arguments.take(p, torch.cat([indices.new_empty(0, dtype=torch.int64), *chosen]))


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
    """See `gradsync.kernels.select_above`."""
    arguments = SelectionArguments.of(x, indices, values, sections, counts, residual, next_residual)
    check_thresholds(x, thresholds, len(arguments.lengths))
    p = arguments.elements()
    chosen = [indices.new_empty(0, dtype=torch.int64)]
    for threshold, (offset, part, most) in zip(thresholds, arguments.parts(p), strict=True):
        found = is_above(part, threshold).nonzero().flatten()
        chosen.append(offset + found[largest(magnitudes(part[found]), min(most, len(found)))])
    return arguments.take(p, torch.cat(chosen))


@torch.no_grad()
def count_above(x: Tensor, thresholds: Tensor, counts: Tensor, *, sections: Sections | None = None) -> None:
    """See `gradsync.kernels.count_above`."""
    check_floating("x", x)
    check_flat("x", x)
    lengths = section_lengths(x, sections)
    check_thresholds(x, thresholds, len(lengths))
    if counts.dtype != torch.int64:
        raise TypeError(f"counts must be int64, got {describe(counts)}")
    check_shape("counts", counts, len(lengths))
    for number, part in enumerate(x.split(lengths)):
        counts[number] = is_above(part, thresholds[number]).sum()


def check_thresholds(x: Tensor, thresholds: Tensor, sections: int) -> None:
    """Refuses what is not one threshold for each section."""
    check_floating("thresholds", thresholds, accumulation_dtype(x.dtype))
    check_shape("thresholds", thresholds, sections)


def is_above(part: Tensor, threshold: Tensor) -> Tensor:
    """Which elements are not within the threshold: all, if there is none."""
    return ~(part.abs().to(threshold.dtype) <= threshold)


def largest(keys: Tensor, k: int) -> Tensor:
    """The indices of the k largest keys, ascending; of equal keys, the first ones."""
    if k == 0:
        return keys.new_empty(0, dtype=torch.int64)
    least = torch.topk(keys, k, sorted=False).values.min()
    above, equal = (keys > least).nonzero().flatten(), (keys == least).nonzero().flatten()
    chosen: Tensor = torch.cat([above, equal[: k - len(above)]]).sort().values
    return chosen
