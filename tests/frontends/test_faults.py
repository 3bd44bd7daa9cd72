"""A rank that dies, stops or raises within a step: the others raise in time and say where."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradsync
from tests.frontends.models import Perceptron
from tests.frontends.twins import assert_same_on_all_ranks
from tests.world import Outcome, Ranks, World

pytestmark = pytest.mark.waiting

TIMEOUT_S = 5.0  # a first step takes seconds where other tests have the cores
PLACE = re.compile(r"bucket '0' \(.* and 7 more\), stage 'all_reduce', step 1: ")


@pytest.fixture(params=[False, True], ids=["store apart", "store on rank 0"])
def short_lived(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(3, store_on_rank_0=request.param) as world:
        yield world


def fall(victim: int, number: int) -> tuple[str, str]:
    """Sends the victim a signal in its second step, before its bucket is ready; returns the others' errors."""
    torch.manual_seed(0)
    model = Perceptron()
    gradsync.attach(model, timeout=TIMEOUT_S)

    def strike(gradient: Tensor) -> None:
        os.kill(os.getpid(), number)

    model(torch.randn(4, 6)).mean().backward()
    output = model(torch.randn(4, 6))
    if dist.get_rank() == victim:
        output.register_hook(strike)
    try:
        output.mean().backward()
    except gradsync.GroupError as error:
        first = str(error)
    try:
        model(torch.randn(4, 6)).mean().backward()
    except RuntimeError as error:
        return first, str(error)
    raise AssertionError("the engine went on")


def survivors(outcomes: list[Outcome], victim: int) -> list[tuple[str, str]]:
    for rank, outcome in enumerate(outcomes):
        assert rank == victim or outcome.error is None, f"rank {rank}: {outcome.error}"
    return [outcome.value for rank, outcome in enumerate(outcomes) if rank != victim]


def missing(world: World, victim: int) -> str:
    """The words for the missing rank; nobody knows more than that it may be rank 0 where the store was on it."""
    on_victim = victim == 0 and world.store_on_rank_0
    return "it ends with rank 0" if on_victim else f"rank {victim} does not answer: it has died, was stopped"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_noticed_naming_bucket_stage_and_step(short_lived: World, victim: int) -> None:
    short_lived.start(fall, victim, signal.SIGKILL)
    outcomes = short_lived.outcomes(limit_s=30)
    assert outcomes[victim].died
    for first, after in survivors(outcomes, victim):
        assert PLACE.match(first) and missing(short_lived, victim) in first, first
        assert after.startswith(f"gradient synchronisation stopped earlier: {first}; detach() and attach again"), after


def test_a_killed_rank_is_named_to_ranks_that_swap_no_message_with_it() -> None:
    """Ranks 0 and 1 swap their sums of the small bucket with 2 and 3 only after these have swapped theirs."""
    with World(4) as world:
        world.start(fall, 3, signal.SIGKILL)
        for first, _ in survivors(world.outcomes(limit_s=30), 3):
            assert PLACE.match(first) and missing(world, 3) in first, first


@pytest.mark.parametrize(("short_lived", "victim"), [(False, 2), (True, 0)], indirect=["short_lived"])
def test_a_stopped_rank_is_noticed_at_the_timeout(short_lived: World, victim: int) -> None:
    short_lived.start(fall, victim, signal.SIGSTOP)
    outcomes = short_lived.outcomes(limit_s=10 * TIMEOUT_S, lost={victim})
    texts = [first for first, _ in survivors(outcomes, victim)]
    for text in texts:
        assert PLACE.match(text) and "(no answer within 5 s)" in text and missing(short_lived, victim) in text, texts


def stop_until_the_others_have_left() -> tuple[str, tuple[int, ...]]:
    """Stops rank 1 in a backward until the others have detached; rank 0 then wakes it."""
    model = Perceptron()
    handle = gradsync.attach(model, timeout=TIMEOUT_S)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    output = model(torch.randn(4, 6))
    if dist.get_rank() == 1:
        output.register_hook(lambda _: os.kill(os.getpid(), signal.SIGSTOP))
    try:
        output.mean().backward()
    except gradsync.GroupError as error:
        said = str(error), error.ranks
    handle.detach()
    if dist.get_rank() == 0:
        time.sleep(1)
        os.kill(int(pids[1]), signal.SIGCONT)
    return said


@pytest.mark.parametrize("short_lived", [False], indirect=True)
def test_a_rank_that_stood_still_blames_nobody_else(short_lived: World) -> None:
    short_lived.start(stop_until_the_others_have_left, size=2)
    for outcome in short_lived.outcomes(limit_s=10 * TIMEOUT_S):
        text, ranks = outcome.value
        assert ranks == (1,) and "rank 1" in text, (text, ranks)
    assert "stood still for" in text or "rank 0 reports: rank 1" in text


def make_fewer_steps() -> str:
    """Gives rank 1 one batch less; rank 1 then continues after its training loop."""
    model = Perceptron()
    gradsync.attach(model, timeout=TIMEOUT_S)
    text = ""
    try:
        for _ in range(1 if dist.get_rank() == 1 else 2):
            model(torch.randn(4, 6)).mean().backward()
    except gradsync.GroupError as error:
        text = str(error)
    dist.barrier()
    return text


def test_a_rank_of_fewer_steps_is_named(world: Callable[[int], Ranks]) -> None:
    texts = world(3).run(make_fewer_steps, limit_s=30)
    for text in (texts[0], texts[2]):
        assert PLACE.match(text) and "rank 1 did not come this far" in text and "fewer steps" in text, texts


def raise_in_backward() -> tuple[str, str]:
    """Raises in rank 1's second backward; rank 1 calls gradsync again once all others have given up."""
    torch.manual_seed(0)
    model = Perceptron()
    handle = gradsync.attach(model, timeout=60)

    def fail(gradient: Tensor) -> None:
        raise ValueError("a bad sample")

    def step() -> None:
        model(torch.randn(4, 6)).mean().backward()

    step()
    failing = model.layers[0].weight.register_hook(fail) if dist.get_rank() == 1 else None
    try:
        step()
    except (ValueError, gradsync.GroupError) as error:
        first = str(error)
    dist.barrier()
    try:
        step()
    except RuntimeError as error:
        second = str(error)
    if failing is not None:
        failing.remove()
    handle.detach()
    model.zero_grad()
    handle = gradsync.attach(model, timeout=10)
    step()
    handle.detach()
    gc.collect()  # would wait for the operation that never ended, which has 60 s
    assert_same_on_all_ranks({name: p.grad for name, p in model.named_parameters()})
    return first, second


def test_a_rank_that_raises_in_backward_tells_the_others_at_once(world: Callable[[int], Ranks]) -> None:
    outcomes = world(3).run(raise_in_backward, limit_s=30)
    for rank, (first, second) in enumerate(outcomes):
        if rank == 1:
            assert first == "a bad sample"
        else:
            assert re.match(PLACE.pattern + "rank 1: backward ended with an error on this rank", first), first
        assert second.startswith("gradient synchronisation stopped earlier: "), second
        assert "detach() and attach again on every rank" in second
