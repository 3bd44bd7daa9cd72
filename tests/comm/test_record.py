"""The ledger counts payload bytes where they are handed to the transport."""

from __future__ import annotations

import pytest
import torch

from gradsync.comm import GroupError, Ledger, LocalGroup, RecordingGroup, run_local
from gradsync.comm.record import Entry
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import Pattern
from tests.costs.test_steps import ByMember0

WAIT_S = 20.0
SIZE = 4


def issue_all(group: RecordingGroup) -> None:
    """One operation of each kind: 40 bytes, 2 * (rank + 1), 3 a peer, 8 + rank (at most 20) a peer, 24."""
    rank, size = group.rank, group.size
    group.all_reduce(torch.zeros(10)).wait(WAIT_S)
    group.all_gather(torch.zeros(rank + 1, dtype=torch.float16), [r + 1 for r in range(size)]).wait(WAIT_S)
    group.all_to_all(torch.zeros(3 * size, dtype=torch.uint8), [3] * size, [3] * size).wait(WAIT_S)
    group.exchange([torch.zeros(8 + rank, dtype=torch.uint8) for _ in range(size)], [20] * size).wait(WAIT_S)
    group.broadcast(torch.zeros(3, dtype=torch.float64)).wait(WAIT_S)


def test_entries_are_what_each_rank_sends_in_order_of_issue() -> None:
    def rank_main(group: LocalGroup) -> Ledger:
        ledger = Ledger()
        issue_all(RecordingGroup(group, ledger))
        return ledger

    for rank, ledger in enumerate(run_local(SIZE, rank_main)):
        assert ledger.entries == [
            Entry(Pattern.ALL_REDUCE, 2 * 40),  # small: swapped with two other ranks
            Entry(Pattern.ALL_GATHER, 3 * 2 * (rank + 1)),
            Entry(Pattern.ALL_TO_ALL, 9),  # what a rank keeps is not sent
            Entry(Pattern.ALL_TO_ALL, 3 * (8 + rank)),  # the messages, not their bounds
            Entry(Pattern.BROADCAST, 3 * 24 if rank == 0 else 0),
        ]
        assert ledger.sent_bytes == sum(entry.sent_bytes for entry in ledger.entries)


def test_bytes_are_counted_as_the_groups_transport_carries_them() -> None:
    class Starred(LocalGroup):
        transport = ByMember0()

    ledger = Ledger()
    first, group, last = Starred.world(3)
    recording = RecordingGroup(group, ledger)
    pending = [recording.all_gather(torch.zeros(4)), *(other.all_gather(torch.zeros(4)) for other in (first, last))]
    for each in pending:
        each.wait(WAIT_S)
    assert ledger.entries == [Entry(Pattern.ALL_GATHER, 16)], "in a star only member 0 sends to several others"


def test_a_group_of_one_sends_nothing() -> None:
    ledger = Ledger()
    issue_all(RecordingGroup(LocalGroup.world(1)[0], ledger))
    assert [entry.sent_bytes for entry in ledger.entries] == [0, 0, 0, 0, 0]


def test_results_rank_and_failures_are_those_of_the_group_inside() -> None:
    def rank_main(group: LocalGroup) -> tuple[int, tuple[int, ...], float]:
        recording = RecordingGroup(group, Ledger())
        return recording.rank, recording.members, float(recording.all_reduce(torch.ones(1)).wait(WAIT_S))

    assert run_local(2, rank_main) == [(0, (0, 1), 2.0), (1, (0, 1), 2.0)]
    first, second = (RecordingGroup(group, Ledger()) for group in LocalGroup.world(2))
    pending = first.all_reduce(torch.ones(1))
    second.announce_failure("no memory")
    with pytest.raises(GroupError, match="rank 1: no memory"):
        pending.wait(WAIT_S)


def test_subgroups_write_into_the_same_ledger_and_tell_what_stays_on_a_node() -> None:
    def rank_main(group: LocalGroup) -> Ledger:
        ledger = Ledger()
        recording = RecordingGroup(group, ledger)
        assert recording.within_node() is recording.within_node()
        recording.within_node().all_gather(torch.zeros(5)).wait(WAIT_S)
        recording.across_nodes().all_gather(torch.zeros(3)).wait(WAIT_S)
        return ledger

    for ledger in run_local(6, rank_main, placement=Placement.regular(3, 2)):
        assert ledger.entries == [Entry(Pattern.ALL_GATHER, 20, True), Entry(Pattern.ALL_GATHER, 2 * 12, False)]
        assert ledger.sent_bytes == 44
