"""Selection of the k elements of largest magnitude, in Triton: a radix select in which the host never waits.

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

from gradsync.kernels.checks import Sections
from gradsync.kernels.reference.largest import SelectionArguments, rounded_to
from gradsync.kernels.triton.boundary import (
    BLOCK,
    bits_of,
    blocks,
    device_of,
    launch,
    on,
)

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
    """Returns which magnitudes are larger than the k-th largest one, and which equal it, as int32 of 0 and 1."""
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
    exact = values if values.dtype == p.dtype else torch.empty(len(values), dtype=p.dtype, device=p.device)
    taken = 0
    for offset, part, count in arguments.parts(p):
        chosen = slice(taken, taken + count)
        _write_largest(part, indices[chosen], exact[chosen])
        indices[chosen] += offset
        taken += count
    if exact is not values:
        rounded_to(values, exact)
    if next_residual is not None:
        next_residual[indices.long()] = exact - values.to(exact.dtype)
