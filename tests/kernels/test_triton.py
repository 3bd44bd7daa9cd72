"""CUDA kernels have the bits of their definitions, in Triton's interpreter or on a GPU, and compile."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync import kernels
from gradsync.kernels import (
    FloatGrid,
    Grid,
    PackedPositions,
    Sections,
    accumulation_dtype,
    choice,
    codes_nbytes,
    device,
    num_scales,
    offsets_nbytes,
    packed_nbytes,
    reference,
    sign_scales_shape,
)
from gradsync.kernels.checks import section_blocks
from tests.compressors.family import gradient
from tests.kernels.native import DTYPES, assert_same_bits, special_values
from tests.kernels.on_device import DEVICE, TRITON
from tests.kernels.shapes import random_indices

pytestmark = pytest.mark.interpreted
SIZES = [0, 1, 1030]  # a block is 1024
SKETCHED = 300  # a block is 256; a step of a kernel of sketches takes the interpreter long
INDEX_DTYPES = (torch.int32, torch.int64)


def values_of(indices: Tensor, dtype: torch.dtype, *dim: int) -> Tensor:
    specials = special_values(dtype)
    rows = (indices.long()[:, None] + torch.arange(dim[0] if dim else 1)) * 5 % 11
    numbers = torch.cat([specials, torch.tensor([1.5, -2.25, 1e-3, 3.0]).to(dtype)])[rows]
    return numbers if dim else numbers[:, 0]


def encode_bitmap(kernels: Any, size: int) -> list[Tensor]:
    indices, words = random_indices(size, 0.3), [torch.full((-(-size // 64),), -1) for _ in range(2)]
    for dtype, out in zip(INDEX_DTYPES, words, strict=True):
        kernels.encode_bitmap(torch.cat([indices.flip(0), indices[:9]]).to(dtype), size, out)
    return words


def decode_bitmap(kernels: Any, size: int) -> list[Tensor]:
    words = torch.randint(-(2**63), 2**63 - 1, (-(-size // 7),), generator=torch.Generator().manual_seed(0))
    words[::3], words[1::3] = 0, -1
    outs = [torch.full((kernels.count_bits(words) + 3,), 77, dtype=dtype) for dtype in INDEX_DTYPES]
    for out in outs:
        kernels.decode_bitmap(words, out[:-3])
    return outs


def count_bits(kernels: Any, size: int) -> list[Tensor]:
    words = torch.randint(-(2**63), 2**63 - 1, (size,), generator=torch.Generator().manual_seed(0))
    return [torch.tensor([kernels.count_bits(words), kernels.count_bits(torch.full((size,), -1))])]


def nonzero_elements(kernels: Any, size: int) -> list[Tensor]:
    outs = []
    for dtype in DTYPES:
        x, chosen = torch.full((size,), -0.0, dtype=dtype), random_indices(size, 0.4)
        x[chosen] = values_of(chosen, dtype)
        found = kernels.nonzero_elements(x)
        outs += [torch.zeros(found.count, dtype=torch.int32), torch.zeros(found.count, dtype=dtype)]
        found.write(*outs[-2:])
    return outs


def top_k(kernels: Any, size: int) -> list[Tensor]:
    """Selects from eleven repeated numbers, so that many elements tie with the last one taken."""
    outs = []
    for number, dtype in enumerate(DTYPES):
        for k in {size, size // 3}:
            whole = torch.full((k + 1,), 77, dtype=INDEX_DTYPES[number % 2]), torch.full((k + 1,), 77, dtype=dtype)
            kernels.top_k(values_of(torch.arange(size), dtype), whole[0][:-1], whole[1][:-1])
            outs += whole
        indices, values = (
            torch.zeros(size // 4 + size // 5).long(),
            torch.zeros(size // 4 + size // 5, dtype=torch.half),
        )
        x, left = values_of(torch.arange(size), dtype), torch.zeros(size, dtype=accumulation_dtype(dtype))
        sections, counts = Sections((size // 2, size - size // 2)), (size // 4, size // 5)
        given = {"residual": torch.full_like(left, 1e-3), "next_residual": left}
        kernels.top_k(x, indices, values, sections=sections, counts=counts, **given)
        outs += [indices, values, left]
    return outs


def select_above(kernels: Any, size: int) -> list[Tensor]:
    outs = []
    for dtype in DTYPES:
        bound = torch.tensor([1.0, 1e-4], dtype=accumulation_dtype(dtype))
        given = {"sections": Sections((size // 2, size - size // 2)), "counts": (size // 2, size // 5)}
        outs += [torch.zeros(sum(given["counts"])).long(), torch.zeros(sum(given["counts"]), dtype=dtype)]
        outs.append(
            torch.tensor(kernels.select_above(values_of(torch.arange(size), dtype), bound, *outs[-2:], **given))
        )
    return outs


def count_above(kernels: Any, size: int) -> list[Tensor]:
    counts = torch.zeros(2).long()
    sections = Sections((size // 2, size - size // 2))
    kernels.count_above(values_of(torch.arange(size), torch.half), torch.tensor([1.0, 1e-4]), counts, sections=sections)
    return [counts]


def narrow(kernels: Any, size: int) -> list[Tensor]:
    outs = [torch.zeros(size, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
    for out in outs:
        kernels.narrow(values_of(torch.arange(size), torch.float32), out, scale=0.5)
    return outs


def sum_parts(kernels: Any, size: int) -> list[Tensor]:
    outs = []
    for dtype in DTYPES:
        parts = [values_of(torch.arange(size) + number, dtype) for number in range(3)]
        for wanted in DTYPES:
            outs.append(torch.full((size + 3,), 77, dtype=wanted))
            kernels.sum_parts(parts, outs[-1][:size], scale=1 / 3)
    return outs


SIGNED = [("mean", 5), ("two", 0), ("rms", 1024), ("one", 0)]  # and elements a block


def pack_signs(kernels: Any, size: int) -> list[Tensor]:
    """Packs each dtype with another scale, with and without a residual; sections begin inside of bytes."""
    sections, outs = Sections((size // 3, 0, size - size // 3)), []
    for dtype, (scale, block) in zip(DTYPES, SIGNED, strict=True):
        x = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
        x[::7] = -0.0
        for residual in (None, torch.linspace(-1, 1, size, dtype=accumulation_dtype(dtype))):
            words = torch.full((-(-size // 8) + 1,), 77, dtype=torch.uint8)
            scales = torch.zeros(sign_scales_shape(sections, block=block, scale=scale))
            left = None if residual is None else torch.full_like(residual, 77)
            options: dict[str, Any] = {"block": block, "scale": scale, "residual": residual, "next_residual": left}
            kernels.pack_signs(x, sections, words[:-1], scales, **options)
            outs += [words, scales, *([] if left is None else [left])]
    return outs


def unpack_signs(kernels: Any, size: int) -> list[Tensor]:
    sections, outs, generator = Sections((size // 3, 0, size - size // 3)), [], torch.Generator().manual_seed(0)
    for dtype, (scale, block) in zip(DTYPES, SIGNED, strict=True):
        shape = sign_scales_shape(sections, block=block, scale=scale)
        parts = [
            (torch.randint(256, (-(-size // 8),), generator=generator).byte(), torch.randn(shape, generator=generator))
            for _ in range(3)
        ]
        outs.append(torch.full((size + 1,), 77, dtype=dtype))
        kernels.unpack_signs(parts, sections, outs[-1][:-1], block=block, scale=scale, factor=1 / 3)
    return outs


def owned_by_hash(kernels: Any, size: int) -> list[Tensor]:
    return [owned for n in (1, 7) for owned in kernels.owned_by_hash(size, n, 3)]


def owners_by_hash(kernels: Any, size: int) -> list[Tensor]:
    indices, outs = torch.arange(size) * 0x7FFFFFFFFFF, [torch.zeros(size, dtype=dtype) for dtype in INDEX_DTYPES]
    for n, out in zip((7, 1 << 16), outs, strict=True):
        kernels.owners_by_hash(indices, n, -3, out)
    return outs


def dealt(split: Any, indices: Tensor, values: Tensor, places: torch.dtype) -> list[Tensor]:
    places_out = [torch.zeros(count, dtype=places) for count in split.counts]
    outs = [torch.zeros(count, *values.shape[1:], dtype=values.dtype) for count in split.counts]
    split.write(values, places_out, outs)
    return [*places_out, *outs]


def partition_hashed(kernels: Any, size: int) -> list[Tensor]:
    indices, outs = random_indices(size, 0.4), []
    for n, dtype, places in ((1, torch.float16, torch.int64), (7, torch.float64, torch.int32)):
        outs += dealt(kernels.partition_hashed(indices, size, n, 2**70), indices, values_of(indices, dtype), places)
    return outs


def partition_rotated(kernels: Any, size: int) -> list[Tensor]:
    indices, outs = random_indices(size, 0.4), []
    for n, dtype, dim in (
        (1, torch.bfloat16, ()),
        (16, torch.float32, ()),
        (7, torch.float32, (3,)),
        (7, torch.half, (0,)),
    ):
        split = kernels.partition_rotated(indices.int(), size, n, 5)
        outs += dealt(split, indices, values_of(indices, dtype, *dim), torch.int32)
    return outs


def messages_of_elements(
    kernels: Any, size: int, n: int, dtype: torch.dtype
) -> tuple[list[PackedPositions], list[Tensor]]:
    """Returns a tensor's packed non-zero positions for n owners, in alternating formats, and the values."""
    indices, runs = random_indices(size, 0.4), -(-size // n)
    x = torch.zeros(size, dtype=dtype)
    x[indices] = values_of(indices, dtype)
    split = kernels.partition_elements(x, n, 3)
    parts = []
    for count, bits in zip(split.counts, (8, 1, 16, 32, 64, 8, 1), strict=False):
        packed = torch.full((-(-packed_nbytes(count, runs, bits) // 8) * 8,), 77, dtype=torch.uint8)
        parts.append(PackedPositions(packed, count, bits))
    values = [torch.zeros(count, dtype=dtype) for count in split.counts]
    split.write(parts, values)
    return parts, values


def partition_elements(kernels: Any, size: int) -> list[Tensor]:
    outs = []
    for n, dtype in ((1, torch.bfloat16), (7, torch.float64)):
        parts, values = messages_of_elements(kernels, size, n, dtype)
        outs += [part.packed for part in parts] + values
    return outs


def unite_elements(kernels: Any, size: int) -> list[Tensor]:
    parts, values = messages_of_elements(reference, size, 7, torch.half)
    union = kernels.unite_elements(parts, -(-size // 7))
    packed = torch.full((-(-packed_nbytes(union.count, -(-size // 7), 8) // 8) * 8,), 77, dtype=torch.uint8)
    outs = [packed, torch.zeros(union.count, dtype=torch.half)]
    union.sum(values, PackedPositions(packed, union.count, 8), outs[1], scale=0.5)
    return outs


def unite_messages(kernels: Any, size: int) -> list[Tensor]:
    parts, values = messages_of_elements(reference, size, 7, torch.half)
    union = kernels.unite_messages(parts, -(-size // 7))
    outs = [torch.zeros(union.count, dtype=torch.int64), torch.zeros(union.count, 1, dtype=torch.half)]
    union.write_indices(outs[0])
    union.sum([value.view(-1, 1) for value in values], [outs[1]], scale=0.5)
    return outs


def join_elements(kernels: Any, size: int) -> list[Tensor]:
    outs = []
    for n, dtype in ((1, torch.float64), (7, torch.bfloat16)):
        outs.append(torch.full((size,), 77, dtype=dtype))
        kernels.join_elements(*messages_of_elements(reference, size, n, dtype), 3, outs[-1])
    return outs


def rotated_index(kernels: Any, size: int) -> list[Tensor]:
    positions = torch.arange(2**31 - size, 2**31).int()
    outs = [torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int32)]
    kernels.rotated_index(6, positions, 7, 2, outs[0])
    kernels.rotated_index(0, positions - (2**31 - size), 7, 2, outs[1])
    return outs


def positions_in(kernels: Any, size: int) -> list[Tensor]:
    owned = torch.arange(0, 3 * size, 3)
    outs = [torch.zeros(-(-size // 2), dtype=dtype) for dtype in INDEX_DTYPES]
    kernels.positions_in(owned.int(), owned[::2].clone(), outs[0])
    kernels.positions_in(owned, owned[::2].int(), outs[1])
    return outs


def offset_messages(size: int) -> list[tuple[Tensor, int]]:
    """Returns messages of some and of all indices, and of full, nearly full and full blocks, which must be walked."""
    mixed = torch.cat([torch.arange(256), torch.arange(256, 511), torch.arange(512, 768)])
    return [(random_indices(size, density), size) for density in (0.3, 1.0)] + [(mixed, 768)] * (size == 1)


def encode_offsets(kernels: Any, size: int) -> list[Tensor]:
    outs = []
    for indices, bound in offset_messages(size):
        for bits, dtype in zip((8, 16), INDEX_DTYPES, strict=True):
            whole = torch.full((offsets_nbytes(len(indices), bound, bits) + 2,), 77, dtype=torch.uint8)
            kernels.encode_offsets(indices.to(dtype), bound, bits, whole[1:-1])  # at an odd address
            outs.append(whole)
    return outs


def decode_offsets(kernels: Any, size: int) -> list[Tensor]:
    outs, messages = [], iter(encode_offsets(reference, size))
    for indices, bound in offset_messages(size):
        for bits, dtype in zip((8, 16), INDEX_DTYPES, strict=True):
            outs.append(torch.full((len(indices) + 1,), 77, dtype=dtype))
            kernels.decode_offsets(next(messages)[1:-1], bound, bits, outs[-1][:-1])
    return outs


def some_rows(size: int, dtype: torch.dtype, dim: int) -> list[tuple[Tensor, Tensor]]:
    """Returns parts with duplicates, unsorted, one of them empty."""
    generator = torch.Generator().manual_seed(dim)
    lists = [torch.randint(max(size, 1), (count,), generator=generator) for count in (size // 2, 0, size // 3)]
    return [
        (rows.int() if number else rows, values_of(torch.arange(len(rows)) + number, dtype, dim))
        for number, rows in enumerate(lists)
    ]


def sum_rows(kernels: Any, size: int) -> list[Tensor]:
    rows = size // 8  # a tile has fewer rows the longer they are
    return [
        out
        for dtype, dim in zip(DTYPES, (1, 3, 17, 0), strict=True)
        for out in kernels.sum_rows(some_rows(rows, dtype, dim), rows, scale=0.3)
    ]


def unite_rows(kernels: Any, size: int) -> list[Tensor]:
    parts = some_rows(size // 8, torch.bfloat16, 9)
    union = kernels.unite_rows([rows for rows, _ in parts], size // 8)
    rows = torch.zeros(union.count, dtype=torch.int32)
    wide = torch.zeros(union.count, 7, dtype=torch.bfloat16)
    outs = [torch.zeros(union.count, 5, dtype=torch.bfloat16), wide[:, 1:6]]  # stripes may overlap
    union.write_indices(rows)
    union.sum([values for _, values in parts], outs, [(0, 5), (4, 9)], scale=0.5)
    return [rows, outs[0], wide]


def join_columns(kernels: Any, size: int) -> list[Tensor]:
    outs, rows = [], size // 8
    for dtype in (torch.float32, torch.float16):
        whole = values_of(torch.arange(rows), dtype, 20)
        outs.append(torch.full((rows, 14), 77, dtype=dtype))
        kernels.join_columns([whole[:, :3], whole[:, 5:10], whole[:, :0]], [(0, 3), (2, 7), (9, 9)], outs[-1][:, 1:11])
    return outs


def scatter_rows(kernels: Any, size: int) -> list[Tensor]:
    outs, bound = [], max(size // 8, 1)
    for dtype, dim in zip(DTYPES, (1, 5, 17, 3), strict=True):
        (indices, values), *_ = some_rows(size // 8, dtype, dim)
        for accumulate in (False, True):
            outs.append(torch.ones(bound, dim, dtype=dtype))
            kernels.scatter_rows(indices, values, outs[-1], accumulate=accumulate)
            kernels.scatter_rows(torch.arange(bound), outs[-1].clone(), outs[-1], accumulate=accumulate)  # sorted
    return outs


def nonzero_rows(kernels: Any, size: int) -> list[Tensor]:
    outs = []
    for dtype, dim in zip(DTYPES, (1, 3, 17, 0), strict=True):
        dense, chosen = torch.full((size // 8, dim + 2), -0.0, dtype=dtype)[:, :dim], random_indices(size // 8, 0.4)
        dense[chosen, -1:] = values_of(chosen, dtype, min(dim, 1))
        found = kernels.nonzero_rows(dense)
        outs.append(torch.zeros(found.count, dtype=torch.int64))
        found.write_indices(outs[-1])
        outs += [torch.zeros(found.count, width, dtype=dtype) for width in (dim // 2, dim - dim // 2)]
        found.gather(outs[-2:], [(0, dim // 2), (dim // 2, dim)])
    return outs


def hierarchical_hash(kernels: Any, size: int) -> list[Tensor]:
    """Returns all indices sorted, and their counts: implementations may place them in other slots."""
    outs = []
    for n, dtype in ((1, torch.int32), (3, torch.int64)):
        indices = torch.arange(size, dtype=dtype)
        ample = kernels.hierarchical_hash(indices, n, slots=8 * size + 1, serial=8 * size, seed=1)
        full = kernels.hierarchical_hash(indices, 1, slots=5, serial=3, seed=1)
        outs += [owned.sort().values for owned in ample.owned] + [torch.cat([*full.owned, full.overflow]).sort().values]
        outs.append(torch.tensor([len(ample.overflow), ample.nbytes, full.nbytes, len(full.overflow) * (size > 100)]))
    return outs


GRIDS = (
    Grid(127, 8, 300),
    Grid(7, 4, 301, "norm", stochastic=True),
    Grid(1, 2, 333, stochastic=True),
    Grid(100, 8, 0, "norm"),
    FloatGrid("e4m3", 256),
    FloatGrid("e5m2"),
    FloatGrid("exponent", 400),
)


def quantised(size: int) -> Iterator[tuple[Sections, Any, Tensor, Tensor | None]]:
    """Quantises an empty section, one whose places pass 2^32, and blocks of zeros and non-finite values."""
    sections = Sections((size, 0, size // 3), (2**32 - size // 2, 0, 7), (2**63 + 5, 1, 2))
    for number, grid in enumerate(GRIDS):
        dtype = DTYPES[number % 4]
        x = gradient(sum(sections.lengths), torch.float64, number).pow_(3).to(dtype)
        x[400:600], x[900:903] = 0, special_values(dtype)[2:5][: len(x[900:903])]
        wide = accumulation_dtype(dtype)
        yield sections, grid, x, None if number % 3 else gradient(len(x), wide, 99)


def quantize(kernels: Any, size: int) -> list[Tensor]:
    outs = []
    for sections, grid, x, residual in quantised(size):
        codes = torch.full((codes_nbytes(sections, grid),), 77, dtype=torch.uint8)
        scales, left = (
            torch.zeros(num_scales(sections, grid)),
            torch.zeros(len(x), dtype=accumulation_dtype(x.dtype)),
        )
        kernels.quantize(x, sections, grid, codes, scales, residual=residual, next_residual=left)
        outs += [codes, scales, left]
    return outs


def block_scales(kernels: Any, size: int) -> list[Tensor]:
    outs = []
    for sections, grid, x, residual in quantised(size):
        if grid.scale != "none":
            outs.append(torch.zeros(num_scales(sections, grid)))
            kernels.block_scales(x, sections, grid, outs[-1], residual=residual)
    return outs


def dequantize(kernels: Any, size: int) -> list[Tensor]:
    outs, made = [], iter(quantize(reference, size))
    for sections, grid, x, _ in quantised(size):
        codes, scales, _ = next(made), next(made), next(made)
        outs.append(torch.full_like(x, 77))
        kernels.dequantize([(codes, scales), (codes.flip(0), scales)], sections, grid, outs[-1], scale=0.3)
    return outs


def random_k(kernels: Any, size: int) -> list[Tensor]:
    sections, outs = some_sections(size), []
    for block, dtype in ((1, torch.int32), (7, torch.int64)):
        runs = [length // max(1, min(block, length)) for length in sections.lengths]
        for counts in (runs, [count // 2 for count in runs]):
            k = sum(c * max(1, min(block, n)) for c, n in zip(counts, sections.lengths, strict=True))
            outs.append(torch.full((k + 3,), 77, dtype=dtype))
            kernels.random_k(sections, counts, outs[-1][:-3], block=block)
    return outs


def hadamard(kernels: Any, size: int) -> list[Tensor]:
    sections, outs = some_sections(size), []
    for dtype in DTYPES:
        x = gradient(sum(sections.lengths), dtype)
        x[-1:] = float("nan")  # in the last, small chunk
        there = torch.full((len(x) + 3,), 77, dtype=accumulation_dtype(dtype))
        back = torch.full((len(x) + 3,), 77, dtype=dtype)
        kernels.hadamard(x, sections, there[:-3], chunk=256)
        kernels.hadamard(there[:-3].clone(), sections, back[:-3], chunk=8, inverse=True)
        outs += [there, back]
    return outs


def count_sketch(kernels: Any, size: int) -> list[Tensor]:
    sections, columns, outs = some_sections(min(size, SKETCHED)), some_columns(min(size, SKETCHED)), []
    for dtype, rows in zip(DTYPES, (4, 1, 1, 2), strict=True):
        x = gradient(sum(sections.lengths), dtype)
        x[-1:] = float("nan")
        count = rows * sum(columns)
        outs.append(torch.full((count + 3,), 77, dtype=accumulation_dtype(dtype)))
        kernels.count_sketch(x, sections, columns, outs[-1][:count], rows=rows)
    return outs


def sketch_estimates(kernels: Any, size: int) -> list[Tensor]:
    sections, columns, outs = some_sections(min(size, SKETCHED)), some_columns(min(size, SKETCHED)), []
    for dtype, rows in zip(DTYPES, (5, 1, 1, 3), strict=True):
        counters = gradient(rows * sum(columns), accumulation_dtype(dtype))
        counters[:2] = torch.tensor([float("nan"), float("inf")])
        outs.append(torch.full((sum(sections.lengths) + 3,), 77, dtype=dtype))
        kernels.sketch_estimates(counters, sections, columns, outs[-1][:-3], rows=rows)
    return outs


def squared_norms(kernels: Any, size: int) -> list[Tensor]:
    sections, outs = some_sections(size), []
    for dtype in DTYPES:
        for block in (0, 29, 1100):  # the sums are of 32 lanes
            outs.append(torch.full((section_blocks(sections, block) + 3,), 77.0, dtype=torch.float64))
            x = gradient(sum(sections.lengths), dtype)
            kernels.squared_norms(x, sections, outs[-1][:-3], block=block)
    return outs


def take_chunks(kernels: Any, size: int) -> list[Tensor]:
    outs = []
    for dtype, sent, chunk in zip(
        DTYPES, (torch.bfloat16, torch.float64, None, None), (1500, 7, 40, 3000), strict=True
    ):
        x = gradient(size, dtype)
        wide = accumulation_dtype(dtype)
        chunks = -(-size // chunk)
        chosen = torch.tensor(sorted({0, chunks // 2, chunks - 1} if chunks else ()), dtype=torch.int64)
        payload = torch.full(
            (len(chosen) * chunk + 3,), 77, dtype=sent if sent is not None and dtype.itemsize > 2 else dtype
        )
        left, norms = torch.full((size + 3,), 77, dtype=wide), torch.full((chunks + 3,), 77, dtype=torch.float64)
        residual = gradient(size, wide).flip(0)
        kernels.take_chunks(x, residual, chosen, payload[:-3], left[:-3], norms[:-3], chunk=chunk, scale=0.25)
        outs += [x, payload, left, norms]
    return outs


def some_columns(size: int) -> tuple[int, int, int]:
    """Returns columns: more counters than a block for the first non-empty section, 16 lanes for the last."""
    return size // SKETCHED * 256 + 2, 3, 272


def some_sections(size: int) -> Sections:
    return Sections((size, 0, size // 3), (3, 0, 2**32 - 9), (2**64 - 1, 5, 7))


def digest(kernels: Any, size: int) -> list[Tensor]:
    xs = [*(values_of(torch.arange(3 * size), dtype) for dtype in DTYPES), torch.arange(size) - 5]
    out = torch.zeros(len(xs), dtype=torch.int64)
    kernels.digest(xs, out)
    return [out]


CASES: dict[str, Callable[[Any, int], list[Tensor]]] = {
    case.__name__: case
    for case in (
        encode_bitmap, decode_bitmap, count_bits, nonzero_elements, top_k, select_above, count_above,
        owners_by_hash, partition_hashed, partition_rotated, partition_elements, unite_elements, join_elements,
        unite_messages,
        rotated_index, owned_by_hash,
        positions_in, encode_offsets, decode_offsets, sum_rows, unite_rows, join_columns, scatter_rows, nonzero_rows,
        hierarchical_hash, narrow, sum_parts, quantize, block_scales, dequantize, random_k, hadamard, pack_signs,
        unpack_signs, count_sketch, sketch_estimates, squared_norms, take_chunks, digest,
    )
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", CASES)
def test_triton_gives_the_bits_of_the_definition(kernel: str, size: int) -> None:
    expected, got = CASES[kernel](reference, size), CASES[kernel](TRITON, size)
    assert len(expected) == len(got) > 0
    for mine, theirs in zip(got, expected, strict=True):
        assert_same_bits(mine, theirs)


def test_every_kernel_has_its_case() -> None:
    assert set(CASES) == set(choice.KERNELS)


@pytest.mark.parametrize("grid", [Grid(7, 4, 300, stochastic=True), FloatGrid("exponent"), Grid(127, 8)], ids=str)
def test_the_runs_of_a_bucket_are_worked_out_once_and_every_step_has_its_seeds(grid: Any) -> None:
    x = gradient(1000, torch.float32)
    kept = importlib.import_module("gradsync.kernels.triton.codes")._runs
    kept.cache_clear()
    missed = []
    for step in range(3):
        sections = Sections((700, 300), (5, 0), (2**63 + step, step))
        made = []
        for version in (TRITON, reference):
            codes = torch.zeros(codes_nbytes(sections, grid), dtype=torch.uint8)
            version.quantize(x, sections, grid, codes, torch.zeros(num_scales(sections, grid)))
            made.append(codes)
        assert torch.equal(*made)
        missed.append(kept.cache_info().misses)
    assert missed[0] == missed[1] == missed[2] > 0


def test_more_owners_than_a_byte_can_number_get_what_is_theirs() -> None:
    for n in (256, 257, 1 << 15, 1 << 16):
        expected, got = (module.partition_hashed(torch.arange(500), 500, n, 1).counts for module in (reference, TRITON))
        assert got == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("magnitudes", [1, 40, 1 << 40])
def test_the_largest_of_many_blocks_are_those_of_the_definition(magnitudes: int, dtype: torch.dtype) -> None:
    """Two histograms of 4096 elements, five blocks of 1024: all, some or hardly any elements tie across blocks."""
    numbers = torch.randint(-magnitudes, magnitudes + 1, (5000,), generator=torch.Generator().manual_seed(0))
    x = (numbers / magnitudes).to(dtype)
    for k in (1, 700, 4999):
        got, expected = ((torch.zeros(k).int(), torch.zeros(k, dtype=dtype)) for _ in range(2))
        TRITON.top_k(x, *got)
        reference.top_k(x, *expected)
        assert torch.equal(got[0], expected[0])
        assert_same_bits(got[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_is_the_largest_and_infinity_the_next(dtype: torch.dtype) -> None:
    x = special_values(dtype)  # 0, -0, NaN, inf, -inf, the smallest subnormal, the largest number
    for k, expected in ((1, [2]), (2, [2, 3]), (3, [2, 3, 4]), (4, [2, 3, 4, 6]), (6, [0, 2, 3, 4, 5, 6])):
        indices, values = torch.zeros(k).long(), torch.zeros(k, dtype=dtype)
        TRITON.top_k(x, indices, values)
        assert indices.tolist() == expected
        assert_same_bits(values, x[indices])


def test_lists_that_are_made_piece_by_piece_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("gradsync.kernels.triton.hashing"), "_DEALT_AT_ONCE", 300)
    for got, expected in zip(TRITON.owned_by_hash(700, 3, 5), reference.owned_by_hash(700, 3, 5), strict=True):
        assert_same_bits(got, expected)


def test_sums_over_many_parts_and_hot_rows_keep_their_order() -> None:
    indices = [torch.zeros(20).long(), torch.tensor([3, 0, 3]), torch.arange(5), *[torch.zeros(1).long()] * 9]
    parts = [
        (rows, torch.randn(len(rows), 3, generator=torch.Generator().manual_seed(n))) for n, rows in enumerate(indices)
    ]
    for got, expected in zip(TRITON.sum_rows(parts, 5), reference.sum_rows(parts, 5), strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_numbers_of_every_size_are_widened_and_rounded_as_torch_does(dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15, 7).to(torch.int16)[: 9 * 1024].view(dtype).view(-1, 64)
    parts = [(torch.arange(len(values)), part) for part in (values, values.flip(0))]
    assert_same_bits(TRITON.sum_rows(parts, 144, scale=1 / 3)[1], reference.sum_rows(parts, 144, scale=1 / 3)[1])


def test_what_cannot_be_worked_on_in_place_is_refused() -> None:
    triton, apart, two = device.load(), torch.arange(6, device=DEVICE)[::2], torch.zeros(2, device=DEVICE)
    three, rows = torch.arange(3, device=DEVICE), torch.zeros(3, 4, device=DEVICE)
    for call in (
        lambda: triton.encode_bitmap(apart, 10, three[:1]),
        lambda: triton.partition_rotated(apart, 10, 2, 0),
        lambda: triton.owners_by_hash(three, 2, 0, apart),
        lambda: triton.nonzero_elements(two.repeat(2)[::2]),
        lambda: triton.top_k(two.repeat(2)[::2], three[:1], two[:1]),
        lambda: triton.top_k(two, apart[:2], two),
        lambda: triton.top_k(two, three[:2], rows[:2, 0]),
        lambda: triton.unite_rows([apart], 10),
        lambda: triton.partition_hashed(three, 10, 1, 0).write(rows[:, 0], [apart.clone()], [rows[:, 1].clone()]),
    ):
        with pytest.raises(TypeError, match=r"must be contiguous, got .*strides \("):
            call()
    for call in (
        lambda: triton.scatter_rows(three, rows.repeat(1, 2)[:, ::2], rows, accumulate=True),
        lambda: triton.scatter_rows(three, rows, rows[:1].expand(3, 4), accumulate=True),
        lambda: triton.nonzero_rows(rows.T),
    ):
        with pytest.raises(TypeError, match="rows of adjacent elements"):
            call()
    with pytest.raises(ValueError, match="all tensors must be on"):
        triton.decode_bitmap(three, three.to("meta"))
    assert not rows.any()


def test_an_explicit_choice_of_triton_reaches_every_kernel_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with kernels.use("triton"):
        assert kernels.active() == "triton"
        for kernel in CASES:
            family = choice.KERNELS[kernel].__module__.rpartition(".")[2]
            module = importlib.import_module(f"gradsync.kernels.triton.{family}")
            there = [torch.zeros(1, device=DEVICE)]
            assert choice.pick(kernel, there) is getattr(module, kernel, getattr(reference, kernel))
            if hasattr(module, kernel):
                with monkeypatch.context() as without:
                    without.delattr(module, kernel)
                    choice.version.cache_clear()
                    assert choice.pick(kernel, []) is getattr(reference, kernel)
                choice.version.cache_clear()
        assert_same_bits(kernels.owned_by_hash(9, 2, 0)[1].cpu(), reference.owned_by_hash(9, 2, 0)[1])


def test_tensors_on_a_device_go_to_triton_and_no_others() -> None:
    there: Any = SimpleNamespace(is_cuda=True, dtype=torch.int64, layout=torch.strided, is_neg=lambda: False)
    other: Any = SimpleNamespace(is_cuda=True, dtype=torch.complex64, layout=torch.strided, is_neg=lambda: False)
    assert choice.pick("count_bits", [there]) is device.load().count_bits
    assert not device.supports([there, torch.zeros(1)]) and not device.supports([there, other])
    with kernels.use("reference"):
        assert choice.pick("count_bits", [there]) is reference.count_bits


def of_many(kernel: str, number: int) -> None:
    """Calls a kernel for many sections, each with more above its threshold than is taken, or many tensors."""
    x, out = torch.linspace(1, 2, 6 * number, device=DEVICE).half(), torch.zeros(number, device=DEVICE).long()
    given = {"sections": Sections((6,) * number), "counts": (1,) * number}
    if kernel == "top_k":
        device.load().top_k(x, out, x[:number].clone(), **given)
    elif kernel == "select_above":
        assert device.load().select_above(x, out.float(), out, x[:number].clone(), **given) == number
    else:
        device.load().digest([part.to(DTYPES[place % 2]) for place, part in enumerate(x.split(6))], out)


@pytest.mark.parametrize("kernel", ["top_k", "select_above", "digest"])
def test_launches_do_not_grow_with_sections_and_tensors(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(choice.KERNELS[kernel].__module__.replace("reference", "triton"))
    launches, real = [0], module.launch

    def launch(*arguments: Any, **constants: Any) -> None:
        launches[-1] += 1
        real(*arguments, **constants)

    monkeypatch.setattr(module, "launch", launch)
    for number in (3, 50):
        of_many(kernel, number)
        launches.append(0)
    assert launches[0] == launches[1] > 0


COMPILE = """
import importlib, json, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for module, name, types, constants in json.load(sys.stdin):
    kernel = getattr(importlib.import_module(module), name)
    constants = {k: getattr(tl, v[3:]) if str(v).startswith("tl.") else v for k, v in constants.items()}
    signature = dict(zip((k for k in kernel.arg_names if k not in constants), types, strict=True))
    signature |= dict.fromkeys(constants, "constexpr")
    single = {"num_sections": 1} if "num_sections" in signature else {}  # Triton makes a constant of a number of 1
    for fixed in ({}, single) if single else ({},):
        types, numbers = signature | dict.fromkeys(fixed, "constexpr"), constants | fixed
        done = triton.compile(ASTSource(kernel, types, numbers), target=GPUTarget("cuda", 80, 32))
    print(name, len(done.asm["cubin"]))
"""


def signature_of(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """Returns module, name, argument types and constants of a launch, as the compiler takes them."""
    kinds = [
        f"*{'u' if a.dtype == torch.uint8 else 'fp' if a.is_floating_point() else 'i'}{8 * a.element_size()}"
        if isinstance(a, Tensor)
        else "i32" if -(2**31) <= a < 2**31 else "i64"
        for a in arguments
    ]  # fmt: skip
    names = {
        name: value if isinstance(value, (int, float, str)) else f"tl.{value}" for name, value in constants.items()
    }
    return kernel.fn.__module__, kernel.fn.__name__, kinds, names


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a GPU, on which the tests above have compiled all kernels")
def test_every_kernel_compiles_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The interpreter accepts code that the compiler rejects. Machine code for sm_80 needs no GPU."""
    launched: dict[str, tuple[Any, ...]] = {}

    def launch(kernel: Any, programs: int, where: torch.device, *arguments: Any, **constants: Any) -> None:
        launched[f"{kernel.fn.__module__}.{kernel.fn.__name__}"] = signature_of(kernel, arguments, constants)
        real(kernel, programs, where, *arguments, **constants)

    real = importlib.import_module("gradsync.kernels.triton.boundary").launch
    written = set()
    for file in Path(device.load().__path__[0]).glob("*.py"):
        module = importlib.import_module(f"gradsync.kernels.triton.{file.stem}")
        written |= {
            f"{module.__name__}.{name}" for name, value in vars(module).items() if is_kernel(name, value, module)
        }
        if hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", launch)
    for case in CASES.values():
        case(TRITON, 1)
    assert set(launched) == written
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command, given = [sys.executable, "-c", COMPILE], json.dumps(list(launched.values()))
    done = subprocess.run(command, input=given, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(int(line.split()[1]) > 0 for line in done.stdout.splitlines())
    assert len(done.stdout.splitlines()) == len(launched)


def is_kernel(name: str, value: object, module: Any) -> bool:
    """Whether a module defines a kernel by this name: kernels that are launched have a leading underscore."""
    return name.startswith("_") and getattr(getattr(value, "fn", None), "__module__", None) == module.__name__
