"""Ranks meet in the store before they make communicators: who is missing is named, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import gradsync
from gradsync.comm import GroupError, rendezvous, torch_group
from gradsync.comm.rendezvous import Entry, _Rendezvous, _written
from gradsync.comm.roll_call import RollCall
from gradsync.comm.store import StoreClient
from gradsync.planner import AveragingPlanner
from tests.frontends.models import Perceptron
from tests.world import Ranks, World

pytestmark = pytest.mark.waiting

Worlds = Callable[[int], Ranks]
TIMEOUT_S = 5.0  # where a rank is missing
PATIENT_S = 30.0  # where none is: other tests may have the cores


@pytest.fixture
def short_lived() -> Iterator[World]:
    with World(3) as world:
        yield world


def keys() -> int:
    dist.barrier()
    number: int = distributed_c10d._get_default_store().num_keys()
    dist.barrier()
    return number


def raised(call: Callable[[], object]) -> tuple[str, tuple[int, ...], float]:
    began_s = time.monotonic()
    with pytest.raises(GroupError) as caught:
        call()
    return str(caught.value), caught.value.ranks, time.monotonic() - began_s


def come_without(absent: int) -> tuple[int, tuple[str, tuple[int, ...], float] | None]:
    """All but one rank attach, each a little later than the one before; then all do."""
    before, told = keys(), None
    if dist.get_rank() != absent:
        time.sleep(0.3 * dist.get_rank())
        told = raised(lambda: gradsync.attach(Perceptron(), timeout=TIMEOUT_S))
    dist.barrier()
    gradsync.attach(Perceptron(), timeout=PATIENT_S).detach()
    return keys() - before, told


@pytest.mark.parametrize("absent", [0, 1])
def test_the_rank_that_does_not_come_is_named_and_the_next_attach_works(world: Worlds, absent: int) -> None:
    for left, told in world(3).run(come_without, absent, limit_s=30):
        assert left == 0
        if told is not None:
            text, ranks, seconds = told
            assert text.startswith(f"rank {absent} did not come to attach() with a plan of gradients within 5 s"), text
            assert ranks == (absent,) and seconds < TIMEOUT_S + 5


def come_late() -> int:
    before = keys()
    if dist.get_rank() == 1:
        time.sleep(1.5)
    gradsync.attach(Perceptron(), timeout=PATIENT_S).detach()
    return keys() - before


def test_a_late_rank_is_waited_for(world: Worlds) -> None:
    assert world(3).run(come_late) == [0, 0, 0]


def come_for_different_things(kind: str) -> tuple[int, str]:
    before, other = keys(), dist.get_rank() == 1
    if kind == "version" and other:
        rendezvous.VERSION = "0.0.1"
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = AveragingPlanner() if kind == "plan" and other else None
    text, ranks, seconds = raised(lambda: gradsync.attach(model, optimizer, plan=plan, timeout=60))
    assert ranks == () and seconds < 10, (ranks, seconds)
    return keys() - before, text


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("plan", "came to different things at the same time, all must come to the same: attach() with a plan of gr"),
        ("version", "have different versions of gradsync, install the same one everywhere: 0.1.0 on rank 0, 0.0.1 on "),
    ],
)
def test_all_raise_where_ranks_come_for_different_things(short_lived: World, kind: str, words: str) -> None:
    for left, text in short_lived.run(come_for_different_things, kind, limit_s=30):
        assert left == 0 and words in text, text


def die(number: int, where: str) -> tuple[str, tuple[int, ...], float]:
    """Rank 1 gets a signal before it attaches, or when all have met and it begins to connect."""
    gradsync.attach(Perceptron(), timeout=PATIENT_S).detach()  # its imports take seconds where others work, too
    dist.barrier()
    if dist.get_rank() == 1:
        if where == "connecting":
            torch_of = "gradsync.comm.communicators.new_communicator"
            pytest.MonkeyPatch().setattr(torch_of, lambda *arguments: os.kill(os.getpid(), number))
        else:
            os.kill(os.getpid(), number)
    return raised(lambda: gradsync.attach(Perceptron(), timeout=TIMEOUT_S))


@pytest.mark.parametrize("where", ["before", "connecting"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named_in_time(short_lived: World, number: int, where: str) -> None:
    short_lived.start(die, number, where)
    outcomes = short_lived.outcomes(limit_s=40, lost={1} if number == signal.SIGSTOP else ())
    for rank in (0, 2):
        text, ranks, seconds = outcomes[rank].value
        words = "did not come to attach()" if where == "before" else "does not answer: it has died, was stopped"
        assert f"rank 1 {words}" in text and ranks == (1,) and seconds < TIMEOUT_S + 5, outcomes


def meet_beside_entries_of_an_earlier_job() -> list[float]:
    """The store has an entry of each rank that nobody waits behind, and one set of these was seen by two ranks."""
    earlier = _Rendezvous(None, "a group of gradsync")
    if dist.get_rank() == 0:
        stale = {rank: Entry(f"old{rank}", "a group of gradsync", "0.0.0", "elsewhere") for rank in range(3)}
        store = distributed_c10d._get_default_store()
        for rank, entry in stale.items():
            store.append(earlier._key, f"{rank}:{_written(entry)} ")  # type: ignore[attr-defined]
        earlier._note_seen(stale)
        (name,) = earlier._seen
        store.append(f"{name}/seen", "0 1 ")  # type: ignore[attr-defined]
    dist.barrier()
    time.sleep(0.3 * dist.get_rank())
    group = torch_group(timeout_s=PATIENT_S)
    total = group.all_reduce(torch.ones(1)).wait(PATIENT_S).tolist()
    group.close()
    return total


def test_entries_of_an_earlier_job_do_no_harm(short_lived: World) -> None:
    assert short_lived.run(meet_beside_entries_of_an_earlier_job) == [[3.0]] * 3


class Counting:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def progress(self) -> dict[str, int]:
        return {"steps": 10 + self.rank}


def call_the_roll() -> list[dict[int, dict[str, int]]]:
    counting, store = Counting(dist.get_rank()), StoreClient()
    roll_call = RollCall(store, "roll", dist.get_rank(), counting.progress)
    dist.barrier()
    found = [roll_call.answers([0, 1, 2]) for _ in range(2)]  # all call at once
    dist.barrier()
    if dist.get_rank() == 1:
        roll_call.close(clear=False)
    dist.barrier()
    if dist.get_rank() != 1:
        found.append(roll_call.answers([0, 1, 2]))
    dist.barrier()
    roll_call.close(clear=True)
    return found


def test_ranks_answer_how_far_they_are_and_who_has_ended_does_not(world: Worlds) -> None:
    everyone = {rank: {"steps": 10 + rank} for rank in range(3)}
    without = {rank: answer for rank, answer in everyone.items() if rank != 1}
    assert world(3).run(call_the_roll) == [[everyone, everyone, without], [everyone] * 2, [everyone, everyone, without]]


def attach_and_detach_often() -> tuple[int, int, int]:
    """Returns store keys, descriptors and threads more after ten more cycles than after two."""

    def cycle(fails: bool) -> None:
        model = Perceptron()
        handle = gradsync.attach(model, timeout=PATIENT_S)
        model(torch.randn(4, 6)).mean().backward()
        handle.load_state_dict(handle.state_dict())
        if fails:
            handle._engine.peers.fail("as planned")
        handle.detach()

    def census() -> tuple[int, int, int]:
        time.sleep(0.5)  # threads of gloo end a little later
        descriptors, threads = (len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task"))
        return keys(), descriptors, threads

    for _ in range(2):
        cycle(fails=False)
    before = census()
    for number in range(10):
        cycle(fails=number % 2 == 1)
    for _ in range(6):  # all ranks look equally often, as a look is at a barrier
        keys_, descriptors, threads = (now - then for now, then in zip(census(), before, strict=True))
    return keys_, descriptors, threads


def test_nothing_is_left_behind_without_a_collection_of_garbage(world: Worlds) -> None:
    assert world(3).run(_without_garbage_collection) == [(0, 0, 0)] * 3


def _without_garbage_collection() -> tuple[int, int, int]:
    gc.collect()
    gc.disable()
    try:
        return attach_and_detach_often()
    finally:
        gc.enable()
