"""CompressingPlanner: its choice of parameters, the schemes that carry payloads, and refused compressors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import gradsync
from gradsync.compressors import (
    QSGD,
    THC,
    BlockInt,
    Cast,
    Compressor,
    CountSketch,
    ErrorFeedback,
    MomentumCorrection,
    RandomK,
    SharedBlockInt,
    Signum,
    SparseMessage,
    Summand,
    TernGrad,
    Threshold,
    TopK,
    Warmup,
    dgc,
)
from gradsync.planner import CompressingPlanner, cheapest_way, default_plan
from gradsync.planner.default.compressing import _advise_feedback, busiest_bytes
from gradsync.plans.plan import Plan
from gradsync.schemes import (
    AllReduce,
    BalancedParallelism,
    CompressedAllGather,
    CompressedAllReduce,
    CompressedTwoWay,
    PowerSGD,
    Scheme,
    Sparsified,
    ways,
)
from gradsync.tensors.bucket import FlatSpec, TensorSpec
from gradsync.tensors.density import DensityProfile, ParameterProfile
from tests.compressors.family import MEMBERS
from tests.frontends.models import Perceptron
from tests.world import Ranks

World = Callable[[int], Ranks]
MIB = 1 << 20
FEEDBACK = ErrorFeedback(TopK(0.01))


def profile(name: str, *shape: int, dtype: torch.dtype = torch.float32, position: int = 0) -> ParameterProfile:
    return ParameterProfile(name, TensorSpec(shape, dtype), sparse=False, position=position)


PROFILES = [
    replace(profile("table", 1000, 8), sparse=True),
    profile("weight", 64, 32),
    profile("bias", 32),
    profile("count", 8, 8, dtype=torch.int64),
    profile("half", 64, 32, dtype=torch.bfloat16),
    profile("gain"),
]


def planned(planner: CompressingPlanner, profiles: list[ParameterProfile], world_size: int = 4) -> Plan:
    plan = planner(profiles, world_size)
    plan.check({p.name: p.tensor for p in profiles}, world_size)
    return plan


def scheme_of_each(plan: Plan) -> dict[str, Scheme[Any]]:
    return {name: bucket.scheme for bucket in plan.buckets for name in bucket.names}


@pytest.mark.parametrize(
    "way", [TopK(0.01), Warmup((TopK(0.25), TopK(0.01)), (0, 10)), Threshold(0.1), THC(4, clip=2.5)]
)
def test_what_needs_error_feedback_and_has_none_is_warned_of_once(
    way: Compressor[Any], caplog: pytest.LogCaptureFixture
) -> None:
    _advise_feedback.cache_clear()
    for _ in range(2):  # plans are asked for more than once
        planned(CompressingPlanner(way), PROFILES)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{way} is biased and loses what it leaves out" in record.getMessage()


@pytest.mark.parametrize(
    "way",
    [
        ErrorFeedback(TopK(0.01)),
        dgc(0.01),
        TopK(0.9),
        QSGD(7),
        Cast("bfloat16"),
        Cast("float16"),
        TernGrad(clip=2.5),
        BlockInt(8),
        Signum(),
        CountSketch(0.2, keep=0.01),
        PowerSGD(2),
    ],
    ids=lambda way: way.title,
)
def test_what_is_meant_to_be_without_error_feedback_is_not_warned_of(
    way: Compressor[Any] | Scheme[Any], caplog: pytest.LogCaptureFixture
) -> None:
    _advise_feedback.cache_clear()
    planned(CompressingPlanner(way), PROFILES)
    assert not caplog.records


def compressed(planner: CompressingPlanner, profiles: list[ParameterProfile]) -> set[str]:
    exact = scheme_of_each(default_plan(profiles, 4))
    return {name for name, scheme in scheme_of_each(planned(planner, profiles)).items() if scheme != exact[name]}


@pytest.mark.parametrize("compressor", [member.compressor for member in MEMBERS.values()], ids=MEMBERS)
def test_any_compressor_is_carried_legally_by_the_fewest_bytes(compressor: Compressor[Any]) -> None:
    schemes = scheme_of_each(planned(CompressingPlanner(compressor), PROFILES, 2))
    chosen = schemes["weight"]
    assert chosen in ways(compressor)
    spec = FlatSpec.of(torch.empty(1 << 20, device="meta"))
    for size in (2, 4, 64):
        if issubclass(compressor.traits.payload, Summand):
            assert size > (compressor.traits.most_summands or size) or isinstance(
                cheapest_way(compressor, spec, size), CompressedAllReduce
            )
            continue
        twice_sparse = issubclass(compressor.traits.payload, SparseMessage)
        legal = [w for w in ways(compressor) if not (twice_sparse and isinstance(w, CompressedTwoWay))]
        moved = busiest_bytes(cheapest_way(compressor, spec, size), spec, size)
        assert moved == min(busiest_bytes(way, spec, size) for way in legal)


def test_the_number_of_ranks_decides_how_payloads_travel() -> None:
    spec = FlatSpec.of(torch.empty(100_000, device="meta"))
    assert isinstance(cheapest_way(TopK(0.01), spec, 2), CompressedAllGather)
    assert isinstance(cheapest_way(TopK(0.3), spec, 64), Sparsified)
    assert isinstance(cheapest_way(BlockInt(8), spec, 2), CompressedAllGather)
    assert isinstance(cheapest_way(BlockInt(8), spec, 4), CompressedTwoWay)
    assert isinstance(cheapest_way(Cast("bfloat16"), spec, 64), CompressedAllReduce)


def test_dense_floating_gradients_are_compressed_and_no_others() -> None:
    assert compressed(CompressingPlanner(FEEDBACK), PROFILES) == {"weight", "bias", "half", "gain"}


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({"exact": ("bias",)}, {"bias"}),
        ({"exact": ("*i*",)}, {"weight", "bias", "gain"}),
        ({"matrices_only": True}, {"bias", "gain"}),
        ({"fewest_elements": 32}, {"gain"}),
        ({"fewest_elements": 33, "exact": ("half",)}, {"bias", "gain", "half"}),
    ],
)
def test_what_the_user_leaves_out_travels_exactly(settings: dict[str, Any], left_out: set[str]) -> None:
    planner = CompressingPlanner(FEEDBACK, **settings)
    assert compressed(planner, PROFILES) == {"weight", "bias", "half", "gain"} - left_out
    schemes = scheme_of_each(planned(planner, PROFILES))
    assert all(schemes[name] == AllReduce() for name in left_out)


def test_what_was_found_to_be_sparse_is_compressed_unless_it_is_to_be_exact() -> None:
    found = replace(profile("words", 100_000, 16), density=DensityProfile(100_000, 20.0))
    assert scheme_of_each(default_plan([found], 4))["words"] != AllReduce()
    assert isinstance(scheme_of_each(planned(CompressingPlanner(FEEDBACK), [found]))["words"], CompressedAllGather)
    exact = CompressingPlanner(FEEDBACK, exact=("words",))
    assert scheme_of_each(planned(exact, [found])) == scheme_of_each(default_plan([found], 4))


def test_buckets_have_the_size_that_was_asked_for_and_the_first_one_is_small() -> None:
    many = [profile(f"p{number}", MIB // 4) for number in range(12)]  # 1 MiB each
    sizes = {
        megabytes: planned(CompressingPlanner(FEEDBACK, bucket_bytes=megabytes * MIB), many) for megabytes in (1, 4)
    }
    assert [len(bucket.names) for bucket in sizes[1].buckets] == [1] * 12
    assert [len(bucket.names) for bucket in sizes[4].buckets] == [1, 4, 4, 3]
    small = [profile(f"p{number}", 64) for number in range(8)]
    assert [len(b.names) for b in planned(CompressingPlanner(FEEDBACK, bucket_bytes=512), small).buckets] == [2] * 4


def test_without_settings_buckets_are_the_default_ones() -> None:
    many = [profile(f"p{number}", MIB // 8) for number in range(70)]
    plan, default = planned(CompressingPlanner(FEEDBACK), many), default_plan(many, 4)
    assert [bucket.names for bucket in plan.buckets] == [bucket.names for bucket in default.buckets]


def test_exact_gradients_go_when_they_are_ready_not_last() -> None:
    layers = [profile(f"p{number}", MIB, position=9 - number) for number in range(10)]  # 4 MiB each
    plan = planned(CompressingPlanner(FEEDBACK, exact=("p9", "p8"), bucket_bytes=8 * MIB), layers)
    assert [bucket.names for bucket in plan.buckets][:2] == [["p9"], ["p8"]]


@st.composite
def profiles_of_models(draw: st.DrawFn) -> list[ParameterProfile]:
    made = []
    for number in range(draw(st.integers(0, 10))):
        shape = draw(st.sampled_from([(0,), (), (7,), (300, 400), (MIB,), (9 * MIB,)]))
        dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.int32]))
        sparse = len(shape) == 2 and dtype is torch.float32 and draw(st.booleans())
        made.append(
            replace(profile(f"p{number}", *shape, dtype=dtype, position=draw(st.integers(0, 4))), sparse=sparse)
        )
    return made


@given(profiles_of_models(), st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from([0, 100]))
@settings(max_examples=40)
def test_every_parameter_is_covered_once_and_the_plan_repeats(
    profiles: list[ParameterProfile], world_size: int, matrices_only: bool, fewest_elements: int
) -> None:
    planner = CompressingPlanner(FEEDBACK, matrices_only=matrices_only, fewest_elements=fewest_elements)
    plan = planned(planner, profiles, world_size)
    assert planner(list(profiles), world_size).digest == plan.digest


def test_a_scheme_is_taken_as_it_is_and_a_function_is_told_the_number_of_ranks() -> None:
    assert scheme_of_each(planned(CompressingPlanner(PowerSGD(2)), PROFILES))["weight"] == PowerSGD(2)
    made = scheme_of_each(planned(CompressingPlanner(lambda ranks: ErrorFeedback(THC(ranks))), PROFILES))["weight"]
    assert made == CompressedAllReduce(ErrorFeedback(THC(4)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CompressingPlanner("topk0.01"), "way must be a compressor, a scheme, or a function .* got 'topk0.01'"),
        (lambda: CompressingPlanner(BalancedParallelism()), "is for dense gradients, but balanced_parallelism is"),
        (lambda: CompressingPlanner(FEEDBACK, exact="*.bias"), r"exact must be a list, got '\*.bias'"),
        (lambda: CompressingPlanner(FEEDBACK, fewest_elements=-1), "fewest_elements must be at least 0, got -1"),
        (lambda: CompressingPlanner(FEEDBACK, fewest_elements=3.0), "fewest_elements must be a whole number, got 3.0"),
        (lambda: CompressingPlanner(FEEDBACK, bucket_bytes=True), "bucket_bytes must be a whole number, got True"),
        (lambda: CompressingPlanner(FEEDBACK, bucket_bytes=0), "bucket_bytes must be at least 1, got 0"),
        (lambda: CompressingPlanner(FEEDBACK, exact=("bais",))(PROFILES, 4), "exact names 'bais', which no parameter"),
        (lambda: CompressingPlanner(lambda ranks: ranks)(PROFILES, 4), "way must be a compressor, .* got 4"),
        (
            lambda: CompressingPlanner(SharedBlockInt(2))(PROFILES, 4),
            "of which 2 can be summed, there are 4 ranks: make it for",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()


class Unannounced(nn.Module):
    """A table with sparse gradients that is no nn.Embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(50, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.embedding((10 * x).long() % 50, self.table, sparse=True))


def tables_that_nobody_announced() -> str:
    text = ""
    for exact in (("table",), ()):
        model = Unannounced()
        handle = gradsync.attach(model, plan=CompressingPlanner(FEEDBACK, exact=exact), timeout=10)
        try:
            for _ in range(3):
                model.zero_grad()
                model(torch.randn(5, 6)).square().mean().backward()
        except ValueError as error:
            text += f"{exact}: {error}"
        handle.detach()
    return text


def test_a_table_that_nobody_announced_must_be_exact(world: World) -> None:
    for text in world(2).run(tables_that_nobody_announced):
        assert text.startswith("(): the plan has no place for the state 'table[0:300]/sent.residual'")
        assert text.endswith("must not be compressed before")


def refusal_of_what_diverges() -> str:
    model = Perceptron()
    try:
        gradsync.attach(model, plan=CompressingPlanner(ErrorFeedback(RandomK(0.1, scaled=True))), timeout=10)
    except ValueError as error:
        return str(error)
    return ""


def test_error_feedback_that_may_diverge_is_refused_on_every_rank(world: World) -> None:
    for text in world(2).run(refusal_of_what_diverges):
        assert "may diverge" in text and "use it without error feedback" in text


def trains_by_each() -> None:
    compressors = (FEEDBACK, ErrorFeedback(BlockInt(8)), QSGD(127), Cast("bfloat16"), MomentumCorrection(TopK(0.1)))
    for compressor in compressors:
        torch.manual_seed(0)
        model = Perceptron()
        handle = gradsync.attach(model, plan=CompressingPlanner(compressor, exact=("*.bias",)), timeout=10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(4):  # the plan is made again after the first steps
            step(model, optimizer)
        schemes = scheme_of_each(handle.plan)
        assert handle.settled and schemes["layers.0.weight"] in ways(compressor)
        assert schemes["layers.0.bias"] == AllReduce()
        handle.detach()


def test_a_model_trains_by_it(world: World) -> None:
    world(2).run(trains_by_each)


def test_the_way_is_the_one_that_is_cheapest_after_warm_up() -> None:
    spec = FlatSpec.of(torch.empty(1_000_000))
    warm = ErrorFeedback(Warmup((TopK(0.25), TopK(0.001)), (0, 100)))
    assert type(cheapest_way(warm, spec, 4)) is type(cheapest_way(ErrorFeedback(TopK(0.001)), spec, 4))
    assert type(cheapest_way(ErrorFeedback(TopK(0.25)), spec, 4)) is not type(cheapest_way(warm, spec, 4))
