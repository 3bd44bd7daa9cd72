"""Kernels that draw: their promises, and that every implementation gives the definition's bits."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync import kernels
from gradsync.kernels import Sections, accumulation_dtype, reference
from gradsync.kernels.reference.draws import draws
from tests.kernels.native import DTYPES, assert_same_bits, cpu, native, special_values
from tests.kernels.on_device import every

LENGTHS = (0, 1, 700, 33, 0, 2, 11_011)  # tensors that share a bucket
PLACES = (0, 5, 2**32 - 30, 7, 0, 2**40, 31)  # of their first elements: across a 32-bit word too
SEEDS = (1, 2, 2**63 + 5, 2**64 - 1, 0, 6, 7)
SECTIONS = Sections(LENGTHS, PLACES, SEEDS)


def drawn(
    kernels: Any,
    sections: Sections,
    counts: list[int],
    block: int = 1,
    dtype: torch.dtype = torch.int64,
    **options: Any,
) -> Tensor:
    """Returns what a kernel draws; it must write nothing behind its outputs."""
    k = sum(count * max(1, min(block, n)) for count, n in zip(counts, sections.lengths, strict=True))
    indices = torch.full((k + 9,), 77, dtype=dtype)
    kernels.random_k(sections, counts, indices[:k], block=block, **options)
    assert (indices[k:] == 77).all()
    return indices[:k]


@pytest.mark.parametrize("block", [1, 6])
def test_of_each_section_so_many_different_elements_are_drawn(block: int) -> None:
    every_run = [n // max(1, min(block, n)) for n in LENGTHS]
    for counts in (every_run, [n // 3 for n in every_run]):
        elements, taken, offset = drawn(reference, SECTIONS, counts, block), 0, 0
        for n, count in zip(LENGTHS, counts, strict=True):
            size = count * max(1, min(block, n))
            mine = elements[taken : taken + size]
            assert len(mine.unique()) == size
            assert size == 0 or offset <= mine.min() <= mine.max() < offset + n
            taken, offset = taken + size, offset + n


@pytest.mark.parametrize(("size", "k", "block"), [(2, 1, 1), (10, 3, 1), (101, 7, 1), (100, 4, 5), (23, 2, 5)])
def test_every_element_and_every_pair_is_drawn_as_often(size: int, k: int, block: int) -> None:
    """Chi-square over 1000 seeds: below the mean + 5 standard deviations of its distribution."""
    draws, hits = 1000, torch.zeros(size)
    pairs = torch.zeros(size, size)
    for seed in range(draws):
        chosen = torch.zeros(size)
        chosen[drawn(cpu, Sections((size,), (0,), (seed * 0x9E3779B97F4A7C15 % 2**64,)), [k], block)] = 1
        hits += chosen
        if block == 1 and size <= 10:
            pairs += chosen[:, None] * chosen
    share = k * block / size
    chi = float((hits - draws * share).square().sum() / (draws * share * (1 - share))) * (size - 1) / size
    assert abs(chi - (size - 1)) < 5 * math.sqrt(2 * (size - 1)) * block
    if size == 10:
        both = share * (k - 1) / (size - 1)
        upper = pairs[torch.triu(torch.ones_like(pairs), 1).bool()]
        chi = float((upper - draws * both).square().sum() / (draws * both * (1 - both)))
        assert abs(chi - len(upper)) < 5 * math.sqrt(2 * len(upper))


def test_other_seeds_and_places_draw_others() -> None:
    first = drawn(reference, Sections((1000,), (0,), (1,)), [100])
    for other in (Sections((1000,), (0,), (2,)), Sections((1000,), (9,), (1,)), Sections((1000,), (0,), (1 + 2**32,))):
        shared = torch.isin(first, drawn(reference, other, [100])).sum()
        assert shared < 30, "10 are expected"


@native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("block", [1, 6])
def test_native_draws_equal_the_definition(block: int, threads: int, module: ModuleType) -> None:
    runs = [n // max(1, min(block, n)) for n in LENGTHS]
    for counts, dtype in ((runs, torch.int32), ([n // 5 for n in runs], torch.int64)):
        got = drawn(cpu, SECTIONS, counts, block, dtype, threads=threads, module=module)
        assert_same_bits(got, drawn(reference, SECTIONS, counts, block, dtype))


@native
def test_of_more_than_32_bits_of_elements_some_are_drawn(module: ModuleType) -> None:
    huge = Sections((2**34 + 77,), (0,), (3,))
    for block in (1, 1000):
        got = drawn(cpu, huge, [50], block, module=module)
        assert_same_bits(got, drawn(reference, huge, [50], block))
        assert got.max() > 2**33


def rotated(
    kernels: Any, x: Tensor, sections: Sections, chunk: int, *, out: torch.dtype | None = None, **options: Any
) -> Tensor:
    room = torch.full((len(x) + 3,), 77, dtype=out or accumulation_dtype(x.dtype))
    kernels.hadamard(x, sections, room[: len(x)], chunk=chunk, **options)
    assert (room[len(x) :] == 77).all()
    return room[: len(x)]


def numbers(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64).to(dtype)


def test_the_transform_is_hadamard_s_with_random_signs() -> None:
    for bits in range(5):
        n = 2**bits
        rows = torch.stack([rotated(reference, row, Sections((n,), (0,), (3,)), n) for row in torch.eye(n).double()])
        matrix = torch.ones(1, 1).double()
        for _ in range(bits):
            matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
        signs = (rows[:, 0] * math.sqrt(n)).round()
        assert signs.abs().tolist() == [1.0] * n
        torch.testing.assert_close(rows, signs[:, None] * matrix / math.sqrt(n), rtol=1e-14, atol=0)


def test_rotations_keep_norms_are_undone_and_spread_a_spike() -> None:
    x = numbers(sum(LENGTHS), torch.float64)
    there = rotated(reference, x, SECTIONS, 4096)
    assert float(there.norm()) == pytest.approx(float(x.norm()), rel=1e-13)
    torch.testing.assert_close(rotated(reference, there, SECTIONS, 4096, inverse=True), x, rtol=0, atol=1e-13)
    spike = torch.zeros(4096)
    spike[77] = 64.0
    assert rotated(reference, spike, Sections((4096,), (0,), (1,)), 4096).abs().unique().tolist() == [1.0]
    signs = sum(draws(5, 0, 100_000) >> bit & 1 for bit in range(32))
    assert abs(float(signs.double().mean()) - 16) < 5 * math.sqrt(8 / 100_000)


@native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_rotations_equal_the_definition(dtype: torch.dtype, threads: int, module: ModuleType) -> None:
    x = numbers(sum(LENGTHS), dtype)
    x[-9:-2] = special_values(dtype)
    for chunk in (1, 8, 2048, 8192):
        there = rotated(cpu, x, SECTIONS, chunk, threads=threads, module=module)
        assert_same_bits(there, rotated(reference, x, SECTIONS, chunk))
        back = rotated(cpu, there, SECTIONS, chunk, out=dtype, inverse=True, threads=threads, module=module)
        assert_same_bits(back, rotated(reference, there, SECTIONS, chunk, out=dtype, inverse=True))
        cpu.hadamard(there, SECTIONS, there, chunk=chunk, inverse=True, threads=threads, module=module)
        assert_same_bits(there.to(dtype), back)


def test_chunks_are_powers_of_two_and_leave_nothing_out() -> None:
    assert kernels.rotation_sizes((7, 0, 100), 32) == [4, 2, 1, 32, 32, 32, 4]


@every
def test_what_does_not_fit_is_refused(kernels: Any) -> None:
    two, indices = Sections((2, 3), (), (1, 2)), torch.zeros(2).long()
    with pytest.raises(ValueError, match="counts must be at most the runs of 1 in 2 elements, 2, got 3"):
        kernels.random_k(two, [3, 0], indices)
    with pytest.raises(ValueError, match="block must be at least 1, got 0"):
        kernels.random_k(two, [1, 1], indices, block=0)
    with pytest.raises(ValueError, match="needs a seed for each of 2 sections, got none"):
        kernels.random_k(Sections((2, 3)), [1, 1], indices)
    with pytest.raises(ValueError, match="indices must be of shape"):
        kernels.random_k(two, [1, 2], indices)
    with pytest.raises(TypeError, match="indices must be int64 or int32"):
        kernels.random_k(two, [1, 1], torch.zeros(2))
    x = torch.zeros(5)
    with pytest.raises(ValueError, match="chunk must be a power of two up to 8192, got 3"):
        kernels.hadamard(x, two, x, chunk=3)
    with pytest.raises(ValueError, match="needs a seed for each of 2 sections, got none"):
        kernels.hadamard(x, Sections((2, 3)), x, chunk=4)
    with pytest.raises(ValueError, match="x must be"):
        kernels.hadamard(x[:4], two, x[:4], chunk=4)
    with pytest.raises(ValueError, match="out must be of shape"):
        kernels.hadamard(x, two, x[:4], chunk=4)
    for arguments, inverse in (((x.half(), x.half()), False), ((x.half(), x), True), ((x.double(), x), True)):
        with pytest.raises(TypeError, match="must be"):
            kernels.hadamard(arguments[0], two, arguments[1], chunk=4, inverse=inverse)


def test_every_implementation_can_be_chosen() -> None:
    sections, x = Sections((5,), (), (1,)), numbers(5)
    found = []
    for implementation in ("reference", "native", "auto"):
        with kernels.use(implementation):
            indices, out = torch.zeros(2).int(), torch.zeros(5)
            kernels.random_k(sections, [2], indices)
            kernels.hadamard(x, sections, out, chunk=4)
            found.append((indices.tolist(), out.tolist()))
    assert found[0] == found[1] == found[2]
