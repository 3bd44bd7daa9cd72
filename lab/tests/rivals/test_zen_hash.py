"""Zen as published pushes pairs out of hashed memory, pulls with hash bitmaps, and loses nothing where memory ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync import kernels
from gradsync.comm import Ledger, LocalGroup, RecordingGroup, drive, run_local
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import Pattern, transfers
from gradsync.engine.engine import Engine
from gradsync.kernels.hierarchy import HashMemory
from gradsync.plans.plan import Plan
from gradsync.schemes import AllReduce, BalancedElements, RowPoint, from_expression, hash_lists, to_expression
from gradsync.schemes.hash_lists import owned_by_hash
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.density import profile_rows
from gradsync.tensors.sparse import SparseRows
from gradsync_lab.rivals.zen_hash import HEAD_BYTES, ZenHash, expected_overflow
from tests.schemes.family import bits, mine, run_scheme

NUMEL, RANKS = 40_009, 4


@pytest.fixture(autouse=True)
def no_lists() -> None:
    """Forgets lists of earlier tests, whose groups may be garbage that was not collected yet."""
    hash_lists.forget()


def kept_nbytes() -> int:
    return sum(each.numel() * each.element_size() for lists in hash_lists._made.values() for each in lists.of_owners)


def sparse(density: float, rank: int, numel: int = NUMEL, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    chosen = torch.rand(numel, generator=generator) < density
    return (torch.randn(numel, generator=generator) * chosen).to(dtype)


def planned(density: float) -> ZenHash:
    scheme = ZenHash().planned_for([profile_rows([sparse(density, 0).nonzero().flatten()], NUMEL)])
    assert isinstance(scheme, ZenHash)
    assert scheme.expected > 0
    return scheme


@pytest.mark.parametrize(
    ("densities", "collectives"),
    [
        ((0.01, 0.01, 0.01, 0.01), 2),
        ((0.0, 0.0, 0.0, 0.0), 2),
        ((0.0, 0.0, 0.2, 0.0), 3),  # one rank's indices do not all find a place
        ((1.0, 1.0, 1.0, 1.0), 3),
    ],
    ids=str,
)
def test_a_density_that_jumps_out_of_the_memory_loses_nothing(densities: tuple[float, ...], collectives: int) -> None:
    """The bits equal those of sums in rank order, whatever the slots."""
    inputs = [sparse(density, rank) for rank, density in enumerate(densities)]
    outcome = run_scheme(planned(0.01), inputs, 0.25)
    expected = sum(inputs[1:], inputs[0]) * 0.25 + 0.0
    assert all(bits(result) == bits(expected) for result in outcome.results)
    assert all(
        [entry.pattern for entry in each.entries] == [Pattern.MESSAGES] * collectives for each in outcome.ledgers
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_have_the_bits_of_our_own_owners(dtype: torch.dtype) -> None:
    inputs = [sparse(0.03, rank, dtype=dtype) for rank in range(RANKS)]
    ours, theirs = (run_scheme(scheme, inputs, 1 / RANKS) for scheme in (BalancedElements(), ZenHash(seed=3)))
    assert [bits(x) for x in theirs.results] == [bits(x) for x in ours.results]


def test_bytes_are_pairs_of_what_others_own_and_a_bit_for_each_element_they_may_own() -> None:
    """Bytes are exact: bitmaps in words of 64 bits, all lengths in multiples of 8 bytes."""
    inputs = [sparse(0.03, rank, dtype=torch.bfloat16) for rank in range(RANKS)]
    owned = kernels.owned_by_hash(NUMEL, RANKS, 0)
    ledgers = run_scheme(ZenHash(), inputs, 1.0).ledgers

    def aligned(nbytes: int) -> int:
        return -(-nbytes // 8) * 8

    for rank, x in enumerate(inputs):
        counts = [int(x[of.long()].count_nonzero()) for owner, of in enumerate(owned) if owner != rank]
        pushed = sum(HEAD_BYTES + aligned(4 * count) + aligned(2 * count) for count in counts)
        union = int(sum((y[owned[rank].long()] != 0).int() for y in inputs).count_nonzero())
        pulled = HEAD_BYTES + -(-len(owned[rank]) // 64) * 8 + aligned(2 * union)
        assert [entry.sent_bytes for entry in ledgers[rank].entries] == [pushed, (RANKS - 1) * pulled]


@pytest.mark.parametrize("density", [0.03, 0.2, 1.0])
def test_the_round_for_what_had_no_place_is_predicted(density: float) -> None:
    inputs = [sparse(density, rank) for rank in range(RANKS)]
    profile = profile_rows([x.nonzero().flatten() for x in inputs], NUMEL)
    steps = planned(0.01).steps((TensorSpec.of(inputs[0]),), (profile,), Placement.one_per_node(RANKS))
    ledgers = run_scheme(planned(0.01), inputs, 1.0).ledgers
    for number, transfer in enumerate(transfers(steps)):
        sent = sum(ledger.entries[number].sent_bytes for ledger in ledgers)
        assert sent == pytest.approx(sum(map(transfer.sent_bytes, range(transfer.size))), rel=0.05)
    assert [transfer.stage for transfer in transfers(steps)] == ["push", "repeat", "pull"]


@pytest.mark.parametrize(("slots", "share"), [(1000, 0.198), (2000, 0.042), (3000, 0.015), (4000, 0.007)])
def test_the_share_that_no_rehash_has_a_slot_for_is_that_of_rounds(slots: int, share: float) -> None:
    assert expected_overflow(1000.0, HashMemory(slots, 0)) / 1000 == pytest.approx(share, abs=0.002)
    assert expected_overflow(1000.0, HashMemory(slots, 250)) == 0


@pytest.mark.parametrize("expected", [0, 5000])
def test_memory_is_counted_with_the_lists(expected: int) -> None:
    """Most memory goes to the lists at 1 % density; the paper's figure leaves lists out."""
    scheme, indices = ZenHash(expected=expected), sparse(0.01, 0).nonzero().flatten().int()
    hashed, owned = scheme._hash(indices, RANKS), kernels.owned_by_hash(NUMEL, RANKS, 0)
    lists = sum(each.numel() * each.element_size() for each in owned)
    assert lists == 4 * NUMEL > hashed.nbytes


def test_lists_are_made_once_and_go_with_the_last_group_they_are_kept_for() -> None:
    cpu = torch.device("cpu")
    ours, theirs = (RecordingGroup(LocalGroup.world(1)[0], Ledger()) for _ in range(2))
    first = owned_by_hash(1001, 4, 0, cpu, kept_for=ours)
    owned_by_hash(1001, 4, 1, cpu, kept_for=ours)
    assert owned_by_hash(1001, 4, 0, cpu, kept_for=theirs) is first
    assert kept_nbytes() == 2 * 4004
    del ours
    assert kept_nbytes() == 4004, "the other seed's were for nobody else"
    assert owned_by_hash(1001, 4, 0, cpu) is first
    del theirs
    assert kept_nbytes() == 0


def table_of(x: Tensor) -> tuple[SparseRows, ...]:
    return (SparseRows.from_dense(x.view(-1, 1)),)


@pytest.mark.parametrize(
    ("scheme", "x"),
    [(ZenHash(), sparse(0.1, 0, 1013)), (RowPoint(owners="hash"), table_of(sparse(0.1, 0, 1013)))],
    ids=["elements", "rows"],
)
def test_lists_are_made_in_the_first_step_alone(scheme: Any, x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], kernels.owned_by_hash
    monkeypatch.setattr(kernels, "owned_by_hash", lambda *key, **device: made.append(key) or make(*key, **device))

    def three_steps(group: LocalGroup) -> None:
        recording = RecordingGroup(group, Ledger())
        for _ in range(3):
            drive(scheme.synchronize(mine(x), {}, recording, 1.0), timeout_s=20)

    run_local(2, three_steps)
    assert made == [(1013, 2, 0)]


def engine_of(plan: Any, numel: int) -> Engine:
    return Engine({"weight": torch.zeros(numel)}, LocalGroup.world(1)[0], plan, timeout_s=5)


def step(engine: Engine) -> None:
    engine.begin()
    engine.load("weight", torch.ones(engine.specs["weight"].numel))
    engine.finish()


def plan_with(scheme: Any, numel: int) -> Plan:
    return Plan.make({"weight": TensorSpec((numel,), torch.float32)}, 1, [(["weight"], scheme)])


def test_lists_go_when_the_last_engine_that_runs_such_a_plan_is_closed() -> None:
    first, second = (engine_of(plan_with(ZenHash(), 1019), 1019) for _ in range(2))
    step(first)
    lists = kept_nbytes()
    assert lists >= 4 * 1019
    step(second)
    assert kept_nbytes() == lists, "both read the same"
    first.close()
    step(second)
    assert kept_nbytes() == lists
    second.close()
    assert kept_nbytes() == 0


def test_lists_go_with_the_plan_that_needed_them() -> None:
    plans = iter([ZenHash(), AllReduce()])
    engine = engine_of(lambda profiles, world_size: plan_with(next(plans), 1021), 1021)
    step(engine)
    assert kept_nbytes() >= 4 * 1021
    step(engine)
    assert kept_nbytes() == 0
    engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 0.5}, r"seed must be a whole number, got 0\.5"),
        ({"expected": -1}, "expected must be at least 0, got -1"),
        ({"expected": True}, "expected must be a whole number, got True"),
    ],
)
def test_settings_that_are_none_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ZenHash(**settings)


def test_plans_name_it_as_the_records_do() -> None:
    assert to_expression(ZenHash(expected=7)) == {"zen_hash": {"seed": 0, "expected": 7}}
    assert from_expression({"zen_hash": {"expected": 7}}).planned_for(()) == ZenHash()
