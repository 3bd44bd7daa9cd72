"""Each round mixes as its schedule says, bit by bit the same within a group, and moves the bytes that it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsync.comm import LocalGroup
from gradsync.comm.shuffle import (
    GroupSchedule,
    Round,
    crossing,
    exact,
    grid,
    of_ranks,
    together,
    with_local_steps,
    with_ranks_absent,
)
from gradsync.compressors import THC, BlockInt, Cast, ErrorFeedback, TopK, Warmup
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import transfers
from gradsync.schemes import (
    AllReduce,
    BalancedParallelism,
    CoarseGrained,
    CompressedAllGather,
    HalfPrecision,
    Hierarchical,
    ReduceScatter,
    Scheme,
    Shuffled,
    from_expression,
    to_expression,
)
from gradsync.tensors.bucket import Bucket
from tests.schemes.family import run_scheme
from tests.schemes.stateful import bucket, gradient

SCHEDULES = {
    "alone": together(1),
    "together": together(3),
    "grid": grid((2, 3)),
    "pairs": grid((2,) * 2),
    "prime": exact(5, 2),
    "racks": crossing([range(3), range(3, 6)], 1),
    "irregular": GroupSchedule((Round(((0, 1, 2), (3,), (4,))), Round(((0,), (1,), (2, 3, 4))))),
    "slow": with_ranks_absent(grid((2, 2)), (3,), 2),
}
NODES = {  # nodes, ranks on each, and a schedule of the nodes
    "2x2": (2, 2, with_local_steps(together(2), 3)),
    "3x2": (3, 2, exact(3, 2)),
    "2x3": (2, 3, with_ranks_absent(with_local_steps(together(2), 2), (1,), 2)),
    "4x2": (4, 2, with_ranks_absent(grid((2, 2)), (3,), 2)),
    "4x2, racks": (4, 2, with_local_steps(crossing([range(2), range(2, 4)], 1), 2)),
}
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


@every_schedule
@pytest.mark.parametrize("inner", [AllReduce(), ReduceScatter()], ids=["all-reduce", "halves"])
def test_each_round_mixes_as_its_schedule_says(schedule: GroupSchedule, inner: Scheme[Any]) -> None:
    scheme, like, n = Shuffled.by(schedule, inner), bucket(), schedule.size
    states = [scheme.init(like, group) for group in LocalGroup.world(n)]
    inputs = [gradient(rank) for rank in range(n)]
    for step in range(2 * len(schedule.rounds)):
        before = torch.stack([x[: like.numel] for x in inputs])
        outcome = run_scheme(scheme, inputs, 1 / n, states)
        states, inputs = outcome.states, [result.clone() for result in outcome.results]
        after = torch.stack([x[: like.numel] for x in inputs])
        torch.testing.assert_close(after, torch.from_numpy(schedule.round(step).mixing) @ before)
        for group, share in schedule.round(step).parts:
            for rank in group if share == 1 else ():
                assert torch.equal(after[rank], after[group[0]]), "the same bits"
            flags = [inputs[rank][like.numel :] for rank in group]
            assert all(torch.equal(flag > 0, flags[0] > 0) for flag in flags), "of the group"
    if schedule.is_exact:
        torch.testing.assert_close(after, after.mean(dim=0).expand_as(after))


@every_schedule
def test_recorded_bytes_are_the_predicted_ones(schedule: GroupSchedule) -> None:
    scheme, like, n = Shuffled.by(schedule), bucket(torch.float32), schedule.size
    states = [scheme.init(like, group) for group in LocalGroup.world(n)]
    for step in range(len(schedule.rounds)):
        outcome = run_scheme(scheme, [gradient(rank, like) for rank in range(n)], 1 / n, states)
        states = outcome.states
        expected = scheme.steps(like.specs, (), Placement.one_per_node(n), step)
        assert scheme.steps(like.specs, (), Placement.one_per_node(n), scheme.unchanged_since(step)) == expected
        for rank, ledger in enumerate(outcome.ledgers):
            assert ledger.sent_bytes == sum(transfer.sent_bytes(rank) for transfer in transfers(expected))


@pytest.mark.parametrize("shape", NODES)
@pytest.mark.parametrize(
    ("between", "lost", "apart"),
    [
        (AllReduce(), 1e-6, 1e-6),
        (ReduceScatter(), 1e-6, 1e-6),
        (HalfPrecision(), 2**-8, 0.05),
        (CompressedAllGather(Cast("bfloat16")), 1e-6, 0.05),
        (CompressedAllGather(BlockInt(8)), 1e-6, 0.05),
    ],
    ids=["all-reduce", "halves", "sums of 16 bits", "16 bits", "8 bits"],
)
def test_nodes_with_several_ranks_average_whole_or_rest(
    shape: str, between: Scheme[Any], lost: float, apart: float
) -> None:
    nodes, per_node, of_nodes = NODES[shape]
    placement, like, n = Placement.regular(nodes, per_node), bucket(torch.float32), nodes * per_node
    schedule = of_ranks(of_nodes, placement)
    scheme = Shuffled.by(schedule, Hierarchical(ReduceScatter(), between, per_node))
    states = [scheme.init(like, group) for group in LocalGroup.world(n, placement)]
    values = [gradient(rank, like) for rank in range(n)]
    for step in range(2 * len(schedule.rounds)):
        before = torch.stack(values)[:, : like.numel].double()
        flags = torch.stack([gradient(rank, like)[like.numel :] for rank in range(n)])
        inputs = [torch.cat([x[: like.numel], own]) for x, own in zip(values, flags, strict=True)]
        outcome = run_scheme(scheme, inputs, 1 / n, states, placement)
        states, values = outcome.states, [result.clone() for result in outcome.results]
        after = torch.stack(values)[:, : like.numel].double()
        largest = float(before.abs().max())
        assert float((after.mean(dim=0) - before.mean(dim=0)).abs().max()) <= lost * largest, "the mean is kept"
        mixed = torch.from_numpy(schedule.round(step).mixing) @ before
        assert float((after - mixed).abs().max()) <= apart * largest
        for group, share in schedule.round(step).parts:
            used = flags[list(group)].sum(dim=0) > 0
            for rank in group:
                assert torch.equal(values[rank][like.numel :] > 0, used), "the flags of the group"
                assert share != 1 or scheme.traits.lossy or torch.equal(after[rank], after[group[0]]), "the same bits"
        expected = transfers(scheme.steps(like.specs, (), placement, step))
        for rank, ledger in enumerate(outcome.ledgers):
            assert ledger.sent_bytes == sum(transfer.sent_bytes(rank) for transfer in expected)
            assert bool(ledger.entries) == (not schedule.round(step).rests), "who rests sends nothing"


def test_a_warm_up_goes_on_through_the_rounds() -> None:
    """Three rounds, and two compressors: the first of them is for the first step alone."""
    few = Warmup((TopK(0.1), TopK(0.5)), (0, 1))
    scheme, like = Shuffled((((0, 1), (2,)), ((0, 1, 2),), ((0,), (1, 2))), scheme=CompressedAllGather(few)), bucket()
    assert [scheme.unchanged_since(step) for step in range(8)] == [0, 1, 2, 3, 1, 2, 3, 1]
    for step in range(8):
        now, then = (
            scheme.steps(like.specs, (), Placement.one_per_node(3), each)
            for each in (step, scheme.unchanged_since(step))
        )
        assert now == then


@every_schedule
@pytest.mark.parametrize(
    ("inner", "lost"),
    [(CompressedAllGather(Cast("bfloat16")), 1e-6), (CompressedAllGather(BlockInt(8)), 1e-6), (HalfPrecision(), 2**-8)],
)
def test_what_travels_rounded_keeps_the_mean_of_all(schedule: GroupSchedule, inner: Scheme[Any], lost: float) -> None:
    """A rank keeps the rounding error of its values; only the rounding of 16-bit sums on their way is lost."""
    scheme, like, n = Shuffled.by(schedule, inner), bucket(torch.float32), schedule.size
    states = [scheme.init(like, group) for group in LocalGroup.world(n)]
    values = [gradient(rank, like) for rank in range(n)]
    before = torch.stack(values)[:, : like.numel].double()
    for step in range(len(schedule.rounds)):
        outcome = run_scheme(scheme, values, 1 / n, states)
        states, values = outcome.states, outcome.results
        mixed = torch.from_numpy(schedule.round(step).mixing) @ before
        after = torch.stack(values)[:, : like.numel].double()
        apart = (after.mean(dim=0) - before.mean(dim=0)).abs().max()
        assert float(apart) <= lost * float(before.abs().max())
        assert float((after - mixed).abs().max()) < 0.05 * float(before.abs().max()), "what rounding leaves apart"
        before = after


def test_a_scale_is_that_of_the_sum_over_all_ranks() -> None:
    whole, like = Shuffled.by(together(3)), bucket()
    states = [whole.init(like, group) for group in LocalGroup.world(3)]
    inputs = [gradient(rank) for rank in range(3)]
    total = torch.stack(inputs).sum(dim=0)
    result = run_scheme(whole, inputs, 0.25, states).results[0]
    torch.testing.assert_close(result[: like.numel], 0.25 * total[: like.numel])


@every_schedule
def test_plans_can_name_it(schedule: GroupSchedule) -> None:
    scheme = Shuffled.by(schedule, ReduceScatter())
    again = from_expression(to_expression(scheme))
    assert again == scheme and isinstance(again, Shuffled) and again.schedule == schedule


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rounds": [[[0, 1], [2, 3]]]}, "never meet"),
        ({"rounds": [[[0, 1, 1]]]}, "each rank from 0 on once"),
        ({"rounds": [3]}, r"Shuffled\.rounds\.0 must be a list, got 3"),
        ({"rounds": []}, "one or more"),
        ({"rounds": [[[0, 1]]], "relaxations": [[1.0], [1.0]]}, "relaxations must be for 1 rounds or none, got 2"),
        ({"rounds": [[[0, 1]]], "relaxations": [[2.5]]}, r"in \(0, 2\)"),
        ({"rounds": [[[0, 1]]], "scheme": BalancedParallelism()}, "for flat buckets and exact"),
        ({"rounds": [[[0, 1]]], "scheme": CoarseGrained()}, "for flat buckets and exact"),
        ({"rounds": [[[0, 1]]], "scheme": CompressedAllGather(THC())}, "ranks agree on no numbers"),
    ],
)
def test_what_is_no_schedule_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Shuffled(**settings)


def test_a_scheme_that_a_group_cannot_run_is_refused_on_all_ranks_before_the_first_step() -> None:
    """Ranks 0 and 2 are on different nodes; only a later round has them in a group."""
    inner = Hierarchical(ReduceScatter(), AllReduce(), ranks_per_node=2)
    scheme = Shuffled((((0, 1, 2, 3),), ((0, 2), (1,), (3,))), scheme=inner)
    for group in LocalGroup.world(4, Placement.regular(2, 2)):
        with pytest.raises(ValueError, match=r"within the ranks \[0, 2\]: Hierarchical is planned for 2 ranks"):
            scheme.init(bucket(), group)


def test_schedules_of_other_worlds_and_schemes_with_state_are_refused() -> None:
    like: Bucket = bucket(torch.float32)
    with pytest.raises(ValueError, match="for 4 ranks, there are 3"):
        Shuffled.by(grid((2,) * 2)).init(like, LocalGroup.world(3)[0])
    with pytest.raises(ValueError, match="keeps residuals"):
        Shuffled.by(together(2), CompressedAllGather(ErrorFeedback(TopK(0.1)))).init(like, LocalGroup.world(2)[0])
