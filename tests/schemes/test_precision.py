"""Values in 16 bits on the wire: half the bytes, every rank the same rounded bits, and nothing finite made infinite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gradsync.compressors import ErrorFeedback, TopK
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import transfers
from gradsync.schemes import (
    DOUBLING_OF_ELEMENTS,
    AGSparse,
    AllReduce,
    BalancedElements,
    BalancedParallelism,
    CompressedAllGather,
    HalfPrecision,
    RowPoint,
    Scheme,
    from_expression,
    to_expression,
)
from gradsync.tensors.bucket import Layout, TensorSpec
from gradsync.tensors.density import DensityProfile
from gradsync.tensors.sparse import SparseRows
from tests.schemes.family import ROUNDED_MEMBERS, assert_is_scaled_sum, bits, make_inputs, run, run_scheme
from tests.schemes.stateful import Ranks, bucket, gradient

SPARSE: list[Scheme[Any]] = [AGSparse(), BalancedParallelism(), RowPoint(), BalancedElements(), DOUBLING_OF_ELEMENTS]
every_sparse = pytest.mark.parametrize("inner", SPARSE, ids=lambda scheme: scheme.name)
every_type = pytest.mark.parametrize("values", ["bfloat16", "float16"])


def brought(scheme: Scheme[Any], values: Tensor) -> Any:
    """Returns a bucket with these values, as a table's rows or spread over a flat tensor."""
    if scheme.traits.layout is Layout.FLAT:
        return torch.zeros(50 * len(values)).index_copy_(0, 3 + 50 * torch.arange(len(values)), values)
    return (SparseRows(3 * torch.arange(len(values)), values[:, None], 50 * len(values)),)


def values_of(scheme: Scheme[Any], result: Any, count: int) -> Tensor:
    found: Tensor = result[3::50] if scheme.traits.layout is Layout.FLAT else result[0].values[:, 0]
    return found[:count]


@every_type
@every_sparse
def test_every_value_is_rounded_at_its_source_and_once_as_a_sum(inner: Scheme[Any], values: str) -> None:
    """Values are compared bit by bit, with float32 sums; an owner rounds its own values, too."""
    dtype, generator = getattr(torch, values), torch.Generator().manual_seed(0)
    drawn = [torch.randn(40, generator=generator) for _ in range(4)]
    inputs = [brought(inner, each) for each in drawn]
    scale = 0.25  # of a power of two: no further rounding
    exact = torch.zeros(40)
    for each in drawn:
        exact += each.to(dtype).float()
    expected = (scale * exact).to(dtype).float()
    for result in run_scheme(HalfPrecision(inner, values), inputs, scale).results:
        found = values_of(inner, result, 40)
        assert found.dtype == torch.float32
        if inner is DOUBLING_OF_ELEMENTS:  # adds pairs first
            torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=0)
        else:
            assert bits(found) == bits(expected)


@every_sparse
def test_finite_means_stay_finite_and_what_is_not_finite_travels(inner: Scheme[Any]) -> None:
    largest = torch.finfo(torch.float16).max
    extremes = [1.5e5, 3.4e38, -3.4e38, float("inf"), -float("inf"), float("nan"), 1.0]
    inputs = [brought(inner, torch.tensor(each)) for each in (extremes, [1.0] * 7, [1.0] * 7)]
    expected = [5e4, largest, -largest, float("inf"), -float("inf"), float("nan"), 1.0]  # 1.5e5 alone would not fit
    for result in run_scheme(HalfPrecision(inner, "float16"), inputs, 1 / 3).results:
        found = values_of(inner, result, len(extremes))
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-2, atol=0, equal_nan=True)
        assert found[:2].isfinite().all()


def test_a_sum_beyond_the_range_says_so() -> None:
    scheme = HalfPrecision(BalancedParallelism(), "float16")
    inputs = [brought(scheme, torch.tensor([4e4])) for _ in range(3)]
    assert all(values_of(scheme, result, 1).isposinf() for result in run_scheme(scheme, inputs, 1.0).results)


@every_sparse
def test_messages_are_those_of_16_bit_values_to_the_byte(inner: Scheme[Any]) -> None:
    case = "few non-zeros" if inner.traits.layout is Layout.FLAT else "uniform"
    wide = make_inputs(inner, case, 3, torch.float32)
    narrow = [x.bfloat16() if isinstance(x, Tensor) else _as_bfloat16(x) for x in wide]
    of_wide, of_narrow = run_scheme(HalfPrecision(inner), wide, 1.0), run_scheme(inner, narrow, 1.0)
    assert [ledger.entries for ledger in of_wide.ledgers] == [ledger.entries for ledger in of_narrow.ledgers]
    specs = (
        (TensorSpec((4099,), torch.float32),)
        if inner.traits.layout is Layout.FLAT
        else (TensorSpec((64, 8), torch.float32),)
    )
    profiles, placement = (DensityProfile(specs[0].shape[0], 20.0),), Placement.one_per_node(3)
    steps = HalfPrecision(inner).steps(specs, profiles, placement)
    halved = inner.steps(tuple(replace(spec, dtype=torch.bfloat16) for spec in specs), profiles, placement)
    assert transfers(steps) == transfers(halved)


def _as_bfloat16(tables: tuple[SparseRows, ...]) -> tuple[SparseRows, ...]:
    """Merged first, as is done where rows occur twice."""
    return tuple(replace(t, values=t.values.bfloat16()) for t in tables)


def test_repeated_rows_are_merged_before_they_are_rounded() -> None:
    """256 ones and 1: in bfloat16, one after the other, they would be 256."""
    table = SparseRows(torch.full((258,), 7), torch.ones(258, 1), 10)
    scheme = HalfPrecision(BalancedParallelism(), "bfloat16")
    (result,) = run_scheme(scheme, [(table,)], 1.0).results[0]
    assert result.values.item() == 258


@every_type
def test_16_bit_buckets_pass_as_they_are(values: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        inputs = make_inputs(BalancedElements(), "few non-zeros", 3, dtype)
        plain = run_scheme(BalancedElements(), inputs, 1.0)
        outcome = run_scheme(HalfPrecision(BalancedElements(), values), inputs, 1.0)
        assert [bits(x) for x in outcome.results] == [bits(x) for x in plain.results]


@given(
    member=st.sampled_from(ROUNDED_MEMBERS),
    numel=st.integers(0, 300),
    densities=st.lists(st.sampled_from([0.0, 0.02, 0.2, 1.0]), min_size=1, max_size=4),
    scale=st.sampled_from([1.0, 1 / 3, -2.0, 0.0]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=80, deadline=None)
def test_any_data_gives_the_scaled_sum_within_two_roundings(
    member: Any, numel: int, densities: list[float], scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    flat = [torch.randn(numel, generator=generator) * (torch.rand(numel, generator=generator) < d) for d in densities]
    inputs = flat if member.scheme.traits.layout is Layout.FLAT else [(_rows_of(x),) for x in flat]
    outcome = run(member, inputs, scale)
    assert_is_scaled_sum(member, outcome.results, inputs, scale)
    assert all(bits(result) == bits(outcome.results[0]) for result in outcome.results)


def _rows_of(x: Tensor) -> SparseRows:
    """Returns rows of two columns, each row twice."""
    indices = x.nonzero().flatten().repeat(2)
    return SparseRows(indices, torch.stack([x[indices], -x[indices]], dim=1), len(x))


@pytest.mark.parametrize("size", [2, 3])
def test_residuals_are_in_units_of_gradients(size: int) -> None:
    """A residual may go on under another plan, which takes it for a part of a gradient."""
    ranks = Ranks(HalfPrecision(CompressedAllGather(ErrorFeedback(TopK(0.2)))), size, bucket(torch.float32))
    inputs = [gradient(seed, bucket(torch.float32)) for seed in range(size)]
    sent = size * ranks.step(inputs)
    numel = bucket().numel
    assert ranks.residuals().any()
    total = sum(x[:numel].double() for x in inputs)
    torch.testing.assert_close(sent[:numel].double() + ranks.residuals(), total, rtol=0.0, atol=0.1)


def test_it_is_lossy_and_passes_on_what_its_inner_scheme_says() -> None:
    scheme = HalfPrecision(BalancedElements(), "float16")
    assert not scheme.traits.exact
    assert scheme.traits.layout is Layout.FLAT
    assert scheme.title == "balanced_elements float16"
    planned = scheme.planned_for([DensityProfile(1000, 10.0, {4: 2.0})])
    assert planned.stages(4) == ("push", "pull")
    assert planned.planned_for(()) == scheme
    assert from_expression(to_expression(planned)) == planned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": "float8"}, "values must be 'bfloat16' or 'float16', got 'float8'"),
        ({"inner": "all_reduce"}, "inner must be a scheme .*, got 'all_reduce'"),
    ],
)
def test_settings_that_are_none_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HalfPrecision(**{"inner": AllReduce(), **arguments})
