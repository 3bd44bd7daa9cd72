"""Calls of Python functions in a steady step of many small gradients: few in all, and two for each gradient.

Each call counts: between kernels of backward the caches hold nothing of it.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync.plans.plan import Plan
from gradsync.schemes import AllReduce
from gradsync.tensors.bucket import TensorSpec
from tests.world import Ranks

World = Callable[[int], Ranks]
LIBRARY = str(Path(gradsync.__file__).parent)
FEW, MANY = 20, 40  # gradients


def calls_of_a_step(gradients: int, *, set_to_none: bool) -> Counter[str]:
    """Returns how often each function of the library is called in one step, on all threads."""
    calls: Counter[str] = Counter()
    counts = False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if counts and event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            calls[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"] += 1

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(gradients // 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    size = torch.distributed.get_world_size()
    plan = Plan.make(specs, size, [([(name, 0, spec.numel) for name, spec in specs.items()], AllReduce())])
    threading.setprofile(profile)
    try:
        handle = gradsync.attach(model, plan=plan, timeout=20)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    for step in range(8):
        counts = step == 7
        sys.setprofile(profile if counts else None)
        optimizer.zero_grad(set_to_none=set_to_none)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    counts = False
    sys.setprofile(None)
    handle.detach()
    return calls


@pytest.mark.parametrize("set_to_none", [True, False], ids=["new gradients", "kept gradients"])
def test_a_small_gradient_costs_two_calls_and_a_step_few_more(world: World, set_to_none: bool) -> None:
    few, many = (world(2).run(calls_of_few, size, set_to_none) for size in (FEW, MANY))
    for of_few, of_many in zip(few, many, strict=True):
        assert of_many.total() - of_few.total() <= 2 * (MANY - FEW), (of_many - of_few).most_common()
        assert of_few.total() <= 380, of_few.most_common()


def calls_of_few(gradients: int, set_to_none: bool) -> Counter[str]:
    return calls_of_a_step(gradients, set_to_none=set_to_none)
