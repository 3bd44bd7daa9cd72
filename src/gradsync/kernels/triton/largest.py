"""Selection of the k elements of largest magnitude, in Triton: a radix select in which the host never waits.

Elements above a threshold are counted in each block of each section by one launch, and written by another: a section
that has more of them than are wanted is selected from as by `top_k`. The host waits once, for the counts.

Magnitudes are compared as integers, digit by digit from the upper end: a histogram of the next digit, over the elements
that begin with the digits found so far, says which digit the k-th largest has. The number of passes is fixed, so the
host needs no result. Elements are written as in `elements`: a first pass counts those selected in each block, and the
running sum of the counts says where each block writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.checks import Sections, check_dtype, check_flat, check_floating, check_shape, section_lengths
from gradsync.kernels.reference.largest import SelectionArguments, check_thresholds, rounded_to
from gradsync.kernels.triton.boundary import (
    BLOCK,
    bits_of,
    blocks,
    device_of,
    launch,
    on,
)
from gradsync.kernels.triton.ordered import place_after
from gradsync.kernels.triton.positions import before_each
from gradsync.kernels.triton.rows import kind_of, widened

_DIGIT_BITS = 8  # a pass over the elements for each; `_count_digits` and `_find_digit` have 2^8 counts
_COUNTED = 4096  # elements of one program's histogram: it ends in an atomic sum for each count


@triton.jit(do_not_specialize=["shift"])
def _count_digits(
    x: tl.tensor,
    count: tl.tensor,
    bound: tl.tensor,
    shift: tl.tensor,
    counts: tl.tensor,
    MOST: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program adds the next digits of magnitudes that begin with the digits in `bound` to a histogram, `counts`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    upper = (tl.load(x + at, mask=at < count, other=0) & MOST) >> shift
    agrees = (at < count) & ((upper >> DIGIT_BITS) == tl.load(bound).to(upper.dtype))
    digit = tl.arange(0, 1 << DIGIT_BITS)
    found = tl.histogram((upper & ((1 << DIGIT_BITS) - 1)).to(tl.int32), 1 << DIGIT_BITS, mask=agrees)
    tl.atomic_add(counts + digit, found.to(tl.int64), mask=found > 0, sem="relaxed")


@triton.jit
def _find_digit(counts: tl.tensor, bound: tl.tensor, longer: tl.tensor, DIGIT_BITS: tl.constexpr) -> None:
    """A single program finds the next digit of the k-th largest magnitude from the histogram `counts`.

    `longer` gets the digits in `bound` and this one, and how many of the magnitudes with these digits are among the k.
    """
    digit = tl.arange(0, 1 << DIGIT_BITS)
    count = tl.load(counts + digit)
    wanted = tl.load(bound + 1)
    not_below = tl.sum(count, 0) - tl.cumsum(count, 0) + count  # descends
    found = tl.sum((not_below >= wanted).to(tl.int64), 0) - 1
    tl.store(longer, (tl.load(bound) << DIGIT_BITS) + found)
    tl.store(longer + 1, wanted - tl.sum(tl.where(digit > found, count, 0), 0))


@triton.jit
def compared(bits: tl.tensor, inside: tl.tensor, bound: tl.tensor, MOST: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Returns which magnitudes are larger than the k-th largest one, and which equal it, as int32 of 0 and 1 each.

    Args:
        bits: the bits of the elements.
        inside: which of them exist.
        bound: where the bits of the k-th largest magnitude are.
        MOST: a mask of all bits but the sign.
    """
    least = tl.load(bound).to(bits.dtype)
    larger = inside & ((bits & MOST) > least)
    equal = inside & ((bits & MOST) == least)
    return larger.to(tl.int32), equal.to(tl.int32)


@triton.jit
def _count_largest(
    x: tl.tensor, count: tl.tensor, bound: tl.tensor, counts: tl.tensor, MOST: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One program stores how many magnitudes of one block exceed the k-th largest, and how many equal it."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    larger, equal = compared(tl.load(x + at, mask=at < count, other=0), at < count, bound, MOST)
    tl.store(counts + tl.program_id(0), tl.sum(larger, 0))
    tl.store(counts + tl.num_programs(0) + tl.program_id(0), tl.sum(equal, 0))


@triton.jit
def _take_largest(
    x: tl.tensor,
    count: tl.tensor,
    bound: tl.tensor,
    ends: tl.tensor,
    indices: tl.tensor,
    values: tl.tensor,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program writes the selected elements of one block and their indices, after those of all blocks before it."""
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(x + at, mask=at < count, other=0)
    larger, equal = compared(bits, at < count, bound, MOST)
    larger_before = tl.load(ends + program) - tl.sum(larger, 0)
    equal_before = tl.load(ends + tl.num_programs(0) + program) - tl.sum(equal, 0)
    ties = tl.load(bound + 1)
    first = (equal != 0) & (equal_before + tl.cumsum(equal, 0) <= ties)
    taken = ((larger != 0) | first).to(tl.int32)
    place = larger_before + tl.minimum(equal_before, ties) + tl.cumsum(taken, 0) - 1
    tl.store(indices + place, at, mask=taken != 0)
    tl.store(values + place, bits, mask=taken != 0)


@triton.jit
def elements_above(
    x: tl.tensor,
    thresholds: tl.tensor,
    sections: tl.tensor,
    num_sections: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Returns this program's section, (1,), the indices and bits of its elements, and 1 for those above the threshold.

    `sections` lists the first program of each section, and of one behind the last; then the first element of each
    section, and of one behind the last. `thresholds` has one number for each section.
    """
    program = tl.zeros([1], tl.int64) + tl.program_id(0)
    section = place_after(sections, num_sections, program) - 1
    start, stop = tl.load(sections + num_sections + 1 + section), tl.load(sections + num_sections + 2 + section)
    at = start + (program - tl.load(sections + section)) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(x + at, mask=at < stop, other=0)
    within = tl.abs(widened(bits, KIND)) <= tl.load(thresholds + section)
    return section, at, bits, ((at < stop) & (within == 0)).to(tl.int32)


@triton.jit
def _count_above(
    x: tl.tensor,
    thresholds: tl.tensor,
    sections: tl.tensor,
    num_sections: tl.tensor,
    counts: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program stores how many elements of one block of a section are above its threshold."""
    _, _, _, above = elements_above(x, thresholds, sections, num_sections, KIND, BLOCK)
    tl.store(counts + tl.program_id(0), tl.sum(above, 0))


@triton.jit
def _take_above(
    x: tl.tensor,
    thresholds: tl.tensor,
    sections: tl.tensor,
    num_sections: tl.tensor,
    begins: tl.tensor,
    places: tl.tensor,
    indices: tl.tensor,
    values: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program writes the elements of one block that are above the threshold of its section, and their indices.

    It writes to a range of its own: from its section's place in the outputs on (none if it is negative), behind the
    elements of the section's blocks before it. `begins`: how many elements are above before each block.
    """
    section, at, bits, above = elements_above(x, thresholds, sections, num_sections, KIND, BLOCK)
    before = tl.load(begins + tl.program_id(0)) - tl.load(begins + tl.load(sections + section))
    place = tl.load(places + section)
    kept = (above != 0) & (place >= 0)
    tl.store(indices + place + before + tl.cumsum(above, 0) - 1, at, mask=kept)
    tl.store(values + place + before + tl.cumsum(above, 0) - 1, bits, mask=kept)


def _bound(bits: Tensor, k: int) -> Tensor:
    """Returns the k-th largest magnitude, and how many elements of this magnitude are among the k: (2,) int64.

    `bits`: the elements' bits, (numel,) integers; the result is on their device. The magnitude is found 8 bits (one
    digit) at a time, from the upper end.
    """
    bound, most = on(bits.device, [0, k]), torch.iinfo(bits.dtype).max
    for shift in range(8 * bits.element_size() - _DIGIT_BITS, -1, -_DIGIT_BITS):
        counts = torch.zeros(1 << _DIGIT_BITS, dtype=torch.int64, device=bits.device)
        arguments = bits, len(bits), bound, shift, counts
        constants = {"MOST": most, "DIGIT_BITS": _DIGIT_BITS, "BLOCK": _COUNTED}
        launch(_count_digits, blocks(len(bits), _COUNTED), bits.device, *arguments, **constants)
        longer = torch.empty_like(bound)
        launch(_find_digit, 1, bits.device, counts, bound, longer, DIGIT_BITS=_DIGIT_BITS)
        bound = longer
    return bound


def _write_largest(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """Writes the len(indices) elements of `x`, (numel,), of largest magnitude to `values`, and their indices."""
    if len(indices) == 0:
        return
    bits = bits_of(x)
    bound, constants = _bound(bits, len(indices)), {"MOST": torch.iinfo(bits.dtype).max, "BLOCK": BLOCK}
    counts = torch.empty(2, blocks(len(x)), dtype=torch.int32, device=x.device)
    launch(_count_largest, blocks(len(x)), x.device, bits, len(x), bound, counts, **constants)
    arguments = bits, len(x), bound, counts.cumsum(1), indices, bits_of(values)
    launch(_take_largest, blocks(len(x)), x.device, *arguments, **constants)


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
    # Selects section by section; torch operations add and write the residuals.
    arguments = SelectionArguments.of(x, indices, values, sections, counts, residual, next_residual)
    device_of(x=x, indices=indices, values=values, residual=residual, next_residual=next_residual)
    p = arguments.elements()
    exact = _exact(arguments, p)
    taken = 0
    for offset, part, count in arguments.parts(p):
        _take_largest_of(part, offset, indices[taken : taken + count], exact[taken : taken + count])
        taken += count
    _round(arguments, exact, taken)


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
    # Counts in all sections at once, then writes; torch operations add and write the residuals.
    arguments = SelectionArguments.of(x, indices, values, sections, counts, residual, next_residual)
    check_thresholds(x, thresholds, len(arguments.lengths))
    given = {"x": x, "thresholds": thresholds, "indices": indices, "values": values}
    device = device_of(**given, residual=residual, next_residual=next_residual)
    p = arguments.elements()
    exact = _exact(arguments, p)
    bounds, begins, found = _above(p, thresholds, arguments.lengths)
    places, crowded, taken = [], [], 0
    for (offset, part, most), number in zip(arguments.parts(p), found.tolist(), strict=True):
        places.append(taken if number <= most else -1)
        if number > most:
            crowded.append((part, offset, slice(taken, taken + most)))
        taken += min(number, most)
    tables = bits_of(p), thresholds, bounds, len(found), begins, on(device, places)
    constants = {"KIND": kind_of("x", p), "BLOCK": BLOCK}
    launch(_take_above, len(begins) - 1, device, *tables, indices, bits_of(exact), **constants)
    for part, offset, chosen in crowded:
        _take_largest_of(part, offset, indices[chosen], exact[chosen])
    _round(arguments, exact, taken)
    return taken


@torch.no_grad()
def count_above(x: Tensor, thresholds: Tensor, counts: Tensor, *, sections: Sections | None = None) -> None:
    check_floating("x", x)
    check_flat("x", x)
    lengths = section_lengths(x, sections)
    check_thresholds(x, thresholds, len(lengths))
    check_dtype("counts", counts, torch.int64)
    check_shape("counts", counts, len(lengths))
    device_of(x=x, thresholds=thresholds, counts=counts)
    counts.copy_(_above(x, thresholds, lengths)[-1])


def _above(p: Tensor, thresholds: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the table of sections for `_take_above`, its `begins`, and how many elements each section has above.

    `p`: (numel,); `thresholds`: (sections,), as the last result, int64; `lengths`: elements of each section.
    """
    table = torch.tensor([[blocks(length) for length in lengths], lengths], dtype=torch.int64)
    first = torch.nn.functional.pad(table.cumsum(1), (1, 0))
    bounds = on(p.device, first)
    counts = torch.empty(int(first[0, -1]), dtype=torch.int32, device=p.device)
    arguments = bits_of(p), thresholds, bounds, len(lengths), counts
    launch(_count_above, len(counts), p.device, *arguments, KIND=kind_of("x", p), BLOCK=BLOCK)
    begins = before_each(counts)
    return bounds, begins, begins[bounds[0]].diff()


def _exact(arguments: SelectionArguments, p: Tensor) -> Tensor:
    """Returns the output for values, (k,), or, if they are of another dtype than `p`, (numel,), one of p's dtype."""
    values = arguments.values
    return values if values.dtype == p.dtype else torch.empty(len(values), dtype=p.dtype, device=p.device)


def _take_largest_of(part: Tensor, offset: int, indices: Tensor, values: Tensor) -> None:
    """Writes the k largest of a section's elements, (length,), to (k,) outputs, and their indices plus `offset`."""
    _write_largest(part, indices, values)
    indices += offset


def _round(arguments: SelectionArguments, exact: Tensor, count: int) -> None:
    """Rounds the first `count` values, (k,), to the dtype of the outputs, and writes what remains to the residual."""
    values, exact = arguments.values[:count], exact[:count]
    if values.dtype != exact.dtype:
        rounded_to(values, exact)
    if arguments.next_residual is not None:
        arguments.next_residual[arguments.indices[:count].long()] = exact - values.to(exact.dtype)
