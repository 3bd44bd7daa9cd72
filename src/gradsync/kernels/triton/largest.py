"""Selection of the k elements of largest magnitude, in Triton: a radix select in which the host never waits.

All sections are selected from by the same launches: a program works on a block of one section, which it finds in a
table, and histograms, bounds and places have a row for each section.

Elements above a threshold are counted in each block of each section by one launch, and written by another: sections
that have more of them than are wanted are selected from as by `top_k`. The host waits once, for the counts.

Magnitudes are compared as integers, digit by digit from the upper end: a histogram of the next digit, over the elements
that begin with the digits found so far, says which digit the k-th largest has. The number of passes is fixed, so the
host needs no result. Elements are written as in `elements`: a first pass counts those selected in each block, and the
running sum of the counts says where each block writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

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


@triton.jit
def block_of(
    sections: tl.tensor, num_sections: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns this program's section, (1,), the indices of the elements of its block, and which of them exist.

    A single section is not searched for: Triton compiles kernels anew for a number of 1, and then sees that blocks
    are aligned.

    Args:
        sections: the first program of each section, and of one behind the last; then the first element of each section,
            and of one behind the last.
        num_sections: the number of sections.
        count: the number of elements of all sections.
    """
    program = tl.zeros([1], tl.int64) + tl.program_id(0)
    section, begin, stop = program * 0, program * BLOCK, program * 0 + count
    if num_sections > 1:
        section = place_after(sections, num_sections, program) - 1
        elements = sections + num_sections + 1 + section
        begin, stop = tl.load(elements) + (program - tl.load(sections + section)) * BLOCK, tl.load(elements + 1)
    at = begin + tl.arange(0, BLOCK)
    return section, at, at < stop


@triton.jit(do_not_specialize=["shift"])
def _count_digits(
    x: tl.tensor,
    sections: tl.tensor,
    num_sections: tl.tensor,
    count: tl.tensor,
    bound: tl.tensor,
    shift: tl.tensor,
    counts: tl.tensor,
    MOST: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program adds the next digits of a block's magnitudes to the histogram of its section, a row of `counts`.

    It counts those magnitudes that begin with the section's digits in `bound`.
    """
    section, at, inside = block_of(sections, num_sections, count, BLOCK)
    upper = (tl.load(x + at, mask=inside, other=0) & MOST) >> shift
    agrees = inside & ((upper >> DIGIT_BITS) == tl.load(bound + section).to(upper.dtype))
    place = (section << DIGIT_BITS) + tl.arange(0, 1 << DIGIT_BITS)
    found = tl.histogram((upper & ((1 << DIGIT_BITS) - 1)).to(tl.int32), 1 << DIGIT_BITS, mask=agrees)
    tl.atomic_add(counts + place, found.to(tl.int64), mask=found > 0, sem="relaxed")


@triton.jit
def _find_digit(
    counts: tl.tensor, num_sections: tl.tensor, bound: tl.tensor, longer: tl.tensor, DIGIT_BITS: tl.constexpr
) -> None:
    """One program finds the next digit of one section's k-th largest magnitude from its histogram, a row of `counts`.

    `longer` gets the section's digits in `bound` and this one, and how many of the magnitudes with these digits are
    among the k. Both have these two numbers in two rows, of num_sections + 1 numbers.
    """
    section, digit = tl.program_id(0).to(tl.int64), tl.arange(0, 1 << DIGIT_BITS)
    count = tl.load(counts + (section << DIGIT_BITS) + digit)
    wanted = tl.load(bound + num_sections + 1 + section)
    not_below = tl.sum(count, 0) - tl.cumsum(count, 0) + count  # descends
    found = tl.sum((not_below >= wanted).to(tl.int64), 0) - 1
    tl.store(longer + section, (tl.load(bound + section) << DIGIT_BITS) + found)
    tl.store(longer + num_sections + 1 + section, wanted - tl.sum(tl.where(digit > found, count, 0), 0))


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
    x: tl.tensor,
    sections: tl.tensor,
    num_sections: tl.tensor,
    count: tl.tensor,
    bound: tl.tensor,
    counts: tl.tensor,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program stores how many magnitudes of a block exceed the k-th largest of its section, and how many equal it.

    `bound` has this magnitude for each section.
    """
    section, at, inside = block_of(sections, num_sections, count, BLOCK)
    larger, equal = compared(tl.load(x + at, mask=inside, other=0), inside, bound + section, MOST)
    tl.store(counts + tl.program_id(0), tl.sum(larger, 0))
    tl.store(counts + tl.num_programs(0) + tl.program_id(0), tl.sum(equal, 0))


@triton.jit
def _take_largest(
    x: tl.tensor,
    sections: tl.tensor,
    num_sections: tl.tensor,
    count: tl.tensor,
    bound: tl.tensor,
    places: tl.tensor,
    ends: tl.tensor,
    indices: tl.tensor,
    values: tl.tensor,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program writes the selected elements of one block and their indices.

    It writes to a range of its own: from its section's place in the outputs on, behind the elements of the section's
    blocks before it. `ends`: running sums over the blocks of all sections of the two counts of `_count_largest`.
    """
    section, at, inside = block_of(sections, num_sections, count, BLOCK)
    bits = tl.load(x + at, mask=inside, other=0)
    larger, equal = compared(bits, inside, bound + section, MOST)
    program, first, equals = tl.program_id(0), tl.load(sections + section), ends + tl.num_programs(0)
    larger_before = tl.load(ends + program) - tl.sum(larger, 0) - tl.load(ends + first - 1, mask=first > 0, other=0)
    equal_before = tl.load(equals + program) - tl.sum(equal, 0) - tl.load(equals + first - 1, mask=first > 0, other=0)
    ties = tl.load(bound + num_sections + 1 + section)
    earliest = (equal != 0) & (equal_before + tl.cumsum(equal, 0) <= ties)
    taken = ((larger != 0) | earliest).to(tl.int32)
    before = tl.load(places + section) + larger_before + tl.minimum(equal_before, ties)
    place = before + tl.cumsum(taken, 0) - 1
    tl.store(indices + place, at, mask=taken != 0)
    tl.store(values + place, bits, mask=taken != 0)


@triton.jit
def elements_above(
    x: tl.tensor,
    thresholds: tl.tensor,
    sections: tl.tensor,
    num_sections: tl.tensor,
    count: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Returns this program's section, (1,), the indices and bits of its elements, and 1 for those above the threshold.

    `thresholds` has one number for each section; the other arguments are those of `block_of`.
    """
    section, at, inside = block_of(sections, num_sections, count, BLOCK)
    bits = tl.load(x + at, mask=inside, other=0)
    within = tl.abs(widened(bits, KIND)) <= tl.load(thresholds + section)
    return section, at, bits, (inside & (within == 0)).to(tl.int32)


@triton.jit
def _count_above(
    x: tl.tensor,
    thresholds: tl.tensor,
    sections: tl.tensor,
    num_sections: tl.tensor,
    count: tl.tensor,
    counts: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program stores how many elements of one block of a section are above its threshold."""
    _, _, _, above = elements_above(x, thresholds, sections, num_sections, count, KIND, BLOCK)
    tl.store(counts + tl.program_id(0), tl.sum(above, 0))


@triton.jit
def _take_above(
    x: tl.tensor,
    thresholds: tl.tensor,
    sections: tl.tensor,
    num_sections: tl.tensor,
    count: tl.tensor,
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
    section, at, bits, above = elements_above(x, thresholds, sections, num_sections, count, KIND, BLOCK)
    before = tl.load(begins + tl.program_id(0)) - tl.load(begins + tl.load(sections + section))
    place = tl.load(places + section)
    kept = (above != 0) & (place >= 0)
    tl.store(indices + place + before + tl.cumsum(above, 0) - 1, at, mask=kept)
    tl.store(values + place + before + tl.cumsum(above, 0) - 1, bits, mask=kept)


def _bounds(bits: Tensor, sections: Tensor, programs: int, bound: Tensor) -> Tensor:
    """Returns each section's k-th largest magnitude, and how many elements of this magnitude are among its k.

    The magnitudes are found 8 bits (one digit) at a time, from the upper end.

    Args:
        bits: the elements' bits, (numel,) integers; all other tensors are on their device.
        sections: for `block_of`, (2, sections + 1) int64, with blocks of 4096; `programs`: the number of these blocks.
        bound: zeros, and the k of each section, (2, sections + 1) int64 like the result; the last column is unused.
    """
    number, most = bound.shape[1] - 1, torch.iinfo(bits.dtype).max
    for shift in range(8 * bits.element_size() - _DIGIT_BITS, -1, -_DIGIT_BITS):
        counts = torch.zeros(number << _DIGIT_BITS, dtype=torch.int64, device=bits.device)
        arguments = bits, sections, number, len(bits), bound, shift, counts
        constants = {"MOST": most, "DIGIT_BITS": _DIGIT_BITS, "BLOCK": _COUNTED}
        launch(_count_digits, programs, bits.device, *arguments, **constants)
        longer = torch.empty_like(bound)
        launch(_find_digit, number, bits.device, counts, number, bound, longer, DIGIT_BITS=_DIGIT_BITS)
        bound = longer
    return bound


def _write_largest(
    x: Tensor,
    lengths: Sequence[int],
    counts: Sequence[int],
    places: Sequence[int],
    indices: Tensor,
    values: Tensor,
) -> None:
    """Writes the elements of largest magnitude of each section of `x`, (numel,), and their indices.

    Sections of which none is taken have no block, so no program works on them.

    Args:
        lengths, counts: elements of each section, and how many of them to take.
        places: where in the outputs a section's elements begin.
        indices, values: the outputs, 1-D, the latter of x's dtype.
    """
    if not any(counts):
        return
    read = [length if count > 0 else 0 for length, count in zip(lengths, counts, strict=True)]
    counted, written = (_begins(lengths, read, block) for block in (_COUNTED, BLOCK))
    # Pairs of rows, so that each pair begins at a multiple of 16 bytes.
    rows = [*counted, *written, [0] * (len(counts) + 1), [*counts, 0], [*places, 0]]
    bits, table = bits_of(x), on(x.device, torch.tensor(rows, dtype=torch.int64))
    bound = _bounds(bits, table[:2], counted[0][-1], table[4:6])
    programs, arguments = written[0][-1], (bits, table[2:4], len(lengths), len(x), bound)
    constants = {"MOST": torch.iinfo(bits.dtype).max, "BLOCK": BLOCK}
    found = torch.empty(2, programs, dtype=torch.int32, device=x.device)
    launch(_count_largest, programs, x.device, *arguments, found, **constants)
    outputs = table[6], found.cumsum(1), indices, bits_of(values)
    launch(_take_largest, programs, x.device, *arguments, *outputs, **constants)


def _begins(lengths: Sequence[int], read: Sequence[int], block: int) -> list[list[int]]:
    """Returns the table of sections for `block_of`: two rows of sections + 1 numbers.

    `lengths`: elements of each section; `read`: how many of them programs work on, `block` each.
    """
    programs = (blocks(count, block) for count in read)
    return [list(accumulate(programs, initial=0)), list(accumulate(lengths, initial=0))]


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
    # Selects in all sections at once; torch operations add and write the residuals.
    arguments = SelectionArguments.of(x, indices, values, sections, counts, residual, next_residual)
    device_of(x=x, indices=indices, values=values, residual=residual, next_residual=next_residual)
    p = arguments.elements()
    exact = _exact(arguments, p)
    *places, taken = accumulate(arguments.counts, initial=0)
    _write_largest(p, arguments.lengths, arguments.counts, places, indices, exact)
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
    pairs: list[tuple[int, int]] = list(zip(found.tolist(), arguments.counts, strict=True))
    *begin_at, taken = accumulate(map(min, pairs), initial=0)
    fitting = [place if number <= most else -1 for place, (number, most) in zip(begin_at, pairs, strict=True)]
    tables = bits_of(p), thresholds, bounds, len(pairs), len(p), begins, on(device, fitting)
    constants = {"KIND": kind_of("x", p), "BLOCK": BLOCK}
    launch(_take_above, len(begins) - 1, device, *tables, indices, bits_of(exact), **constants)
    crowded = [most if number > most else 0 for number, most in pairs]
    _write_largest(p, arguments.lengths, crowded, begin_at, indices, exact)
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
    first = _begins(lengths, lengths, BLOCK)
    bounds = on(p.device, torch.tensor(first, dtype=torch.int64))
    counts = torch.empty(first[0][-1], dtype=torch.int32, device=p.device)
    arguments = bits_of(p), thresholds, bounds, len(lengths), len(p), counts
    launch(_count_above, len(counts), p.device, *arguments, KIND=kind_of("x", p), BLOCK=BLOCK)
    begins = before_each(counts)
    return bounds, begins, begins[bounds[0]].diff()


def _exact(arguments: SelectionArguments, p: Tensor) -> Tensor:
    """Returns the output for values, (k,), or, if they are of another dtype than `p`, (numel,), one of p's dtype."""
    values = arguments.values
    return values if values.dtype == p.dtype else torch.empty(len(values), dtype=p.dtype, device=p.device)


def _round(arguments: SelectionArguments, exact: Tensor, count: int) -> None:
    """Rounds the first `count` values, (k,), to the dtype of the outputs, and writes what remains to the residual."""
    values, exact = arguments.values[:count], exact[:count]
    if values.dtype != exact.dtype:
        rounded_to(values, exact)
    if arguments.next_residual is not None:
        arguments.next_residual[arguments.indices[:count].long()] = exact - values.to(exact.dtype)
