"""Routes: every leaf of the decision tree gives all ranks the same bits of the mean, with the bytes predicted."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gradsync.comm import Ledger, LocalGroup, RecordingGroup, drive_in_turns
from gradsync.compressors import (
    QSGD,
    THC,
    Cast,
    Compressor,
    CompressorState,
    CountSketch,
    ErrorFeedback,
    Exact,
    Law,
    Message,
    RandomK,
    SharedBlockInt,
    Summand,
    TopK,
    Warmup,
    check_payload,
    check_tensor,
    dgc,
)
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import Compute, Step, transfers
from gradsync.plans.plan import Plan
from gradsync.schemes import (
    BYTECOMP,
    DEVICES,
    WITH_SUMS,
    AllReduce,
    CompressedAllGather,
    CompressedAllReduce,
    CompressedTwoWay,
    Leaf,
    LeafConstraints,
    Route,
    Scheme,
    State,
    compressions,
    from_expression,
    register,
    routes,
    to_expression,
    words_of,
)
from gradsync.schemes.tree import COMPUTE, Kind
from gradsync.state import has_place, slices, with_slices
from gradsync.tensors.bucket import Bucket, Layout, Segment, TensorSpec

pytestmark = pytest.mark.usefixtures("stale_memory")

LENGTHS = (7, 1, 33, 0, 10)
NUMEL = sum(LENGTHS)
NODES = Placement.regular(2, 2)
GATHERED = ("compress@compute", "all_gather", "decompress@compute")
SUMMED = ("compress@compute", "all_reduce", "decompress@compute")
TWO_WAY = (
    "compress@compute",
    "all_to_all",
    "decompress@compute",
    "compress@compute",
    "all_gather",
    "decompress@compute",
)
BUNDLES = ("compress@compute", "all_to_all", "all_gather", "decompress@compute")
FEEDBACK = ErrorFeedback(TopK(0.3))
LEAVES = BYTECOMP.leaves((COMPUTE,))


@register
@dataclass(frozen=True)
class Untouched(Compressor[Message]):
    """A stand-in that loses nothing."""

    name = "untouched"

    def law(self, spec: Any) -> Law:
        return Exact()

    def compress(self, x: Tensor, state: CompressorState) -> tuple[Message, CompressorState]:
        check_tensor(x, state)
        return Message(self, state.spec, state.step, x.clone().view(torch.uint8)), state.next()

    def decompress(self, payload: Message) -> Tensor:
        check_payload(self, payload)
        return payload.data.view(payload.spec.dtype)

    def nbytes(self, spec: Any, step: int = 0) -> int:
        return int(spec.nbytes)


def bucket(dtype: torch.dtype = torch.float32, lengths: Sequence[int] = LENGTHS) -> Bucket:
    segments = tuple(Segment(f"tensor {number}", 0, length) for number, length in enumerate(lengths))
    return Bucket("0", segments, tuple(TensorSpec((length,), dtype) for length in lengths), Layout.FLAT)


def inputs_of(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Small whole numbers, and flags: all ranks use tensor 0, the last one 1, the first one 3, nobody the others."""
    made = []
    for rank in range(size):
        generator = torch.Generator().manual_seed(seed + 10 * rank)
        x = torch.zeros(NUMEL + bucket().num_flags)
        x[:NUMEL] = torch.randint(-8, 9, (NUMEL,), generator=generator)
        x[NUMEL], x[NUMEL + 1], x[NUMEL + 3] = 1.0, float(rank == size - 1), float(rank == 0)
        made.append(x.to(dtype))
    return made


@dataclass
class Outcome:
    results: list[Tensor]
    states: list[State]
    ledgers: list[Ledger]


def run(
    scheme: Scheme[Any], inputs: Sequence[Tensor], placement: Placement, states: Sequence[State] | None = None
) -> Outcome:
    """A step of all ranks in one thread; the inputs stay as they are."""
    ledgers = [Ledger() for _ in inputs]
    world = LocalGroup.world(len(inputs), placement)
    groups = [RecordingGroup(group, ledger) for group, ledger in zip(world, ledgers, strict=True)]
    before = states or [scheme.init(bucket(inputs[0].dtype), group) for group in groups]
    coroutines = [
        scheme.synchronize(x.clone(), state, group, 1 / len(inputs))
        for x, state, group in zip(inputs, before, groups, strict=True)
    ]
    found, _ = drive_in_turns(coroutines)
    return Outcome([result for result, _ in found], [state for _, state in found], ledgers)


def assert_bytes_are_predicted(scheme: Scheme[Any], outcome: Outcome, placement: Placement, step: int = 0) -> None:
    dtype = outcome.results[0].dtype
    expected = transfers(scheme.steps(bucket(dtype).specs, (), placement, step))
    for rank, ledger in enumerate(outcome.ledgers):
        own = [t for t in expected if not t.groups or any(rank in group for group in t.groups)]
        got = [(entry.pattern, entry.sent_bytes) for entry in ledger.entries]
        assert got == [(t.pattern, t.sent_bytes(rank)) for t in own]


def assert_is_mean(outcome: Outcome, inputs: Sequence[Tensor], rtol: float = 1e-6, atol: float = 1e-6) -> None:
    """The same bits on all ranks, near the mean, and flags."""
    first = outcome.results[0]
    assert all(torch.equal(result, first) for result in outcome.results)
    mean = torch.stack([x[:NUMEL].double() for x in inputs]).mean(dim=0)
    torch.testing.assert_close(first[:NUMEL].double(), mean, rtol=rtol, atol=atol)
    used = (first[NUMEL:] > 0).tolist()
    assert used == [True, True, False, True, *[False] * (len(used) - 4)]


def holds(leaves: Sequence[Leaf], placement: Placement, dtype: torch.dtype = torch.float32) -> None:
    inputs = inputs_of(placement.size, dtype)
    eps = torch.finfo(dtype).eps
    for leaf in leaves:
        route = Route.of(leaf, Untouched(), placement.ranks_per_node or 1)
        try:
            outcome = run(route, inputs, placement)
            assert_is_mean(outcome, inputs, 4 * eps, 16 * eps)
            assert_bytes_are_predicted(route, outcome, placement)
        except BaseException as error:
            error.add_note(f"on the way {', '.join(route.tasks)} in {dtype}")
            raise


@pytest.mark.parametrize("part", range(3))
def test_every_leaf_gives_all_ranks_the_same_bits_of_the_mean_with_the_bytes_predicted(part: int) -> None:
    """Each leaf runs on one device, on 2 nodes of 2 ranks."""
    holds(LEAVES[part::3], NODES)


@cache
def of_two_devices() -> tuple[Leaf, ...]:
    return BYTECOMP.leaves(DEVICES)


def test_leaves_of_two_devices_do_so_too() -> None:
    holds(random.Random(0).sample(of_two_devices(), 40), NODES)


@given(
    leaf=st.sampled_from(LEAVES),
    nodes=st.integers(1, 3),
    per_node=st.integers(1, 3),
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_any_bucket_on_any_nodes_gives_the_scaled_sum_on_any_leaf(
    leaf: Leaf, nodes: int, per_node: int, lengths: list[int], dtype: torch.dtype
) -> None:
    whole, placement = bucket(dtype, lengths), Placement.regular(nodes, per_node)
    numel, route = sum(lengths), Route.of(leaf, Untouched(), per_node)
    inputs = [torch.full((numel + whole.num_flags,), float(rank + 1), dtype=dtype) for rank in range(placement.size)]
    groups = LocalGroup.world(placement.size, placement)
    pairs = [(x.clone(), route.init(whole, group), group) for x, group in zip(inputs, groups, strict=True)]
    found, _ = drive_in_turns([route.synchronize(x, state, group, 0.5) for x, state, group in pairs])
    for result, _ in found:
        assert torch.equal(result[:numel], torch.full((numel,), 0.5 * sum(range(placement.size + 1)), dtype=dtype))
        assert bool((result[numel:] > 0).all())


@pytest.mark.parametrize("shape", [(3, 2), (1, 2), (3, 1), (1, 1)])
def test_leaves_do_so_on_nodes_of_other_shapes(shape: tuple[int, int]) -> None:
    holds(LEAVES[shape[0] :: 6], Placement.regular(*shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_leaves_do_so_in_other_types(dtype: torch.dtype) -> None:
    holds(LEAVES[dtype.itemsize :: 7], NODES, dtype)


def test_partial_sums_in_half_precision_stay_in_range() -> None:
    large = torch.finfo(torch.float16).max / 2
    inputs = [torch.full((NUMEL + bucket().num_flags,), large, dtype=torch.float16) for _ in range(4)]
    for leaf in WITH_SUMS.leaves((COMPUTE,)):
        lossless = Cast("float16") if any(task.kind is Kind.COMM_L for task in leaf) else Untouched()
        result = run(Route.of(leaf, lossless, 2), inputs, NODES).results[0]
        if compressions(leaf) <= 1:  # a second cast is of sums, which float16 does not hold
            assert torch.equal(result[:NUMEL], inputs[0][:NUMEL]), words_of(leaf)


@pytest.mark.parametrize(
    ("words", "scheme"), [(GATHERED, CompressedAllGather), (TWO_WAY, CompressedTwoWay), (SUMMED, CompressedAllReduce)]
)
@pytest.mark.parametrize(
    "compressor",
    [ErrorFeedback(TopK(0.2)), QSGD(7), dgc(0.2, clip=1.0, ranks=3), Cast("bfloat16"), RandomK(0.3), THC(summands=8)],
    ids=lambda compressor: compressor.title,
)
def test_a_flat_leaf_is_the_compressed_scheme_that_does_the_same(
    words: tuple[str, ...], scheme: Any, compressor: Compressor[Any]
) -> None:
    if (
        words == SUMMED
        and not issubclass(compressor.traits.payload, Summand)
        or words != SUMMED
        and compressor.traits.agrees
    ):
        with pytest.raises(ValueError, match=r"Route\.(tasks|compressor): "):
            Route(words, compressor)
        return
    twin = scheme(compressor)
    route, placement = Route(words, compressor), Placement.one_per_node(3)
    ours = theirs = None
    for step in range(3):
        inputs = inputs_of(3, seed=step)
        ours = run(route, inputs, placement, ours.states if ours else None)
        theirs = run(twin, inputs, placement, theirs.states if theirs else None)
        assert all(torch.equal(a, b) for a, b in zip(ours.results, theirs.results, strict=True))
        assert [ledger.entries for ledger in ours.ledgers] == [ledger.entries for ledger in theirs.ledgers]
        for mine, other in zip(ours.states, theirs.states, strict=True):
            kept, expected = ({part.key: part.values for part in slices(bucket(), s)} for s in (mine, other))
            assert kept.keys() == expected.keys() and all(torch.equal(kept[key], expected[key]) for key in kept)


LOSSY = [leaf for leaf in LEAVES if compressions(leaf)]


def residuals(states: Sequence[State]) -> Tensor:
    """Returns the ranks' residuals by element of the bucket; a residual that several ranks hold alike counts once."""
    left, at = torch.zeros(NUMEL).double(), {f"tensor {i}": sum(LENGTHS[:i]) for i in range(len(LENGTHS))}
    seen = set()
    for state in states:
        for part in slices(bucket(), state):
            alike = (part.name, part.start, part.stop, part.point) if " of " in part.point else object()
            if alike not in seen:
                seen.add(alike)
                left[at[part.name] + part.start : at[part.name] + part.stop] += part.values.double()
    return left


@pytest.mark.parametrize("compressor", [TopK(0.3), QSGD(3)], ids=lambda compressor: compressor.title)
def test_nothing_is_lost_at_any_compression(compressor: Compressor[Any]) -> None:
    """Gradients in are gradients out plus all residuals; all ranks have the same bits."""
    for leaf in LOSSY[1::4]:
        route, outcome = Route.of(leaf, ErrorFeedback(compressor) if compressor == TopK(0.3) else compressor, 2), None
        given, brought = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
        for step in range(3):
            inputs = inputs_of(4, seed=100 * step)
            outcome = run(route, inputs, NODES, outcome.states if outcome else None)
            assert all(torch.equal(result, outcome.results[0]) for result in outcome.results), route.tasks
            assert_bytes_are_predicted(route, outcome, NODES, step)
            given += 4 * outcome.results[0][:NUMEL].double()
            brought += sum(x[:NUMEL].double() for x in inputs)
        assert outcome is not None
        if isinstance(route.compressor, ErrorFeedback):
            assert sum("residual" in key.key for key in slices(bucket(), outcome.states[0])) >= compressions(leaf)
            torch.testing.assert_close(given + residuals(outcome.states), brought, rtol=1e-5, atol=1e-4)


def test_every_compression_keeps_its_own_residual() -> None:
    for leaf in LOSSY:
        route = Route.of(leaf, FEEDBACK, 2)
        states = [route.init(bucket(), group) for group in LocalGroup.world(4, NODES)]
        assert {len(state) for state in states} == {1 + compressions(leaf)}, "of all ranks, of those that idle too"


@pytest.mark.parametrize(
    "words",
    [
        TWO_WAY,
        (*TWO_WAY[:3], "all_reduce", "all_gather"),
        (*TWO_WAY[:4], *TWO_WAY[1:], "compress@compute", "all_gather", "decompress@compute"),
        ("reduce", *GATHERED, "compress@compute", "broadcast", "decompress@compute"),
    ],
)
def test_what_is_left_goes_over_to_another_plan_in_whole(words: tuple[str, ...]) -> None:
    """Also residuals of sums over all ranks, which ranks of both nodes compressed alike."""
    route, flat = Route.of(WITH_SUMS.parse(words), FEEDBACK, 2), Route(GATHERED, FEEDBACK)
    outcome = None
    for step in range(2):
        outcome = run(route, inputs_of(4, seed=step), NODES, outcome.states if outcome else None)
    assert outcome is not None
    moved = []
    for group, state in zip(LocalGroup.world(4, NODES), outcome.states, strict=True):
        saved, fresh = list(slices(bucket(), state)), flat.init(bucket(), group)
        assert all(has_place([fresh], part) for part in saved)
        moved.append(with_slices(bucket(), fresh, saved))
    torch.testing.assert_close(residuals(moved), residuals(outcome.states), rtol=1e-6, atol=1e-6)


def test_routes_resume_from_what_a_checkpoint_holds() -> None:
    route = Route.of(LOSSY[60], FEEDBACK, 2)
    outcome = run(route, inputs_of(4), NODES)
    restored = [
        with_slices(bucket(), route.init(bucket(), group), list(slices(bucket(), state)))
        for group, state in zip(LocalGroup.world(4, NODES), outcome.states, strict=True)
    ]
    again = [run(route, inputs_of(4, seed=1), NODES, states).results[0] for states in (outcome.states, restored)]
    assert torch.equal(*again)


SUMMABLE = [leaf for leaf in WITH_SUMS.leaves((COMPUTE,)) if compressions(leaf)]


@pytest.mark.parametrize(
    "compressor", [Cast("bfloat16"), RandomK(1.0), CountSketch(1.0, keep=1.0)], ids=lambda compressor: compressor.title
)
def test_payloads_that_can_be_summed_are_added_on_their_way(compressor: Compressor[Any]) -> None:
    for leaf in SUMMABLE[::5]:
        route, inputs = Route.of(leaf, compressor, 2), inputs_of(4)
        outcome = run(route, inputs, NODES)
        assert_bytes_are_predicted(route, outcome, NODES)
        assert all(torch.equal(result, outcome.results[0]) for result in outcome.results)
        if not isinstance(compressor, CountSketch):
            assert_is_mean(outcome, inputs, 2**-6, 2**-6)


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (2, 1)])
def test_payloads_are_summed_across_nodes_by_those_ranks_that_have_them(shape: tuple[int, int]) -> None:
    """Gathers payloads on one rank of each node: on a single node the others have nothing, and nobody to sum with."""
    placement, words = Placement.regular(*shape), ("compress@compute", "gather", "all_reduce", "decompress@compute")
    route = Route((*words, "broadcast"), Cast("bfloat16"), placement.ranks_per_node or 1)
    inputs = inputs_of(placement.size)
    outcome = run(route, inputs, placement)
    assert_is_mean(outcome, inputs)
    assert_bytes_are_predicted(route, outcome, placement)


def test_bundles_are_as_many_payloads_and_sums_of_payloads_are_one() -> None:
    def pulled(compressor: Compressor[Any]) -> float:
        route = Route(BUNDLES, compressor)
        return float(transfers(route.steps(bucket().specs, (), Placement.one_per_node(4)))[1].part_bytes[0])

    part = -(-NUMEL // 4)
    assert pulled(Untouched()) == 4 * 4 * -(-part // 2) * 2
    assert pulled(RandomK(1.0)) == 4 * -(-part // 2) * 2


def test_compressors_that_agree_do_so_among_those_whose_payloads_are_summed() -> None:
    across = ("reduce_scatter", *SUMMED, "all_gather")
    rooted = ("reduce", *SUMMED, "broadcast")  # where one rank of each node has data, and compresses
    for words, ranks_per_node in ((SUMMED, 1), (across, 2), (rooted, 2)):
        route, inputs = Route(words, SharedBlockInt(4), ranks_per_node), inputs_of(4)
        outcome = run(route, inputs, NODES)
        assert_is_mean(outcome, inputs, 0.05, 0.3)
        assert_bytes_are_predicted(route, outcome, NODES)
    assert Route(across, SharedBlockInt(4), 2).stages(4) == (
        "node reduce_scatter",
        "across agree",
        "compress@compute",
        "across all_reduce",
        "decompress@compute",
        "node all_gather",
    )


def test_stages_are_the_awaits_but_for_a_first_compression() -> None:
    for leaf in LEAVES[::5]:
        route = Route.of(leaf, Untouched(), 2)
        steps = transfers(route.steps(bucket().specs, (), NODES))
        moves = [stage for stage in route.stages(4) if "compress@" not in stage]
        assert moves == [transfer.stage for transfer in steps]
        assert len(set(route.stages(4))) == len(route.stages(4)) == len(leaf) - route.traits.prepares


def test_steps_follow_the_compressor_s_warm_up() -> None:
    route = Route(TWO_WAY, ErrorFeedback(Warmup((TopK(0.5), TopK(0.1)), (0, 3))))

    def steps(step: int) -> tuple[Step, ...]:
        return route.steps(bucket().specs, (), NODES, step)

    assert [route.unchanged_since(round) for round in range(5)] == [0, 0, 0, 3, 3]
    assert steps(0) == steps(2) != steps(3) == steps(4)


def test_steps_name_their_devices() -> None:
    words = ("compress@offload", "all_to_all", "decompress@compute", "compress@offload", "all_gather", *GATHERED[2:])
    steps = Route(words, TopK(0.5)).steps(bucket().specs, (), NODES)
    devices = [step.device for step in steps if isinstance(step, Compute)]
    assert devices == ["offload", "compute", "offload", "compute"]


def test_plans_name_routes() -> None:
    specs = {"w": TensorSpec((30, 5), torch.float32)}
    scheme = Route(TWO_WAY, ErrorFeedback(TopK(0.01)))
    plan = Plan.make(specs, 4, [(["w"], scheme)])
    again = Plan.from_json(plan.to_json())
    again.check(specs, 4)
    assert again.buckets[0].scheme == scheme == from_expression(to_expression(scheme))
    assert from_expression({"route": {"tasks": ["all_reduce"]}}) == Route(("all_reduce",))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ["all_gather"]}, r"Route\.tasks: 'all_gather' may not come at the beginning"),
        ({"tasks": "all_reduce"}, r"Route\.tasks must be a list, got 'all_reduce'"),
        ({"tasks": []}, r"Route\.tasks: the tasks \(\) end too early"),
        ({"tasks": [*GATHERED]}, r"Route\.compressor must be a compressor, as the tasks compress, got None"),
        ({"tasks": ["all_reduce"], "compressor": {"sign": {}}}, r"Route\.compressor must be None, as no task"),
        (
            {"tasks": [*SUMMED], "compressor": {"top_k": {"ratio": 0.1}}},
            r"Route\.tasks: no all_reduce can sum the payloads of top_k",
        ),
        (
            {"tasks": [*GATHERED], "compressor": {"thc": {"summands": 4}}},
            r"Route\.compressor: .* after each compress there must come all_reduce and decompress",
        ),
        ({"tasks": ["all_reduce"], "ranks_per_node": 2}, r"Route\.ranks_per_node must be 1 for tasks among all"),
        ({"tasks": ["all_reduce"], "ranks_per_node": 0}, r"Route\.ranks_per_node must be at least 1, got 0"),
        ({"tasks": ["all_reduce"], "ranks_per_node": 2.0}, r"Route\.ranks_per_node must be a whole number"),
    ],
)
def test_plans_with_routes_that_are_none_are_refused_when_they_are_read(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_expression({"route": settings})
    plan = Plan.make({"w": TensorSpec((3,), torch.float32)}, 2, [(["w"], AllReduce())])
    by_hand = plan.model_dump(mode="json")
    by_hand["buckets"][0]["scheme"] = {"route": settings}
    with pytest.raises(ValueError, match=r"plan, field buckets\.0\.scheme: .*Route\."):
        Plan.from_json(json.dumps(by_hand))


@pytest.mark.parametrize("nodes", [(0, 0, 1), (0, 1, 2, 3)])
def test_nodes_that_differ_from_the_plan_are_refused_on_every_rank(nodes: tuple[int, ...]) -> None:
    route, placement = Route(("reduce_scatter", "all_reduce", "all_gather"), ranks_per_node=2), Placement(nodes)
    for group in LocalGroup.world(len(nodes), placement):
        with pytest.raises(ValueError, match="planned for 2 ranks on each node, the nodes have"):
            route.init(bucket(), group)


def test_more_ranks_than_payloads_can_be_summed_of_are_refused() -> None:
    route = Route(SUMMED, SharedBlockInt(3))
    with pytest.raises(ValueError, match="4 payloads are added, at most 3 can be"):
        route.init(bucket(), LocalGroup.world(4)[0])


def test_ranks_that_clip_together_are_those_that_compress_the_same_range() -> None:
    across = ("reduce_scatter", *GATHERED, "all_gather")
    Route(across, dgc(0.1, clip=1.0, ranks=2), 2).init(bucket(), LocalGroup.world(4, NODES)[0])
    with pytest.raises(ValueError, match="made for 4 ranks, 2 compress together: set its ranks"):
        Route(across, dgc(0.1, clip=1.0, ranks=4), 2).init(bucket(), LocalGroup.world(4, NODES)[0])


def test_a_compressor_may_take_the_routes_that_its_payloads_can() -> None:
    one = {"devices": (COMPUTE,)}
    assert len(routes(TopK(0.1), 2, **one)) == 174
    assert len(routes(TopK(0.1), **one)) == 12, "without several ranks on a node flat ones only"
    assert len(routes(Cast(), 2, **one)) == len(SUMMABLE) + 9
    agreeing = routes(SharedBlockInt(4), 2, **one)
    assert {route.compressor for route in agreeing} == {None, SharedBlockInt(4)}
    assert len(agreeing) == 9 + 1 + 2, "of all ranks, or across nodes after a dense reduce_scatter or reduce"
    assert set(routes(TopK(0.1), 2, constraints=LeafConstraints(most_compressions=0))) == {
        Route.of(leaf, None, 2) for leaf in LEAVES if not compressions(leaf)
    }
    with pytest.raises(ValueError, match="no route of thc is left under most_compressions=2 and without all_reduce"):
        without = ("all_reduce", "reduce", "reduce_scatter")
        routes(THC(summands=4), 2, constraints=LeafConstraints(2, without))
