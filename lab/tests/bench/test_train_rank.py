"""gradsync settles without learning, all methods can afford a block's length, and disturbed blocks are repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from gradsync_lab.bench.methods import method
from gradsync_lab.bench.steal import Steal
from gradsync_lab.bench.train import TrainSpec
from gradsync_lab.bench.train_rank import Contestant, affordable_steps, attempt, compete, settle
from tests.world import Ranks

World = Callable[[int], Ranks]


class Line:
    """A workload: a straight line through noise."""

    def batches(self, rank: int, world_size: int, seed: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * seed + rank)
        while True:
            yield torch.randn(8, 3, generator=generator)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()


class Restless:
    """An attachment that tries plans for some steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.no_sync = nullcontext
        self.kept: dict[str, Any] = {"step": steps, "state": {"residual": 1.0}}
        self.detached = False

    @property
    def settled(self) -> bool:
        self.steps -= 1
        return self.steps <= 0

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state

    def detach(self) -> None:
        self.detached = True


def contestant(attachment: Any) -> Contestant:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Contestant("gradsync", model, attachment, optimizer, Line().batches(0, 2, seed=0))


def settled_state() -> tuple[bool, bool, bool, bool]:
    attachment = Restless(5)
    who, untouched = contestant(attachment), contestant(None)
    trained = []
    who.optimizer.register_step_post_hook(lambda *_: trained.append(1))
    batches = who.batches
    settle(Line(), who)
    same = all(
        torch.equal(a, b)
        for a, b in zip(who.model.state_dict().values(), untouched.model.state_dict().values(), strict=True)
    )
    assert who.failed is None and attachment.kept == {"step": 0, "state": {}}, "what trials left is gone"
    momentum_gone = not who.optimizer.state_dict()["state"]
    return (
        same,
        momentum_gone,
        who.batches is batches and all(p.grad is None for p in who.model.parameters()),
        len(trained) >= 3,
    )


def test_settling_trains_and_leaves_weights_statistics_momentum_and_data_as_they_were(world: World) -> None:
    assert world(2).run(settled_state) == [(True,) * 4] * 2


def fails_on_one_rank() -> tuple[str | None, bool]:
    attachment = Restless(5)
    who = contestant(attachment)
    with attempt(who):
        if torch.distributed.get_rank() == 1:
            raise ValueError("no")
    return who.failed, attachment.detached


def test_what_fails_on_one_rank_is_detached_on_all_so_that_others_can_be_measured(world: World) -> None:
    assert world(2).run(fails_on_one_rank) == [("failed on another rank", True), ("ValueError: no", True)]


def steps_of_a_block(step_s: list[float], most_block_s: float) -> int:
    contestants = [contestant(None) for _ in step_s]
    rank = torch.distributed.get_rank()
    for who, seconds in zip(contestants, step_s, strict=True):
        who.step_s = [seconds * (1 + rank)] * 3
    contestants.append(contestant(None))
    contestants[-1].failed, contestants[-1].step_s = "broken", [1e9]
    return affordable_steps(contestants, TrainSpec(block_steps=8, most_block_s=most_block_s))


@pytest.mark.parametrize(
    ("step_s", "steps"), [([0.1, 0.2], 8), ([0.1, 1.0], 4), ([0.1, 2.0], 2), ([0.1, 100.0], 1), ([], 8)]
)
def test_a_block_is_as_long_as_the_slowest_method_on_the_slowest_rank_affords(
    world: World, step_s: list[float], steps: int
) -> None:
    assert world(2).run(steps_of_a_block, step_s, 8.0) == [steps, steps]


class Short(Line):
    """A `Line` with the fields that a contestant needs."""

    batch_size = 8

    def model(self, *, sparse: bool, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(3, 3)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)


class Disturbed:
    """A `Patience` that reports a disturbance at given calls, counted from 0."""

    def __init__(self, *times: int) -> None:
        self.times, self.asked = times, -1

    def is_lost(self, since: Steal) -> bool:
        self.asked += 1
        return self.asked in self.times


def rounds_that_count(*disturbed: int) -> tuple[int, int, int, int]:
    ways = {name: method(name) for name in ("ddp_default", "gradsync")}
    spec = TrainSpec(block_steps=2, warmup_steps=1)
    contestants, stolen = compete(Short(), ways, spec, 3, Disturbed(*disturbed))
    first, second = contestants
    assert (len(first.blocks), len(first.sent_bytes), len(first.backward_s)) == (3, 3, 3) and len(stolen) == 3
    for who in contestants:
        if who.attachment is not None:
            who.attachment.detach()
    return len(first.blocks), len(second.blocks), len(first.losses), len(second.losses)


def test_what_the_host_disturbed_is_made_again_rounds_by_all_methods(world: World) -> None:
    """One method settles first, then rounds follow."""
    (calm,) = set(world(2).run(rounds_that_count))
    (again,) = set(world(2).run(rounds_that_count, 0, 2, 4))
    assert calm[:2] == again[:2] == (3, 3)
    assert calm[2] == calm[3] and again[2] == again[3] == calm[2] + 2 * 3, "steps made again are trained, too"


def steps_trained(*names: str) -> dict[str, tuple[int, int]]:
    spec = TrainSpec(block_steps=2, warmup_steps=1)
    ways = {name: method(name) for name in names}
    contestants, _ = compete(Short(), ways, spec, 2, Disturbed())
    for who in contestants:
        if who.attachment is not None:
            who.attachment.detach()
    return {who.name: (len(who.losses), who.cycle) for who in contestants}


def test_all_methods_train_equal_steps_also_beside_those_with_cycles(world: World) -> None:
    """Losses would not be comparable after different numbers of steps."""
    (found, _) = world(2).run(steps_trained, "ddp_default", "local_sgd3", "local_sgd2")
    assert found == {"ddp_default": (21, 1), "local_sgd3": (21, 3), "local_sgd2": (21, 2)}, "three blocks of 1 + 6"
