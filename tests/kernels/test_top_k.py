"""The k elements of the largest magnitude, exactly k, ties by index; native bits equal the definition's."""

from __future__ import annotations

from types import ModuleType

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gradsync import kernels
from gradsync.kernels import Sections, accumulation_dtype, reference
from tests.kernels.native import DTYPES, assert_same_bits, cpu, native, special_values
from tests.kernels.on_device import TRITON, every

SAMPLED = 40_007  # more elements than are looked at before a threshold is guessed


def chosen(kernels, x: Tensor, k: int, *, dtype: torch.dtype = torch.int64, **options) -> tuple[Tensor, Tensor]:
    """Returns indices and values; nothing is written behind them."""
    indices, values = torch.full((k + 16,), 77, dtype=dtype), torch.full((k + 16,), 77, dtype=x.dtype)
    kernels.top_k(x, indices[:k], values[:k], **options)
    assert (indices[k:] == 77).all() and (values[k:] == 77).all()
    return indices[:k], values[:k]


def written_out(x: Tensor, k: int) -> list[int]:
    """Returns top_k's result as its docstring defines it, for numbers without NaN."""
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
    """Returns tensors in which a sample predicts the whole badly."""
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
        kernels.top_k(x, three.long(), three.int())
    with pytest.raises(TypeError, match="indices must be int64 or int32"):
        kernels.top_k(x, three, three)
    with pytest.raises(TypeError, match="x must be float"):
        kernels.top_k(x.int(), three.long(), three.int())
    with pytest.raises(ValueError, match="x must be 1-D"):
        kernels.top_k(x[None], three.long(), three)


@every
def test_sections_residuals_and_thresholds_that_do_not_fit_are_refused(kernels) -> None:
    x, out, two = torch.ones(5), (torch.zeros(2).long(), torch.zeros(2)), Sections((3, 2))
    with pytest.raises(ValueError, match="sections must be of x's 5 elements, got 6"):
        kernels.top_k(x, *out, sections=Sections((3, 3)), counts=(1, 1))
    with pytest.raises(ValueError, match="counts must be one for each of 2 sections, got none"):
        kernels.top_k(x, *out, sections=two)
    with pytest.raises(ValueError, match="counts must be one for each of 2 sections, got 1"):
        kernels.top_k(x, *out, sections=two, counts=(2,))
    with pytest.raises(ValueError, match="counts must be within the 2 elements of section 1, got 3"):
        kernels.top_k(x, *out, sections=two, counts=(0, 3))
    with pytest.raises(ValueError, match=r"must be of shape \(3,\)"):
        kernels.top_k(x, *out, sections=two, counts=(2, 1))
    with pytest.raises(ValueError, match="residual and next_residual belong together"):
        kernels.top_k(x, *out, residual=x)
    with pytest.raises(ValueError, match="residual must be of shape"):
        kernels.top_k(x, *out, residual=x[1:], next_residual=x.clone())
    with pytest.raises(TypeError, match="residual must be"):
        kernels.top_k(x, *out, residual=x, next_residual=x.double())
    with pytest.raises(ValueError, match="thresholds must be of shape"):
        kernels.select_above(x, torch.ones(2), *out)
    with pytest.raises(TypeError, match="thresholds must be"):
        kernels.count_above(x, torch.ones(1).double(), torch.zeros(1).long())
    with pytest.raises(TypeError, match="counts must be int64"):
        kernels.count_above(x, torch.ones(1), torch.zeros(1).int())


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


LENGTHS = (0, 1, 700, 64, 0, SAMPLED, 33, 5000)


def bucket(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns sections of different magnitudes, some with ties and special values, and a residual."""
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(length, generator=generator) * 10.0 ** (i % 4) for i, length in enumerate(LENGTHS)]
    parts[2].round_()
    x, residual = torch.cat(parts), torch.randn(sum(LENGTHS), generator=generator).round_()
    x[700:707], residual[700:800] = special_values(torch.float32), 0.0
    return x.to(dtype), residual.to(accumulation_dtype(dtype))


def outputs(x: Tensor, room: int, values: torch.dtype) -> list[Tensor]:
    left = torch.full((len(x),), 77, dtype=accumulation_dtype(x.dtype))
    return [torch.full((room,), 77, dtype=torch.int32), torch.full((room,), 77, dtype=values), left]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_each_section_its_largest_are_taken_with_the_residual_and_the_rest_is_left(dtype: torch.dtype) -> None:
    (x, residual), counts = bucket(dtype), (0, 1, 70, 0, 0, 400, 33, 50)
    indices, values, left = outputs(x, sum(counts), dtype)
    sections = Sections(LENGTHS)
    given = {"sections": sections, "counts": counts, "residual": residual, "next_residual": left}
    reference.top_k(x, indices, values, **given)
    p, start, taken = residual + x, 0, 0
    for length, count in zip(LENGTHS, counts, strict=True):
        alone = chosen(reference, p[start : start + length], count)
        assert torch.equal(indices[taken : taken + count], alone[0] + start)
        assert_same_bits(values[taken : taken + count], alone[1].to(dtype))
        start, taken = start + length, taken + count
    expected = p.clone()
    expected[indices] -= values
    assert_same_bits(left, expected)


@native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_choice_by_sections_equals_the_definition(dtype: torch.dtype, threads: int, module: ModuleType) -> None:
    (x, residual), sections = bucket(dtype), Sections(LENGTHS)
    some, none = (0, 1, 70, 0, 0, 400, 33, 50), [0] * len(LENGTHS)
    bounds = torch.tensor([0.0, 1.0, 7.0, 50.0, 0.0, 25.0, -1.0, float("nan")], dtype=accumulation_dtype(dtype))
    for counts, sent, fed in [(some, sent, fed) for sent in DTYPES for fed in (True, False)] + [
        (counts, dtype, True) for counts in (LENGTHS, none)
    ]:
        results = []
        for kernel, options in ((cpu, {"threads": threads, "module": module}), (reference, {})):
            top, above = outputs(x, sum(counts), sent), outputs(x, sum(counts), sent)
            given = [{"residual": residual, "next_residual": outs[2]} if fed else {} for outs in (top, above)]
            options |= {"sections": sections, "counts": counts}
            kernel.top_k(x, *top[:2], **given[0], **options)
            count = kernel.select_above(x, bounds, *above[:2], **given[1], **options)
            results.append([*top, above[0][:count], above[1][:count], above[2]])
        for got, expected in zip(*results, strict=True):
            assert_same_bits(got, expected)
    counted = [torch.zeros(len(LENGTHS)).long() for _ in range(2)]
    cpu.count_above(x, bounds, counted[0], sections=sections, threads=threads, module=module)
    reference.count_above(x, bounds, counted[1], sections=sections)
    assert counted[0].tolist() == counted[1].tolist()


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_choice_by_sections_on_a_device_equals_the_definition(dtype: torch.dtype) -> None:
    """Sections of several blocks of 1024, and empty ones, of which some have more above than are wanted."""
    lengths, counts = (0, 1, 700, 64, 0, 2500, 33, 1024, 0), (0, 1, 70, 64, 0, 400, 33, 500, 0)
    x = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(3)).to(dtype)
    x[:7], x[2000:2400] = special_values(dtype), 1.0
    wide, sections = accumulation_dtype(dtype), Sections(lengths)
    bounds = torch.tensor([0.0, 1.0, 0.1, 0.2, 0.0, 0.5, -1.0, float("nan"), 0.0], dtype=wide)
    for fed, sent in ((True, torch.bfloat16), (False, dtype)):
        results = []
        for kernel in (TRITON, reference):
            outs = outputs(x, sum(counts), sent)
            given = {"residual": x.to(wide).flip(0), "next_residual": outs[2]} if fed else {}
            count = kernel.select_above(x, bounds, *outs[:2], sections=sections, counts=counts, **given)
            results.append([outs[0][:count], outs[1][:count], outs[2]])
        for got, expected in zip(*results, strict=True):
            assert_same_bits(got, expected)
    counted = [torch.zeros(len(lengths)).long() for _ in range(2)]
    for kernel, out in zip((TRITON, reference), counted, strict=True):
        kernel.count_above(x, bounds, out, sections=sections)
    assert counted[0].tolist() == counted[1].tolist()


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_by_sections_on_a_device_equal_the_definition(dtype: torch.dtype) -> None:
    """Sections of several blocks and of less than one, empty ones, and some of which nothing or everything is taken."""
    lengths, counts = (0, 700, 64, 1, 0, 4200, 33, 7, 1024, 0), (0, 70, 0, 1, 0, 1300, 33, 3, 900, 0)
    x = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(3)).to(dtype)
    x[:7], x[-1031:-1024], x[1500:3500], x[-800:] = special_values(dtype), special_values(dtype), 1.0, -2.0
    wide, sections = accumulation_dtype(dtype), Sections(lengths)
    for fed, sent in ((True, torch.bfloat16), (False, dtype)):
        results = []
        for kernel in (TRITON, reference):
            outs = outputs(x, sum(counts), sent)
            given = {"residual": x.to(wide).flip(0), "next_residual": outs[2]} if fed else {}
            kernel.top_k(x, *outs[:2], sections=sections, counts=counts, **given)
            results.append(outs)
        for got, expected in zip(*results, strict=True):
            assert_same_bits(got, expected)


@every
def test_above_a_threshold_is_what_is_not_within_it_and_of_too_many_the_largest(kernels) -> None:
    x = torch.tensor([1.0, -2.0, 0.0, float("nan"), 2.0, -3.0, float("inf"), 0.5])
    for threshold, most, expected in (
        (2.0, 8, [3, 5, 6]),
        (1.0, 8, [1, 3, 4, 5, 6]),
        (1.0, 4, [1, 3, 5, 6]),
        (float("inf"), 8, [3]),
        (0.0, 8, [0, 1, 3, 4, 5, 6, 7]),
        (float("nan"), 8, list(range(8))),
        (9.0, 0, []),
    ):
        bound, indices, values = torch.tensor([threshold]), torch.zeros(most).long(), torch.zeros(most)
        count = kernels.select_above(x, bound, indices, values)
        assert indices[:count].tolist() == expected
        assert_same_bits(values[:count], x[expected])


def test_what_16_bits_round_off_is_left() -> None:
    x, left = torch.tensor([1.0, 2.0 + 2.0**-12, -4.0 - 2.0**-9]), torch.zeros(3)
    indices, values = torch.zeros(2).long(), torch.zeros(2, dtype=torch.bfloat16)
    cpu.top_k(x, indices, values, residual=torch.zeros(3), next_residual=left)
    assert (indices.tolist(), values.tolist()) == ([1, 2], [2.0, -4.0])
    assert left.tolist() == [1.0, 2.0**-12, -(2.0**-9)]
