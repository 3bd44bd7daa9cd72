"""The design space: its points, their schedules, and the volumes that Zen (OSDI 2025) gives for them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gradsync.schemes import (
    POINTS,
    Aggregation,
    Balance,
    Communication,
    ElementPoint,
    Partition,
    Point,
    RowPoint,
    from_expression,
)
from gradsync.schemes.points import NAMES
from gradsync.schemes.space import Message, PartialSum, Schedule, schedule

every_point = pytest.mark.parametrize("point", POINTS, ids=str)
SIZES = [1, 2, 3, 4, 5, 7, 8, 16]
POWERS = [2, 4, 8, 16]


def gamma(ranks: int) -> float:
    """A densification ratio for tests: neither 1 nor the number of ranks."""
    return float(ranks**0.6)


def rows_of(partials: Iterable[PartialSum], blocks: int) -> float:
    """Rows in a message, in those of one rank's tensor; parts are equally dense."""
    return sum(gamma(len(ranks)) / blocks for _, ranks in partials)


def busiest(plan: Schedule, stages: Iterable[str] | None = None) -> float:
    """Rows that the busiest rank receives."""
    received = [0.0] * plan.size
    for each in plan.rounds:
        for message in each.messages if stages is None or each.stage in stages else ():
            received[message.destination] += rows_of(message.partials, plan.blocks)
    return max(received)


def test_there_are_eighteen_points() -> None:
    assert len(set(POINTS)) == 18
    assert sum(point.partition is Partition.CENTRALIZATION for point in POINTS) == 6


@pytest.mark.parametrize("size", SIZES)
@every_point
def test_every_rank_ends_with_every_blocks_sum(point: Point, size: int) -> None:
    plan = schedule(point, size)
    everyone = tuple(range(size))
    held = [{(block, (rank,)) for block in range(plan.blocks)} for rank in everyone]
    for each in plan.rounds:
        sent: list[Message] = list(each.messages)
        for message in sent:
            assert message.source != message.destination
            assert set(message.partials) <= held[message.source], "nobody sends what it does not have"
        for message in sent:
            assert message.partials
            held[message.destination] |= set(message.partials)
        for merge in each.merges:
            counted = [rank for _, ranks in merge.partials for rank in ranks]
            assert len(counted) == len(set(counted)), "no rank's tensor is added twice"
            assert set(merge.partials) <= held[merge.rank]
            held[merge.rank] = held[merge.rank] - set(merge.partials) | {merge.sum}
    assert all((block, everyone) in partials for partials in held for block in range(plan.blocks))


@pytest.mark.parametrize("size", SIZES)
@every_point
def test_all_ranks_add_a_blocks_pieces_in_the_same_order(point: Point, size: int) -> None:
    """A sum that several ranks take for themselves is one of the same parts, in the same order: the same bits."""
    plan = schedule(point, size)
    taken: dict[PartialSum, set[tuple[PartialSum, ...]]] = {}
    for each in plan.rounds:
        for merge in each.merges:
            taken.setdefault(merge.sum, set()).add(merge.partials)
    assert len([partial for partial in taken if len(partial[1]) == size]) == plan.blocks
    assert all(len(orders) == 1 for orders in taken.values())


@pytest.mark.parametrize("size", SIZES)
@every_point
def test_pairs_never_send_each_other_two_messages_in_a_round(point: Point, size: int) -> None:
    for each in schedule(point, size).rounds:
        ways = [(message.source, message.destination) for message in each.messages]
        assert len(ways) == len(set(ways))


def point(
    communication: Communication, aggregation: Aggregation, partition: Partition = Partition.CENTRALIZATION
) -> Point:
    return Point(
        communication, aggregation, partition, Balance.BALANCED if partition is Partition.PARALLELISM else None
    )


@pytest.mark.parametrize("size", POWERS)
@pytest.mark.parametrize("communication", Communication)
def test_one_shot_centralization_receives_every_other_ranks_tensor(communication: Communication, size: int) -> None:
    plan = schedule(point(communication, Aggregation.ONE_SHOT), size)
    assert busiest(plan) == pytest.approx(size - 1)


@pytest.mark.parametrize("size", POWERS)
def test_hierarchical_centralization_has_the_papers_volume(size: int) -> None:
    """Zen, equation 2: the sum over i = 1 .. log2 n of gamma^(2^(i-1))."""
    plan = schedule(point(Communication.HIERARCHY, Aggregation.INCREMENTAL), size)
    assert len(plan.rounds) == size.bit_length() - 1
    assert busiest(plan) == pytest.approx(sum(gamma(1 << i) for i in range(size.bit_length() - 1)))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_chain_of_partial_sums_moves_less_than_partial_sums_all_round(size: int) -> None:
    plan = schedule(point(Communication.RING, Aggregation.INCREMENTAL), size)
    assert busiest(plan) <= gamma(size - 1) + gamma(size)
    assert len(plan.rounds) == 2 * (size - 1)


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("aggregation", Aggregation)
def test_balanced_parallelism_has_the_papers_volume(aggregation: Aggregation, size: int) -> None:
    """Zen, equation 1: (n-1)/n of the rows in push, of the union in pull."""
    plan = schedule(point(Communication.POINT_TO_POINT, aggregation, Partition.PARALLELISM), size)
    assert busiest(plan, ["push"]) == pytest.approx((size - 1) / size)
    assert busiest(plan, ["pull"]) == pytest.approx((size - 1) / size * gamma(size))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_pushes_of_a_ring_have_the_papers_volumes(size: int) -> None:
    """Zen, appendix B: partial sums cost the sum of gamma^i / n. Concatenations come to (n-1)/2."""
    summed = schedule(point(Communication.RING, Aggregation.INCREMENTAL, Partition.PARALLELISM), size)
    assert busiest(summed, ["push"]) == pytest.approx(sum(gamma(i) for i in range(1, size)) / size)
    forwarded = schedule(point(Communication.RING, Aggregation.ONE_SHOT, Partition.PARALLELISM), size)
    assert busiest(forwarded, ["push"]) == pytest.approx((size - 1) / 2)


@pytest.mark.parametrize("size", POWERS)
def test_pushes_by_halving_have_their_volumes(size: int) -> None:
    steps = range(1, size.bit_length())
    summed = schedule(point(Communication.HIERARCHY, Aggregation.INCREMENTAL, Partition.PARALLELISM), size)
    assert busiest(summed, ["push"]) == pytest.approx(sum(2.0**-i * gamma(2 ** (i - 1)) for i in steps))
    forwarded = schedule(point(Communication.HIERARCHY, Aggregation.ONE_SHOT, Partition.PARALLELISM), size)
    assert busiest(forwarded, ["push"]) == pytest.approx(len(steps) / 2)


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
def test_a_split_all_gather_pushes_straight_and_pulls_in_pairs(size: int) -> None:
    """SparCML's: n-1 messages at once, then one in each of log2 n rounds; bytes as with a parameter server."""
    servers = Point(Communication.POINT_TO_POINT, Aggregation.ONE_SHOT, Partition.PARALLELISM, Balance.IMBALANCED)
    plan = schedule(servers, size, Communication.HIERARCHY)
    pulls = [each for each in plan.rounds if each.stage == "pull"]
    assert len(pulls) == (size - 1).bit_length()
    assert all(len(each.messages) == size for each in pulls)
    assert busiest(plan, ["push"]) == pytest.approx((size - 1) / size)
    assert busiest(plan, ["pull"]) == pytest.approx((size - 1) / size * gamma(size))


@pytest.mark.parametrize("pull_by", Communication)
@pytest.mark.parametrize("communication", Communication)
def test_sums_may_go_any_way_to_all(communication: Communication, pull_by: Communication) -> None:
    for size in (1, 3, 4, 6):
        for aggregation in Aggregation:
            plan = schedule(point(communication, aggregation, Partition.PARALLELISM), size, pull_by)
            received = [set[PartialSum]() for _ in range(size)]
            for each in plan.rounds:
                for message in each.messages:
                    received[message.destination] |= set(message.partials)
                for merge in each.merges:
                    received[merge.rank].add(merge.sum)
            everyone = tuple(range(size))
            assert all((block, everyone) in partials for partials in received for block in range(plan.blocks))


def test_named_points_have_the_names_of_records() -> None:
    """A spelt-out named point gets its name, too; any other setting makes another scheme."""
    assert {each.title for each in NAMES} == {
        "recursive_doubling",
        "recursive_doubling_split",
        "sparse_ps",
        "blocks256",
    }
    spelled = {"element_point": {"aggregation": "one_shot", "balance": "imbalanced", "block": 256}}
    assert from_expression(spelled).title == "blocks256"
    assert from_expression({"element_point": {**spelled["element_point"], "block": 64}}).title.endswith("blocks of 64")
    for kind in (RowPoint, ElementPoint):
        titles = [kind.at(point).title for point in POINTS]
        assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("balance", [None, Balance.BALANCED])
@pytest.mark.parametrize("partition", Partition)
def test_balance_goes_with_parallelism_only(partition: Partition, balance: Balance | None) -> None:
    if (partition is Partition.PARALLELISM) == (balance is not None):
        assert Point(Communication.RING, Aggregation.ONE_SHOT, partition, balance) in POINTS
        return
    with pytest.raises(
        ValueError, match="balance must be balanced or imbalanced for parallelism, None for centralization; got"
    ):
        Point(Communication.RING, Aggregation.ONE_SHOT, partition, balance)


@pytest.mark.parametrize("kind", [RowPoint, ElementPoint])
def test_settings_that_are_none_are_refused(kind: type[RowPoint] | type[ElementPoint]) -> None:
    with pytest.raises(ValueError, match=r"communication must be 'ring', 'hierarchy' or 'point_to_point', got 'star'"):
        kind(communication="star")
    with pytest.raises(ValueError, match="None for centralization; got balanced for centralization"):
        kind(partition=Partition.CENTRALIZATION)
    with pytest.raises(ValueError, match="pull_by is for parallelism, .* got ring with centralization"):
        kind(partition=Partition.CENTRALIZATION, balance=None, pull_by=Communication.RING)
    with pytest.raises(ValueError, match="pull_by must be 'ring', 'hierarchy' or 'point_to_point' or None, got 'star'"):
        kind(pull_by="star")
    with pytest.raises(ValueError, match=r"seed must be a whole number, got 0\.5"):
        kind(seed=0.5)
    with pytest.raises(ValueError, match=r"owners must be one of None, 'rotated_stripe', 'hash' with balance balanced"):
        kind(owners="even_split")
    with pytest.raises(ValueError, match="push_format must be one of smallest, list, .*, got 'zip'"):
        kind(push_format="zip")
    for block, what in ((0, "at least 1"), (True, "a whole number"), (1.5, "a whole number")):
        with pytest.raises(ValueError, match=f"block must be {what}, got {block}"):
            ElementPoint(block=block)


def test_a_round_is_in_pairs_where_nobody_has_two_messages_to_send_or_to_get() -> None:
    doubling = schedule(point(Communication.HIERARCHY, Aggregation.INCREMENTAL), 6)
    assert [each.in_pairs for each in doubling.rounds] == [True] * len(doubling.rounds)
    servers = point(Communication.POINT_TO_POINT, Aggregation.ONE_SHOT, Partition.PARALLELISM)
    assert [each.in_pairs for each in schedule(servers, 2).rounds] == [True, True]
    assert [each.in_pairs for each in schedule(servers, 3).rounds] == [False, False]
