"""gradsync beside DistributedDataParallel around the same model: found and refused, or allowed where it is right."""

from __future__ import annotations

import gc
import logging
import os
import sys
import types
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync.frontends.agreement import _attached
from tests.frontends.twins import assert_same_on_all_ranks
from tests.world import Ranks

World = Callable[[int], Ranks]

AROUND = "call gradsync.attach(ddp_model)"


class Wrapper(nn.Module):
    """A wrapper around a model, as frameworks add."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.wrapped = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.wrapped(x)
        return result


def raising(function: Callable[[], object]) -> str:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("nothing was raised")


def inside_of_ddp(kind: str) -> str:
    inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = {
        "itself": lambda: DistributedDataParallel(inner),
        "in a module": lambda: DistributedDataParallel(Wrapper(inner)),
        "in a framework": lambda: Wrapper(DistributedDataParallel(Wrapper(inner))),
        "a part": lambda: DistributedDataParallel(inner),
    }[kind]()
    said = raising(lambda: gradsync.attach(inner[0] if kind == "a part" else inner, timeout=10))
    assert not any(module in _attached for module in inner.modules())
    del model
    gradsync.attach(inner, timeout=10).detach()
    return said


@pytest.mark.parametrize("kind", ["itself", "in a module", "in a framework", "a part"])
def test_a_model_inside_of_ddp_is_refused_with_the_right_call(world: World, kind: str) -> None:
    for said in world(2).run(inside_of_ddp, kind):
        assert AROUND in said, said


def around_ddp() -> str:
    inner = DistributedDataParallel(nn.Linear(3, 3))
    model = nn.Sequential(inner, nn.Linear(3, 3))
    said = raising(lambda: gradsync.attach(model, timeout=10))
    gradsync.attach(model, timeout=10, exclude=["0.*"]).detach()
    return said


def test_a_model_that_contains_ddp_is_refused_with_the_right_call(world: World) -> None:
    for said in world(2).run(around_ddp):
        assert "contains DistributedDataParallel at '0'" in said and "exclude=['0.*']" in said, said


def on_one_rank() -> str:
    inner = nn.Linear(3, 3)
    alone = dist.new_group([0])
    model = DistributedDataParallel(inner, process_group=alone) if dist.get_rank() == 0 else inner
    said = raising(lambda: gradsync.attach(inner, timeout=10))
    assert model is not None
    return said


def test_ddp_on_one_rank_raises_on_all(world: World) -> None:
    for said in world(2).run(on_one_rank):
        assert AROUND in said, said


def ddp_around_later(kind: str) -> str:
    inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    handle = gradsync.attach(inner, timeout=10)
    inner(torch.randn(4, 3)).sum().backward()
    inner.zero_grad()
    model = DistributedDataParallel(inner if kind == "itself" else Wrapper(inner))
    said = raising(lambda: model(torch.randn(4, 3)))
    assert all(p.grad is None for p in inner.parameters()), "before anything is exchanged"
    handle.detach()
    model(torch.randn(4, 3)).sum().backward()
    return said


@pytest.mark.parametrize("kind", ["itself", "in a module"])
def test_ddp_that_is_put_around_later_is_refused_in_the_next_forward(world: World, kind: str) -> None:
    for said in world(2).run(ddp_around_later, kind):
        assert AROUND in said and "put around" in said, said


def the_right_calls() -> None:
    """Attaches behind DDP's hook, and in a DDP that averages other parameters only."""
    ddp = DistributedDataParallel(nn.Linear(3, 3, bias=False))
    handle = gradsync.attach(ddp, timeout=10)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
        torch.testing.assert_close(ddp.module.weight.grad, torch.full((3, 3), 0.5))
    handle.detach()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    ignored = [f"0.{name}" for name, _ in model[0].named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    for attach_first in (True, False):
        if attach_first:
            handle = gradsync.attach(model[0], timeout=10)
        around = DistributedDataParallel(model)
        if not attach_first:
            handle = gradsync.attach(model[0], timeout=10)
        for _ in range(2):
            model.zero_grad()
            around(torch.randn(2, 3) + dist.get_rank()).square().sum().backward()
            assert_same_on_all_ranks({n: p.grad for n, p in model.named_parameters()})
        handle.detach()
        del around
        gc.collect()


def what_holds_a_graph_alone_is_no_wrapper() -> None:
    """Holds a graph elsewhere: it keeps accumulation nodes alive, as DDP does, but is no wrapper."""
    other = DistributedDataParallel(nn.Linear(2, 2))
    model = nn.Linear(3, 1)
    loss = model(torch.ones(1, 3)).sum()
    handle = gradsync.attach(model, timeout=10)
    handle.detach()
    assert loss.requires_grad and other is not None


@pytest.mark.parametrize("case", [the_right_calls, what_holds_a_graph_alone_is_no_wrapper])
def test_two_ranks(world: World, case: Callable[[], None]) -> None:
    world(2).run(case)


def warnings_of_a_lone_rank(kind: str) -> list[str]:
    """Returns the logged warnings where the process group has one rank."""
    texts: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger("gradsync").addHandler(listener)
    modules = {"torchft": types.ModuleType("torchft")} if kind == "torchft" else {}
    try:
        with (
            patch.dict(os.environ, {"WORLD_SIZE": "4" if kind == "torchrun" else "1"}),
            patch.dict(sys.modules, modules),
        ):
            gradsync.attach(nn.Linear(2, 2), timeout=10).detach()
    finally:
        logging.getLogger("gradsync").removeHandler(listener)
    return texts


def test_a_rank_that_is_alone_among_others_is_told_so(world: World) -> None:
    (texts,) = world(1).run(warnings_of_a_lone_rank, "torchrun")
    assert len(texts) == 1 and "synchronises nothing" in texts[0] and "WORLD_SIZE says that the job has 4" in texts[0]
    (texts,) = world(1).run(warnings_of_a_lone_rank, "torchft")
    assert len(texts) == 1 and "synchronises nothing" in texts[0] and "torchft" in texts[0]
    assert world(1).run(warnings_of_a_lone_rank, "alone") == [[]]


def inside_of_torchft() -> str:
    """Attaches inside torchft's class, which is known by its module's name."""
    made = type("DistributedDataParallel", (DistributedDataParallel,), {"__module__": "torchft.ddp"})
    inner = nn.Linear(3, 3)
    model = made(inner)
    return raising(lambda: gradsync.attach(inner, timeout=10)) + raising(lambda: gradsync.attach(model, timeout=10))


def test_torchft_is_refused_by_name(world: World) -> None:
    for said in world(2).run(inside_of_torchft):
        assert said.count("torchft's DistributedDataParallel averages") == 2, said
