"""The elements of the largest magnitude: exactly k of them, ties by index; native gives the definition's bits."""

from __future__ import annotations

from types import ModuleType

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gradsync import kernels
from gradsync.kernels import cpu, reference
from tests.kernels.native import DTYPES, assert_same_bits, native, special_values
from tests.kernels.on_device import every

SAMPLED = 40_007  # more elements than are looked at before a threshold is guessed


def chosen(kernels, x: Tensor, k: int, *, dtype: torch.dtype = torch.int64, **options) -> tuple[Tensor, Tensor]:
    """Indices and values; nothing is written behind them."""
    indices, values = torch.full((k + 16,), 77, dtype=dtype), torch.full((k + 16,), 77, dtype=x.dtype)
    kernels.top_k(x, indices[:k], values[:k], **options)
    assert (indices[k:] == 77).all() and (values[k:] == 77).all()
    return indices[:k], values[:k]


def written_out(x: Tensor, k: int) -> list[int]:
    """The promise word for word, for numbers without NaN."""
    by_magnitude = sorted(range(len(x)), key=lambda i: (-abs(float(x[i])), i))
    return sorted(by_magnitude[:k])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_definition_takes_the_largest_and_of_equal_ones_the_first(dtype: torch.dtype) -> None:
    x = torch.randint(-4, 5, (101,), generator=torch.Generator().manual_seed(0)).to(dtype)
    for k in (0, 1, 13, 50, 101):
        indices, values = chosen(reference, x, k)
        assert indices.tolist() == written_out(x, k)
        assert torch.equal(values, x[indices])


@native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000, SAMPLED])
def test_native_top_k_equals_the_definition(size: int, dtype: torch.dtype, threads: int, module: ModuleType) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    for k, index_dtype in {
        0: torch.int32,
        min(size, 3): torch.int64,
        size // 100: torch.int32,
        size: torch.int64,
    }.items():
        got = chosen(cpu, x, k, dtype=index_dtype, threads=threads, module=module)
        expected = chosen(reference, x, k, dtype=index_dtype)
        assert torch.equal(got[0], expected[0])
        assert_same_bits(got[1], expected[1])


def misleading(pattern: str) -> Tensor:
    """Tensors in which a sample says little of the whole."""
    x = torch.zeros(SAMPLED)
    if pattern == "equal":
        x += 3.0
    elif pattern == "few":
        x[::5000] = torch.arange(9.0)
    elif pattern == "two":
        x[::2] = -1.0
    elif pattern == "ascending":
        x = torch.arange(float(SAMPLED))
    elif pattern == "dense corner":
        x[-300:] = torch.randn(300, generator=torch.Generator().manual_seed(0))
    return x


@native
@pytest.mark.parametrize("k", [1, 8, 400, 20_000])
@pytest.mark.parametrize("pattern", ["zero", "equal", "few", "two", "ascending", "dense corner"])
def test_a_sample_that_misleads_costs_no_exactness(pattern: str, k: int, module: ModuleType) -> None:
    x = misleading(pattern)
    got, expected = chosen(cpu, x, k, module=module), chosen(reference, x, k)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@native
@settings(max_examples=40, deadline=None)
@given(magnitudes=st.integers(1, 50), size=st.integers(16_000, 40_000), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_native_top_k_equals_the_definition_on_ties(
    module: ModuleType, magnitudes: int, size: int, share: float, seed: int
) -> None:
    x = torch.randint(-magnitudes, magnitudes + 1, (size,), generator=torch.Generator().manual_seed(seed)).float()
    got, expected = chosen(cpu, x, int(share * size), module=module), chosen(reference, x, int(share * size))
    assert torch.equal(got[0], expected[0])


@native
@pytest.mark.parametrize("size", [7, SAMPLED])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_are_the_largest_and_travel(dtype: torch.dtype, size: int, module: ModuleType) -> None:
    x = torch.zeros(size, dtype=dtype)
    x[:7] = special_values(dtype)  # 0, -0, NaN, inf, -inf, the smallest subnormal, the largest number
    for implementation, options in ((reference, {}), (cpu, {"module": module})):
        for k, expected in ((1, [2]), (2, [2, 3]), (3, [2, 3, 4]), (4, [2, 3, 4, 6]), (5, [2, 3, 4, 5, 6])):
            indices, values = chosen(implementation, x, k, **options)
            assert indices.tolist() == expected
            assert_same_bits(values, x[indices])
        assert chosen(implementation, x, 7, **options)[0].tolist() == list(range(7))


@every
def test_outputs_that_do_not_fit_are_refused(kernels) -> None:
    x, three = torch.ones(5), torch.zeros(3)
    with pytest.raises(ValueError, match="indices must be of at most x's 5 elements"):
        kernels.top_k(x, torch.zeros(6).long(), torch.zeros(6))
    with pytest.raises(ValueError, match="values must be of shape"):
        kernels.top_k(x, three.long(), torch.zeros(2))
    with pytest.raises(TypeError, match="values must be"):
        kernels.top_k(x, three.long(), three.double())
    with pytest.raises(TypeError, match="indices must be int64 or int32"):
        kernels.top_k(x, three, three)
    with pytest.raises(TypeError, match="x must be float"):
        kernels.top_k(x.int(), three.long(), three.int())
    with pytest.raises(ValueError, match="x must be 1-D"):
        kernels.top_k(x[None], three.long(), three)


def test_elements_that_are_apart_are_refused_not_copied() -> None:
    x, indices, values = torch.ones(6), torch.zeros(3).long(), torch.zeros(3)
    for arguments in (
        (x.repeat(2)[::2], indices, values),
        (x, torch.zeros(6).long()[::2], values),
        (x, indices, torch.zeros(6)[::2]),
    ):
        with pytest.raises(TypeError, match=r"must be contiguous.*strides \(2\)"):
            cpu.top_k(*arguments)


def test_every_implementation_can_be_chosen() -> None:
    indices, values = torch.zeros(2).long(), torch.zeros(2)
    for implementation in ("reference", "native", "auto"):
        with kernels.use(implementation):
            kernels.top_k(torch.tensor([1.0, -3.0, 2.0]), indices.zero_(), values.zero_())
            assert (indices.tolist(), values.tolist()) == ([1, 2], [-3.0, 2.0])
