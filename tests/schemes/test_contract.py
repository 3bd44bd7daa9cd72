"""The promises of every scheme, tested on ranks as threads. A new scheme is one row in `family.MEMBERS`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from gradsync.comm import GroupError, LocalGroup, drive, run_local
from gradsync.costs.cluster import Placement
from gradsync.schemes import BalancedParallelism, CoarseGrained, PowerSGD, Shuffled, registered
from gradsync.schemes.compressed import Compressed
from gradsync.schemes.points import SMALLEST
from gradsync.tensors.bucket import Layout, TensorSpec
from gradsync.tensors.density import DensityProfile
from gradsync.tensors.index_formats import SPARSE_FORMATS, IndexFormat
from gradsync.tensors.sparse import SparseRows
from tests.schemes.contract import DTYPES, REPEAT, contract, largest_group, name_of, predicted, received_bytes, runs
from tests.schemes.family import (
    ALL_MEMBERS,
    CASES,
    MEMBERS,
    NESTED_MEMBERS,
    POINT_MEMBERS,
    ROUNDED_MEMBERS,
    ROW_MEMBERS,
    SIZES,
    Member,
    Outcome,
    Tables,
    assert_is_scaled_sum,
    bits,
    make_inputs,
    mean_of,
    replayed_bytes,
    run,
    run_scheme,
)

pytestmark = pytest.mark.usefixtures("stale_memory")

BALANCED = [member for member in MEMBERS if member.scheme.name == BalancedParallelism.name]
every_row_member = pytest.mark.parametrize("member", ROW_MEMBERS, ids=name_of)
every_size = pytest.mark.parametrize("size", SIZES)
every_size_and_dtype = pytest.mark.parametrize(
    ("size", "dtype"), [(size, dtype) for size in SIZES for dtype in (DTYPES if size == 3 else DTYPES[:1])]
)

globals().update(contract(MEMBERS, [*POINT_MEMBERS, *NESTED_MEMBERS, *ROUNDED_MEMBERS]))


def test_every_registered_scheme_is_a_row_of_the_table() -> None:
    """Schemes that lose more than a rounding, or average groups, have contracts of their own."""
    others = (Compressed, PowerSGD, CoarseGrained, Shuffled)
    builtin = {
        name
        for name, scheme in registered().items()
        if scheme.__module__.startswith("gradsync.") and not issubclass(scheme, others)
    }
    assert {member.scheme.name for member in ALL_MEMBERS} == builtin


@runs(NESTED_MEMBERS)
def test_ranks_of_all_nodes_have_as_many_turns_whatever_their_data(member: Member, case: str, size: int) -> None:
    """Each issues what the steps say of its own groups; where its data needs fewer rounds the last turns are empty."""
    inputs = make_inputs(member.scheme, case, size, torch.float32)
    outcome, expected = mean_of(member, case, size, torch.float32), predicted(member, inputs)
    alone = not member.placement(size).is_hierarchy
    turns = len(expected) if alone else len(member.planned(inputs).stages(size))
    assert outcome.awaits == [turns] * size
    for rank, ledger in enumerate(outcome.ledgers):
        own = [t for t in expected if alone or rank in (place for group in t.groups for place in group)]
        assert [entry.pattern for entry in ledger.entries] == [transfer.pattern for transfer in own]
        if not alone:
            assert [entry.inside for entry in ledger.entries] == [t.stage.startswith("node") for t in own]


@runs([m for m in POINT_MEMBERS if m.scheme.push_format == SMALLEST], dtypes=True)
def test_points_send_what_their_schedule_says_of_these_rows(
    member: Member, case: str, size: int, dtype: torch.dtype
) -> None:
    """Bytes agree on every rank, without an expectation of the data."""
    scheme = member.scheme
    expected = replayed_bytes(scheme, make_inputs(scheme, case, size, dtype))
    assert [ledger.sent_bytes for ledger in mean_of(member, case, size, dtype).ledgers] == expected


@pytest.mark.parametrize(
    "member", [m for m in POINT_MEMBERS if m.skewed and m.scheme.traits.layout is Layout.ROWS], ids=name_of
)
def test_steps_know_who_sends_most_where_rows_lie_together(member: Member) -> None:
    def brought(rank: int) -> Tables:
        drawn = torch.rand(2000, generator=torch.Generator().manual_seed(rank)) ** 4
        return (SparseRows((5000 * drawn).long(), torch.ones(2000, 16), 5000),)

    inputs = [brought(rank) for rank in range(5)]
    recorded = [ledger.sent_bytes for ledger in run(member, inputs, 1.0).ledgers]
    expected = predicted(member, inputs)
    sent = [sum(transfer.sent_bytes(rank) for transfer in expected) for rank in range(5)]
    assert max(recorded) > 1.07 * sum(recorded) / 5, "the case must be skewed"
    assert sent == pytest.approx(recorded, rel=0.05)


@every_size_and_dtype
@every_row_member
def test_recorded_bytes_are_exact_where_nothing_is_padded(member: Member, size: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(member.scheme, "aligned", size, dtype)
    outcome = mean_of(member, "aligned", size, dtype)
    for rank, ledger in enumerate(outcome.ledgers):
        expected = [transfer.sent_bytes(rank) for transfer in predicted(member, inputs)]
        assert [entry.sent_bytes for entry in ledger.entries] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("dtype", "large", "rounded"),
    [(torch.bfloat16, 256.0, {4: 260.0, 8: 264.0}), (torch.float16, 2048.0, {4: 2052.0, 8: 2056.0})],
    ids=["bfloat16", "float16"],
)
@pytest.mark.parametrize("member", [m for m in ALL_MEMBERS if m.scheme.traits.layout is Layout.ROWS], ids=name_of)
def test_rows_are_summed_in_float32(
    member: Member, dtype: torch.dtype, large: float, rounded: dict[int, float]
) -> None:
    size = largest_group(member)

    def brought(rank: int) -> Tables:
        value = torch.full((1, 2), large if rank == 0 else 1.0, dtype=dtype)
        return (SparseRows(torch.tensor([3]), value, 5),)

    naive = torch.tensor(large, dtype=dtype)
    for _ in range(size - 1):
        naive += torch.tensor(1.0, dtype=dtype)
    assert naive == large, "the case must tell the two sums apart"
    for (result,) in run(member, [brought(rank) for rank in range(size)], 1.0).results:
        assert result.values.tolist() == [[rounded[size]] * 2]


@runs([m for m in ALL_MEMBERS if m.scheme.traits.layout is Layout.ROWS], sizes=(3,))
def test_rows_come_back_sorted_and_unique(member: Member, case: str, size: int) -> None:
    inputs = make_inputs(member.scheme, case, size, torch.float32)
    for result in mean_of(member, case, size, torch.float32).results:
        for position, table in enumerate(result):
            union = torch.unique(torch.cat([x[position].indices for x in inputs]))
            assert torch.equal(table.indices, union)


@every_size
@every_row_member
def test_a_table_is_present_if_any_rank_has_it(member: Member, size: int) -> None:
    def present(case: str) -> list[list[bool]]:
        return [[table.present for table in x] for x in mean_of(member, case, size, torch.float32).results]

    assert present("absent everywhere") == [[False]] * size
    assert present("no rows anywhere") == [[True]] * size
    assert present("rank 1 absent") == [[True]] * size
    assert present("one table absent") == [[False, True]] * size


@pytest.mark.parametrize("bad", [-1, 8])
@every_row_member
def test_an_index_outside_of_the_table_fails_on_every_rank(member: Member, bad: int) -> None:
    errors: dict[int, Exception] = {}

    def rank_main(group: LocalGroup) -> None:
        indices = torch.tensor([1, bad if group.rank == 1 else 2])
        rows = (SparseRows(indices, torch.ones(2, 4), 8),)
        try:
            drive(member.planned([rows] * 3).synchronize(rows, {}, group, 1.0), timeout_s=20)
        except Exception as error:
            errors[group.rank] = error
            raise

    with pytest.raises(ValueError, match=rf"index {bad} .*outside \[0, num_rows=8\)"):
        run_local(3, rank_main)
    assert sorted(errors) == [0, 1, 2]
    assert isinstance(errors[1], ValueError)
    assert all(isinstance(errors[r], GroupError) and f"index {bad}" in str(errors[r]) for r in (0, 2))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("member", BALANCED, ids=name_of)
def test_balanced_parallelism_gives_all_owners_equal_volumes_however_skewed_the_rows(member: Member, size: int) -> None:
    outcome: Outcome = run(member, make_inputs(member.scheme, "skewed", size, torch.float32), 1.0)
    pulled = [ledger.entries[-1].sent_bytes for ledger in outcome.ledgers]
    assert len(set(pulled)) == 1
    assert pulled[0] > 0
    for push in predicted(member, make_inputs(member.scheme, "skewed", size, torch.float32)):
        assert len({received_bytes(push, owner) for owner in range(size)}) == 1


@st.composite
def row_inputs(draw: st.DrawFn) -> list[Tables]:
    """Up to four ranks with up to three tables, any repetition and order of rows, tables absent here and there."""
    size, dtype = draw(st.integers(1, 4)), draw(st.sampled_from(DTYPES))
    shapes = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def one_table(num_rows: int, dim: int) -> SparseRows:
        if draw(st.booleans()) and draw(st.booleans()):
            return SparseRows.absent((num_rows, dim), dtype, torch.device("cpu"))
        indices = torch.tensor(draw(st.lists(st.integers(0, num_rows - 1), max_size=15)), dtype=torch.int64)
        return SparseRows(indices, torch.randn(len(indices), dim, generator=generator).to(dtype), num_rows)

    return [tuple(one_table(*shape) for shape in shapes) for _ in range(size)]


@every_row_member
@given(inputs=row_inputs(), scale=st.sampled_from([1.0, 0.25, 1 / 3, -2.0, 0.0]))
@settings(max_examples=60, deadline=None)
def test_any_rows_give_the_scaled_sum(member: Member, inputs: list[Tables], scale: float) -> None:
    outcome = run(member, inputs, scale)
    assert_is_scaled_sum(member, outcome.results, inputs, scale)
    assert all(bits(result) == bits(outcome.results[0]) for result in outcome.results)
    present = [any(x[i].present for x in inputs) for i in range(len(inputs[0]))]
    assert [table.present for table in outcome.results[0]] == present


@given(
    member=st.sampled_from([m for m in POINT_MEMBERS if m.scheme.traits.layout is Layout.ROWS]),
    formats=st.tuples(*[st.sampled_from([SMALLEST, *SPARSE_FORMATS])] * 2),
    inputs=row_inputs(),
    scale=st.sampled_from([1.0, 1 / 3, -2.0, 0.0]),
)
@settings(max_examples=300, deadline=None)
def test_any_rows_give_the_scaled_sum_at_any_point(
    member: Member, formats: tuple[str, str], inputs: list[Tables], scale: float
) -> None:
    push, pull = formats
    outcome = run_scheme(replace(member.scheme, push_format=push, pull_format=pull), inputs, scale)
    assert_is_scaled_sum(member, outcome.results, inputs, scale)
    assert all(bits(result) == bits(outcome.results[0]) for result in outcome.results)
    for position, table in enumerate(outcome.results[0]):
        assert table.present == any(x[position].present for x in inputs)
        assert torch.equal(table.indices, torch.unique(torch.cat([x[position].indices for x in inputs])))


@given(
    member=st.sampled_from([m for m in POINT_MEMBERS if m.scheme.traits.layout is Layout.FLAT]),
    formats=st.tuples(*[st.sampled_from([SMALLEST, *IndexFormat])] * 2),
    block=st.sampled_from([1, 1, 3, 256]),
    size=st.integers(1, 5),
    numel=st.integers(0, 300),
    densities=st.lists(st.sampled_from([0.0, 0.01, 0.2, 1.0]), min_size=5, max_size=5),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 1 / 3, -2.0, 0.0]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=300, deadline=None)
def test_any_flat_bucket_gives_the_scaled_sum_at_any_point(
    member: Member,
    formats: tuple[str, str],
    block: int,
    size: int,
    numel: int,
    densities: list[float],
    dtype: torch.dtype,
    scale: float,
    seed: int,
) -> None:
    """Ranks of very different densities: one with nothing, one with everything."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(numel, generator=generator).to(dtype) * (torch.rand(numel, generator=generator) < density)
        for density in densities[:size]
    ]
    scheme = replace(member.scheme, block=block, push_format=formats[0], pull_format=formats[1], seed=seed)
    outcome = run_scheme(scheme, inputs, scale)
    assert_is_scaled_sum(member, outcome.results, inputs, scale)
    assert all(bits(result) == bits(outcome.results[0]) for result in outcome.results)


@pytest.mark.parametrize(
    "member", [m for m in POINT_MEMBERS if m.scheme.traits.layout is Layout.FLAT], ids=lambda m: m.title
)
def test_zeros_that_travelled_dense_have_the_sign_of_those_that_did_not(member: Member) -> None:
    inputs = [torch.tensor(x) for x in ([0.0, -0.0, -0.0], [0.0, 0.0, 0.0], [-0.0, 1.0, 0.5])]
    outcome = run_scheme(member.scheme, inputs, -2.0)
    assert all(bits(result) == bits(outcome.results[0]) for result in outcome.results)


def test_steps_take_any_table_shape() -> None:
    """Tables with more than two dimensions, or one, have the elements of a row as their columns."""
    absent = SparseRows.absent((30, 12), torch.float32, torch.device("cpu"))
    for scheme in (member.planned([(absent,)]) for member in ROW_MEMBERS):
        flat = scheme.steps(
            (TensorSpec((30, 12), torch.float32),), (DensityProfile(30, 5.0),), Placement.one_per_node(4)
        )
        shaped = scheme.steps(
            (TensorSpec((30, 3, 4), torch.float32),), (DensityProfile(30, 5.0),), Placement.one_per_node(4)
        )
        assert flat == shaped


def tight(inputs: list[Tables]) -> BalancedParallelism:
    """Room for the rank with the fewest rows."""
    rows = [min(len(torch.unique(t.indices)) for t in column) for column in zip(*inputs, strict=True)]
    return BalancedParallelism(capacity=tuple(rows), same_rows=tuple(range(len(rows))))


def mistaken(inputs: list[Tables]) -> BalancedParallelism:
    """Room for all, but tables of a length are taken to have the same rows."""
    rows = [table.num_rows for table in inputs[0]]
    return BalancedParallelism(capacity=tuple(rows), same_rows=tuple(rows.index(count) for count in rows))


@pytest.mark.parametrize("plan", [tight, mistaken])
@pytest.mark.parametrize(
    ("case", "size"), [(c, n) for turn, c in enumerate(CASES[Layout.ROWS]) for n in (3, (1, 2, 4, 8)[turn % 4])]
)
def test_rows_that_a_plan_did_not_expect_give_the_same_bits(size: int, case: str, plan: Any) -> None:
    (asking, *_) = BALANCED
    inputs = make_inputs(asking.scheme, case, size, torch.float32)
    outcome = run(replace(asking, plan=plan), inputs, 1 / size)
    assert [bits(x) for x in outcome.results] == [bits(x) for x in mean_of(asking, case, size, torch.float32).results]
    assert set(outcome.awaits) in ({2}, {3}), "all ranks decide alike"


@pytest.mark.parametrize("plan", [tight, mistaken])
def test_only_ranks_whose_rows_do_not_fit_keep_them_back(plan: Any) -> None:
    """`tight`: rank r brings 10 + r rows. `mistaken`: rank 1 has other rows in one table."""
    (asking, *_) = BALANCED
    case = "uniform" if plan is tight else "the same rows on some ranks"
    inputs = make_inputs(asking.scheme, case, 3, torch.float32)
    member = replace(asking, plan=plan)
    outcome = run(member, inputs, 1.0)
    assert [transfer.stage for transfer in predicted(member, inputs)] == ["push", REPEAT, "pull"]
    header_alone = [ledger.entries[0].sent_bytes == 2 * (8 + 8 * len(inputs[0])) for ledger in outcome.ledgers]
    assert header_alone == ([False, True, True] if plan is tight else [False, True, False])
    assert outcome.awaits == [3] * 3


def test_tables_that_are_absent_together_keep_a_plan_for_common_rows() -> None:
    """Rank 1 did not use two tables that have the same rows elsewhere."""
    (asking, *_) = BALANCED
    present = make_inputs(asking.scheme, "two tables with the same rows", 1, torch.float32)[0]
    absent = tuple(SparseRows.absent((t.num_rows, t.dim), torch.float32, torch.device("cpu")) for t in present)
    inputs = [present, absent, present]
    outcome = run(replace(asking, plan=mistaken), inputs, 1.0)
    assert outcome.awaits == [2] * 3
    assert [bits(x) for x in outcome.results] == [bits(x) for x in run(asking, inputs, 1.0).results]


def test_a_scheme_planned_for_other_tables_is_refused() -> None:
    scheme = BalancedParallelism(capacity=(5,), same_rows=(0,))
    tables = make_inputs(scheme, "two tables", 1, torch.float32)[0]
    with pytest.raises(ValueError, match="planned for 1 tables, the bucket has 2"):
        drive(scheme.synchronize(tables, {}, LocalGroup.world(1)[0], 1.0), timeout_s=20)
