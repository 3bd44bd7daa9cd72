"""Balanced ownership of single elements: even loads, never more bytes than a ring, and what counts as zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gradsync.comm import Ledger, LocalGroup, Pending, RecordingGroup, drive, run_local
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import Pattern, Transfer, transfers
from gradsync.schemes import AllReduce, BalancedElements, Scheme, from_expression, to_expression
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.density import DensityProfile, profile_rows
from tests.schemes.family import Outcome, bits, run_scheme

SIZE = 1 << 20
NUM_RANKS = 8
SPARSE_STAGES = ["sizes", "push", "counts", "pull"]
DENSE_STAGES = ["sizes", "all_reduce"]


def normal(places: Tensor, numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zero but for normal numbers at these places."""
    x = torch.zeros(numel, dtype=dtype)
    x[places] = torch.randn(len(places), generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x


def random_places(density: float, numel: int, seed: int) -> Tensor:
    return (torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < density).nonzero().flatten()


def columns_of_2048(count: int) -> Tensor:
    columns = torch.arange(7, 2048, 2048 // count)[:count]
    return (torch.arange(SIZE // 2048)[:, None] * 2048 + columns).flatten()


def zipf_rows(dim: int, hits: int, seed: int) -> Tensor:
    """Elements of the rows that `hits` draws from a Zipf law over contiguous ranks touch."""
    weights = 1 / torch.arange(1, SIZE // dim + 1, dtype=torch.float64)
    drawn = torch.multinomial(weights, hits, replacement=True, generator=torch.Generator().manual_seed(seed)).unique()
    return (drawn[:, None] * dim + torch.arange(dim)).flatten()


PATTERNS: dict[str, Callable[[int], Tensor]] = {  # papers' shapes: the places of a rank's non-zeros
    "random, 1 %": lambda rank: random_places(0.01, SIZE, rank),
    "the first 2 %, dense": lambda rank: torch.arange(SIZE // 50),
    "another dense region on each rank": lambda rank: torch.arange(SIZE // 100) + rank * (SIZE // 10),
    "40 columns of 2048": lambda rank: columns_of_2048(40),
    "every 8th element": lambda rank: torch.arange(3, SIZE, NUM_RANKS),
    "every 16th element": lambda rank: torch.arange(5, SIZE, 2 * NUM_RANKS),
    "Zipf rows of 16": lambda rank: zipf_rows(16, 4000, rank),
}
LARGEST_IMBALANCE = 1.05  # max / mean; the deviation of a random share of ten thousand non-zeros is 1.2 % at 8 owners


class ReceivingGroup(RecordingGroup):
    """Also notes what comes in from the others in each all-to-all."""

    received_bytes = 0

    def all_to_all(
        self, buffer: Tensor, sent: Sequence[int], received: Sequence[int], *, largest: int | None = None
    ) -> Pending[list[Tensor]]:
        self.received_bytes += sum(received) - received[self.rank]
        return super().all_to_all(buffer, sent, received, largest=largest)


def loads(inputs: list[Tensor]) -> tuple[list[int], list[float]]:
    """Returns for each rank the bytes that came in with push, and the bytes that went out with pull."""

    def rank_main(group: LocalGroup) -> tuple[int, float]:
        recording = ReceivingGroup(group, Ledger())
        drive(BalancedElements().synchronize(inputs[group.rank].clone(), {}, recording, 1.0), timeout_s=20)
        return recording.received_bytes, recording.ledger.entries[-1].sent_bytes

    pushed, pulled = zip(*run_local(len(inputs), rank_main), strict=True)
    return list(pushed), list(pulled)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_pattern_loads_one_owner_in_push_or_pull(pattern: str) -> None:
    inputs = [normal(PATTERNS[pattern](rank), SIZE, rank) for rank in range(NUM_RANKS)]
    for load in loads(inputs):
        assert min(load) > 0, "nothing travelled"
        assert max(load) <= LARGEST_IMBALANCE * sum(load) / len(load)


@dataclass(frozen=True)
class Case:
    """`shared`: the ranks have the same non-zeros, else each its own."""

    density: float
    shared: bool
    dtype: torch.dtype

    def inputs(self, size: int, numel: int) -> list[Tensor]:
        places = [random_places(self.density, numel, 0 if self.shared else rank) for rank in range(size)]
        return [normal(p, numel, rank, self.dtype) for rank, p in enumerate(places)]


def stages_of(outcome: Outcome) -> list[str]:
    """The stages that the ledgers show, which must be the same on every rank."""
    patterns = {tuple(entry.pattern for entry in ledger.entries) for ledger in outcome.ledgers}
    assert len(patterns) == 1
    return DENSE_STAGES if Pattern.ALL_REDUCE in patterns.pop() else SPARSE_STAGES


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shared", [True, False], ids=["same", "own"])
@pytest.mark.parametrize("density", [0.02, 0.3, 0.8, 0.9, 0.95, 1.0])
def test_no_density_moves_more_than_a_ring_and_the_sizes(
    density: float, shared: bool, dtype: torch.dtype, size: int
) -> None:
    numel = 20_011
    inputs = Case(density, shared, dtype).inputs(size, numel)
    outcome = run_scheme(BalancedElements(), inputs, 1 / size)
    ring = Transfer("", Pattern.ALL_REDUCE, (float(numel * dtype.itemsize),) * size)
    sizes_bytes = 8 * size * (size - 1)
    assert max(ledger.sent_bytes for ledger in outcome.ledgers) <= ring.sent_bytes(0) + sizes_bytes
    if density <= 0.8:  # positions included, push fills less than a part
        assert stages_of(outcome) == SPARSE_STAGES
    if density == 1.0:
        assert stages_of(outcome) == DENSE_STAGES


@pytest.mark.parametrize("size", [1, 2, 4])
def test_dense_data_takes_an_all_reduce_and_nothing_more_than_the_sizes(size: int) -> None:
    inputs = [torch.randn(5003, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    outcome, dense = (run_scheme(scheme, inputs, 1 / size) for scheme in (BalancedElements(), AllReduce()))
    for ledger, of_dense in zip(outcome.ledgers, dense.ledgers, strict=True):
        assert [entry.pattern for entry in ledger.entries] == [Pattern.ALL_GATHER, Pattern.ALL_REDUCE]
        assert ledger.sent_bytes == of_dense.sent_bytes + 8 * size * (size - 1)
    assert [bits(x) for x in outcome.results] == [bits(x) for x in dense.results]


def test_one_dense_rank_among_empty_ones_makes_all_switch() -> None:
    """The dense rank would otherwise send all its elements, and get all of them back, with positions."""
    inputs = [normal(torch.arange(5003 if rank == 2 else 0), 5003) for rank in range(4)]
    outcome = run_scheme(BalancedElements(), inputs, 1.0)
    assert stages_of(outcome) == DENSE_STAGES
    assert all(torch.equal(result, inputs[2]) for result in outcome.results)
    profile = profile_rows([x.nonzero().flatten() for x in inputs], 5003)
    steps = BalancedElements().steps((TensorSpec.of(inputs[0]),), (profile,), Placement.one_per_node(4))
    assert [transfer.stage for transfer in transfers(steps)] == DENSE_STAGES


def test_without_a_profile_the_all_reduce_is_predicted() -> None:
    specs, placement = (TensorSpec((5003,), torch.float32),), Placement.one_per_node(4)
    steps = transfers(BalancedElements().steps(specs, (), placement))
    assert steps == [
        Transfer("sizes", Pattern.ALL_GATHER, (32.0,) * 4),
        *transfers(AllReduce().steps(specs, (), placement)),
    ]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("density", [0.0005, 0.01, 0.1, 0.5])
def test_bytes_of_each_stage_are_predicted_within_three_percent(density: float, size: int) -> None:
    numel = 400_003
    inputs = Case(density, False, torch.float32).inputs(size, numel)
    profile = profile_rows([x.nonzero().flatten() for x in inputs], numel)
    expected = transfers(
        BalancedElements().steps((TensorSpec.of(inputs[0]),), (profile,), Placement.one_per_node(size))
    )
    assert [transfer.stage for transfer in expected] == SPARSE_STAGES
    entries = [ledger.entries for ledger in run_scheme(BalancedElements(), inputs, 1.0).ledgers]
    for number, transfer in enumerate(expected):
        sent = sum(of_rank[number].sent_bytes for of_rank in entries)
        tolerance = 0.03 if density > 0.001 else 0.15  # of two hundred non-zeros a rank
        assert sent == pytest.approx(sum(map(transfer.sent_bytes, range(transfer.size))), rel=tolerance)


def test_predicted_and_taken_way_agree_on_both_sides_of_the_switch() -> None:
    specs, placement = (TensorSpec((80_000,), torch.float32),), Placement.one_per_node(8)
    for density, expected in [(0.92, SPARSE_STAGES), (0.95, DENSE_STAGES)]:
        places = torch.arange(int(80_000 * density))  # whole runs: owners get exactly equal numbers
        profile = DensityProfile(80_000, float(len(places)))
        steps = transfers(BalancedElements().steps(specs, (profile,), placement))
        assert [transfer.stage for transfer in steps] == expected
        assert stages_of(run_scheme(BalancedElements(), [normal(places, 80_000) for _ in range(8)], 1.0)) == expected


def test_zeros_of_either_sign_stay_at_home_and_come_out_positive() -> None:
    inputs = [torch.full((1000,), -0.0) for _ in range(4)]
    inputs[1][7] = 3.0
    outcome = run_scheme(BalancedElements(), inputs, 1.0)
    assert sum(ledger.entries[1].sent_bytes for ledger in outcome.ledgers) <= 16  # one value with its position
    expected = torch.zeros(1000)
    expected[7] = 3.0
    assert all(bits(result) == bits(expected) for result in outcome.results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_everything_that_is_not_zero_travels(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), tiny, torch.finfo(dtype).max], dtype=dtype)
    for brings in range(3):
        inputs = [torch.zeros(4001, dtype=dtype) for _ in range(3)]
        inputs[brings][17::800] = special
        outcome = run_scheme(BalancedElements(), inputs, 1.0)
        assert stages_of(outcome) == SPARSE_STAGES
        for result in outcome.results:
            torch.testing.assert_close(result, inputs[brings], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "large", "rounded"),
    [(torch.bfloat16, 256.0, 264.0), (torch.float16, 2048.0, 2056.0)],
    ids=["bfloat16", "float16"],
)
def test_elements_are_summed_in_float32(dtype: torch.dtype, large: float, rounded: float) -> None:
    inputs = [torch.zeros(500, dtype=dtype) for _ in range(8)]
    for rank, x in enumerate(inputs):
        x[3] = large if rank == 0 else 1.0
    outcome = run_scheme(BalancedElements(), inputs, 1.0)
    assert stages_of(outcome) == SPARSE_STAGES
    assert {float(result[3]) for result in outcome.results} == {rounded}


def test_a_float16_sum_of_few_elements_may_pass_the_range_that_its_mean_is_in() -> None:
    value = torch.finfo(torch.float16).max / 2
    inputs = [torch.zeros(500, dtype=torch.float16).index_fill_(0, torch.tensor([3]), value) for _ in range(8)]
    outcome = run_scheme(BalancedElements(), inputs, 1 / 8)
    assert stages_of(outcome) == SPARSE_STAGES
    assert all(torch.equal(result, inputs[0]) for result in outcome.results)


def test_the_seed_moves_owners_and_not_results() -> None:
    inputs = [normal(random_places(0.05, 30_011, rank), 30_011, rank) for rank in range(4)]
    first, second = (run_scheme(BalancedElements(seed=seed), inputs, 0.25) for seed in (0, 1))
    assert [bits(x) for x in first.results] == [bits(x) for x in second.results]
    assert [ledger.entries[1] for ledger in first.ledgers] != [ledger.entries[1] for ledger in second.ledgers]


def test_sums_are_in_rank_order_to_the_bit() -> None:
    places = random_places(0.05, 30_011, 5)
    inputs = [normal(places, 30_011, rank) for rank in range(5)]
    expected = torch.zeros(30_011)
    for x in inputs:
        expected += x
    assert bits(run_scheme(BalancedElements(), inputs, 1.0).results[0]) == bits(expected + 0.0)


def test_settings_round_trip_and_unknown_ones_are_refused() -> None:
    scheme = BalancedElements(seed=7, capacity=(40, 90))
    assert to_expression(scheme) == {"balanced_elements": {"owners": "rotated_stripe", "seed": 7, "capacity": [40, 90]}}
    assert from_expression(to_expression(scheme)) == scheme
    assert scheme.planned_for(()) == BalancedElements(seed=7)
    with pytest.raises(ValueError, match="owners must be 'rotated_stripe', got 'column_stripe'"):
        BalancedElements(owners="column_stripe")
    with pytest.raises(ValueError, match=r"seed must be a whole number, got 0\.5"):
        BalancedElements(seed=0.5)
    with pytest.raises(ValueError, match=r"capacity\.1 must be at least 0, got -1"):
        from_expression({"balanced_elements": {"capacity": [1, -1]}})
    with pytest.raises(ValueError, match=r"capacity must be two numbers, .* or none, got \[5\]"):
        BalancedElements(capacity=(5,))


def planned(inputs: Sequence[Tensor]) -> Scheme[Tensor]:
    numel = inputs[0].numel()
    return BalancedElements().planned_for([profile_rows([x.nonzero().flatten() for x in inputs], numel)])


def awaits_of(outcome: Outcome) -> list[Pattern]:
    """The patterns of all collectives, which must be the same on every rank."""
    (patterns,) = {tuple(entry.pattern for entry in ledger.entries) for ledger in outcome.ledgers}
    return list(patterns)


AT_ONCE = [Pattern.ALL_TO_ALL] * 2  # push and pull
ALL_REDUCED = [Pattern.ALL_TO_ALL, Pattern.ALL_REDUCE]
PUSHED_AGAIN = [Pattern.ALL_TO_ALL] * 3
PULLED_AGAIN = [Pattern.ALL_TO_ALL, Pattern.ALL_TO_ALL, Pattern.ALL_GATHER]
BOTH_AGAIN = [*PUSHED_AGAIN, Pattern.ALL_GATHER]


@pytest.mark.parametrize(
    ("densities", "expected"),
    [
        ((0.0, 0.0, 0.0, 0.0), AT_ONCE),
        ((0.01, 0.01, 0.01, 0.01), AT_ONCE),
        ((0.0, 0.0, 0.05, 0.0), PUSHED_AGAIN),  # rank 2 alone keeps its elements back; the union is as expected
        ((0.3, 0.3, 0.3, 0.3), BOTH_AGAIN),
        ((0.0, 1.0, 0.0, 0.0), ALL_REDUCED),
        ((1.0, 1.0, 1.0, 1.0), ALL_REDUCED),
    ],
    ids=str,
)
def test_whatever_a_plan_did_not_expect_gives_the_same_bits(
    densities: tuple[float, ...], expected: list[Pattern]
) -> None:
    """Planned for 1 %, on four ranks that touch different elements."""
    numel = 20_011
    scheme = planned(Case(0.01, False, torch.float32).inputs(4, numel))
    inputs = [normal(random_places(d, numel, rank), numel, rank) for rank, d in enumerate(densities)]
    outcome, asking = run_scheme(scheme, inputs, 0.25), run_scheme(BalancedElements(), inputs, 0.25)
    assert awaits_of(outcome) == expected
    assert [bits(x) for x in outcome.results] == [bits(x) for x in asking.results]
    if expected is PUSHED_AGAIN:
        heads = [ledger.entries[0].sent_bytes == 3 * (8 + 8 * 4) for ledger in outcome.ledgers]
        assert heads == [True] * 4, "empty ones have nothing, rank 2 keeps it"


def test_a_union_that_a_plan_did_not_expect_is_pulled_again() -> None:
    """The ranks were the same when they were measured, and now are not."""
    numel = 20_011
    scheme = planned(Case(0.02, True, torch.float32).inputs(8, numel))
    inputs = Case(0.02, False, torch.float32).inputs(8, numel)
    outcome, asking = run_scheme(scheme, inputs, 1.0), run_scheme(BalancedElements(), inputs, 1.0)
    assert awaits_of(outcome) == PULLED_AGAIN
    assert [bits(x) for x in outcome.results] == [bits(x) for x in asking.results]


SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-45)


def any_density(kinds: Sequence[type[Scheme[Tensor]]]) -> Callable[[], None]:
    """Returns a test of schemes that are planned for one density and meet others."""

    @given(
        kind=st.sampled_from(kinds),
        numel=st.integers(0, 400),
        expected=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
        densities=st.lists(st.sampled_from([0.0, 0.01, 0.2, 1.0]), min_size=1, max_size=4),
        stride=st.sampled_from([1, 2, 4, 64]),
        special=st.lists(st.tuples(st.integers(0, 399), st.sampled_from(SPECIAL)), max_size=3),
        seed=st.integers(0, 2**32),
    )
    @settings(max_examples=100, deadline=None)
    def test_any_density_may_follow_any_other(
        kind: type[Scheme[Tensor]],
        numel: int,
        expected: float,
        densities: list[float],
        stride: int,
        special: list[tuple[int, float]],
        seed: int,
    ) -> None:
        """Ranks have densities in any order, values that are not finite, and strides that a bad map gives one owner."""
        scheme = kind().planned_for([DensityProfile(numel, expected * numel, {len(densities): 1.0})])
        inputs = [
            normal(random_places(d, numel, seed + r) // stride * stride, numel, r) for r, d in enumerate(densities)
        ]
        for place, value in special:
            inputs[place % len(inputs)][place % max(numel, 1) :][:1] = value
        outcome = run_scheme(scheme, inputs, 0.5)
        total = sum(inputs[1:], inputs[0]) * 0.5 + 0.0
        for result in outcome.results:
            torch.testing.assert_close(result, total, rtol=1e-6, atol=1e-44, equal_nan=True)
            assert bits(result.nan_to_num(0.0)) == bits(outcome.results[0].nan_to_num(0.0))
        finite = total.isfinite()
        if Pattern.ALL_REDUCE not in awaits_of(outcome):  # adds as the transport does
            assert bits(outcome.results[0][finite]) == bits(total[finite])

    return test_any_density_may_follow_any_other


test_any_density_may_follow_any_other = any_density([BalancedElements])


@pytest.mark.parametrize("density", [0.02, 0.5, 0.9, 0.95, 1.0])
def test_with_room_no_density_moves_more_than_a_ring_and_the_counts(density: float) -> None:
    numel, size = 20_011, 4
    inputs = Case(density, False, torch.float32).inputs(size, numel)
    outcome = run_scheme(planned(inputs), inputs, 1.0)
    ring = Transfer("", Pattern.ALL_REDUCE, (4.0 * numel,) * size)
    heads_bytes = (size - 1) * (8 + 8 * size + 16)
    assert max(ledger.sent_bytes for ledger in outcome.ledgers) <= ring.sent_bytes(0) + heads_bytes
    assert awaits_of(outcome) == (AT_ONCE if density <= 0.9 else ALL_REDUCED)
