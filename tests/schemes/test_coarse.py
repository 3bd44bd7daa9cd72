"""Coarse-grained: nothing is lost, the same chunks on all ranks, those with the largest norms, none forgotten."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.compressors import SENT
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import transfers
from gradsync.schemes import (
    SPLIT_OF_ELEMENTS,
    BalancedElements,
    BalancedParallelism,
    CoarseGrained,
    HalfPrecision,
    Hierarchical,
    PowerSGD,
    ReduceScatter,
    Scheme,
    from_expression,
    to_expression,
)
from gradsync.state import rescaled
from gradsync.tensors.bucket import Bucket, TensorSpec
from gradsync.tensors.density import DensityProfile, profile_rows
from tests.schemes.stateful import Ranks, bucket, gradient

pytestmark = pytest.mark.usefixtures("stale_memory")

SMALL = CoarseGrained(ratio=0.2, chunk=100)  # the bucket has 3126 elements: the last chunk is short
KINDS = [
    pytest.param(SMALL, id="late"),
    pytest.param(replace(SMALL, choice="exact"), id="exact"),
    pytest.param(replace(SMALL, scheme=ReduceScatter(), max_age=7), id="halves"),
    pytest.param(replace(SMALL, scheme=HalfPrecision(values="bfloat16")), id="bfloat16"),
    pytest.param(replace(SMALL, scheme=HalfPrecision(values="float16"), choice="exact"), id="exact float16"),
    pytest.param(replace(SMALL, warmup=(1.0, 0.5), steps_per_ratio=2), id="warm-up"),
    pytest.param(replace(SMALL, chunk=5000), id="one chunk"),
    pytest.param(replace(SMALL, ratio=1.0), id="dense"),
    pytest.param(replace(SMALL, scoring="agreement", freeze=True), id="agreement"),
    pytest.param(replace(SMALL, scoring="relative", choice="exact"), id="exact relative"),
]
KEEP_MOMENTUM = [
    pytest.param(replace(SMALL, momentum=0.9), id="momentum"),
    pytest.param(replace(SMALL, momentum=0.9, choice="exact", scoring="agreement"), id="exact momentum"),
]
ONE = bucket(torch.float32, ((1000,),))


def elements(x: Tensor, like: Bucket) -> Tensor:
    return x[: like.numel].double()


def constant(values: Sequence[float], like: Bucket = ONE) -> Tensor:
    """So much in every element of each chunk of 100."""
    x = torch.zeros(like.numel + like.num_flags)
    x[: like.numel] = torch.tensor(values).repeat_interleave(100)
    return x


def chunks_of(x: Tensor) -> list[int]:
    """Returns the chunks in which some element arrived."""
    return x[: ONE.numel].view(-1, 100).any(dim=1).nonzero().flatten().tolist()


@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_lost(scheme: CoarseGrained, dtype: torch.dtype) -> None:
    """Nothing is lost on a rank, bit by bit, or in the sum, up to rounding in the message's dtype."""
    ranks = Ranks(scheme, 3, like := bucket(dtype))
    brought, given = torch.zeros(like.numel).double(), torch.zeros(like.numel).double()
    for step in range(6):
        inputs = [gradient(10 * step + rank, like) for rank in range(3)]
        before = [ranks.kept(rank).elements["residual"] for rank in range(3)]
        result = ranks.step(inputs, scale=0.25)
        assert result.dtype is dtype
        given += 4 * elements(result, like)
        brought += sum(elements(x, like) for x in inputs)
        sent = torch.zeros_like(brought)
        for rank in range(3):
            left = ranks.kept(rank).elements["residual"]
            assert left.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
            total = before[rank] + inputs[rank][: like.numel]
            part = total - left
            assert torch.equal(part + left, total)
            sent += part.double()
        rounding = 2**-7 if dtype is torch.bfloat16 or isinstance(scheme.scheme, HalfPrecision) else 1e-6
        torch.testing.assert_close(4 * elements(result, like), sent, rtol=rounding, atol=20 * rounding)
        assert (result[like.numel :] > 0).tolist()[:2] == [True, True], "flags arrive"
    if dtype is torch.float64 and not isinstance(scheme.scheme, HalfPrecision):
        torch.testing.assert_close(given + ranks.residuals(), brought, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scheme", KINDS + KEEP_MOMENTUM)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_and_turns_are_as_predicted_whatever_the_data(
    scheme: CoarseGrained, size: int, dtype: torch.dtype
) -> None:
    ranks = Ranks(scheme, size, like := bucket(dtype))
    for step in range(5):
        inputs = [gradient(step + rank, like) * (step != 1) for rank in range(size)]
        ranks.step(inputs)
        expected = transfers(scheme.steps(like.specs, (), Placement.one_per_node(size), step))
        assert [t.stage for t in expected] == list(scheme.stages(size))
        assert ranks.outcome.awaits == [len(expected)] * size
        for rank, ledger in enumerate(ranks.outcome.ledgers):
            got = [(entry.pattern, entry.sent_bytes) for entry in ledger.entries]
            assert got == [(t.pattern, pytest.approx(t.sent_bytes(rank))) for t in expected]


FEW = 0.02  # share of a gradient's elements that are not zero
ACROSS = Hierarchical(ReduceScatter(), BalancedElements(), ranks_per_node=2)


@pytest.mark.parametrize(
    ("carrier", "size"),
    [(BalancedElements(), 2), (BalancedElements(), 4), (SPLIT_OF_ELEMENTS, 3), (ACROSS, 4)],
    ids=["balanced elements of 2", "balanced elements of 4", "split of elements of 3", "2 nodes of 2"],
)
@pytest.mark.parametrize("choice", ["late", "exact"])
@pytest.mark.parametrize(
    "settings", [{"ratio": 1.0}, {}, {"history": 0.0}, {"momentum": 0.9}], ids=["all", "some", "forgetful", "momentum"]
)
def test_a_carrier_of_few_elements_sends_as_many_bytes_as_predicted(
    carrier: Scheme[Any], size: int, choice: Any, settings: dict[str, Any]
) -> None:
    """In usual steps, by which every chunk has been sent. Chunks with many non-zero elements are chosen more often."""
    scheme = replace(SMALL, **{"scheme": carrier, "ratio": 0.25, "choice": choice, **settings})
    together = scheme.scheme.ranks_per_node if carrier is ACROSS else 1
    placement, like = Placement.regular(size // together, together), bucket(torch.float32, ((6400,), (3200,)))
    ranks = Ranks(scheme, size, like, placement)
    recorded = predicted = dense = 0.0
    for step in range(12):
        inputs = [few(size * step + rank, like) for rank in range(size)]
        ranks.step(inputs)
        if step < 6:
            continue
        known = profile_rows([x[: like.numel].nonzero().flatten() for x in inputs], like.numel)
        recorded += sum(entry.sent_bytes for ledger in ranks.outcome.ledgers for entry in ledger.entries)
        predicted += sent_by_all(scheme, like, (known,), placement, step)
        dense += sent_by_all(scheme, like, (), placement, step)
    assert recorded == pytest.approx(predicted, rel=0.06 if scheme.history else 0.2)
    assert predicted < (0.8 if carrier is ACROSS else 0.4) * dense


def test_a_union_that_is_rounded_above_all_elements_counts_as_full() -> None:
    like = bucket(torch.float32)
    scheme, placement = replace(SMALL, scheme=BalancedElements(), history=0.01), Placement.one_per_node(2)
    full = DensityProfile(like.specs[0].numel, like.specs[0].numel / 3, {2: math.nextafter(3.0, 4.0)})
    told, most = (sent_by_all(scheme, like, known, placement) for known in ((full,), ()))
    assert 0 < told <= most * 1.01


def few(seed: int, like: Bucket) -> Tensor:
    """Returns a gradient with few non-zero elements, and flags that are all set."""
    x = gradient(seed, like)
    x[: like.numel] *= torch.rand(like.numel, generator=torch.Generator().manual_seed(seed)) < FEW
    x[like.numel :] = 1.0
    return x


def sent_by_all(
    scheme: CoarseGrained, like: Bucket, known: tuple[DensityProfile, ...], placement: Placement, step: int = 0
) -> float:
    told = transfers(scheme.steps(like.specs, known, placement, step))
    return sum(each.sent_bytes(rank) for each in told for rank in range(placement.size))


@pytest.mark.parametrize(
    "settings",
    [{"scheme": HalfPrecision(BalancedElements())}, {"momentum": 0.9, "masking": False}],
    ids=["bfloat16", "momentum that stays"],
)
def test_chunks_that_fill_up_are_predicted_to_be_full(settings: dict[str, Any]) -> None:
    scheme = replace(SMALL, **{"scheme": BalancedElements(), **settings})
    placement, like = Placement.one_per_node(2), bucket(torch.float32, ((3200,),))
    found = [
        sent_by_all(scheme, like, known, placement)
        for known in ((), (DensityProfile(3200, FEW * 3200),), (DensityProfile(3200, 0.0),))
    ]
    assert len(set(found)) == 1


@pytest.mark.parametrize("known", [(), (DensityProfile(1, 1.0),)], ids=["nothing known", "all non-zero"])
def test_zeros_that_fill_up_the_last_chunk_are_not_predicted_to_travel(known: tuple[DensityProfile, ...]) -> None:
    scheme = CoarseGrained(HalfPrecision(BalancedElements()))
    like, size = bucket(torch.float32, ((1,),)), 4
    ranks = Ranks(scheme, size, like)
    ranks.step([gradient(rank, like) for rank in range(size)])
    recorded = sum(entry.sent_bytes for ledger in ranks.outcome.ledgers for entry in ledger.entries)
    assert recorded <= sent_by_all(scheme, like, known, Placement.one_per_node(size)) <= 2 * recorded


def test_chunks_and_one_number_for_each_are_all_that_travels() -> None:
    (expected,) = transfers(SMALL.steps(bucket(torch.float32).specs, (), Placement.one_per_node(2)))
    assert expected.part_bytes[0] == 4 * (6 * 100 + 32 + bucket().num_flags)
    half = replace(SMALL, scheme=HalfPrecision(values="bfloat16"))
    (narrow,) = transfers(half.steps(bucket(torch.float32).specs, (), Placement.one_per_node(2)))
    assert narrow.part_bytes[0] == expected.part_bytes[0] / 2


def test_all_chunks_give_the_mean() -> None:
    ranks = Ranks(replace(SMALL, ratio=1.0), 3)
    for step in range(2):
        inputs = [gradient(10 * step + rank) for rank in range(3)]
        mean = torch.stack(inputs).mean(dim=0)
        torch.testing.assert_close(elements(ranks.step(inputs), bucket()), elements(mean, bucket()), rtol=0, atol=1e-14)
        assert not ranks.residuals().any()


@pytest.mark.parametrize("choice", ["late", "exact"])
@pytest.mark.parametrize("values", ["bfloat16", "float16"])
def test_sums_in_16_bits_give_the_mean_over_any_number_of_ranks(values: str, choice: str) -> None:
    """A third is no power of two: what is left of it comes after the sum."""
    ranks = Ranks(replace(SMALL, scheme=HalfPrecision(values=values), ratio=1.0, choice=choice), 3, ONE)
    inputs = [constant([float(rank + number) for number in range(10)]) for rank in range(3)]
    mean = torch.stack(inputs).mean(dim=0)[:1000]
    torch.testing.assert_close(ranks.step(inputs)[:1000], mean, rtol=2**-7, atol=0)


@pytest.mark.parametrize("choice", ["late", "exact"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_means_of_16_bit_gradients_are_rounded_once(dtype: torch.dtype, choice: str) -> None:
    """The sums are whole numbers, so that the factor alone can bring an error; it is no number of 16 bits."""
    like = bucket(dtype, ((1000,),))
    ranks = Ranks(replace(SMALL, ratio=1.0, choice=choice), 3, like)
    inputs = [constant([float(3 * number + rank**2) for number in range(10)], like).to(dtype) for rank in range(3)]
    mean = torch.stack(inputs).double().sum(dim=0).mul(1 / 3)
    assert torch.equal(ranks.step(inputs)[:1000], mean[:1000].to(dtype))


def test_the_exact_choice_is_that_of_the_largest_norms_over_all_ranks() -> None:
    """No rank alone would choose chunk 4."""
    ranks = Ranks(replace(SMALL, ratio=0.1, choice="exact"), 2, ONE)
    first = constant([9.0, 0, 0, 0, 5.0, 0, 0, 0, 0, 0])
    second = constant([0.0, 0, 0, 0, -5.0, 0, 0, 0, 9.0, 0])
    assert not ranks.step([first, second]).any(), "their sum is zero, their norms are not"
    assert ranks.residuals().view(-1, 100)[:, 0].tolist() == [9.0, 0, 0, 0, 0, 0, 0, 0, 9.0, 0]
    assert chunks_of(ranks.step([0 * first, 0 * second])) == [0], "of equal norms the first"


def test_the_late_choice_goes_by_what_the_last_step_left() -> None:
    ranks = Ranks(replace(SMALL, ratio=0.1), 2, ONE)
    sizes = constant([1.0, 1, 2, 3, 4, 5, 6, 7, 8, 1])
    nothing = torch.zeros_like(sizes)
    found = [chunks_of(ranks.step([sizes if step == 0 else nothing] * 2)) for step in range(9)]
    assert found == [[0], [8], [7], [6], [5], [4], [3], [2], [1]], "no chunk twice while others wait"


def test_the_late_choice_chooses_as_the_exact_one_what_grows_as_it_did() -> None:
    """Chunks with the largest gradients are sent in every step, others when their residuals have grown as large."""
    sizes = constant([50.0, 1, 2, 3, 4, 5, 6, 7, 8, 1])
    ranks = Ranks(SMALL, 2, ONE)
    for step in range(12):
        norms = (ranks.residuals() + 2 * elements(sizes, ONE)).view(-1, 100).abs().sum(dim=1)
        chosen = chunks_of(ranks.step([sizes, sizes]))
        if step > 0:  # the first one has nothing to choose by
            assert chosen == sorted(norms.sort(descending=True, stable=True).indices[:2].tolist())
            assert 0 in chosen


@pytest.mark.parametrize("choice", ["late", "exact"])
def test_after_a_dense_step_the_choice_goes_by_its_sums(choice: str) -> None:
    ranks = Ranks(replace(SMALL, ratio=0.1, warmup=(1.0,), steps_per_ratio=1, choice=choice), 2, ONE)
    sizes = constant([1.0, 1, 2, 3, 9, 5, 6, 7, 8, 1])
    assert len(chunks_of(ranks.step([sizes, sizes]))) == 10
    assert chunks_of(ranks.step([sizes, sizes])) == [4]


@pytest.mark.parametrize("choice", ["late", "exact"])
def test_no_chunk_waits_longer_than_its_age_allows(choice: str) -> None:
    sizes = constant([9.0, 9, 9, 9, 9, 9, 9, 9, 9, 1e-3])
    without, capped = ({"max_age": age} for age in (None, 10))
    waited = []
    for settings in (without, capped):
        ranks, last = Ranks(replace(SMALL, choice=choice, **settings), 2, ONE), [0] * 10  # 2 of 10 chunks
        longest = 0
        for step in range(60):
            for chunk in chunks_of(ranks.step([sizes, sizes])):
                last[chunk] = step
            longest = max(longest, step - min(last))
        waited.append(longest)
    assert waited[0] == 59, "without a cap it starves"
    assert waited[1] <= 10 + 2 / 0.2


def test_chunks_in_which_the_ranks_cancel_out_wait_for_those_in_which_they_agree() -> None:
    agreed, noise = constant([1.0] * 5 + [0.0] * 5), constant([0.0] * 5 + [3.0] * 5)
    for choice in ("late", "exact"):
        counts = {}
        for scoring in ("norm", "agreement"):
            ranks = Ranks(replace(SMALL, choice=choice, scoring=scoring), 2, ONE)
            sent = [chunk for _ in range(30) for chunk in chunks_of(ranks.step([agreed + noise, agreed - noise]))]
            counts[scoring] = sum(chunk < 5 for chunk in sent)
        assert counts["agreement"] > 1.5 * counts["norm"]


def test_tensors_with_small_gradients_are_served_as_well() -> None:
    like = bucket(torch.float32, ((500,), (500,)))
    sizes = constant([100.0, 101, 102, 103, 104, 1.0, 1.01, 1.02, 1.03, 1.04], like)
    for choice in ("late", "exact"):
        shares = {}
        for scoring in ("norm", "relative"):
            ranks = Ranks(replace(SMALL, choice=choice, scoring=scoring), 2, like)
            sent = [chunk for _ in range(40) for chunk in chunks_of(ranks.step([sizes, sizes]))]
            shares[scoring] = sum(chunk >= 5 for chunk in sent) / len(sent)
        assert shares["norm"] < 0.1
        assert 0.4 < shares["relative"] < 0.6


@pytest.mark.parametrize("masking", [True, False])
def test_momentum_of_a_rank_is_sent_as_a_gradient_is(masking: bool) -> None:
    """One rank, u = u / 2 + g of which the chunk with more of it is sent: masked, u begins anew there."""
    scheme = CoarseGrained(ratio=0.5, chunk=1, choice="exact", momentum=0.5, masking=masking)
    like = bucket(shapes=((2,),))
    ranks = Ranks(scheme, 1, like)
    inputs = torch.zeros(like.numel + like.num_flags, dtype=torch.float64)
    inputs[:2] = torch.tensor([4.0, 3.0])
    results = [ranks.step([inputs])[:2].tolist() for _ in range(3)]
    # u = (4, 3), p = u; then u = (4 or 6, 4.5), p = (4 or 6, 7.5)
    last = [6 + 4.0, 0.0] if masking else [6 + 7.0, 0.0]
    assert results == [[4.0, 0.0], [0.0, 7.5], last]


def test_of_all_chunks_momentum_is_an_optimisers() -> None:
    """Nothing is masked in a dense step."""
    ranks = Ranks(replace(SMALL, ratio=1.0, momentum=0.9), 2)
    velocity = torch.zeros(bucket().numel, dtype=torch.float64)
    for step in range(4):
        inputs = [gradient(10 * step + rank) for rank in range(2)]
        velocity = 0.9 * velocity + torch.stack(inputs).mean(dim=0)[: bucket().numel]
        torch.testing.assert_close(elements(ranks.step(inputs), bucket()), velocity, rtol=0, atol=1e-13)


@pytest.mark.parametrize("scheme", KINDS + KEEP_MOMENTUM)
def test_a_loss_that_is_scaled_otherwise_changes_no_choice(scheme: CoarseGrained) -> None:
    like = bucket(torch.float32)
    plain, scaled, factor = Ranks(scheme, 2, like), Ranks(scheme, 2, like), 1.0
    for step in range(12):
        if step % 3 == 2:
            scaled.states, factor = [rescaled(state, 2.0) for state in scaled.states], 2 * factor
        inputs = [gradient(10 * step + rank, like) for rank in range(2)]
        plain.step(inputs)
        scaled.step([torch.cat([x[: like.numel] * factor, x[like.numel :]]) for x in inputs])
        assert scaled.states[0][SENT][0].arrived == plain.states[0][SENT][0].arrived, step


@pytest.mark.parametrize("scheme", [SMALL, replace(SMALL, choice="exact", scheme=HalfPrecision())], ids=str)
def test_what_arrived_is_told(scheme: CoarseGrained) -> None:
    ranks, like = Ranks(scheme, 2), bucket()
    assert ranks.states[0][SENT][0].arrived is None, "before the first step nothing was left out"
    for step in range(3):
        result = ranks.step([gradient(10 * step + rank) for rank in range(2)])
        sections = ranks.states[0][SENT][0].arrived
        assert sections is not None and len(sections) == 6
        assert sections == ranks.states[1][SENT][0].arrived
        arrived = torch.zeros(like.numel, dtype=torch.bool)
        for start, stop in sections:
            arrived[start:stop] = True
        assert not result[: like.numel][~arrived].any()
        assert all(result[start:stop].any() for start, stop in sections)
    ranks = Ranks(replace(SMALL, ratio=1.0), 2)
    ranks.step([gradient(0), gradient(1)])
    assert ranks.states[0][SENT][0].arrived is None


def test_what_is_kept_is_forgotten_as_asked_for() -> None:
    sizes = constant([9.0, 1, 0, 0, 0, 0, 0, 0, 0, 0])
    for history, expected in ((1.0, 4.0), (0.5, 1.875), (0.0, 1.0)):
        ranks = Ranks(replace(SMALL, ratio=0.1, history=history, choice="exact"), 1, ONE)
        for _ in range(4):
            ranks.step([sizes])
        assert ranks.residuals()[100] == expected


def test_what_16_bits_cannot_hold_is_kept_and_sent_later() -> None:
    """Finite numbers never become infinite: values beyond the range go with the next steps."""
    scheme = CoarseGrained(HalfPrecision(values="float16"), ratio=1.0, chunk=100)
    ranks = Ranks(scheme, 2, ONE)
    huge, nothing = constant([1e5] * 10), torch.zeros_like(constant([0.0] * 10))
    first = ranks.step([huge, nothing], scale=1.0)[:1000]
    assert (first == 65504).all()
    second = ranks.step([nothing, nothing], scale=1.0)[:1000]
    torch.testing.assert_close((first + second).double(), torch.full((1000,), 1e5).double(), rtol=0, atol=16)
    assert (first.double() + second + ranks.residuals() == 1e5).all()


def test_norms_beyond_16_bits_are_the_largest_that_there_are() -> None:
    scheme = CoarseGrained(HalfPrecision(values="float16"), ratio=0.1, chunk=100, scoring="relative")
    ranks = Ranks(scheme, 2, ONE)
    huge, small = constant([1.0] * 9 + [1e6]), constant([1.0] * 10)
    assert ranks.step([huge, huge]).isfinite().all(), "a step to keep"
    sent = [chunks_of(ranks.step([small, small])) for _ in range(30)]
    assert sent[0] == [9]
    assert all(ranks.kept().together[name].isfinite().all() for name in ("scores", "levels"))


@pytest.mark.parametrize("scheme", KINDS + KEEP_MOMENTUM)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_in_any_chunk_shows_in_the_result(scheme: CoarseGrained, value: float) -> None:
    """All ranks see the non-finite value, whether or not its chunk is sent."""
    ranks = Ranks(scheme, 2)
    inputs = [gradient(rank) for rank in range(2)]
    ranks.step(inputs)
    states, shown = ranks.states, 0
    for number in range(scheme.num_chunks(bucket(torch.float32).numel)):
        ranks.states = states
        spoilt = inputs[1].clone()
        spoilt[number * scheme.chunk + 7] = value
        result = elements(ranks.step([inputs[0], spoilt]), bucket(torch.float32))
        assert not result.isfinite().all()
        shown += int(result[1:].isfinite().all())
    if scheme.choice == "late" and scheme.num_chosen(len(result), 1) < scheme.num_chunks(len(result)):
        assert shown, "where nothing was sent"


@pytest.mark.parametrize("scheme", KINDS + KEEP_MOMENTUM)
def test_a_step_can_be_taken_back(scheme: CoarseGrained) -> None:
    ranks = Ranks(scheme, 2)
    inputs = [gradient(rank) for rank in range(2)]
    ranks.step(inputs)
    states = ranks.states
    first = ranks.step(inputs)
    ranks.states = states
    assert torch.equal(ranks.step(inputs), first)


@pytest.mark.parametrize("inner", [SMALL, replace(SMALL, choice="exact")], ids=["late", "exact"])
def test_nothing_is_lost_between_nodes_either(inner: CoarseGrained) -> None:
    """Ranks of a node sum first; between nodes each has the chunks of its own part of the node's sums."""
    like = bucket(torch.float32)
    scheme = Hierarchical(ReduceScatter(), inner, ranks_per_node=2)
    ranks = Ranks(scheme, 4, like, Placement.regular(2, 2))
    brought, given = torch.zeros(like.numel).double(), torch.zeros(like.numel).double()
    for step in range(3):
        inputs = [gradient(10 * step + rank, like) for rank in range(4)]
        given += 4 * elements(ranks.step(inputs), like)
        brought += sum(elements(x, like) for x in inputs)
        for rank, ledger in enumerate(ranks.outcome.ledgers):
            expected = transfers(scheme.steps(like.specs, (), Placement.regular(2, 2), step))
            assert ledger.sent_bytes == pytest.approx(sum(t.sent_bytes(rank) for t in expected))
    kept = [ranks.kept(rank).elements["residual"].double() for rank in range(4)]
    left = torch.cat([kept[0] + kept[2], kept[1] + kept[3]])[: like.numel]
    torch.testing.assert_close(given + left, brought, rtol=0, atol=1e-4)


def test_a_bucket_without_elements_has_flags_only() -> None:
    like = bucket(shapes=((0, 3),))
    for scheme in (SMALL, replace(SMALL, choice="exact", max_age=2), replace(SMALL, scoring="relative")):
        result = Ranks(scheme, 2, like).step([gradient(0, like), gradient(1, like)])
        assert (result > 0).tolist() == [True, True, *[False] * (like.num_flags - 2)]


def test_steps_change_with_the_warm_up_and_at_no_other_round() -> None:
    scheme = replace(SMALL, warmup=(1.0, 0.5), steps_per_ratio=2)
    assert [scheme.unchanged_since(step) for step in range(6)] == [0, 0, 2, 2, 4, 4]
    assert [scheme.num_chosen(1000, step) for step in range(6)] == [10, 10, 5, 5, 2, 2]
    assert [SMALL.unchanged_since(step) for step in range(3)] == [0, 0, 0]


def test_plans_name_it_and_illegal_settings_are_refused() -> None:
    scheme = CoarseGrained(
        HalfPrecision(), 0.05, 4096, "exact", "relative", 0.9, 100, True, warmup=(1.0, 0.25), steps_per_ratio=500
    )
    assert from_expression(to_expression(scheme)) == scheme
    cases: list[tuple[dict[str, Any], str]] = [
        ({"ratio": 0.0}, r"CoarseGrained.ratio must be in \(0, 1\], got 0.0"),
        ({"warmup": (1.5,), "steps_per_ratio": 1}, r"CoarseGrained.warmup.0 must be in \(0, 1\], got 1.5"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"choice": "early"}, "choice must be 'late' or 'exact', got 'early'"),
        ({"scoring": "size"}, "scoring must be 'norm', 'agreement' or 'relative', got 'size'"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"momentum": 0.9, "freeze": True}, "momentum needs freeze=False and history=1, got freeze=True"),
        ({"history": 1.5}, r"history must be in \[0, 1\], got 1.5"),
        ({"max_age": 0}, "max_age must be at least 1 or None, got 0"),
        ({"warmup": (1.0,)}, "steps_per_ratio must be at least 1 with a warmup"),
        ({"steps_per_ratio": 3}, "steps_per_ratio must be at least 1 with a warmup, and 0 without"),
        ({"scheme": BalancedParallelism()}, "scheme must be exact and for flat buckets"),
        ({"scheme": PowerSGD()}, "scheme must be exact and for flat buckets"),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=message):
            replace(SMALL, **settings)
    with pytest.raises(ValueError, match="is for floating-point gradients"):
        SMALL.check((TensorSpec((4,), torch.int64),))
