"""Triton kernels that sum tensors into count sketches, and estimate the elements from sketches.

Neighbouring elements form a group, which is added to a window of adjacent counters. Counters take no atomics: a stable
sort by window brings the groups of each window together, in their order, and one lane adds up one counter. Random bits
are computed again wherever they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.checks import Sections
from gradsync.kernels.draws import check_median, sketch_keys, sketch_lanes
from gradsync.kernels.reference.sketches import check_count_sketch
from gradsync.kernels.triton.boundary import BLOCK, bits_of, device_of, launch, on
from gradsync.kernels.triton.draws import draws
from gradsync.kernels.triton.rows import kind_of, narrowed, widened

_COUNTERS = 256  # that one program adds up, as many elements to each
_ESTIMATES = 256


@triton.jit
def drawn_by(row: tl.tensor, group: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns random draws for groups of elements in a count sketch: window number, mask to xor lanes with, sign bits.

    They are int64. A group is as many neighbouring elements as it has lanes; a window is as many adjacent counters.
    `row` is the address of a row of the kernel's table, which describes one row of the sketch; `group` has the numbers
    of the groups.
    """
    start, columns, lanes = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    place = start + group * lanes
    lower, upper = place.to(tl.uint32), (place >> 32).to(tl.uint32)
    drawn = draws(lower, upper, tl.load(row + 6)).to(tl.int64)
    signs = draws(lower, upper, tl.load(row + 7)).to(tl.int64)
    return (drawn * (columns // lanes)) >> 32, drawn % lanes, signs


@triton.jit
def _place_groups(table: tl.tensor, places: tl.tensor, windows: tl.tensor, BLOCK: tl.constexpr) -> None:
    """One program writes the number of the window (adjacent counters) for each group in a block of groups of elements.

    Windows are numbered over all rows of `table`. `places` has, for each program, the row and the first group there.
    """
    program = tl.program_id(0)
    row = table + tl.load(places + 2 * program) * 10
    group = tl.load(places + 2 * program + 1) + tl.arange(0, BLOCK)
    length, lanes = tl.load(row + 1), tl.load(row + 4)
    window, _, _ = drawn_by(row, group)
    tl.store(windows + tl.load(row + 8) + group, tl.load(row + 9) + window, mask=group * lanes < length)


@triton.jit
def _add_groups(
    x: tl.tensor,
    table: tl.tensor,
    places: tl.tensor,
    order: tl.tensor,
    bounds: tl.tensor,
    counters: tl.tensor,
    COUNTERS: tl.constexpr,
    KIND: tl.constexpr,
    OUT_KIND: tl.constexpr,
) -> None:
    """One program sums one block of counters of a row: each lane adds the elements that go to one counter."""
    program = tl.program_id(0)
    row = table + tl.load(places + 2 * program) * 10
    counter = tl.load(places + 2 * program + 1) + tl.arange(0, COUNTERS)
    begin, length, columns, lanes = tl.load(row), tl.load(row + 1), tl.load(row + 3), tl.load(row + 4)
    first_group, window = tl.load(row + 8), tl.load(row + 9) + counter // lanes
    known = counter < columns
    at = tl.load(bounds + window, mask=known, other=0)
    end = tl.load(bounds + window + 1, mask=known, other=0)
    total = widened(tl.zeros([COUNTERS], x.dtype.element_ty), KIND)
    while tl.max((at < end).to(tl.int32), 0) > 0:
        group = tl.load(order + at, mask=at < end, other=0) - first_group
        _, mask, signs = drawn_by(row, group)
        element = group * lanes + ((counter % lanes) ^ mask)
        inside = (at < end) & (element < length)
        value = widened(tl.load(x + begin + element, mask=inside, other=0), KIND)
        value = tl.where(((signs >> (counter % lanes)) & 1) != 0, value * -1.0, value)
        total = tl.where(inside, total + value, total)
        at += 1
    tl.store(counters + tl.load(row + 5) + counter, narrowed(total, OUT_KIND), mask=known)


@triton.jit
def _estimate(
    counters: tl.tensor,
    table: tl.tensor,
    places: tl.tensor,
    out: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    KIND: tl.constexpr,
    OUT_KIND: tl.constexpr,
) -> None:
    """One program writes the estimates of one block of elements: the medians over ROWS of their counters times signs.

    COLUMNS is ROWS, rounded up to a power of two; `places` is a list of `_programs`.
    """
    program = tl.program_id(0)
    first = table + tl.load(places + 2 * program) * 10
    element = tl.load(places + 2 * program + 1) + tl.arange(0, ELEMENTS)
    begin, length, lanes = tl.load(first), tl.load(first + 1), tl.load(first + 4)
    number = tl.arange(0, COLUMNS)[None, :]
    used = number < ROWS
    rows = first + tl.where(used, number, 0) * 10
    inside = (element < length)[:, None] & used
    window, mask, signs = drawn_by(rows, (element // lanes)[:, None])
    lane = (element % lanes)[:, None] ^ mask
    value = widened(tl.load(counters + tl.load(rows + 5) + window * lanes + lane, mask=inside, other=0), KIND)
    value = tl.where(((signs >> lane) & 1) != 0, value * -1.0, value) + 0.0
    nan = value != value  # noqa: PLR0124 (Triton has no isnan; only NaN differs from itself)
    value = tl.where(used, tl.where(nan, 0.0, value), float("inf"))
    if ROWS > 1:
        value = tl.sort(value, 1)
    median = tl.sum(tl.where(number == ROWS // 2, value, 0.0), 1)
    median = tl.where(tl.max(nan.to(tl.int32), 1) > 0, float("nan"), median)
    tl.store(out + begin + element, narrowed(median, OUT_KIND), mask=element < length)


def _rows_of(sections: Sections, columns: Sequence[int], rows: int) -> list[tuple[int, ...]]:
    """Returns the table that the kernels read: a tuple of ten integers for each section and each of its `rows`.

    A group is `lanes` neighbouring elements, which are added at once to a window of `lanes` neighbouring counters. The
    integers: the section's first element in the flat tensor, number of elements, place of the first in its own tensor,
    counters in a row (`columns` of the section), `lanes`; then, of this row, the first counter, two hash keys, the
    first group and the first window. Counters, groups and windows are numbered through all sections and rows.
    """
    found, begin, counters, groups, windows = [], 0, 0, 0, 0
    for length, start, seed, count in zip(sections.lengths, sections.places, sections.seeds, columns, strict=True):
        lanes = sketch_lanes(count)
        for row in range(rows):
            keys = [key - (key >> 63 << 64) for key in sketch_keys(seed, row)]  # as int64
            found.append((begin, length, start, count, lanes, counters, *keys, groups, windows))
            counters, groups, windows = counters + count, groups + -(-length // lanes), windows + count // lanes
        begin += length
    return found


def _programs(counts: Sequence[int], entries: int) -> list[int]:
    """Returns for each program, in one flat list, the number of its list of entries and its first entry there.

    `counts`: the lengths of the lists of entries; one program handles `entries` of them.
    """
    return [number for which, count in enumerate(counts) for at in range(0, count, entries) for number in (which, at)]


def count_sketch(x: Tensor, sections: Sections, columns: Sequence[int], counters: Tensor, *, rows: int) -> None:
    check_count_sketch("x", x, sections, columns, counters, rows)
    device = device_of(x=x, counters=counters)
    kinds = {"KIND": kind_of("x", x), "OUT_KIND": kind_of("counters", counters)}
    found = _rows_of(sections, columns, rows)
    groups, windows = [-(-row[1] // row[4]) for row in found], sum(row[3] // row[4] for row in found)
    table = on(device, [entry for row in found for entry in row])
    placed = torch.empty(sum(groups), dtype=torch.int64, device=device)
    programs = _programs(groups, BLOCK)
    launch(_place_groups, len(programs) // 2, device, table, on(device, programs), placed, BLOCK=BLOCK)
    ordered, order = placed.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(windows + 1, device=device))
    programs = _programs([row[3] for row in found], _COUNTERS)
    launch(
        _add_groups, len(programs) // 2, device, bits_of(x), table, on(device, programs), order, bounds,
        bits_of(counters), COUNTERS=_COUNTERS, **kinds,
    )  # fmt: skip


def sketch_estimates(counters: Tensor, sections: Sections, columns: Sequence[int], out: Tensor, *, rows: int) -> None:
    check_count_sketch("out", out, sections, columns, counters, rows)
    check_median(rows)
    device = device_of(counters=counters, out=out)
    found = _rows_of(sections, columns, rows)
    table = on(device, [entry for row in found for entry in row])
    lengths = [length if row == 0 else 0 for length in sections.lengths for row in range(rows)]
    programs, width = _programs(lengths, _ESTIMATES), 1 << (rows - 1).bit_length()
    constants = {"ROWS": rows, "COLUMNS": width, "ELEMENTS": _ESTIMATES}
    kinds = {"KIND": kind_of("counters", counters), "OUT_KIND": kind_of("out", out)}
    memory = bits_of(counters), bits_of(out)
    launch(
        _estimate, len(programs) // 2, device, memory[0], table, on(device, programs), memory[1], **constants, **kinds
    )
