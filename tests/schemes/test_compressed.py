"""Schemes that carry payloads: the same bits on all ranks, the mean of what was decoded, bytes as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.comm import LocalGroup
from gradsync.compressors import (
    QSGD,
    Compressor,
    ErrorFeedback,
    MomentumCorrection,
    RandomK,
    ScaledSign,
    Summand,
    TernGrad,
    TopK,
    Unbiased,
    Warmup,
    dgc,
)
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import Step, transfers
from gradsync.schemes import (
    AllReduce,
    CoarseGrained,
    CompressedAllGather,
    CompressedAllReduce,
    CompressedTwoWay,
    HalfPrecision,
    Hierarchical,
    PowerSGD,
    Scheme,
    Sparsified,
    from_expression,
    to_expression,
    ways,
)
from gradsync.tensors.bucket import Bucket, Layout, Segment, TensorSpec
from tests.compressors.family import MEMBERS, Member, gradient, with_agreement
from tests.schemes.family import Outcome, run_scheme

pytestmark = pytest.mark.usefixtures("stale_memory")

LENGTHS = (700, 1, 33, 0, 2050)
NUMEL = sum(LENGTHS)
SIZES = (1, 2, 3)

members = pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS)


def bucket(dtype: torch.dtype = torch.float32) -> Bucket:
    segments = tuple(Segment(f"tensor {number}", 0, length) for number, length in enumerate(LENGTHS))
    return Bucket("0", segments, tuple(TensorSpec((length,), dtype) for length in LENGTHS), Layout.FLAT)


def inputs_of(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Gradients with flags behind; rank 0 has not used the second tensor."""
    flags = torch.zeros(bucket().num_flags, dtype=dtype)
    made = [torch.cat([gradient(NUMEL, dtype, seed + 10 * rank), flags]) for rank in range(size)]
    for rank, x in enumerate(made):
        x[NUMEL : NUMEL + len(LENGTHS)] = 1.0
        x[NUMEL + 1] = float(rank > 0)
    return made


def run(scheme: Scheme[Any], inputs: Sequence[Tensor], states: Any = None) -> tuple[Outcome, Any]:
    """The outcome of a step, and the states after it."""
    groups = LocalGroup.world(len(inputs))
    states = states or [scheme.init(bucket(inputs[0].dtype), group) for group in groups]
    outcome = run_scheme(scheme, inputs, 1 / len(inputs), states)
    return outcome, outcome.states


def decoded_mean(member: Member, inputs: Sequence[Tensor]) -> Tensor:
    """The mean of what each rank's payload decodes to, computed in one place."""
    compressor = member.compressor
    values = [x[:NUMEL] for x in inputs]
    states = [compressor.init(bucket(x.dtype).flat_spec, rank) for rank, x in enumerate(values)]
    agreed = with_agreement(compressor, values, states)
    payloads = [compressor.compress(x, state)[0] for x, state in zip(values, agreed, strict=True)]
    if member.decodes_sums:
        mean = torch.empty(NUMEL, dtype=torch.float64)
        compressor.sum_into(mean, payloads, 1 / len(payloads))
        return mean
    return torch.stack([compressor.decompress(payload).double() for payload in payloads]).mean(dim=0)


@members
@pytest.mark.parametrize("size", SIZES)
def test_every_way_gives_all_ranks_the_same_mean(member: Member, size: int) -> None:
    inputs = inputs_of(size)
    expected = decoded_mean(member, inputs)
    for scheme in ways(member.compressor):
        outcome, _ = run(scheme, inputs)
        first = outcome.results[0]
        assert all(torch.equal(result, first) for result in outcome.results), scheme.title
        used = (first[NUMEL:] > 0).tolist()
        assert used == [True, size > 1, True, True, True, *[False] * (len(used) - 5)], "flags arrive"
        if not isinstance(scheme, CompressedTwoWay):  # which compresses twice, and in other parts
            numbers = member.compressor.number_dtype(bucket().flat_spec)  # of a sum on the way
            eps = torch.finfo(numbers).eps if numbers.is_floating_point else 1e-6
            torch.testing.assert_close(first[:NUMEL].double(), expected, rtol=size * eps + 2e-6, atol=size * eps)


@members
@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_as_predicted(member: Member, size: int) -> None:
    inputs, specs = inputs_of(size), bucket().specs
    for scheme in ways(member.compressor):
        if isinstance(scheme, Sparsified):
            continue  # its inner scheme's own contract: it depends on which elements the ranks share
        outcome, _ = run(scheme, inputs)
        expected = transfers(scheme.steps(specs, (), Placement.one_per_node(size)))
        assert [t.stage for t in expected] == list(scheme.stages(size))
        for rank, ledger in enumerate(outcome.ledgers):
            got = [(entry.pattern, entry.sent_bytes) for entry in ledger.entries]
            assert got == [(t.pattern, pytest.approx(t.sent_bytes(rank))) for t in expected], scheme.title


@members
def test_nothing_is_lost_on_any_way(member: Member) -> None:
    """Gradients in are the result plus all residuals: of what ranks sent, and of owners' sums."""
    compressor, size = member.compressor, 2
    if not isinstance(compressor, ErrorFeedback):
        if (
            member.adds_momentum
            or not compressor.traits.feeds_back
            or isinstance(compressor.law(bucket().flat_spec), Unbiased)
        ):
            pytest.skip("no error feedback around it")
        compressor = ErrorFeedback(compressor)
    for scheme in ways(compressor):
        states, given, brought = None, torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
        for step in range(3):
            inputs = inputs_of(size, seed=100 * step)
            outcome, states = run(scheme, inputs, states)
            given += outcome.results[0][:NUMEL].double() * size
            brought += sum(x[:NUMEL].double() for x in inputs)
        left = sum(residuals(state["sent"]) for state in states)
        if "sums" in states[0]:
            left = left + torch.cat([residuals(state["sums"]) for state in states])
        numbers = compressor.number_dtype(bucket().flat_spec)
        summed = isinstance(scheme, CompressedAllReduce) and numbers.is_floating_point  # on the way, in their type
        rounding = 40 * torch.finfo(numbers).eps if summed else 3e-5
        assert float((given + left - brought).abs().max()) <= rounding, scheme.title


def residuals(kept: Any) -> Tensor:
    return torch.cat([part.elements["residual"] for part in kept]).double()


@pytest.mark.parametrize("compressor", [RandomK(0.25, scaled=True), QSGD(7), TernGrad(block=16)], ids=str)
def test_two_way_is_unbiased_where_its_compressor_is(compressor: Compressor) -> None:
    """An owner draws for its sums what no rank drew for its gradient."""
    x = torch.cat([torch.linspace(-1, 1, NUMEL), torch.zeros(bucket().num_flags)])
    scheme, steps = CompressedTwoWay(compressor), 60
    groups, total = LocalGroup.world(2), torch.zeros(NUMEL).double()
    states = [scheme.init(bucket(), group) for group in groups]
    for _ in range(steps):
        outcome, states = run(scheme, [x, x], states)
        total += outcome.results[0][:NUMEL].double() / steps
    truth = x[:NUMEL].double()
    assert float(total @ truth / (truth @ truth)) == pytest.approx(1.0, abs=0.15)


MILDER_FIRST = ErrorFeedback(Warmup((TopK(0.5), TopK(0.1)), (0, 3)))


@pytest.mark.parametrize(
    "scheme",
    [
        *ways(MILDER_FIRST),
        CompressedTwoWay(ErrorFeedback(TopK(0.1)), MILDER_FIRST),
        HalfPrecision(CompressedAllGather(MILDER_FIRST)),
        Hierarchical(inter=CompressedAllGather(MILDER_FIRST), ranks_per_node=2),
        PowerSGD(1, matrices="bucket", start_step=3),
        CoarseGrained(ratio=0.2, chunk=16, warmup=(1.0,), steps_per_ratio=3),
    ],
    ids=lambda scheme: scheme.title,
)
def test_steps_change_when_they_are_said_to_and_at_no_other_round(scheme: Scheme) -> None:
    placement = Placement.regular(2, getattr(scheme, "ranks_per_node", 1))

    def steps(step: int) -> tuple[Step, ...]:
        return scheme.steps(bucket().specs, (), placement, step)

    assert [scheme.unchanged_since(round) for round in range(6)] == [0, 0, 0, 3, 3, 3]
    for round in range(6):
        assert steps(round) == steps(scheme.unchanged_since(round))
    assert steps(0) != steps(3)


@pytest.mark.parametrize("way", range(len(ways(TopK(0.1)))))
def test_ranks_that_clip_together_are_those_that_there_are(way: int) -> None:
    for ranks in (1, 3):
        scheme = ways(dgc(0.1, clip=1.0, ranks=ranks))[way]
        with pytest.raises(ValueError, match=f"made for {ranks} ranks, 2 compress together: set its ranks"):
            scheme.init(bucket(), LocalGroup.world(2)[0])
    for legal in (dgc(0.1, clip=1.0, ranks=2), dgc(0.1)):
        ways(legal)[way].init(bucket(), LocalGroup.world(2)[0])


def test_error_feedback_of_sums_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="sums has error feedback and .* has none"):
        CompressedTwoWay(QSGD(127), sums=ErrorFeedback(ScaledSign()))


class OfThree(TopK):
    traits = replace(TopK(0.1).traits, made_for_ranks=3)


def test_wrappers_are_made_for_the_ranks_of_what_is_in_them() -> None:
    assert ErrorFeedback(OfThree(0.1)).traits.made_for_ranks == 3
    assert Warmup((OfThree(0.5), OfThree(0.1)), (0, 5)).traits.made_for_ranks == 3
    assert MomentumCorrection(OfThree(0.1)).traits.made_for_ranks == 3
    assert ErrorFeedback(TopK(0.1)).traits.made_for_ranks is None


def test_sums_of_16_bit_gradients_are_made_in_float32() -> None:
    inputs = inputs_of(3, torch.bfloat16)
    expected = decoded_mean(Member(TopK(1.0)), inputs)
    for scheme in (CompressedAllGather(TopK(1.0)), CompressedTwoWay(TopK(1.0))):
        result = run(scheme, inputs)[0].results[0][:NUMEL]
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=1e-30)


def test_payloads_that_no_all_reduce_can_sum_are_refused() -> None:
    with pytest.raises(ValueError, match="no all-reduce can sum the payloads of top_k"):
        CompressedAllReduce(TopK(0.1))
    with pytest.raises(ValueError, match="must be an exact scheme of flat buckets"):
        Sparsified(TopK(0.1), HalfPrecision(AllReduce()))
    with pytest.raises(ValueError, match="compressor must be a compressor .*, got"):
        CompressedAllGather(AllReduce())
    summands = [m.compressor for m in MEMBERS.values() if issubclass(m.compressor.traits.payload, Summand)]
    for compressor in summands:
        with pytest.raises(ValueError, match="leaves no sparse elements"):
            Sparsified(compressor)


@members
def test_plans_name_compressors(member: Member) -> None:
    for scheme in ways(member.compressor):
        assert from_expression(to_expression(scheme)) == scheme
    two_way = CompressedTwoWay(member.compressor, sums=TopK(0.5)) if not member.compressor.traits.agrees else None
    if two_way is not None:
        assert from_expression(to_expression(two_way)) == two_way


def test_an_expression_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'top_k' is a compressor, expected a scheme"):
        from_expression({"top_k": {"ratio": 0.1}})
    with pytest.raises(ValueError, match="unknown compressor 'tip_k'; there are .*top_k"):
        from_expression({"compressed_all_gather": {"compressor": {"tip_k": {"ratio": 0.1}}}})
    with pytest.raises(ValueError, match="compressor: 'all_reduce' is a scheme, expected a compressor"):
        from_expression({"compressed_all_gather": {"compressor": {"all_reduce": {}}}})
