"""Count sketches, in plain torch operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradsync.kernels.checks import Sections, check_floating, check_sections, check_shape
from gradsync.kernels.choice import dispatched
from gradsync.kernels.draws import check_median, check_sketch, sketch_keys, sketch_lanes
from gradsync.kernels.reference.draws import draws_at
from gradsync.kernels.reference.rows import accumulation_dtype


def check_count_sketch(
    name: str, elements: Tensor, sections: Sections, columns: Sequence[int], counters: Tensor, rows: int
) -> None:
    """Checks a sketch's elements, (numel,), and counters, (rows * sum of columns,); raises errors of `count_sketch`."""
    check_sketch(sections, columns, rows)
    check_sections(name, elements, sections)
    check_floating("counters", counters, accumulation_dtype(elements.dtype))
    check_shape("counters", counters, rows * sum(columns))


@dispatched("x", "counters", entries="x")
@torch.no_grad()
def count_sketch(x: Tensor, sections: Sections, columns: Sequence[int], counters: Tensor, *, rows: int) -> None:
    """Sums the elements of each section, times random signs, into `rows` rows of counters. (Charikar et al., 2002)

    In each row, any two elements of a section share a counter with a probability of at most 1 / columns (neighbours
    never), and their signs are independent. For speed, neighbours are hashed together: a section is cut into groups of
    `lanes` elements, the largest power of two up to 32 and the square root of `columns` that divides `columns`. (With
    larger groups, whole groups would collide often: with one window for all, always.) For each group, by the place of
    its first element in its tensor, a row draws d and s of 32 bits. The group goes to window d * (columns / lanes) >>
    32 of `lanes` counters, and the element in lane i to counter j = i ^ (d mod lanes) of this window, negated if bit j
    of s is 1. (The keys of row r are seed + k (2 r) and seed + k (2 r + 1), k = 0x9E3779B97F4A7C15.) A counter adds in
    the order of the elements, from 0, in float32 (float64 for float64).

    Args:
        x: (numel,) floating.
        sections: with seeds.
        columns: for each section, the counters of a row, below 2^31.
        counters: (rows * sum of columns,) float32, float64 for float64: section by section, row by row. Overwritten.

    Raises:
        ValueError: no seeds, no counters for elements, shapes that do not fit.
        TypeError: other dtypes.
    """
    check_count_sketch("x", x, sections, columns, counters, rows)
    counters.zero_()
    for part, row, column, negative in _hashed(x, sections, columns, counters, rows):
        addends = part.to(row.dtype)
        # On a CPU, torch adds in order.
        row.index_add_(0, column, torch.where(negative, -addends, addends))


@dispatched("counters", "out", entries="out")
@torch.no_grad()
def sketch_estimates(counters: Tensor, sections: Sections, columns: Sequence[int], out: Tensor, *, rows: int) -> None:
    """Writes the estimate of each element from a count sketch: the median over rows of its counters times its signs.

    If one of these counters is NaN, the estimate is NaN.

    Args:
        counters: (rows * sum of columns,) float32, or float64, from `count_sketch`.
        sections: as in `count_sketch`.
        columns: for each section, the counters of a row.
        out: (numel,) floating, of a dtype with the counters' dtype as `accumulation_dtype`. Overwritten.
        rows: odd.

    Raises:
        ValueError: an even number of rows, no seeds, no counters for elements, shapes that do not fit.
        TypeError: other dtypes.
    """
    check_count_sketch("out", out, sections, columns, counters, rows)
    check_median(rows)
    estimates: list[Tensor] = []
    for part, row, column, negative in _hashed(out, sections, columns, counters, rows):
        found = row[column]
        estimates.append(torch.where(negative, -found, found) + 0.0)  # without -0.0, of which a median is not sure
        if len(estimates) == rows:
            part.copy_(torch.stack(estimates).median(dim=0).values)
            estimates.clear()


def _hashed(
    flat: Tensor, sections: Sections, columns: Sequence[int], counters: Tensor, rows: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yields for each section and sketch row: elements, counters, the index of each element's counter, and its sign.

    (length,) floating, (columns,) floating, (length,) int64 and (length,) bool; True is negative.
    """
    begin = first = 0
    for length, start, seed, count in zip(sections.lengths, sections.places, sections.seeds, columns, strict=True):
        lanes = sketch_lanes(count)
        lane = torch.arange(lanes, device=flat.device)
        groups = torch.arange(start, start + length, lanes, device=flat.device)[:, None]
        for row in range(rows):
            where, which = sketch_keys(seed, row)
            drawn, signs = draws_at(groups, where), draws_at(groups, which)
            counter = lane ^ drawn % lanes
            column = (drawn * (count // lanes) >> 32) * lanes + counter
            negative = (signs >> counter & 1).bool()
            own = counters[first : first + count]
            yield flat[begin : begin + length], own, column.flatten()[:length], negative.flatten()[:length]
            first += count
        begin += length
