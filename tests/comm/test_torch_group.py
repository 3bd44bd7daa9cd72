"""`TorchGroup` on gloo: operations as `Group` says, bounded waits, failures that are told."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from gradsync.comm import GroupError, LocalGroup, TorchGroup, run_local
from gradsync.comm.group import Group
from tests.world import Ranks

World = Callable[[int], Ranks]


def operations(group: Group) -> dict[str, list[list[float]]]:
    """Every operation once, with lengths that differ between the ranks, some of them zero; what came back."""
    rank, size = group.rank, group.size
    mine = torch.arange(3.0) + 10 * rank
    lengths = [(2 * r) % 3 for r in range(size)]
    sent = [(rank + peer) % 3 for peer in range(size)]
    received = [(peer + rank) % 3 for peer in range(size)]
    outgoing = torch.arange(float(sum(sent))) + 100 * rank
    messages = [torch.arange(8 + rank + peer, dtype=torch.uint8) + 50 * rank for peer in range(size)]
    bounds = [20 + peer for peer in range(size)]
    return {
        "all_reduce": [group.all_reduce(mine.clone()).wait(10).tolist()],
        "all_gather": [part.tolist() for part in group.all_gather(mine).wait(10)],
        "all_gather of lengths": [p.tolist() for p in group.all_gather(torch.ones(lengths[rank]), lengths).wait(10)],
        "all_to_all": [part.tolist() for part in group.all_to_all(outgoing, sent, received).wait(10)],
        "exchange": [part.tolist() for part in group.exchange(messages, bounds).wait(10)],
        "broadcast": [group.broadcast(mine.clone()).wait(10).tolist()],
    }


def operations_on_gloo(members: list[int] | None) -> dict[str, list[list[float]]] | None:
    process_group = None if members is None else dist.new_group(members)
    if members is not None and dist.get_rank() not in members:
        return None
    group = TorchGroup(process_group, timeout_s=10)
    assert group.members == tuple(members or range(dist.get_world_size()))
    found = operations(group)
    group.close()
    return found


@pytest.mark.parametrize(("size", "members"), [(2, None), (3, None), (4, None), (4, [1, 3]), (4, [0, 2, 3])])
def test_processes_get_what_threads_get(world: World, size: int, members: list[int] | None) -> None:
    """The last case has ranks that were in different numbers of groups before."""
    got = [found for found in world(size).run(operations_on_gloo, members) if found is not None]
    assert got == run_local(len(members or range(size)), operations)


def operations_of_groups_within_groups() -> list[tuple[tuple[int, ...], dict[str, list[list[float]]]]]:
    """Runs operations in a group of ranks 1, 2, 3, and in a group of the first and last of these three."""
    group = TorchGroup(timeout_s=10)
    found = []
    for places in ((1, 2, 3), (0, 2)):
        if group.rank in places:
            group = group.subgroup(places)
            found.append((group.members, operations(group)))
        else:
            break
    return found


def test_subgroups_have_subgroups(world: World) -> None:
    got = world(4).run(operations_of_groups_within_groups)
    (three, two) = run_local(3, operations), run_local(2, operations)
    outer, inner = (1, 2, 3), (1, 3)
    assert got == [[], [(outer, three[0]), (inner, two[0])], [(outer, three[1])], [(outer, three[2]), (inner, two[1])]]


def wait_for_an_absent_rank(absent: int) -> str:
    group = TorchGroup(timeout_s=10)
    text = ""
    if group.rank != absent:
        with pytest.raises(GroupError) as caught:
            group.all_reduce(torch.ones(2)).wait(3.0)
        text = str(caught.value)
    dist.barrier()
    group.close()
    return text


@pytest.mark.parametrize("absent", [0, 2])
def test_a_wait_ends_at_its_timeout_and_names_who_is_missing(world: World, absent: int) -> None:
    texts = world(3).run(wait_for_an_absent_rank, absent)
    expected = f"rank {absent} did not come this far: still at work, or a loop of fewer steps"
    assert all(text.startswith(expected) for rank, text in enumerate(texts) if rank != absent), texts


def wait_for_a_rank_that_left() -> str:
    group = TorchGroup(timeout_s=60)
    group.all_reduce(torch.ones(2)).wait(10)
    text = ""
    if group.rank == 1:
        group.close()
    else:
        with pytest.raises(GroupError) as caught:
            group.all_reduce(torch.ones(2)).wait(60.0)
        text = str(caught.value)
    dist.barrier()
    return text


def test_a_rank_that_left_earlier_is_named_at_once(world: World) -> None:
    texts = world(3).run(wait_for_a_rank_that_left, limit_s=20)
    for text in (texts[0], texts[2]):
        assert text.startswith("rank 1 detached before this") or "a connection broke" in text, texts


def hear_of_a_failure() -> str:
    group = TorchGroup(timeout_s=60)
    text = ""
    if group.rank == 0:
        with pytest.raises(GroupError) as caught:
            group.all_reduce(torch.ones(2)).wait(60.0)
        text = str(caught.value)
    elif group.rank == 1:
        group.announce_failure("out of coffee")
        group.announce_failure("a consequence")
    dist.barrier()
    group.close()
    return text


def test_the_first_failure_announced_reaches_who_waits(world: World) -> None:
    assert world(3).run(hear_of_a_failure, limit_s=20)[0] == "rank 1: out of coffee"


def failures_do_not_outlive_the_group() -> None:
    first = TorchGroup(timeout_s=10)
    first.announce_failure("long ago")
    first.close()
    second = TorchGroup(timeout_s=10)
    if second.rank == 0:
        time.sleep(1.5)  # longer than a poll, so that the other rank asks
    assert second.all_reduce(torch.ones(1)).wait(10).item() == 2
    second.close()


def test_a_new_group_does_not_hear_of_old_failures(world: World) -> None:
    world(2).run(failures_do_not_outlive_the_group)


def test_a_group_of_one_needs_no_process_group() -> None:
    (group,) = LocalGroup.world(1)
    assert operations(group)["all_reduce"] == [[0.0, 1.0, 2.0]]


def leave_with_a_failure_between_two_looks() -> str:
    """Rank 1 announces a failure and leaves while rank 0, which waits for it, is between two reads of its notices."""
    group = TorchGroup(timeout_s=20)
    text = ""
    if group.rank == 1:
        dist.barrier()
        group.announce_failure("rank 2 is lost", [2])
        group._whereabouts._board.note_left(1, 0)
        dist.barrier()
    else:
        left_before, failure = group._whereabouts._board.left_before, group._whereabouts._board.failure
        first: list[str] = []

        def meanwhile(name: str, read: Callable[..., object]) -> Callable[..., object]:
            def look(*arguments: object) -> object:
                found = read(*arguments)
                if not first:  # the others act behind the first read
                    first.append(name)
                    dist.barrier()
                    dist.barrier()
                return found

            return look

        group._whereabouts._board.left_before = meanwhile("left", left_before)  # type: ignore[method-assign, assignment]
        group._whereabouts._board.failure = meanwhile("failure", failure)  # type: ignore[method-assign, assignment]
        text = str(group._whereabouts.told(0))
    dist.barrier()
    group.close()
    return text


def test_a_rank_that_leaves_because_of_a_failure_is_not_blamed(world: World) -> None:
    assert world(2).run(leave_with_a_failure_between_two_looks)[0] == "rank 1 reports: rank 2 is lost"
