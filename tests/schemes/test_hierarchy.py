"""Sums inside nodes first: what it degenerates to, what it refuses; all ranks stay in step whatever their data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from gradsync.comm import GroupError, LocalGroup, Pending, run_local
from gradsync.compressors import TopK
from gradsync.costs.cluster import Placement
from gradsync.plans.plan import Plan
from gradsync.schemes import (
    AGSparse,
    AllReduce,
    BalancedElements,
    BalancedParallelism,
    CompressedAllGather,
    Hierarchical,
    ReduceScatter,
    Scheme,
    Shuffled,
    SparseReduceScatter,
    State,
    from_expression,
    to_expression,
)
from gradsync.tensors.bucket import Bucket, Layout, Segment, TensorSpec
from tests.schemes.family import bits, make_inputs, mine, profiles_of, run_scheme, specs_of

TABLE_STRIPES = BalancedParallelism(owners="table_stripe")
FLAT, TABLES = (SparseReduceScatter(), BalancedElements()), (TABLE_STRIPES, AGSparse())


@pytest.mark.parametrize(("parts", "case"), [(FLAT, "few non-zeros"), (TABLES, "four tables")])
@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1)])
def test_on_one_node_or_with_one_rank_a_node_it_is_one_of_its_parts(
    parts: tuple[Any, Any], case: str, shape: tuple[int, int]
) -> None:
    placement = Placement.regular(*shape)
    part = parts[0] if shape == (1, 3) else parts[1]
    scheme = Hierarchical(*parts, ranks_per_node=shape[1])
    inputs = make_inputs(scheme, case, placement.size, torch.bfloat16)
    ours, alone = (run_scheme(s, inputs, 1 / 3, placement=placement) for s in (scheme, part))
    assert [bits(x) for x in ours.results] == [bits(x) for x in alone.results]
    specs, profiles = specs_of(inputs[0]), profiles_of(inputs)
    assert scheme.steps(specs, profiles, placement) == part.steps(specs, profiles, placement)
    assert scheme.stages(placement.size) == part.stages(placement.size)


@given(
    nodes=st.integers(1, 3),
    per_node=st.integers(1, 3),
    numel=st.integers(0, 40),
    density=st.sampled_from([0.0, 0.1, 1.0]),
    intra=st.sampled_from([ReduceScatter(), SparseReduceScatter()]),
    inter=st.sampled_from([AllReduce(), BalancedElements()]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_any_flat_bucket_on_any_nodes_gives_the_scaled_sum(
    nodes: int, per_node: int, numel: int, density: float, intra: Any, inter: Any, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randint(-8, 9, (numel,), generator=generator).float() * (torch.rand(numel, generator=generator) < density)
        for _ in range(nodes * per_node)
    ]
    scheme = Hierarchical(intra, inter, per_node)
    outcome = run_scheme(scheme, inputs, 0.5, placement=Placement.regular(nodes, per_node))
    assert all(torch.equal(result, 0.5 * sum(inputs)) for result in outcome.results)


class GetsScaled(AllReduce):
    """An all-reduce that refuses to scale: `steps` has no time for that."""

    async def synchronize(self, x: Any, state: State, group: Any, scale: float) -> Any:
        assert scale == 1.0
        return await super().synchronize(x, state, group, scale)


class ScalesItself(AllReduce):
    """An all-reduce that gets sums as they are."""

    traits = replace(AllReduce.traits, scales_first=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("intra", [ReduceScatter(), SparseReduceScatter()])
def test_sums_inside_nodes_are_scaled_where_the_next_scheme_begins_with_that(intra: Any, dtype: torch.dtype) -> None:
    placement = Placement.regular(3, 2)
    inputs = make_inputs(ReduceScatter(), "few non-zeros", placement.size, dtype)
    early, late = (
        run_scheme(Hierarchical(intra, inter, 2), inputs, 1 / 6, placement=placement)
        for inter in (GetsScaled(), ScalesItself())
    )
    assert [bits(x) for x in early.results] == [bits(x) for x in late.results]


def test_ranks_of_a_node_need_not_be_neighbours() -> None:
    placement = Placement((0, 1, 0, 1))
    scheme = Hierarchical(ReduceScatter(), AllReduce(), 2)
    inputs = make_inputs(scheme, "prime", 4, torch.float32)
    outcome = run_scheme(scheme, inputs, 1.0, placement=placement)
    assert all(torch.allclose(result, sum(inputs)) for result in outcome.results)
    (push, *_, pull) = (t for t in scheme.steps(specs_of(inputs[0]), (), placement) if hasattr(t, "groups"))
    assert push.groups == pull.groups == ((0, 2), (1, 3))


def test_a_16_bit_sum_is_rounded_once() -> None:
    """Rounded on each node, 256 + 1 would be 256 there, and the ones of all nodes were lost."""
    values = [256.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    for intra, inter in ((ReduceScatter(), AllReduce()), FLAT):
        inputs = [torch.full((5,), value, dtype=torch.bfloat16) for value in values]
        scheme = Hierarchical(intra, inter, 2)
        for result in run_scheme(scheme, inputs, 1.0, placement=Placement.regular(4, 2)).results:
            assert result.tolist() == [264.0] * 5


def in_turns(
    schemes: Sequence[Scheme[Any]], inputs: Sequence[Sequence[Any]], placement: Placement
) -> list[tuple[list[Any], int]]:
    """Several buckets at once, their turns alternating as a plan's do; of each rank the results and its turns."""

    def rank_main(group: LocalGroup) -> tuple[list[Any], int]:
        running = [s.synchronize(mine(x[group.rank]), {}, group, 1.0) for s, x in zip(schemes, inputs, strict=True)]
        pending: dict[int, Pending[Any]] = {number: each.send(None) for number, each in enumerate(running)}
        results: dict[int, Any] = {}
        turns = 0
        while pending:
            turns += 1
            for number in sorted(pending):
                try:
                    pending[number] = running[number].send(pending[number].wait(20.0))
                except StopIteration as done:
                    results[number] = done.value[0]
                    del pending[number]
        return [results[number] for number in range(len(running))], turns

    return run_local(placement.size, rank_main, placement=placement)


def test_a_node_whose_rows_do_not_fit_does_not_put_the_others_out_of_step() -> None:
    """Node 0 pushes once more and node 1 does not; what both do next they do in one order, for two buckets at once."""
    asking = Hierarchical(TABLE_STRIPES, AGSparse(), 2)
    inputs = make_inputs(asking, "uniform", 4, torch.float32)  # rank r brings 10 + r rows
    inputs = [inputs[3], inputs[0], inputs[1], inputs[2]]  # only rank 0 brings more than 12
    tight = Hierarchical(BalancedParallelism((12,), (0,), "table_stripe"), AGSparse(), 2)
    placement = Placement.regular(2, 2)
    expected = [bits(x) for x in run_scheme(asking, inputs, 1.0, placement=placement).results]
    everything = in_turns([tight, tight], [inputs, inputs], placement)
    assert [[bits(x) for x in results] for results, _ in everything] == [[x, x] for x in expected]
    assert {turns for _, turns in everything} == {len(tight.stages(4))}


def test_parts_that_travel_dense_do_not_put_sparse_ones_out_of_step() -> None:
    """The first half of the bucket is dense, the second one empty: one part is all-reduced, the other is not."""
    scheme = Hierarchical(ReduceScatter(), BalancedElements(), 2)
    inputs = [
        torch.cat([torch.randn(2000, generator=torch.Generator().manual_seed(r)), torch.zeros(2000)]) for r in range(4)
    ]
    placement = Placement.regular(2, 2)
    results = in_turns([scheme, scheme], [inputs, inputs], placement)
    for got, turns in results:
        assert all(torch.allclose(x, sum(inputs), atol=1e-6) for x in got)
        assert turns == len(scheme.stages(4))
    patterns = [
        [entry.pattern for entry in ledger.entries]
        for ledger in run_scheme(scheme, inputs, 1.0, placement=placement).ledgers
    ]
    assert len(patterns[0]) != len(patterns[1]), "the case must have parts of both kinds"


@dataclass(frozen=True)
class Remembering(AllReduce):
    """Keeps state, for a test."""

    def init(self, bucket: Bucket, group: Any) -> State:
        return {"momentum": torch.zeros(bucket.numel)}


def over_nodes(scheme: Hierarchical) -> State:
    """Returns the scheme's state on rank 0 of two nodes with two ranks."""
    return scheme.init(BUCKET, LocalGroup.world(4, Placement.regular(2, 2))[0])


BUCKET = Bucket("0", (Segment("p", 0, 4),), (TensorSpec((4,), torch.float32),), Layout.FLAT)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hierarchical(AllReduce()), r"intra must be a scheme of type Partitioned .*, got AllReduce"),
        (lambda: Hierarchical(ReduceScatter(), 3), "inter must be a scheme .*, got 3"),
        (lambda: Hierarchical(ReduceScatter(), AllReduce(), 0), "ranks_per_node must be at least 1, got 0"),
        (
            lambda: Hierarchical(ReduceScatter(), Shuffled((((0, 1),),)), 2),
            r"inter must sum over all nodes, got shuffled, which averages some of them: .* make a new plan",
        ),
        (
            lambda: Hierarchical(ReduceScatter(), AGSparse()),
            "the same kind of bucket, got reduce_scatter for flat buckets and ags",
        ),
        (
            lambda: Hierarchical(BalancedParallelism(), AGSparse()),
            "BalancedParallelism with owners='table_stripe' does, got",
        ),
        (
            lambda: over_nodes(Hierarchical(inter=Remembering(), ranks_per_node=2)),
            "which keeps 'momentum' of the whole bucket",
        ),
        (
            lambda: over_nodes(Hierarchical(SparseReduceScatter(), CompressedAllGather(TopK(0.5)), 2)),
            "without state beside sparse_reduce_scatter, got compressed_all_gather, which keeps state",
        ),
        (lambda: SparseReduceScatter(seed=0.5), r"seed must be a whole number, got 0\.5"),
        (lambda: BalancedParallelism(owners="luck"), "owners must be 'column_stripe' or 'table_stripe', got 'luck'"),
        (lambda: Hierarchical(ranks_per_node=2).stages(5), "planned for 2 ranks a node, there are 5 ranks"),
    ],
)
def test_what_makes_no_hierarchy_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("nodes", [(0, 0, 1), (0, 0, 0, 1), (0, 1, 2, 3)])
def test_nodes_that_differ_from_the_plan_are_refused_on_every_rank(nodes: tuple[int, ...]) -> None:
    scheme, placement = Hierarchical(ReduceScatter(), AllReduce(), 2), Placement(nodes)
    for group in LocalGroup.world(len(nodes), placement):
        with pytest.raises(ValueError, match="planned for 2 ranks on each node, the nodes have"):
            scheme.init(BUCKET, group)
    with pytest.raises(ValueError, match="planned for 2 ranks on each node"):
        scheme.steps(BUCKET.specs, (), placement)


def test_an_index_outside_of_the_table_fails_on_every_rank_of_every_node() -> None:
    scheme = Hierarchical(TABLE_STRIPES, AGSparse(), 2)
    inputs = make_inputs(scheme, "uniform", 4, torch.float32)
    inputs[3][0].indices[0] = 64
    with pytest.raises(ValueError, match=r"index 64 .*outside \[0, num_rows=64\)"):
        run_scheme(scheme, inputs, 1.0, placement=Placement.regular(2, 2))


def test_a_failure_is_heard_of_in_the_groups_of_all_nodes() -> None:
    """Rank 0 waits for rank 2, which does not come; neither has to do with rank 3, which failed."""

    def rank_main(group: LocalGroup) -> str:
        if group.rank == 3:
            group.announce_failure("out of coffee")
        if group.rank != 0:
            return ""
        with pytest.raises(GroupError) as caught:
            group.across_nodes().all_reduce(torch.ones(1)).wait(20.0)
        return str(caught.value)

    assert run_local(4, rank_main, placement=Placement.regular(2, 2))[0] == "rank 3: out of coffee"


@pytest.mark.parametrize("intra", [ReduceScatter(), SparseReduceScatter()])
def test_the_parts_of_a_flat_bucket_have_room_for_the_fullest_of_them(intra: Any) -> None:
    """Every tenth of 10 000 elements, and all of the first 500; two ranks of a node bring the same."""
    indices = torch.arange(10_000)
    indices = indices[(indices % 10 == 0) | (indices < 500)]
    (profile,) = profiles_of([torch.zeros(10_000).index_fill(0, indices, 1.0)] * 4)
    scheme = Hierarchical(intra, BalancedElements(), 2).planned_for([profile])
    assert isinstance(scheme, Hierarchical) and isinstance(scheme.inter, BalancedElements)
    part = int((indices < 5000).sum()) if intra == ReduceScatter() else len(indices) // 2
    assert [part <= room <= 1.5 * part + 32 for room in scheme.inter.capacity] == [True] * 2
    assert scheme.planned_for(()) == Hierarchical(intra, BalancedElements(), 2)
    assert scheme.has_room_for([profile]) and not scheme.has_room_for([replace(profile, rows=2.0 * profile.rows)])


def test_plans_name_hierarchies_with_their_parts() -> None:
    specs: Mapping[str, TensorSpec] = {"w": TensorSpec((30, 5), torch.float32), "b": TensorSpec((7,), torch.float32)}
    tables = Hierarchical(BalancedParallelism((9,), (0,), "table_stripe"), BalancedParallelism(), 2)
    flat = Hierarchical(SparseReduceScatter(seed=3), BalancedElements(), 2)
    plan = Plan.make(specs, 4, [(["w"], tables), (["b"], flat)])
    again = Plan.from_json(plan.to_json())
    assert [bucket.scheme for bucket in again.buckets] == [tables, flat]
    again.check(specs, 4)
    assert [stage for bucket, stage in plan.order if bucket == "0"] == [
        "node push",
        "across sizes",
        "across push",
        "across pull",
        "node pull",
    ]
    assert from_expression(to_expression(flat)) == flat
    assert tables.planned_for(()) == Hierarchical(TABLE_STRIPES, BalancedParallelism(), 2)
    with pytest.raises(ValueError, match="planned for 1 tables, the bucket has 2"):
        tables.check((specs["w"], specs["w"]))
