"""`static_graph=True`: gradients that are ready in nested backwards, or more than once, as in DDP's static graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsync
from tests.frontends.models import Branches, Checkpointed
from tests.frontends.twins import Twin, compare_with_ddp, detach, follow, make_twins
from tests.world import Ranks

World = Callable[[int], Ranks]


class Repeated(nn.Module):
    """A block that is checkpointed twice and used once more, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.out = nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return {"out": [self.out(self.block(x))], "name": "out"}


class Reentrant(Checkpointed):
    """A module with re-entrant checkpoints."""

    def __init__(self) -> None:
        super().__init__(reentrant=True)


def inputs() -> Tensor:
    return torch.randn(4, 6, requires_grad=True)  # as re-entrant checkpoints need it


def step(twin: Twin, number: int) -> None:
    twin.optimizer.zero_grad()
    output = twin.model(inputs())
    (output["out"][0] if isinstance(output, dict) else output).square().mean().backward()
    twin.optimizer.step()


def accumulating_step(twin: Twin, number: int) -> None:
    twin.optimizer.zero_grad()
    for micro in range(3):
        with nullcontext() if micro == 2 else twin.no_sync():
            twin.model(inputs()).square().mean().backward()
    twin.optimizer.step()


def compare(make: Callable[[], nn.Module]) -> None:
    compare_with_ddp(make, step, options={"static_graph": True}, static_graph=True)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("make", [Reentrant, Repeated])
def test_reentrant_checkpoints_give_ddps_gradients(world: World, make: Callable[[], nn.Module], size: int) -> None:
    world(size).run(compare, make)


def accumulate() -> None:
    """Accumulates without nested backwards: DDP asserts where a static graph meets `no_sync`."""
    twins = make_twins(Reentrant, options={"static_graph": True})
    oracle = twins[0].module
    assert isinstance(oracle, Reentrant)
    oracle.reentrant = False
    follow(twins, accumulating_step, steps=4)
    detach(twins)


def test_local_gradients_accumulate(world: World) -> None:
    world(2).run(accumulate)


def overlap() -> list[int]:
    """Returns how many gradients the engine has when backward ends, in the first and in the second step."""
    torch.manual_seed(0)
    model = Reentrant()
    handle = gradsync.attach(model, static_graph=True, timeout=20)
    engine, missing = handle._engine, []
    finish = engine.finish

    def watched() -> None:
        missing.append(engine.missing())
        finish()

    load, loads = engine.load, []

    def counted(name: str, *rest: Any, **options: Any) -> None:
        loads[-1] += torch._C._current_graph_task_id() != -1 and not ended()
        load(name, *rest, **options)

    def ended() -> bool:
        return bool(seen_end)

    seen_end: list[bool] = []
    engine.finish, engine.load = watched, counted
    for _ in range(2):
        loads.append(0)
        seen_end.clear()
        x = inputs()
        x.register_hook(lambda gradient: seen_end.append(True))
        model(x).mean().backward()
    handle.detach()
    assert missing == [[], []]
    return loads


def test_from_the_second_step_on_gradients_go_while_backward_does(world: World) -> None:
    for first, second in world(2).run(overlap):
        assert first == 0
        assert second > 0


def change() -> str:
    torch.manual_seed(0)
    model = Branches()
    handle = gradsync.attach(model, static_graph=True, timeout=20)
    try:
        for number in range(2):
            taken = (0, 1) if number and dist.get_rank() == 1 else (0,)
            model(torch.randn(4, 6), taken).mean().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        handle.detach()
    return "nothing raised"


def test_a_graph_that_changes_is_found_on_all_ranks(world: World) -> None:
    for text in world(2).run(change):
        assert "Your training graph has changed" in text
        assert "branches.1." in text
