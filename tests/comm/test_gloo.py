"""`GlooGroup`: whichever way an operation takes, by size and rate, it gives what threads give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from gradsync.comm import GlooGroup, GroupError, LocalGroup, run_local, torch_group
from gradsync.comm.gloo import FAST_BYTES_PER_S
from gradsync.comm.group import Group
from gradsync.comm.rounds import CHUNK_BYTES
from gradsync.steps import DIRECT_BYTES
from tests.world import Ranks

World = Callable[[int], Ranks]

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
        expected = run_local(size, lambda group, length=length: operations(group, length))  # type: ignore[misc]
        for mine, theirs in zip(got, expected, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b.double(), rtol=0, atol=0)


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


def half_sums(length: int) -> torch.Tensor:
    group = GlooGroup(timeout_s=20, bytes_per_s=FAST)
    total = group.all_reduce(torch.full((length,), 1 / 3 + dist.get_rank(), dtype=torch.bfloat16)).wait(20)
    group.close()
    return total


@pytest.mark.parametrize("length", [10, DIRECT_BYTES // 4])
def test_half_precision_is_summed_in_full_and_alike_on_all_ranks(world: World, length: int) -> None:
    totals = world(4).run(half_sums, length)
    exact = sum(torch.full((length,), 1 / 3 + r, dtype=torch.bfloat16).float() for r in range(4))
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
    assert all("no answer within 3 s: rank 1 did not come this far" in texts[rank] for rank in (0, 2)), texts


def test_threads_take_no_notice_of_the_bound() -> None:
    def rank_main(group: LocalGroup) -> list[float]:
        parts = group.all_to_all(torch.ones(2) * group.rank, [1, 1], [1, 1], largest=1).wait(10)
        return [float(part) for part in parts]

    assert run_local(2, rank_main) == [[0.0, 1.0], [0.0, 1.0]]
