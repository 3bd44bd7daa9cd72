"""`GlooGroup`: whichever way an operation takes, by size and rate, it gives what threads give."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gradsync.comm import (
    LENGTH_BYTES,
    GlooGroup,
    GroupError,
    Ledger,
    LocalGroup,
    RecordingGroup,
    TorchGroup,
    communicators,
    run_local,
    torch_group,
)
from gradsync.comm.backends import GROUP_OF_BACKEND
from gradsync.comm.gloo import FAST_BYTES_PER_S, MOST_DIRECT_BYTES
from gradsync.comm.group import Group
from gradsync.comm.network_cost import network_cost
from gradsync.comm.rounds import CHUNK_BYTES, Rounds
from gradsync.costs.steps import Pattern, Transfer
from gradsync.costs.transport import DIRECT_BYTES, DOUBLED_BYTES, SUMMED_BYTES
from tests.world import Ranks
from tests.world import World as ShortLived

World = Callable[[int], Ranks]

CPU = torch.device("cpu")
SLOW, FAST = FAST_BYTES_PER_S / 2, FAST_BYTES_PER_S * 2
LENGTHS = [0, 1, 1001, DIRECT_BYTES // 8 + 3, DIRECT_BYTES // 4, DIRECT_BYTES + 5, 3 * CHUNK_BYTES // 4 + 1]


def numbers(count: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in any order."""
    return ((torch.arange(count) + 3 * rank) % 17).to(dtype)


def operations(group: Group, length: int) -> list[torch.Tensor]:
    """Every operation whose way depends on size, in flight together, waited for in another order than issued."""
    rank, size = group.rank, group.size
    uneven = [length + peer for peer in range(size)]
    sent, received = [length + (rank + p) % 2 for p in range(size)], [length + (p + rank) % 2 for p in range(size)]
    outgoing = numbers(sum(sent), rank)
    under_way = [
        group.all_to_all(outgoing, sent, received),
        group.all_reduce(numbers(length, rank)),
        group.all_gather(numbers(length, rank, torch.int64)),
        group.all_to_all(outgoing.clone(), sent, received, largest=length + 1),
        group.all_gather(numbers(length + rank, rank, torch.bfloat16), uneven),
        group.all_reduce(numbers(length, rank, torch.bfloat16)),
    ]
    results = [pending.wait(20) for pending in (*under_way[3:], *under_way[:3])]
    return [torch.cat(result) if isinstance(result, list) else result for result in results]


def sums_on_gloo(length: int, bytes_per_s: float) -> list[torch.Tensor]:
    group = GlooGroup(timeout_s=20, bytes_per_s=bytes_per_s)
    found = operations(group, length)
    group.close()
    return [part.double() for part in found]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("bytes_per_s", [SLOW, FAST], ids=["slow", "fast"])
def test_every_way_gives_what_threads_get(world: World, size: int, bytes_per_s: float) -> None:
    ranks = world(size)
    for length in LENGTHS:
        got = ranks.run(sums_on_gloo, length, bytes_per_s)
        expected = run_local(size, lambda group, length=length: operations(group, length))
        for mine, theirs in zip(got, expected, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b.double(), rtol=0, atol=0)


BODIES = [0, 1, 700, DIRECT_BYTES // 4, CHUNK_BYTES - 8, CHUNK_BYTES - 7, 3 * CHUNK_BYTES + 5]


def exchanges(group: Group, lengths: list[int], bound: int) -> list[torch.Tensor]:
    """Two in flight, waited for in the other order; member r sends `lengths[(r + j) % len(lengths)]` bytes to j."""
    rank, size = group.rank, group.size
    under_way = []
    for turn in range(2):
        bodies = [lengths[(rank + peer + turn) % len(lengths)] for peer in range(size)]
        messages = [numbers(LENGTH_BYTES + body, rank + turn + peer, torch.uint8) for peer, body in enumerate(bodies)]
        under_way.append(group.exchange(messages, [LENGTH_BYTES + bound + 8 * peer for peer in range(size)]))
    second, first = under_way[1].wait(20), under_way[0].wait(20)
    return [*first, *second]


def exchanges_on_gloo(lengths: list[int], bound: int, bytes_per_s: float) -> list[torch.Tensor]:
    group = GlooGroup(timeout_s=20, bytes_per_s=bytes_per_s)
    found = exchanges(group, lengths, bound)
    group.close()
    return [part.clone() for part in found]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("bytes_per_s", [SLOW, FAST], ids=["slow", "fast"])
def test_messages_of_unknown_length_arrive_whole_whichever_way_they_go(
    world: World, size: int, bytes_per_s: float
) -> None:
    """Bounds are far above the messages, just above them, and as long as they."""
    ranks = world(size)
    cases = [(BODIES, max(BODIES)), ([0], max(BODIES)), ([0, 5], DIRECT_BYTES // 8), ([CHUNK_BYTES], CHUNK_BYTES + 1)]
    for lengths, bound in cases:
        got = ranks.run(exchanges_on_gloo, lengths, bound, bytes_per_s)
        expected = run_local(size, lambda group, a=lengths, b=bound: exchanges(group, a, b))
        for mine, theirs in zip(got, expected, strict=True):
            assert [len(part) for part in mine] == [len(part) for part in theirs]
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def swaps(group: Group, lengths: list[int], bound: int) -> list[torch.Tensor]:
    """Runs at once: one hop of a ring, pairs without the last rank, and messages of rank 0 to all others."""
    rank, size = group.rank, group.size
    ways = [
        [(r, (r + 1) % size) for r in range(size)],
        [(r, r ^ 1) for r in range(size - size % 2)],
        [(0, other) for other in range(1, size)],
        [],
    ]
    under_way = []
    for turn, messages in enumerate(ways):
        bodies = {to: lengths[(rank + turn) % len(lengths)] for source, to in messages if source == rank}
        outgoing = {to: numbers(LENGTH_BYTES + body, rank + turn, torch.uint8) for to, body in bodies.items()}
        origins = [source for source, to in messages if to == rank]
        in_pairs = messages is not ways[2]
        under_way.append(group.swap(outgoing, origins, LENGTH_BYTES + bound, CPU, in_pairs=in_pairs))
    arrived = [pending.wait(20) for pending in under_way]
    return [part.clone() for messages in arrived for _, part in sorted(messages.items())]


def swaps_on_gloo(lengths: list[int], bound: int, bytes_per_s: float | None) -> list[torch.Tensor]:
    """Runs `swaps`; without a rate, groups use torch's own all-to-all, as on other backends."""
    group = TorchGroup(timeout_s=20) if bytes_per_s is None else GlooGroup(timeout_s=20, bytes_per_s=bytes_per_s)
    found = swaps(group, lengths, bound)
    group.close()
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("bytes_per_s", [SLOW, FAST, None], ids=["slow", "fast", "by torch"])
def test_messages_between_some_members_arrive_whole(world: World, size: int, bytes_per_s: float | None) -> None:
    ranks = world(size)
    for lengths, bound in [(BODIES, max(BODIES)), ([0, 5], 5), ([CHUNK_BYTES], 3 * CHUNK_BYTES)]:
        got = ranks.run(swaps_on_gloo, lengths, bound, bytes_per_s)
        expected = run_local(size, lambda group, a=lengths, b=bound: swaps(group, a, b))
        for mine, theirs in zip(got, expected, strict=True):
            assert len(mine) == len(theirs)
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def receives_larger_than_messages(late: int) -> list[list[int]]:
    """Receives by both of gloo's operations; rank `late` starts when the messages of the others wait already."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((100 + rank,), rank, dtype=torch.uint8)
    others = [0 if peer == rank else 1 for peer in range(size)]
    output, single = torch.full((2, 300 * (size - 1)), 255, dtype=torch.uint8), torch.full((300,), 255).byte()
    if rank == late:
        time.sleep(0.1)
    sent = [len(mine) * other for other in others]
    dist.all_to_all_single(output[0], mine.repeat(size - 1), [300 * other for other in others], sent)
    send = dist.isend(mine, (rank + 1) % size)
    dist.recv(single, (rank - 1) % size)
    send.wait()
    return [part.tolist() for part in (*output[0].split(300), single)]


@pytest.mark.parametrize("late", [0, 1])
def test_gloo_fills_the_start_of_a_receive_that_is_larger_than_the_message(world: World, late: int) -> None:
    """`GlooGroup.exchange` relies on this."""
    for rank, parts in enumerate(world(3).run(receives_larger_than_messages, late)):
        origins = [*(peer for peer in range(3) if peer != rank), (rank - 1) % 3]
        assert parts == [[origin] * (100 + origin) + [255] * (200 - origin) for origin in origins]


def an_exchange_beyond_its_bound(bound: int) -> str:
    """Rank 1's message to rank 0 is too long: it tells the others, as the engine does."""
    group = GlooGroup(timeout_s=10, bytes_per_s=SLOW)
    messages = [torch.zeros(bound + (group.rank == 1 and peer == 0), dtype=torch.uint8) for peer in range(3)]
    try:
        group.exchange(messages, [bound] * 3).wait(8.0)
        text = ""
    except ValueError as error:
        group.announce_failure(str(error))
        text = str(error)
    except GroupError as error:
        text = str(error)
    dist.barrier()
    group.close()
    return text


@pytest.mark.parametrize("bound", [64, 2 * CHUNK_BYTES])
def test_a_message_beyond_its_bound_fails_on_every_rank(world: World, bound: int) -> None:
    texts = world(3).run(an_exchange_beyond_its_bound, bound)
    assert texts[1].startswith(f"the message to member 0 has {bound + 1} bytes; expected 8 (for its length) to {bound}")
    assert texts[0] == texts[2] == f"rank 1: {texts[1]}"


def an_exchange_with_a_dead_rank(bound: int) -> str:
    group = GlooGroup(timeout_s=10, bytes_per_s=SLOW)
    dist.barrier()
    if group.rank == 1:
        os._exit(3)
    with pytest.raises(GroupError) as caught:
        group.exchange([torch.zeros(bound, dtype=torch.uint8)] * 3, [2 * bound] * 3).wait(8.0)
    return str(caught.value)


@pytest.mark.parametrize("bound", [64, 2 * CHUNK_BYTES])
def test_an_exchange_with_a_rank_that_died_ends(bound: int) -> None:
    with ShortLived(3) as world:
        world.start(an_exchange_with_a_dead_rank, bound)
        outcomes = world.outcomes(limit_s=30)
    assert outcomes[1].died
    assert all("rank 1 does not answer: it has died" in outcomes[rank].value for rank in (0, 2)), outcomes


def kinds_of_groups() -> list[str]:
    found = []
    for backend in ("gloo", "cpu:gloo", None):
        group = torch_group(dist.new_group(backend=backend), timeout_s=20)
        found.append(type(group).__name__)
        group.close()
    return found


def test_gloo_is_known_however_it_was_asked_for(world: World) -> None:
    for kinds in world(2).run(kinds_of_groups):
        assert kinds == ["GlooGroup"] * 3


class OwnGroup(TorchGroup):
    """A transport from elsewhere."""


def group_of_a_registered_class() -> list[str]:
    with patch.dict(GROUP_OF_BACKEND, {"gloo": OwnGroup}):
        group = torch_group(timeout_s=20)
    part = group.subgroup((dist.get_rank(),))
    total = group.all_reduce(torch.ones(3)).wait(20)
    group.close()
    return [type(group).__name__, type(part).__name__, str(total.tolist())]


def test_a_registered_class_carries_a_backend_and_makes_its_subgroups(world: World) -> None:
    assert world(2).run(group_of_a_registered_class) == [["OwnGroup", "OwnGroup", "[2.0, 2.0, 2.0]"]] * 2


def half_sums(length: int) -> torch.Tensor:
    group = GlooGroup(timeout_s=20, bytes_per_s=FAST)
    total = group.all_reduce(torch.full((length,), 1 / 3 + dist.get_rank(), dtype=torch.bfloat16)).wait(20)
    group.close()
    return total


@pytest.mark.parametrize("length", [10, SUMMED_BYTES // 2])
def test_half_precision_is_summed_in_full_and_alike_on_all_ranks(world: World, length: int) -> None:
    totals = world(3).run(half_sums, length)
    exact = sum(torch.full((length,), 1 / 3 + r, dtype=torch.bfloat16).float() for r in range(3))
    for total in totals:
        assert torch.equal(total, torch.as_tensor(exact).bfloat16())


def measured_rate() -> float:
    group = GlooGroup(timeout_s=20)
    rate = group.bytes_per_s
    group.close()
    return rate


def test_the_rate_is_measured_and_the_same_on_all_ranks(world: World) -> None:
    first, *others = world(3).run(measured_rate)
    assert first > 1e6 and all(rate == first for rate in others)


def noted(ways: list[str], way: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the operation, which adds `way` to `ways` at each call."""

    def call(*args: Any) -> Any:
        ways.append(way)
        return operation(*args)

    return call


def ways_by_size(alpha_s: float, bytes_per_s: float) -> tuple[list[str], list[str]]:
    """Returns the algorithm of all-gathers of 1/4, 3/4 and 2 MiB sent by a rank, and the one their price assumes."""
    group = GlooGroup(timeout_s=20, bytes_per_s=bytes_per_s)
    group.alpha_s, group.stage_s, ways = alpha_s, 0.0, []
    direct, ring = GlooGroup._all_to_all, TorchGroup.all_gather

    with (
        patch.object(GlooGroup, "_all_to_all", noted(ways, "direct", direct)),
        patch.object(TorchGroup, "all_gather", noted(ways, "ring", ring)),
    ):
        parts = [nbytes // (group.size - 1) for nbytes in (DIRECT_BYTES, 3 * DIRECT_BYTES, 2 * MOST_DIRECT_BYTES)]
        for part in parts:
            group.all_gather(torch.zeros(part, dtype=torch.uint8)).wait(20)
    cost = network_cost(RecordingGroup(group, Ledger()))
    assert cost is not None
    gathers = [Transfer("", Pattern.ALL_GATHER, (float(part),) * group.size) for part in parts]
    group.close()
    return ways, ["ring" if gather.carried_by(cost.transport).is_forwarded else "direct" for gather in gathers]


@pytest.mark.parametrize(
    ("alpha_s", "ways"), [(1e-6, ["direct", "ring", "ring"]), (1e-2, ["direct", "direct", "ring"])]
)
def test_messages_start_at_once_where_latency_costs_more_than_their_order_saves(
    world: World, alpha_s: float, ways: list[str]
) -> None:
    assert world(3).run(ways_by_size, alpha_s, SLOW) == [(ways, ways)] * 3


SUMMED_LENGTHS = [1, SUMMED_BYTES // 4, SUMMED_BYTES // 4 + 1, DOUBLED_BYTES // 4, DOUBLED_BYTES // 4 + 1]


def sums_by_size(alpha_s: float, bytes_per_s: float) -> tuple[list[str], list[float], list[list[float]]]:
    """Returns the algorithm of all-reduces of several sizes, the bytes that the ledger has of each, and the sums."""
    group = GlooGroup(timeout_s=20, bytes_per_s=bytes_per_s)
    group.alpha_s, group.stage_s, ways, sums, ledger = alpha_s, 0.0, [], [], Ledger()

    with (
        patch.object(TorchGroup, "all_reduce", noted(ways, "ring", TorchGroup.all_reduce)),
        patch.object(GlooGroup, "_all_to_all", noted(ways, "direct", GlooGroup._all_to_all)),
        patch.object(Rounds, "all_reduce", noted(ways, "doubling", Rounds.all_reduce)),
    ):
        for length in SUMMED_LENGTHS:
            mine = torch.randn(length, generator=torch.Generator().manual_seed(group.rank))
            sums.append(RecordingGroup(group, ledger).all_reduce(mine).wait(20).tolist())
    group.close()
    return ways, [entry.sent_bytes for entry in ledger.entries], sums


@pytest.mark.parametrize(
    ("size", "ways"),
    [
        (2, ["direct"] * 5),
        (3, ["direct"] * 2 + ["ring"] * 3),
        (4, ["doubling"] * 4 + ["ring"]),
    ],
)
def test_an_all_reduce_sums_by_size_alone_whatever_was_measured(world: World, size: int, ways: list[str]) -> None:
    """Rounding depends on the algorithm: a choice by measured links would change last bits from run to run."""
    share = {"direct": size - 1, "ring": 2 * (size - 1) / size, "doubling": 2}
    sent = [4 * length * share[way] for length, way in zip(SUMMED_LENGTHS, ways, strict=True)]
    (found, recorded, sums), *others = world(size).run(sums_by_size, 1e-6, SLOW)
    assert (found, recorded) == (ways, pytest.approx(sent))
    assert [*others, *world(size).run(sums_by_size, 1e-2, 100 * FAST)] == [(ways, recorded, sums)] * (2 * size - 1)


def sums_of_halves(length: int) -> list[float]:
    group = GlooGroup(timeout_s=20, bytes_per_s=FAST)
    mine = torch.randn(length, generator=torch.Generator().manual_seed(group.rank)).bfloat16()
    total = group.all_reduce(mine).wait(20)
    group.close()
    return total.tolist()


def test_sums_by_doubling_are_rounded_at_each_of_their_additions(world: World) -> None:
    a, b, c, d = (torch.randn(1000, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(4))
    assert world(4).run(sums_of_halves, 1000) == [((a + b) + (c + d)).tolist()] * 4


def small_sum_beside_a_large_exchange() -> bool:
    """Returns whether a small all-reduce ends although a large all-to-all, issued before it, cannot."""
    group = GlooGroup(timeout_s=20, bytes_per_s=SLOW)
    blocked = threading.Event()
    group._rounds._thread.submit(lambda: blocked.wait(20) and None)
    total = group.all_reduce(torch.ones(3)).wait(20)
    blocked.set()
    group.close()
    return total.tolist() == [4.0] * 3


def test_a_small_all_reduce_does_not_wait_for_large_messages(world: World) -> None:
    assert world(4).run(small_sum_beside_a_large_exchange) == [True] * 4


def threads_of_sockets() -> int:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


def shares_the_thread_of_sockets() -> list[Any]:
    """Exchanges in a group and a subgroup; returns how many threads more watch sockets, and what torch knows of it."""
    before = threads_of_sockets()
    group = GlooGroup(timeout_s=20, bytes_per_s=SLOW)
    of_two = group.subgroup((0, 1)) if group.rank < 2 else group.subgroup((2,))
    total = of_two.all_reduce(numbers(5, 0)).wait(20)
    found = [threads_of_sockets() - before, total.equal(numbers(5, 0) * of_two.size)]
    group.close()
    return [*found, "GRADSYNC_GLOO" in dist.Backend._plugins, dist.new_group(backend="cpu:gloo").size()]


def test_groups_share_the_thread_that_watches_sockets_and_torch_makes_groups_as_before(world: World) -> None:
    assert world(3).run(shares_the_thread_of_sockets) == [[0, True, False, 3]] * 3


def test_one_thread_at_a_time_has_a_backend_known() -> None:
    known, entered = dist.Backend._plugins, threading.Event()

    def enter() -> None:
        with communicators._known_backend():
            entered.set()

    other = threading.Thread(target=enter)
    with communicators._known_backend() as end:
        other.start()
        assert not entered.wait(0.2) and "GRADSYNC_GLOO" in known
        end()  # as when torch has asked for the backend, and members are waited for
        assert entered.wait(10)
        other.join()
    assert "GRADSYNC_GLOO" not in known


def left_over_after_half_a_start() -> tuple[int, list[str]]:
    """Process groups and threads that a group leaves behind whose second communicator cannot be made."""
    make, made = TorchGroup._communicator, []

    def once(group: TorchGroup) -> dist.ProcessGroup:
        if made:
            raise RuntimeError("no more of them")
        made.append(make(group))
        return made[0]

    groups, threads = len(distributed_c10d._world.pg_map), set(threading.enumerate())
    with patch.object(TorchGroup, "_communicator", once), pytest.raises(RuntimeError, match="no more of them"):
        GlooGroup(timeout_s=10)
    new = set(threading.enumerate()) - threads  # those of tests before may end meanwhile
    for each in new:
        each.join(5.0)
    return len(distributed_c10d._world.pg_map) - groups, [each.name for each in new if each.is_alive()]


def test_a_group_that_cannot_be_made_whole_leaves_nothing(world: World) -> None:
    assert world(2).run(left_over_after_half_a_start) == [(0, [])] * 2


def rounds_without_an_answer() -> str:
    group = GlooGroup(timeout_s=10, bytes_per_s=SLOW)
    text = ""
    if group.rank != 1:
        part = torch.zeros(CHUNK_BYTES)
        with pytest.raises(GroupError) as caught:
            group.all_to_all(part.repeat(3), [len(part)] * 3, [len(part)] * 3).wait(3.0)
        text = str(caught.value)
    dist.barrier()
    group.close()
    return text


def test_rounds_that_wait_for_an_absent_rank_end_at_the_timeout(world: World) -> None:
    texts = world(3).run(rounds_without_an_answer)
    assert all("rank 1 did not come this far" in texts[rank] for rank in (0, 2)), texts
    assert all("no answer within 3 s" in texts[rank] for rank in (0, 2)), texts


def test_threads_take_no_notice_of_the_bound() -> None:
    def rank_main(group: LocalGroup) -> list[float]:
        parts = group.all_to_all(torch.ones(2) * group.rank, [1, 1], [1, 1], largest=1).wait(10)
        return [float(part) for part in parts]

    assert run_local(2, rank_main) == [[0.0, 1.0], [0.0, 1.0]]
