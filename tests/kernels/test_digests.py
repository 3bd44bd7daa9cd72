"""Digests are the same from every implementation and depend on the bits and order of all elements, and nothing else."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradsync import kernels
from gradsync.kernels import reference
from tests.kernels.native import BASE, DTYPES, MODULES, cpu, native, special_values
from tests.kernels.on_device import every

SIZES = [0, 1, 2, 3, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 70_001]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
floating = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def digest(kernels: Any, x: Tensor, **options: Any) -> int:
    room = torch.full((3,), 77)
    kernels.digest([x], room[1:2], **options)
    assert room[[0, 2]].tolist() == [77, 77]
    return int(room[1])


def any_bits(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Returns random bit patterns, with NaNs and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator)
    return bits.to(BITS[dtype.itemsize]).view(dtype)


@native
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64], ids=str)
def test_native_digests_equal_the_definition(dtype: torch.dtype, module: ModuleType) -> None:
    for size in SIZES:
        x = any_bits(size, dtype)
        if dtype.is_floating_point:
            x[: min(size, 7)] = special_values(dtype)[:size]
        expected = digest(reference, x)
        for threads in (1, 2, 5):
            assert digest(cpu, x, threads=threads, module=module) == expected, (size, threads)


@every
def test_several_at_once_are_each_its_own(kernels: Any) -> None:
    xs = [any_bits(size, dtype) for size in (0, 3, 2050) for dtype in DTYPES] + [torch.arange(1500)]
    together = torch.zeros(len(xs), dtype=torch.int64)
    kernels.digest(xs, together)
    assert together.tolist() == [digest(kernels, x) for x in xs]
    kernels.digest([], together[:0])


@native
@pytest.mark.parametrize("threads", [2, 3, 16])
def test_threads_share_blocks_of_several_tensors(threads: int, module: ModuleType) -> None:
    xs = [any_bits(size, torch.float32) for size in (5000, 0, 1, 40_000, 700)]
    outs = [torch.zeros(len(xs), dtype=torch.int64) for _ in range(2)]
    cpu.digest(xs, outs[0], threads=threads, module=module)
    cpu.digest(xs, outs[1], threads=1, module=module)
    assert torch.equal(*outs)


def test_long_tensors_are_the_same_in_the_pieces_of_the_definition() -> None:
    """The definition takes 2^18 words at once."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = any_bits((1 << 20) + 1, dtype)
        assert digest(reference, x) == digest(cpu, x, module=BASE)


def test_the_definition_stays_what_it_is() -> None:
    """Ranks of different versions must agree: a change of this definition is a change of the protocol."""
    x = torch.arange(3000.0)
    expected = [-320011902412128129, 1472780929591912687]
    assert [digest(reference, x), digest(reference, x.bfloat16())] == expected


@every
@floating
def test_all_nans_are_one_and_both_zeros(dtype: torch.dtype, kernels: Any) -> None:
    bits = BITS[dtype.itemsize]
    width = 8 * dtype.itemsize
    infinity = torch.tensor([torch.inf], dtype=dtype).view(bits)
    signs = torch.tensor([-(1 << (width - 1))], dtype=bits)
    nans = [infinity + 1, infinity + 5, (infinity + 1) | signs]
    alike = [torch.cat([torch.ones(3, dtype=dtype), nan.view(dtype)]) for nan in nans]
    assert all(each[-1].isnan() for each in alike)
    alike.append(torch.cat([torch.ones(3, dtype=dtype), torch.tensor([torch.nan], dtype=dtype)]))
    assert len({digest(kernels, each) for each in alike}) == 1
    zeros = torch.tensor([0.0, -0.0], dtype=dtype)
    assert digest(kernels, zeros) == digest(kernels, zeros.flip(0)) == digest(kernels, torch.zeros(2, dtype=dtype))
    other = [torch.inf, -torch.inf, 0.0, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, 1.0, torch.nan]
    assert len({digest(kernels, torch.tensor([each], dtype=dtype)) for each in other}) == len(other)


@every
def test_nothing_is_something_of_its_own(kernels: Any) -> None:
    sizes = [digest(kernels, torch.zeros(size)) for size in (0, 1, 2, 1024, 1025)]
    assert len(set(sizes)) == len(sizes), "zeros behind the end would count as nothing"


@st.composite
def changed(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Draws a tensor and a copy that differs in one bit of one non-NaN element."""
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.integers(1, 5000))
    x = torch.randn(size, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(dtype)
    at, bit = draw(st.integers(0, size - 1)), draw(st.integers(0, 8 * dtype.itemsize - 1))
    other = x.clone()
    flip = 1 << bit if bit < 8 * dtype.itemsize - 1 else -(1 << bit)
    other.view(BITS[dtype.itemsize])[at] ^= flip
    return x, other


@settings(deadline=None, max_examples=200)
@given(changed())
def test_any_bit_counts(pair: tuple[Tensor, Tensor]) -> None:
    x, other = pair
    alike = bool(x.isnan().logical_and(other.isnan()).logical_or(x == other).all())
    for module in MODULES:
        assert (digest(cpu, x, module=module) == digest(cpu, other, module=module)) == alike


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(DTYPES), st.integers(2, 9000), st.data())
def test_the_order_counts(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    """Weights set by hand have few bits set: in float64 most of these bits are zero."""
    x = torch.ones(size, dtype=dtype)
    first, second = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    x[first], other = 2.0, x.clone()
    other[second] = 2.0
    assert digest(cpu, x) != digest(cpu, other)


@floating
def test_blocks_that_change_places_count(dtype: torch.dtype) -> None:
    x = torch.randn(8192, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert digest(cpu, x) != digest(cpu, x.roll(4096))


def test_differences_that_would_cancel_out_in_a_sum_count() -> None:
    """Signs flipped in pairs, and one unit more beside one less: 4096 tensors must have distinct digests."""
    found = set()
    for number in range(1 << 12):
        x = torch.ones(64)
        chosen = torch.tensor([number >> bit & 1 for bit in range(12)], dtype=torch.bool)
        x[:12][chosen] = -1.0
        x[12:24][chosen] = -1.0
        found.add(digest(cpu, x))
    assert len(found) == 1 << 12


@every
def test_what_does_not_fit_is_refused(kernels: Any) -> None:
    x, out = torch.zeros(5), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="xs must be 1-D"):
        kernels.digest([x.view(1, 5)], out)
    with pytest.raises(ValueError, match="out must be of shape"):
        kernels.digest([x, x], out)
    with pytest.raises(TypeError, match="out must be int64"):
        kernels.digest([x], torch.zeros(1))
    with pytest.raises(TypeError, match="xs must be float"):
        kernels.digest([x, x.int()], out)


@native
def test_elements_that_are_apart_are_refused(module: ModuleType) -> None:
    with pytest.raises(TypeError, match="contiguous"):
        cpu.digest([torch.zeros(8)[::2]], torch.zeros(1, dtype=torch.int64), module=module)
    apart, together = any_bits(64, torch.float32)[::2], any_bits(64, torch.float32)[::2].contiguous()
    assert digest(reference, apart) == digest(reference, together), "the definition takes them"


def test_every_implementation_can_be_chosen() -> None:
    found = []
    for implementation in ("reference", "native", "auto"):
        with kernels.use(implementation):
            found.append(digest(kernels, torch.arange(5000.0)))
    assert len(set(found)) == 1
