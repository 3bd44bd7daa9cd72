"""Triton kernels that draw random numbers: random sets of elements, and randomised Hadamard rotations.

Each lane computes its own random bits in uint32 arithmetic; nothing is shared. The seeds and places of sections, or of
chunks, come in a table. Each output element has one writer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.checks import Sections, check_index_out
from gradsync.kernels.draws import rotations, run_draws
from gradsync.kernels.reference.hashing import signed
from gradsync.kernels.reference.randomized import check_hadamard, rotation_scale
from gradsync.kernels.reference.rows import accumulation_dtype
from gradsync.kernels.triton.boundary import (
    BLOCK,
    bits_of,
    blocks,
    device_of,
    launch,
    on,
)
from gradsync.kernels.triton.draws import draws
from gradsync.kernels.triton.rows import kind_of, narrowed, widened

_MIN_PIECE = 1024  # elements that one program rotates, of as many chunks


@triton.jit
def added(value: tl.tensor, other: tl.tensor, number: tl.constexpr, size: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Returns (value + r) mod size, int64, with r drawn in [0, size): one round of a Feistel network.

    `key`, `other` (the other half) and `number` (of the round) decide r.
    """
    drawn = draws(other.to(tl.uint32), tl.full([1], number, tl.uint32), key)
    total = value + ((drawn.to(tl.int64) * size) >> 32)
    return tl.where(total >= size, total - size, total)


@triton.jit
def permuted(numbers: tl.tensor, a: tl.tensor, b: tl.tensor, key: tl.tensor) -> tl.tensor:
    left, right = numbers // b, numbers % b
    left = added(left, right, 0, a, key)
    right = added(right, left, 1, b, key)
    left = added(left, right, 2, a, key)
    right = added(right, left, 3, b, key)
    return left * b + right


@triton.jit
def _draw_runs(table: tl.tensor, places: tl.tensor, indices: tl.tensor, BLOCK: tl.constexpr) -> None:
    """One program writes one block of a section's drawn indices: those of runs, adjacent elements drawn together.

    `table`: for each section the fields of its `RunDraw`, and the place of its first drawn index in `indices`.
    `places`: for each program its section, and how many of the section's drawn indices come before the block.
    """
    program = tl.program_id(0)
    row = table + tl.load(places + 2 * program) * 10
    at = tl.load(places + 2 * program + 1) + tl.arange(0, BLOCK)
    offset, length, count, run, runs = (
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    )  # fmt: skip
    shift, a, b, key, begin = (
        tl.load(row + 5), tl.load(row + 6), tl.load(row + 7), tl.load(row + 8), tl.load(row + 9)
    )  # fmt: skip
    inside = at < count * run
    numbers = permuted(tl.where(inside, at // run, 0), a, b, key)
    while tl.max((numbers >= runs).to(tl.int32), 0) > 0:
        numbers = tl.where(numbers >= runs, permuted(numbers, a, b, key), numbers)
    element = shift + numbers * run + at % run
    element = tl.where(element >= length, element - length, element)
    tl.store(indices + begin + at, (offset + element).to(indices.dtype.element_ty), mask=inside)


def random_k(sections: Sections, counts: Sequence[int], indices: Tensor, *, block: int = 1) -> None:
    found = run_draws(sections, counts, block)
    check_index_out("indices", indices, sum(d.taken * d.run for d in found), sum(sections.lengths))
    device = device_of(indices=indices)
    rows, places, begin = [], [], 0
    for number, drawn in enumerate(found):
        rows += [*drawn[:-1], signed(drawn.key), begin]
        places += [(number, first) for first in range(0, drawn.taken * drawn.run, BLOCK)]
        begin += drawn.taken * drawn.run
    table, programs = on(device, rows), on(device, [entry for place in places for entry in place])
    launch(_draw_runs, len(places), device, table, programs, indices, BLOCK=BLOCK)


@triton.jit
def signs(place: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """Returns which elements a rotation with this seed negates, given their places, int64: one random bit for each."""
    word = place // 32
    drawn = draws(word.to(tl.uint32), (word >> 32).to(tl.uint32), seed)
    return ((drawn >> (place % 32).to(tl.uint32)) & 1) != 0


@triton.jit
def _rotate(
    x: tl.tensor,
    table: tl.tensor,
    num_chunks: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    BITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    INVERSE: tl.constexpr,
    KIND: tl.constexpr,
    OUT_KIND: tl.constexpr,
) -> None:
    """One program applies the randomised Hadamard rotation, or its INVERSE, to CHUNKS chunks of 2^BITS elements."""
    size: tl.constexpr = 1 << BITS
    lane = tl.arange(0, CHUNKS * size)
    chunk = tl.program_id(0).to(tl.int64) * CHUNKS + lane // size
    inside = chunk < num_chunks
    at = tl.load(table + 3 * chunk, mask=inside, other=0) + lane % size
    place = tl.load(table + 3 * chunk + 1, mask=inside, other=0) + lane % size
    negated = signs(place, tl.load(table + 3 * chunk + 2, mask=inside, other=0))
    v = widened(tl.load(x + at, mask=inside, other=0), KIND)
    if not INVERSE:
        v = tl.where(negated, v * -1.0, v)  # 0 - v would not be -0.0
    for stage in tl.static_range(BITS):
        pairs = tl.permute(tl.reshape(v, [CHUNKS * size // (2 << stage), 2, 1 << stage]), [0, 2, 1])
        first, second = tl.split(pairs)
        v = tl.reshape(tl.permute(tl.join(first + second, first - second), [0, 2, 1]), [CHUNKS * size])
    v = v * tl.load(scale)
    if INVERSE:
        v = tl.where(negated, v * -1.0, v)
    tl.store(out + at, narrowed(v, OUT_KIND), mask=inside)


def hadamard(x: Tensor, sections: Sections, out: Tensor, *, chunk: int, inverse: bool = False) -> None:
    check_hadamard(x, sections, out, chunk, inverse)
    device = device_of(x=x, out=out)
    by_size: dict[int, list[int]] = {}
    for begin, place, seed, bits, count in rotations(sections, chunk):
        for at in range(0, count << bits, 1 << bits):
            by_size.setdefault(bits, []).extend((begin + at, place + at, signed(seed)))
    wide = accumulation_dtype(x.dtype)
    kinds = {"KIND": kind_of("x", x), "OUT_KIND": kind_of("out", out)}
    memory = bits_of(x), bits_of(out)
    for bits, rows in by_size.items():
        together, count = max(1, _MIN_PIECE >> bits), len(rows) // 3
        scale = on(device, torch.tensor([rotation_scale(bits)], dtype=wide))
        constants = {"BITS": bits, "CHUNKS": together, "INVERSE": int(inverse), **kinds}
        table = on(device, rows)
        launch(_rotate, blocks(count, together), device, memory[0], table, count, scale, memory[1], **constants)
