"""Triton kernels that quantise tensors to codes of few bits, and sum the tensors that several codes decode to.

The scales of all blocks are found first, then the codes. One program handles a tile of one block: some bytes of its
codes and the elements in them. It finds its block in a table of runs (adjacent blocks of one length), which the host
makes. Largest magnitudes are atomic maxima of their bits as integers, which have the same order; squares are summed in
the order of `reference.blocks.ordered_sum`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.checks import Sections
from gradsync.kernels.grids import AnyGrid, check_drawn, draws, runs
from gradsync.kernels.reference.blocks import GROUP, LANES, ordered_sum
from gradsync.kernels.reference.codes import (
    check_codes,
    check_dequantize,
    check_found,
    check_quantize,
    stored_scales,
)
from gradsync.kernels.reference.rows import accumulation_dtype
from gradsync.kernels.triton.blocks import sum_of_lanes
from gradsync.kernels.triton.boundary import (
    BLOCK,
    addresses,
    bits_of,
    blocks,
    device_of,
    launch,
    on,
)
from gradsync.kernels.triton.draws import mixed
from gradsync.kernels.triton.rows import kind_of, narrowed, widened

_COLUMNS = 8  # columns of the table of runs; two more if codes are rounded at random


@triton.jit
def run_of(table: tl.tensor, num_runs: tl.tensor, COLUMNS: tl.constexpr) -> tl.tensor:
    """Returns a pointer to the row of `table` that describes the blocks this program works on, by binary search.

    A row, of COLUMNS numbers, is for a run of equally long blocks; its column 0 is the first program that works on the
    run.
    """
    program = tl.program_id(0).to(tl.int64)
    low = program * 0
    high = low + num_runs
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(table + middle * COLUMNS) <= program
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return table + low * COLUMNS


@triton.jit
def drawn(row: tl.tensor, upper: tl.tensor, lower: tl.constexpr) -> tl.tensor:
    """Returns 32 random bits for an element at a place of 64 bits, given as its upper and lower 32 bits.

    Columns 8 and 9 of `row`, of the table of runs, hold the seed.
    """
    key, added = tl.load(row + 8).to(tl.uint32), tl.load(row + 9).to(tl.uint32)
    return mixed(mixed(key ^ lower, 0) + added + upper.to(tl.uint32) * 0x9E3779B9, 0)


@triton.jit
def noise_from(row: tl.tensor, first: tl.tensor, after: tl.tensor) -> tl.tensor:
    """Returns 32 random bits for each place `first` + `after` of its tensor, as `reference.draws.noise` does.

    `row`, of the table of runs, holds the seed.
    """
    place = first + after
    upper = first >> 32
    wrapped = (place >> 32) != upper
    key = tl.where(wrapped, drawn(row, upper + 1, 0), drawn(row, upper, 0))
    added = tl.where(wrapped, drawn(row, upper + 1, 1), drawn(row, upper, 1))
    return mixed(place.to(tl.uint32) ^ key, added)


@triton.jit
def corrected(
    x: tl.tensor, residual: tl.tensor, at: tl.tensor, inside: tl.tensor, KIND: tl.constexpr, CORRECTS: tl.constexpr
) -> tl.tensor:
    """Returns x (with CORRECTS, x + residual) at the indices `at`, in float32 or float64; 0 where not `inside`."""
    p = widened(tl.load(x + at, mask=inside, other=0), KIND)
    if CORRECTS:
        p = tl.load(residual + at, mask=inside, other=0) + p
    return p


@triton.jit
def _find_largest(
    x: tl.tensor,
    residual: tl.tensor,
    table: tl.tensor,
    num_runs: tl.tensor,
    most: tl.tensor,
    KIND: tl.constexpr,
    CORRECTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program raises a block's entry of `most` to the largest magnitude in one tile, by an atomic maximum."""
    row = run_of(table, num_runs, COLUMNS)
    number = tl.program_id(0).to(tl.int64) - tl.load(row)
    length, tiles = tl.load(row + 2), tl.load(row + 6)
    block = number // tiles
    element = (number % tiles) * TILE + tl.arange(0, TILE)
    inside = element < length
    p = corrected(x, residual, tl.load(row + 1) + block * length + element, inside, KIND, CORRECTS)
    if KIND == "f64":
        bits = p.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        bits = p.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(most + tl.load(row + 4) + block, tl.max(bits, 0), sem="relaxed")


@triton.jit
def _sum_squares(
    x: tl.tensor,
    residual: tl.tensor,
    table: tl.tensor,
    num_runs: tl.tensor,
    sums: tl.tensor,
    KIND: tl.constexpr,
    CORRECTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program stores the sum of squares of TILE elements of a block: each lane adds its own, then all are added."""
    row = run_of(table, num_runs, COLUMNS)
    number = tl.program_id(0).to(tl.int64) - tl.load(row)
    length, tiles = tl.load(row + 2), tl.load(row + 6)
    begin = tl.load(row + 1) + number // tiles * length
    lane = tl.arange(0, LANES)
    lanes = tl.zeros([LANES], tl.float64)
    for line in tl.static_range(TILE // LANES):
        element = (number % tiles) * TILE + line * LANES + lane
        p = corrected(x, residual, begin + element, element < length, KIND, CORRECTS).to(tl.float64)
        lanes += p * p
    tl.store(sums + tl.program_id(0), sum_of_lanes(lanes, LANES))


@triton.jit
def small_code(value: tl.tensor, TOP: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr) -> tl.tensor:
    """Returns the bits of the nearest 8-bit float to each float32, as int32; NaN gives zero.

    The 8-bit floats have FRACTION bits after the point and the exponent bias BIAS; the largest one is TOP.
    """
    kept = tl.where(tl.abs(value) >= 0, value, 0.0)  # NaN is not
    magnitude = tl.minimum(tl.abs(kept), tl.full(kept.shape, TOP, tl.float32))
    bits = magnitude.to(tl.int32, bitcast=True)
    sign = (kept.to(tl.int32, bitcast=True) >> 24) & 0x80
    base = tl.full(bits.shape, (151 - BIAS - FRACTION) << 23, tl.int32)
    subnormal = (magnitude + base.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - base
    even = (bits >> (23 - FRACTION)) & 1
    normal = (bits - ((127 - BIAS) << 23) + (1 << (22 - FRACTION)) - 1 + even) >> (23 - FRACTION)
    return sign | tl.where(bits < ((128 - BIAS) << 23), subnormal, normal)


@triton.jit
def small_value(code: tl.tensor, FRACTION: tl.constexpr, BIAS: tl.constexpr) -> tl.tensor:
    magnitude = code & 0x7F
    factor = tl.full(code.shape, (254 - BIAS) << 23, tl.int32).to(tl.float32, bitcast=True)
    value = (magnitude << (23 - FRACTION)).to(tl.float32, bitcast=True) * factor
    bits = value.to(tl.int32, bitcast=True)
    if FRACTION == 3:
        bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
    else:
        bits = tl.where(magnitude > 0x7C, 0x7FC00000, tl.where(magnitude == 0x7C, 0x7F800000, bits))
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def in_float(value: tl.tensor) -> tl.tensor:
    """Returns float32 or float64 numbers as float32; finite ones beyond its range are clamped to it."""
    if value.dtype == tl.float64:
        most = tl.full(value.shape, 3.4028234663852886e38, tl.float64)
        value = tl.where(value - value == 0, tl.minimum(tl.maximum(value, -most), most), value)
    return value.to(tl.float32)


@triton.jit
def exponent_code(value: tl.tensor, draw: tl.tensor) -> tl.tensor:
    """Returns the codes, as int32, of float32 numbers rounded to powers of two, up or down by the random bits `draw`.

    The format is `exponent` of `FloatGrid`; for the constants see csrc/quantize.cpp.
    """
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    up = magnitude.to(tl.uint32) + (draw >> 9)
    code = tl.minimum(tl.maximum((up >> 23).to(tl.int32) - 17, 0), 126)
    code = tl.where(code == 0, 0, code | ((bits >> 24) & 0x80))
    return tl.where(magnitude >= 0x7F800000, 0x7F, code)


@triton.jit
def exponent_value(code: tl.tensor) -> tl.tensor:
    magnitude = code & 0x7F
    bits = tl.where(magnitude == 0, 0, tl.where(magnitude == 0x7F, 0x7FC00000, (magnitude + 17) << 23))
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def level_of(code: tl.tensor, ROUNDING: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Returns the number, before scaling, that each code (an unsigned number in an int32) stands for, as float32."""
    if ROUNDING == "e4m3":
        level = small_value(code, 3, 7)
    elif ROUNDING == "e5m2":
        level = small_value(code, 2, 15)
    elif ROUNDING == "exponent":
        level = exponent_value(code)
    elif BITS == 8:
        level = (code - ((code & 0x80) << 1)).to(tl.float32)
    else:
        level = code.to(tl.float32) - TOP
    return level


@triton.jit
def divided(a: tl.tensor, b: tl.tensor, SUM: tl.constexpr) -> tl.tensor:
    """Returns a / b in their dtype SUM, correctly rounded, which Triton's `/` of float32 is not."""
    if SUM == tl.float64:
        quotient = a / b
    else:
        quotient = tl.div_rn(a, b)
    return quotient


@triton.jit
def integer_level(
    scaled: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    lane: tl.tensor,
    accumulator: tl.constexpr,
    ROUNDING: tl.constexpr,
    TOP: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Returns the whole number in [-TOP, TOP] that each of (TILE,) scaled elements is rounded to; 0 for NaN.

    Args:
        scaled: the elements.
        row: of the table of runs, with the seed of random rounding.
        first: the place of the first element in its tensor.
        lane: each element's number from there.
        accumulator: the dtype of `scaled` and of the result.
        ROUNDING: "stochastic", or else to nearest.
    """
    kept = tl.where(tl.abs(scaled) >= 0, scaled, 0.0)  # NaN is not
    most = tl.full([TILE], TOP, accumulator)
    kept = tl.minimum(tl.maximum(kept, -most), most)
    if ROUNDING == "stochastic":
        fixed = (kept * 16777216).to(tl.int32)  # towards zero
        level = ((fixed + (noise_from(row, first, lane) >> 8).to(tl.int32)) >> 24).to(accumulator)
    else:
        whole = tl.full([TILE], 6755399441055744 if accumulator == tl.float64 else 12582912, accumulator)
        level = (kept + whole) - whole  # at that magnitude an ulp is 1, so that adding rounds
    return level


@triton.jit
def _encode(
    x: tl.tensor,
    residual: tl.tensor,
    table: tl.tensor,
    num_runs: tl.tensor,
    scales: tl.tensor,
    codes: tl.tensor,
    next_residual: tl.tensor,
    KIND: tl.constexpr,
    CORRECTS: tl.constexpr,
    KEEPS: tl.constexpr,
    ROUNDING: tl.constexpr,
    TOP: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program quantises one tile of elements to codes of BITS bits; with KEEPS it writes their next residual."""
    accumulator: tl.constexpr = tl.float64 if KIND == "f64" else tl.float32
    row = run_of(table, num_runs, COLUMNS)
    number = tl.program_id(0).to(tl.int64) - tl.load(row)
    length, nbytes, tiles = tl.load(row + 2), tl.load(row + 3), tl.load(row + 6)
    block = number // tiles
    lane = tl.arange(0, TILE)
    byte = (number % tiles) * TILE + lane
    begin = tl.load(row + 1) + block * length
    inverse = tl.full([], 1, accumulator)
    step = tl.full([], 1, accumulator)
    if ROUNDING != "exponent":
        scale = tl.load(scales + tl.load(row + 4) + block)
        narrow = tl.div_rn(tl.full([], TOP, tl.float32), scale)
        wide = divided(tl.full([], TOP, accumulator), scale.to(accumulator), accumulator)
        inverse = tl.where(tl.abs(narrow) < float("inf"), wide, tl.full([], 0, accumulator))
        step = divided(scale.to(accumulator), tl.full([], TOP, accumulator), accumulator)
    packed = tl.zeros([TILE], tl.int32)
    for part in tl.static_range(8 // BITS):
        element = part * nbytes + byte
        inside = (byte < nbytes) & (element < length)
        p = corrected(x, residual, begin + element, inside, KIND, CORRECTS)
        scaled = p * inverse
        first = tl.load(row + 5) + block * length + part * nbytes + (number % tiles) * TILE
        if ROUNDING == "e4m3":
            code = small_code(scaled.to(tl.float32), TOP, 3, 7)
            level = small_value(code, 3, 7).to(accumulator)
        elif ROUNDING == "e5m2":
            code = small_code(scaled.to(tl.float32), TOP, 2, 15)
            level = small_value(code, 2, 15).to(accumulator)
        elif ROUNDING == "exponent":
            code = exponent_code(in_float(scaled), noise_from(row, first, lane))
            level = exponent_value(code).to(accumulator)
        else:
            level = integer_level(scaled, row, first, lane, accumulator, ROUNDING, TOP, TILE)
            if BITS == 8:
                code = level.to(tl.int32) & 0xFF
            else:
                code = (level + TOP).to(tl.int32)
        packed = packed | tl.where(inside, code << (part * BITS), 0)
        if KEEPS:
            tl.store(next_residual + begin + element, p - level * step, mask=inside)
    tl.store(codes + tl.load(row + 7) + block * nbytes + byte, packed.to(tl.uint8), mask=byte < nbytes)


@triton.jit
def _decode(
    addresses: tl.tensor,
    num_parts: tl.tensor,
    table: tl.tensor,
    num_runs: tl.tensor,
    out: tl.tensor,
    factor: tl.tensor,
    KIND: tl.constexpr,
    ROUNDING: tl.constexpr,
    TOP: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program decodes one tile of bytes of all parts, and writes `factor` times the sum of each element."""
    accumulator: tl.constexpr = tl.float64 if KIND == "f64" else tl.float32
    row = run_of(table, num_runs, COLUMNS)
    number = tl.program_id(0).to(tl.int64) - tl.load(row)
    length, nbytes, tiles = tl.load(row + 2), tl.load(row + 3), tl.load(row + 6)
    block = number // tiles
    byte = (number % tiles) * TILE + tl.arange(0, TILE)
    begin = tl.load(row + 1) + block * length
    for part in tl.static_range(8 // BITS):
        total = tl.zeros([TILE], accumulator)
        n = 0
        while n < num_parts:
            codes = tl.load(addresses + 2 * n).to(tl.pointer_type(tl.uint8))
            code = tl.load(codes + tl.load(row + 7) + block * nbytes + byte, mask=byte < nbytes, other=0).to(tl.int32)
            level = level_of((code >> (part * BITS)) & ((1 << BITS) - 1), ROUNDING, TOP, BITS).to(accumulator)
            if ROUNDING == "exponent":
                total += level
            else:
                scales = tl.load(addresses + 2 * n + 1).to(tl.pointer_type(tl.float32))
                scale = tl.load(scales + tl.load(row + 4) + block)
                total += level * divided(scale.to(accumulator), tl.full([], TOP, accumulator), accumulator)
            n += 1
        element = part * nbytes + byte
        inside = (byte < nbytes) & (element < length)
        total = total * tl.load(factor)
        tl.store(out + begin + element, narrowed(total, KIND), mask=inside)


def quantize(
    x: Tensor,
    sections: Sections,
    grid: AnyGrid,
    codes: Tensor,
    scales: Tensor,
    *,
    residual: Tensor | None = None,
    next_residual: Tensor | None = None,
) -> None:
    check_quantize(x, sections, grid, scales, residual, next_residual)
    check_codes(codes, sections, grid)
    check_drawn(sections, grid)
    device = device_of(x=x, codes=codes, scales=scales, residual=residual, next_residual=next_residual)
    if grid.scale in ("max", "norm"):
        _find_scales(x, sections, grid, scales, residual)
    found = _runs(sections.lengths, sections.starts, grid, device)
    table = _with_seeds(found, sections, grid)
    before, after = (x if kept is None else kept for kept in (residual, next_residual))
    arguments = bits_of(x), before, table, len(table), scales, codes, after
    constants = {
        **_decoding(x, grid),
        "COLUMNS": table.shape[1],
        "CORRECTS": residual is not None,
        "KEEPS": next_residual is not None,
        "TILE": found.tile,
    }
    launch(_encode, found.programs, device, *arguments, **constants)


def block_scales(
    x: Tensor, sections: Sections, grid: AnyGrid, scales: Tensor, *, residual: Tensor | None = None
) -> None:
    check_quantize(x, sections, grid, scales, residual)
    check_found(grid)
    device_of(x=x, scales=scales, residual=residual)
    _find_scales(x, sections, grid, scales, residual)


def dequantize(
    parts: Sequence[tuple[Tensor, Tensor]], sections: Sections, grid: AnyGrid, out: Tensor, *, scale: float = 1.0
) -> None:
    check_dequantize(parts, sections, grid, out)
    tensors = [tensor for part in parts for tensor in part]
    device = device_of(out=out, parts=tensors)
    found = _runs(sections.lengths, sections.starts, grid, device)
    factor = on(device, torch.tensor([scale], dtype=accumulation_dtype(out.dtype)))
    parts_table = on(device, addresses(tensors))
    arguments = parts_table, len(parts), found.table, len(found.table), bits_of(out), factor
    launch(_decode, found.programs, device, *arguments, **_decoding(out, grid), COLUMNS=_COLUMNS, TILE=found.tile)


def _decoding(x: Tensor, grid: AnyGrid) -> dict[str, object]:
    """Returns the compile-time constants of the kernels: dtype of `x`, rounding, largest level and bits of a code."""
    return {
        "KIND": kind_of("x", x),
        "ROUNDING": grid.rounding,
        "TOP": int(grid.top),
        "BITS": grid.bits,
    }


def _find_scales(x: Tensor, sections: Sections, grid: AnyGrid, scales: Tensor, residual: Tensor | None) -> None:
    tile = GROUP if grid.scale == "norm" else BLOCK
    table, _, programs, _ = _runs(sections.lengths, sections.starts, grid, x.device, tile)
    wide = accumulation_dtype(x.dtype)
    arguments = bits_of(x), x if residual is None else residual, table, len(table)
    constants = {"KIND": kind_of("x", x), "CORRECTS": residual is not None, "COLUMNS": _COLUMNS, "TILE": tile}
    if grid.scale == "max":
        integers = torch.int64 if wide == torch.float64 else torch.int32
        most = torch.zeros(len(scales), dtype=integers, device=x.device)
        launch(_find_largest, programs, x.device, *arguments, most, **constants)
        scales.copy_(stored_scales(most.view(wide), grid))
        return
    sums = torch.empty(programs, dtype=torch.float64, device=x.device)
    launch(_sum_squares, programs, x.device, *arguments, sums, **constants, LANES=LANES)
    begin = 0
    for run in runs(sections, grid):
        part = sums[begin : begin + run.blocks * blocks(run.length, tile)].view(run.blocks, -1)
        scales[run.scales] = stored_scales(ordered_sum(part).sqrt(), grid)
        begin += part.numel()


class _Runs(NamedTuple):
    table: Tensor  # (runs, 8) int64, on the device, as `run_of` reads it
    owners: Tensor  # (runs,) int64: the section of each
    programs: int
    tile: int


@lru_cache(maxsize=1024)  # the same buckets come at every step, each with up to two tables
def _runs(
    lengths: tuple[int, ...], starts: tuple[int, ...], grid: AnyGrid, device: torch.device, tile: int = 0
) -> _Runs:
    """Returns a table of the runs (adjacent blocks of one length), for programs that handle `tile` elements of a block.

    With tile = 0 a program handles bytes of a block's codes instead: as many as the longest block has, rounded up to a
    power of two, at most BLOCK. `lengths`, `starts`: for each section of the flat tensor, which is cut into blocks, its
    elements and the place of its first element in its own tensor. The columns: first program, first element, elements
    of a block, bytes of a block's codes, first block, place of the first element in its own tensor, tiles of a block,
    first byte.
    """
    found = list(runs(Sections(lengths, starts, tuple(range(len(lengths)))), grid))  # sections' numbers for seeds
    of_bytes, longest = tile == 0, max((run.nbytes for run in found), default=1)
    tile = tile or min(BLOCK, 1 << (longest - 1).bit_length())
    rows, programs = [], 0
    for run in found:
        tiles = blocks(run.nbytes if of_bytes else run.length, tile)
        rows.append((programs, run.begin, run.length, run.nbytes, run.scale, run.place, tiles, run.codes))
        programs += run.blocks * tiles
    table = torch.tensor(rows, dtype=torch.int64).view(-1, _COLUMNS)
    owners = torch.tensor([run.seed for run in found], dtype=torch.int64)
    return _Runs(table.to(device), owners, programs, tile)  # waits for the device, once: other streams read it too


def _with_seeds(found: _Runs, sections: Sections, grid: AnyGrid) -> Tensor:
    """Returns the table of runs; for random rounding, with two more columns for the halves of each run's seed."""
    if not draws(grid):
        return found.table
    halves = torch.tensor([(seed & 0xFFFFFFFF, seed >> 32) for seed in sections.seeds], dtype=torch.int64).view(-1, 2)
    return torch.cat([found.table, on(found.table.device, halves[found.owners])], dim=1)
