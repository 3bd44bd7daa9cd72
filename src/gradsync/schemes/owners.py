"""Ownership: which rank sums which part of a table (Zen's balance dimension)."""

from __future__ import annotations


def column_stripes(dim: int, size: int) -> list[tuple[int, int]]:
    """[start, stop) of the columns each of `size` ranks owns of *every* row.

    Whatever rows a step touches, all owners get equally many elements of each: imbalance 1 in push and pull if `size`
    divides `dim`, with no hash and no table (Zen, OSDI 2025, made exact for row-sparse gradients). With fewer columns
    than ranks some ranks own none.
    """
    return [(owner * dim // size, (owner + 1) * dim // size) for owner in range(size)]
