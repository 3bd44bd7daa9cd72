"""The default plan is complete, deterministic, in the order of readiness, and has the fewest bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from gradsync.comm import Ledger, LocalGroup, RecordingGroup, drive, run_local
from gradsync.planner import default_plan, default_plans
from gradsync.planner.default.plan import SPARSE_SCHEMES, sparse_schemes
from gradsync.plans.plan import Plan
from gradsync.schemes import AGSparse, AllReduce, BalancedElements, BalancedParallelism, Scheme
from gradsync.tensors.bucket import Layout, TensorSpec
from gradsync.tensors.density import DensityProfile, ParameterProfile, profile_rows
from gradsync.tensors.sparse import SparseRows

MIB = 1 << 20


def dense(name: str, nbytes: int, dtype: torch.dtype = torch.float32, position: int = 0) -> ParameterProfile:
    return ParameterProfile(name, TensorSpec((nbytes // dtype.itemsize,), dtype), sparse=False, position=position)


def sparse(
    name: str, density: DensityProfile | None = None, dtype: torch.dtype = torch.float32, dim: int = 16
) -> ParameterProfile:
    return ParameterProfile(name, TensorSpec((1000, dim), dtype), sparse=True, density=density)


def names(plan: Plan) -> list[list[str]]:
    return [bucket.names for bucket in plan.buckets]


@st.composite
def profiles(draw: st.DrawFn) -> list[ParameterProfile]:
    result = []
    for number in range(draw(st.integers(0, 12))):
        dtype = draw(st.sampled_from([torch.float32, torch.float16]))
        if draw(st.booleans()):
            nbytes = draw(st.sampled_from([0, 400, MIB, 3 * MIB, 20 * MIB, 30 * MIB]))
            result.append(dense(f"p{number}", nbytes, dtype, draw(st.integers(0, 5))))
        else:
            density = draw(st.sampled_from([None, DensityProfile(1000, 50.0)]))
            result.append(sparse(f"p{number}", density, dtype))
    return result


@given(profiles(), st.sampled_from([1, 2, 4, 8]))
def test_every_parameter_is_covered_once_and_the_plan_repeats(parameters: list[ParameterProfile], world: int) -> None:
    plan = default_plan(parameters, world)
    plan.check({p.name: p.tensor for p in parameters}, world)  # raises for what is left out or covered twice
    assert default_plan(list(parameters), world).digest == plan.digest
    layouts = {name: bucket.scheme.traits.layout for bucket in plan.buckets for name in bucket.names}
    assert layouts == {p.name: Layout.ROWS if p.sparse else Layout.FLAT for p in parameters}


def test_dense_buckets_are_cut_as_ddp_cuts_them() -> None:
    parameters = [dense(f"p{i}", 512 << 10) for i in range(60)]  # 0.5 MiB each
    assert [len(bucket) for bucket in names(default_plan(parameters, 4))] == [2, 50, 8]
    assert names(default_plan([dense("huge", 100 * MIB), dense("last", 4)], 4)) == [["last", "huge"]]


def test_gradients_go_in_the_order_in_which_they_become_ready() -> None:
    unmeasured = [dense(name, 2 * MIB) for name in "abc"]
    assert names(default_plan(unmeasured, 4)) == [["c"], ["b", "a"]]
    measured = [dense(name, 2 * MIB, position=place) for name, place in (("a", 1), ("b", 0), ("c", 2))]
    assert names(default_plan(measured, 4)) == [["b"], ["a", "c"]]


def test_dtypes_have_buckets_of_their_own_each_in_ready_order() -> None:
    parameters = [dense("a", 8), dense("b", 8, torch.float16), dense("c", 8), dense("d", 8, torch.float16)]
    assert names(default_plan(parameters, 4)) == [["d", "b"], ["c", "a"]]


def test_tables_of_a_dtype_share_a_bucket_behind_the_dense_ones() -> None:
    parameters = [sparse("t"), dense("w", 8), sparse("h", dtype=torch.float16), sparse("u"), dense("b", 8)]
    plan = default_plan(parameters, 4)
    assert names(plan) == [["b", "w"], ["h"], ["u", "t"]]
    assert [bucket.scheme.name for bucket in plan.buckets] == ["all_reduce", *["balanced_parallelism"] * 2]


def placed(profile: ParameterProfile, position: int, pattern: str = "") -> ParameterProfile:
    density = DensityProfile(1000, 50.0, {4: 1.5}, pattern) if profile.sparse else None
    return replace(profile, position=position, density=density)


def test_tables_ready_before_dense_parameters_are_exchanged_at_once() -> None:
    """A language model: the table of scores is ready first, the table of words last."""
    parameters = [placed(sparse("words"), 3), placed(dense("lstm", 8), 2), placed(sparse("scores"), 0)]
    plan, between, at_the_end = default_plans(parameters, 4)
    assert names(plan) == [["scores"], ["lstm"], ["words"]]
    turns = [(plan.buckets[int(bucket)].names[0], stage) for bucket, stage in plan.order]
    stages = plan.buckets[0].scheme.stages(4)
    assert turns == [*(("scores", s) for s in stages), ("lstm", "all_reduce"), *(("words", s) for s in stages)]
    assert names(at_the_end) == [["lstm"], ["scores", "words"]]
    assert between.buckets == plan.buckets
    ends = [turn for turn in between.order if turn[0] != "0"]
    assert ends == [*(("2", s) for s in stages[:-1]), ("1", "all_reduce"), ("2", stages[-1])]


def test_tables_with_the_same_rows_stay_together_where_the_last_of_them_is_ready() -> None:
    early, late = placed(sparse("early"), 0, "a"), placed(sparse("late"), 2, "a")
    assert names(default_plan([late, placed(dense("w", 8), 1), early], 4)) == [["w"], ["early", "late"]]


def test_without_measurements_the_first_sparse_scheme_is_taken() -> None:
    assert sparse_schemes([sparse("t", DensityProfile(1000, 5.0)), sparse("u")], 2) == [BalancedParallelism()]


def counted_bytes(scheme: AGSparse | BalancedParallelism, tables: Sequence[Sequence[torch.Tensor]], dim: int) -> float:
    """Returns the bytes that the busiest rank sends; `tables[rank]` are the row indices of that rank's tables."""

    def rank_main(group: LocalGroup) -> float:
        ledger = Ledger()
        x = tuple(SparseRows(rows, torch.ones(len(rows), dim), 1000) for rows in tables[group.rank])
        drive(scheme.synchronize(x, {}, RecordingGroup(group, ledger), 1.0), timeout_s=20)
        return ledger.sent_bytes

    return max(run_local(len(tables), rank_main))


@pytest.mark.parametrize(
    ("world", "stride", "expected"),
    [
        (2, 100, AGSparse),
        (2, 50, AGSparse),
        (2, 0, AGSparse),  # as many, in one stage
        (8, 100, AGSparse),  # nothing to merge, so owners would send everything twice
        (8, 50, BalancedParallelism),
        (8, 0, BalancedParallelism),
    ],
)
def test_the_scheme_that_is_chosen_is_the_one_that_sends_fewest_bytes(
    world: int, stride: int, expected: type[AGSparse | BalancedParallelism]
) -> None:
    rows = [torch.arange(100) + stride * rank for rank in range(world)]
    density = profile_rows(rows, 1000)
    chosen = sparse_schemes([sparse("t", density)], world)[0]
    planned = [scheme.planned_for([density]) for scheme in SPARSE_SCHEMES]
    counted = {scheme: counted_bytes(scheme, [[r] for r in rows], 16) for scheme in planned}
    assert counted[chosen] == min(counted.values())
    assert type(chosen) is expected


def found(name: str, rows: float, *, num_rows: int = 1000, dim: int = 64) -> ParameterProfile:
    """Returns the profile of a table with dense gradients whose `rows` rows were non-zero on a rank."""
    density = DensityProfile(num_rows, rows, {4: 1.5})
    return ParameterProfile(name, TensorSpec((num_rows, dim), torch.float32), sparse=False, density=density)


@pytest.mark.parametrize(("rows", "layout"), [(20.0, Layout.ROWS), (250.0, Layout.ROWS), (450.0, Layout.FLAT)])
def test_a_dense_gradient_is_exchanged_by_rows_if_that_saves_half_of_the_bytes(rows: float, layout: Layout) -> None:
    plan = default_plan([found("words", rows), dense("w", 4000)], 4)
    layouts = {name: bucket.scheme.traits.layout for bucket in plan.buckets for name in bucket.names}
    assert layouts == {"words": layout, "w": Layout.FLAT}
    by_layout = default_plan([found("words", rows), dense("w", 4000)], 4, by_layout=True)
    assert {bucket.scheme.traits.layout for bucket in by_layout.buckets} == {Layout.FLAT}


def test_a_plan_by_layout_is_tried_where_sparsity_was_found_and_only_there() -> None:
    by_layout = default_plan([found("words", 20.0)], 4, by_layout=True).digest
    assert by_layout in [plan.digest for plan in default_plans([found("words", 20.0)], 4)]
    assert default_plans([found("words", 20.0)], 4)[0].digest != by_layout
    assert len(default_plans([found("words", 900.0)], 4)) == len(default_plans([dense("words", 256_000)], 4))


def scattered(name: str, rows: float, elements: float, *, num_rows: int = 1000, dim: int = 64) -> ParameterProfile:
    """Returns the profile of a dense gradient with these shares of non-zero rows and elements, alike on all ranks."""
    profiles = [DensityProfile(size, share * size, {4: 1.0}) for size, share in ((num_rows, rows), (64_000, elements))]
    spec = TensorSpec((num_rows, dim), torch.float32)
    return ParameterProfile(name, spec, sparse=False, density=profiles[0], elements=profiles[1])


@pytest.mark.parametrize(
    ("rows", "elements", "scheme"),
    [
        (1.0, 0.1, BalancedElements(capacity=(9616, 9616))),  # zeros anywhere, as behind dead units
        (0.1, 0.1, None),  # whole rows: fewer positions
        (1.0, 0.6, AllReduce()),
        (0.5, 0.05, BalancedElements(capacity=(4816, 4816))),
    ],
)
def test_zeros_are_used_by_rows_or_by_elements_whichever_moves_fewer_bytes(
    rows: float, elements: float, scheme: Scheme[Any] | None
) -> None:
    profiles = [scattered("w", rows, elements), dense("b", 4000)]
    plan = default_plan(profiles, 4)
    plan.check({p.name: p.tensor for p in profiles}, 4)
    chosen = {name: bucket.scheme for bucket in plan.buckets for name in bucket.names}
    assert chosen["w"] == scheme if scheme is not None else chosen["w"].traits.layout is Layout.ROWS
    assert chosen["b"] == AllReduce()


def test_one_rank_searches_for_nothing() -> None:
    (plan,) = default_plans([found("words", 20.0)], 1)
    assert plan.buckets[0].scheme.traits.layout is Layout.FLAT


def test_measured_tables_have_room_for_their_rows_and_half_as_many_again() -> None:
    def density(rows: float, pattern: str = "", num_rows: int = 1000) -> DensityProfile:
        return DensityProfile(num_rows, rows, {4: 1.0}, pattern)

    known = [density(10.5, "a"), density(990.0), density(0.0), density(10.5, "a"), density(10.5), density(9.0, "b", 20)]
    scheme = BalancedParallelism(capacity=(32, 1000, 16, 32, 32, 20), same_rows=(0, 1, 2, 0, 4, 5))
    assert BalancedParallelism().planned_for(known) == scheme
    assert AGSparse().planned_for(known) == AGSparse(capacity=scheme.capacity, same_rows=scheme.same_rows)
    assert AllReduce().planned_for(known) == AllReduce()


def test_capacities_follow_the_order_of_the_tables_in_the_bucket_and_are_part_of_the_plan() -> None:
    """Buckets are in ready order, the reverse of the model's order."""
    early, middle, late = (
        replace(sparse(name, DensityProfile(1000, rows, {4: 1.0}, pattern)), position=position)
        for name, rows, pattern, position in (("early", 40.0, "x", 0), ("middle", 60.0, "y", 1), ("late", 40.0, "x", 2))
    )
    unmeasured = replace(late, density=None)
    plan = default_plan([late, middle, early], 4)
    assert names(plan) == [["middle", "early", "late"]]
    assert plan.buckets[0].scheme == BalancedParallelism(capacity=(106, 76, 76), same_rows=(0, 1, 1))
    assert [stage for _, stage in plan.order] == ["push", "pull"]
    assert Plan.from_json(plan.to_json()) == plan
    assert default_plan([unmeasured, middle, early], 4).buckets[0].scheme == BalancedParallelism()
