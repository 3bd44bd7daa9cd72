"""Count sketches: what many elements add up to in few counters, and what these tell of each element."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradsync.kernels.checks import Sections
from gradsync.kernels.choice import pick


def count_sketch(x: Tensor, sections: Sections, columns: Sequence[int], counters: Tensor, *, rows: int) -> None:
    """Adds up each section's elements in `rows` rows of counters, with signs; see Charikar et al., 2002.

    In each row any two elements of a section share a counter with probability 1 / columns at most, or never where they
    are near each other, and their signs are independent. Neighbours move together, which is what makes it fast: a
    section is cut into groups of as many as the largest power of two, up to 32 and the root of `columns`, that divides
    `columns`. (Of larger ones whole groups would meet often: with one window for all, always.) For a group, by the
    place of its first element in its tensor, a row draws d and s of 32 bits: it goes to window
    d * (columns / lanes) >> 32 of as many counters, the element in lane i to counter j = i ^ (d mod lanes) of these,
    negated where bit j of s is 1. (The keys of row r are the seed + 2 r and + 2 r + 1 times 0x9E3779B97F4A7C15.) A
    counter adds in the order of the elements, from 0, in float32 (float64 for float64).

    Args:
        x: (numel,) floating.
        sections: with seeds.
        columns: of each section, the counters of a row, below 2^31.
        counters: (rows * sum of columns,) float32, float64 for float64: section by section, row by row. Overwritten.

    Raises:
        ValueError: no seeds, no counters for elements, shapes that do not fit.
        TypeError: other dtypes.
    """
    pick("count_sketch", [x, counters], x.numel())(x, sections, columns, counters, rows=rows)


def sketch_estimates(counters: Tensor, sections: Sections, columns: Sequence[int], out: Tensor, *, rows: int) -> None:
    """What each element is, as far as `count_sketch` knows: the median over the rows of its counters with its signs.

    Where one of them is NaN, it is NaN.

    Args:
        counters: (rows * sum of columns,) float32, or float64.
        sections: those of `count_sketch`.
        columns: of each section, the counters of a row.
        out: (numel,) of any dtype that is summed in the counters' one. Overwritten.
        rows: odd.

    Raises:
        ValueError: an even number of rows, no seeds, no counters for elements, shapes that do not fit.
        TypeError: other dtypes.
    """
    pick("sketch_estimates", [counters, out], out.numel())(counters, sections, columns, out, rows=rows)
