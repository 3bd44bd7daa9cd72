"""Ranks as threads: each collective gives what its definition says, and no mistake ends in a hang."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from gradsync.comm import LENGTH_BYTES, GroupError, LocalGroup, run_local
from gradsync.comm.framing import length_of
from gradsync.costs.cluster import Placement

every_size = pytest.mark.parametrize("size", [1, 2, 3, 4])
CPU = torch.device("cpu")
WAIT_S = 20.0


def numbers(rank: int, count: int) -> Tensor:
    """Distinct on every rank."""
    return torch.arange(count, dtype=torch.float32) + 100 * rank


@every_size
def test_all_reduce_sums_in_place(size: int) -> None:
    def rank_main(group: LocalGroup) -> tuple[Tensor, bool]:
        buffer = numbers(group.rank, 3)
        result = group.all_reduce(buffer).wait(WAIT_S)
        return result, result.data_ptr() == buffer.data_ptr()

    expected = sum(numbers(rank, 3) for rank in range(size))
    for result, in_place in run_local(size, rank_main):
        assert torch.equal(result, expected)
        assert in_place


@every_size
def test_all_gather_returns_every_buffer_in_rank_order(size: int) -> None:
    gathered = run_local(size, lambda group: group.all_gather(numbers(group.rank, 2)).wait(WAIT_S))
    for parts in gathered:
        assert [part.tolist() for part in parts] == [numbers(rank, 2).tolist() for rank in range(size)]


@every_size
def test_all_gather_takes_different_lengths(size: int) -> None:
    lengths = list(range(size))  # rank 0 brings nothing
    gathered = run_local(size, lambda group: group.all_gather(numbers(group.rank, group.rank), lengths).wait(WAIT_S))
    for parts in gathered:
        assert [part.tolist() for part in parts] == [numbers(rank, rank).tolist() for rank in range(size)]


@every_size
def test_all_to_all_hands_part_j_to_rank_j(size: int) -> None:
    def rank_main(group: LocalGroup) -> list[list[float]]:
        sent = [group.rank + peer for peer in range(size)]
        buffer = torch.cat([torch.full((n,), float(10 * group.rank + peer)) for peer, n in enumerate(sent)])
        return [part.tolist() for part in group.all_to_all(buffer, sent, sent).wait(WAIT_S)]

    for rank, received in enumerate(run_local(size, rank_main)):
        assert received == [[float(10 * peer + rank)] * (peer + rank) for peer in range(size)]


def message(length: int, content: int) -> Tensor:
    """Room for the length, then bytes that tell who sent it."""
    return torch.full((LENGTH_BYTES + length,), content, dtype=torch.uint8)


@every_size
def test_exchange_hands_out_messages_whose_lengths_only_their_senders_know(size: int) -> None:
    def rank_main(group: LocalGroup) -> tuple[list[list[int]], list[int]]:
        messages = [message(3 * group.rank + peer, 10 * group.rank + peer) for peer in range(size)]
        arrived = group.exchange(messages, [50 + peer for peer in range(size)]).wait(WAIT_S)
        return [part[LENGTH_BYTES:].tolist() for part in arrived], [length_of(part) for part in arrived]

    for rank, (contents, lengths) in enumerate(run_local(size, rank_main)):
        assert contents == [[10 * peer + rank] * (3 * peer + rank) for peer in range(size)]
        assert lengths == [LENGTH_BYTES + len(content) for content in contents]


@pytest.mark.parametrize("length", [-1, 5])
def test_a_message_beyond_its_bound_is_refused_before_anything_is_sent(length: int) -> None:
    first, second = LocalGroup.world(2)
    with pytest.raises(ValueError, match=f"to member 1 has {8 + length} bytes; expected 8 .* to 12, the bound"):
        first.exchange([message(4, 1), message(length, 1)], [12, 12])
    second.all_reduce(torch.ones(1))
    assert float(first.all_reduce(torch.ones(1)).wait(WAIT_S)) == 2  # the refused operation was none


def test_bounds_that_differ_between_ranks_are_named() -> None:
    def rank_main(group: LocalGroup) -> None:
        group.exchange([message(1, 0)] * 2, [9, 9 + group.rank]).wait(WAIT_S)

    with pytest.raises(GroupError, match=r"expected the bounds \[9, (9|10)\], got \[\[9, 9\], \[9, 10\]\]"):
        run_local(2, rank_main)


@every_size
def test_swap_hands_messages_to_the_next_member(size: int) -> None:
    def rank_main(group: LocalGroup) -> dict[int, list[int]]:
        to, origin = (group.rank + 1) % size, (group.rank - 1) % size
        arrived = group.swap({to: message(group.rank, group.rank)}, [origin], 50, CPU).wait(WAIT_S)
        return {peer: part[LENGTH_BYTES:].tolist() for peer, part in arrived.items()}

    for rank, arrived in enumerate(run_local(size, rank_main)):
        origin = (rank - 1) % size
        assert arrived == {origin: [origin] * origin}


def test_a_swap_of_which_members_think_differently_is_refused() -> None:
    def rank_main(group: LocalGroup) -> None:
        outgoing = {1: message(3, 7)} if group.rank == 0 else {}
        group.swap(outgoing, [], 50, CPU).wait(WAIT_S)

    with pytest.raises(GroupError, match=r"swap expected messages of \[\], got those of \[0\]"):
        run_local(2, rank_main)
    first, _ = LocalGroup.world(2)
    with pytest.raises(ValueError, match="to member 1 has 13 bytes; expected 8 .* to 12, the bound"):
        first.swap({1: message(5, 1)}, [], 12, CPU)


@every_size
def test_broadcast_copies_rank_zero_in_place(size: int) -> None:
    def rank_main(group: LocalGroup) -> Tensor:
        buffer = numbers(group.rank, 3)
        group.broadcast(buffer).wait(WAIT_S)
        return buffer

    assert all(torch.equal(buffer, numbers(0, 3)) for buffer in run_local(size, rank_main))


def test_a_group_of_one_copies_nothing_in_an_all_reduce() -> None:
    buffer = torch.ones(3)
    (group,), before = LocalGroup.world(1), buffer._version
    assert group.all_reduce(buffer).wait(5.0) is buffer
    assert buffer._version == before


def test_operations_in_flight_may_be_awaited_in_another_order() -> None:
    def rank_main(group: LocalGroup) -> tuple[float, float]:
        first = group.all_reduce(torch.tensor([1.0]))
        second = group.all_reduce(torch.tensor([10.0]))
        pair = (first, second) if group.rank == 0 else (second, first)
        results = [float(pending.wait(WAIT_S)) for pending in pair]
        return min(results), max(results)

    assert run_local(3, rank_main) == [(3.0, 30.0)] * 3


def test_a_result_is_not_changed_by_what_others_do_with_theirs() -> None:
    def rank_main(group: LocalGroup) -> list[float]:
        parts = group.all_gather(numbers(group.rank, 1)).wait(WAIT_S)
        group.all_reduce(torch.zeros(1)).wait(WAIT_S)  # everybody has its parts
        if group.rank == 0:
            parts[1].fill_(-1)
        group.all_reduce(torch.zeros(1)).wait(WAIT_S)
        return [float(part) for part in parts]

    assert run_local(2, rank_main) == [[0.0, -1.0], [0.0, 100.0]]


def test_different_operations_fail_on_every_rank() -> None:
    errors: dict[int, str] = {}

    def rank_main(group: LocalGroup) -> None:
        buffer = torch.zeros(2)
        pending = group.broadcast(buffer) if group.rank == 1 else group.all_reduce(buffer)
        try:
            pending.wait(WAIT_S)
        except GroupError as error:
            errors[group.rank] = str(error)

    run_local(3, rank_main)
    assert errors == dict.fromkeys(range(3), "the ranks issued different operations: all_reduce, broadcast")


def test_lengths_that_do_not_agree_are_named() -> None:
    with pytest.raises(GroupError, match=r"all_gather expected \[2, 2\] elements, got \[2, 3\]"):
        run_local(2, lambda group: group.all_gather(torch.zeros(2 + group.rank), [2, 2]).wait(WAIT_S))

    def exchange(group: LocalGroup) -> None:
        group.all_to_all(torch.zeros(4), [2, 2], [2, 1]).wait(WAIT_S)

    with pytest.raises(GroupError, match=r"all_to_all expected \[2, 1\] elements, got \[2, 2\]"):
        run_local(2, exchange)


def test_a_missing_rank_is_named_after_the_timeout() -> None:
    groups = LocalGroup.world(3)
    groups[1].all_reduce(torch.zeros(1))
    pending = groups[0].all_reduce(torch.zeros(1))
    with pytest.raises(GroupError, match="no answer from rank 2 within 0 s"):
        pending.wait(0.01)


def test_an_announced_failure_wakes_those_who_wait() -> None:
    groups = LocalGroup.world(2)
    pending = groups[0].all_reduce(torch.zeros(1))
    threading.Timer(0.01, groups[1].announce_failure, ["out of memory"]).start()
    with pytest.raises(GroupError, match="rank 1: out of memory"):
        pending.wait(WAIT_S)


def test_run_local_raises_the_cause_and_not_its_echo() -> None:
    def rank_main(group: LocalGroup) -> None:
        if group.rank == 2:
            raise KeyError("the cause")
        group.all_reduce(torch.zeros(1)).wait(WAIT_S)

    with pytest.raises(KeyError, match="the cause"):
        run_local(3, rank_main)


def test_run_local_names_the_ranks_that_hang() -> None:
    release = threading.Event()
    try:
        with pytest.raises(GroupError, match=r"ranks \[1\] did not finish"):
            run_local(2, lambda group: release.wait(WAIT_S) if group.rank == 1 else True, timeout_s=0.02)
    finally:
        release.set()


def test_run_local_returns_results_by_rank() -> None:
    assert run_local(4, lambda group: (group.rank, group.size)) == [(rank, 4) for rank in range(4)]


def test_subgroups_are_apart_from_each_other_and_from_the_whole() -> None:
    def rank_main(group: LocalGroup) -> tuple[object, ...]:
        whole = group.all_reduce(torch.tensor([1.0]))
        node, across = group.within_node(), group.across_nodes()
        sums = [g.all_reduce(torch.tensor([10.0 ** g.members[g.rank]])) for g in (across, node)]
        return node.members, across.members, [int(s.wait(WAIT_S)) for s in sums], int(whole.wait(WAIT_S))

    assert run_local(4, rank_main, placement=Placement.regular(2, 2)) == [
        ((0, 1), (0, 2), [101, 11], 4),
        ((0, 1), (1, 3), [1010, 11], 4),
        ((2, 3), (0, 2), [101, 1100], 4),
        ((2, 3), (1, 3), [1010, 1100], 4),
    ]


def test_a_subgroup_of_all_is_the_group() -> None:
    (first, _) = LocalGroup.world(2, Placement((4, 4)))
    assert first.within_node() is first
    (first, _) = LocalGroup.world(2)
    assert first.across_nodes() is first
    assert first.within_node().size == 1
