"""The plan nobody asked for: complete, deterministic, in the order of readiness, and by the fewest bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from gradsync.bucket import Layout, TensorSpec
from gradsync.comm import Ledger, LocalGroup, RecordingGroup, drive, run_local
from gradsync.density import DensityProfile, ParameterProfile, profile_rows
from gradsync.plan import Plan
from gradsync.planner import default_plan, default_plans
from gradsync.planner.default import SPARSE_SCHEMES, cheapest_sparse_scheme
from gradsync.schemes import AGSparse, BalancedParallelism
from gradsync.sparse import SparseRows

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
@settings(deadline=None)
def test_every_parameter_is_covered_once_and_the_plan_repeats(parameters: list[ParameterProfile], world: int) -> None:
    plan = default_plan(parameters, world)
    plan.check({p.name: p.tensor for p in parameters}, world)  # raises for what is left out or covered twice
    assert default_plan(list(parameters), world).digest == plan.digest
    layouts = {name: bucket.make_scheme().layout for bucket in plan.buckets for name in bucket.names}
    assert layouts == {p.name: Layout.ROWS if p.sparse else Layout.FLAT for p in parameters}


def test_dense_buckets_are_cut_as_ddp_cuts_them() -> None:
    parameters = [dense(f"p{i}", 512 << 10) for i in range(60)]  # 0.5 MiB each
    assert [len(bucket) for bucket in names(default_plan(parameters, 4))] == [2, 50, 8]
    assert names(default_plan([dense("huge", 100 * MIB), dense("last", 4)], 4)) == [["last"], ["huge"]]


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
    assert [next(iter(bucket.scheme)) for bucket in plan.buckets] == ["all_reduce", *["balanced_parallelism"] * 2]


def placed(profile: ParameterProfile, position: int, pattern: str = "") -> ParameterProfile:
    density = DensityProfile(1000, 50.0, pattern=pattern) if profile.sparse else None
    return replace(profile, position=position, density=density)


def test_tables_ready_before_dense_parameters_are_exchanged_at_once() -> None:
    """A language model: the table of scores is ready first, the table of words last."""
    parameters = [placed(sparse("words"), 3), placed(dense("lstm", 8), 2), placed(sparse("scores"), 0)]
    plan, between, at_the_end = default_plans(parameters, 4)
    assert names(plan) == [["scores"], ["lstm"], ["words"]]
    turns = [(plan.buckets[int(bucket)].names[0], stage) for bucket, stage in plan.order]
    stages = plan.buckets[0].make_scheme().stages
    assert turns == [*(("scores", s) for s in stages), ("lstm", "all_reduce"), *(("words", s) for s in stages)]
    assert names(at_the_end) == [["lstm"], ["scores", "words"]]
    assert between.buckets == plan.buckets
    ends = [turn for turn in between.order if turn[0] != "0"]
    assert ends == [*(("2", s) for s in stages[:-1]), ("1", "all_reduce"), ("2", stages[-1])]


def test_tables_with_the_same_rows_stay_together_where_the_last_of_them_is_ready() -> None:
    early, late = placed(sparse("early"), 0, "a"), placed(sparse("late"), 2, "a")
    assert names(default_plan([late, placed(dense("w", 8), 1), early], 4)) == [["w"], ["early", "late"]]


def test_without_measurements_the_first_sparse_scheme_is_taken() -> None:
    assert cheapest_sparse_scheme([sparse("t", DensityProfile(1000, 5.0)), sparse("u")], 2) == BalancedParallelism()


def counted_bytes(scheme: AGSparse | BalancedParallelism, tables: Sequence[Sequence[torch.Tensor]], dim: int) -> float:
    """What the busiest rank really sends: `tables[rank]` are its row indices, a table each."""

    def rank_main(group: LocalGroup) -> float:
        ledger = Ledger()
        x = tuple(SparseRows(rows, torch.ones(len(rows), dim), 1000) for rows in tables[group.rank])
        drive(scheme.synchronize(x, {}, RecordingGroup(group, ledger), 1.0), timeout_s=20)
        return ledger.sent_bytes

    return max(run_local(len(tables), rank_main))


@pytest.mark.parametrize(
    ("world", "stride", "expected"),
    [
        (2, 100, AGSparse()),
        (2, 50, AGSparse()),
        (2, 0, BalancedParallelism()),  # a tie: the first
        (8, 100, AGSparse()),  # nothing to merge, so owners would send everything twice
        (8, 50, BalancedParallelism()),
        (8, 0, BalancedParallelism()),
    ],
)
def test_the_scheme_that_is_chosen_is_the_one_that_sends_fewest_bytes(
    world: int, stride: int, expected: AGSparse | BalancedParallelism
) -> None:
    rows = [torch.arange(100) + stride * rank for rank in range(world)]
    chosen = cheapest_sparse_scheme([sparse("t", profile_rows(rows, 1000))], world)
    counted = {scheme: counted_bytes(scheme, [[r] for r in rows], 16) for scheme in SPARSE_SCHEMES}
    assert chosen == min(counted, key=lambda scheme: counted[scheme])
    assert chosen == expected


def found(name: str, rows: float, *, num_rows: int = 1000, dim: int = 64) -> ParameterProfile:
    """A table with dense gradients, of which a rank was seen to fill `rows` rows."""
    density = DensityProfile(num_rows, rows, {4: 1.5})
    return ParameterProfile(name, TensorSpec((num_rows, dim), torch.float32), sparse=False, density=density)


@pytest.mark.parametrize(("rows", "layout"), [(20.0, Layout.ROWS), (250.0, Layout.ROWS), (450.0, Layout.FLAT)])
def test_a_dense_gradient_is_exchanged_by_rows_if_that_saves_half_of_the_bytes(rows: float, layout: Layout) -> None:
    plan = default_plan([found("words", rows), dense("w", 4000)], 4)
    layouts = {name: bucket.make_scheme().layout for bucket in plan.buckets for name in bucket.names}
    assert layouts == {"words": layout, "w": Layout.FLAT}
    by_layout = default_plan([found("words", rows), dense("w", 4000)], 4, by_layout=True)
    assert {bucket.make_scheme().layout for bucket in by_layout.buckets} == {Layout.FLAT}


def test_a_plan_by_layout_is_tried_where_sparsity_was_found_and_only_there() -> None:
    by_layout = default_plan([found("words", 20.0)], 4, by_layout=True).digest
    assert by_layout in [plan.digest for plan in default_plans([found("words", 20.0)], 4)]
    assert default_plans([found("words", 20.0)], 4)[0].digest != by_layout
    assert len(default_plans([found("words", 900.0)], 4)) == len(default_plans([dense("words", 256_000)], 4))


def test_one_rank_searches_for_nothing() -> None:
    (plan,) = default_plans([found("words", 20.0)], 1)
    assert plan.buckets[0].make_scheme().layout is Layout.FLAT
