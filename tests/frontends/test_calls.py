"""Calls of Python functions in a steady step: few in all, two for each small gradient, and few for each bucket.

Each call counts: between kernels of backward the caches hold nothing of it.
"""

from __future__ import annotations

import gc
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
FOR_WAITING = 8  # calls more where the exchange has not ended when backward has


def calls_of_a_step(gradients: int, *, buckets: int = 1, width: int = 4, set_to_none: bool) -> Counter[str]:
    """Returns how often each function of the library is called in one step, on all threads.

    Gradients, of weights and biases of layers of `width`, are in `buckets` of equally many.
    """
    calls: Counter[str] = Counter()
    counts = False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if counts and event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            calls[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"] += 1

    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(gradients // 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    size = torch.distributed.get_world_size()
    each = [(name, 0, spec.numel) for name, spec in specs.items()]
    count = gradients // buckets
    plan = Plan.make(specs, size, [(each[at : at + count], AllReduce()) for at in range(0, gradients, count)])
    threading.setprofile(profile)
    try:
        handle = gradsync.attach(model, plan=plan, timeout=20)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    gc.collect()  # ends now what earlier tests left, not in the step that counts
    for step in range(8):
        counts = step == 7
        sys.setprofile(profile if counts else None)
        optimizer.zero_grad(set_to_none=set_to_none)
        model(torch.ones(3, width)).sum().backward()
        optimizer.step()
    counts = False
    sys.setprofile(None)
    handle.detach()
    return calls


@pytest.mark.parametrize("set_to_none", [True, False], ids=["new gradients", "kept gradients"])
def test_a_small_gradient_costs_two_calls_and_a_step_few_more(world: World, set_to_none: bool) -> None:
    few, many = (world(2).run(calls_of, size, 1, 4, set_to_none) for size in (FEW, MANY))
    for of_few, of_many in zip(few, many, strict=True):
        assert of_many.total() - of_few.total() <= 2 * (MANY - FEW) + FOR_WAITING, (of_many - of_few).most_common()
        assert of_few.total() <= 345 + FOR_WAITING, of_few.most_common()


@pytest.mark.parametrize("set_to_none", [True, False], ids=["new gradients", "kept gradients"])
def test_a_further_bucket_costs_few_calls(world: World, set_to_none: bool) -> None:
    one, five = (world(2).run(calls_of, FEW, buckets, 4, set_to_none) for buckets in (1, 5))
    for of_one, of_five in zip(one, five, strict=True):
        assert of_five.total() - of_one.total() <= 4 * 92, (of_five - of_one).most_common()


def test_a_large_gradient_costs_few_calls(world: World) -> None:
    few, many = (world(2).run(calls_of, size, 1, 200, True) for size in (FEW, MANY))
    for of_few, of_many in zip(few, many, strict=True):
        larger = (MANY - FEW) // 2
        assert of_many.total() - of_few.total() <= 19 * larger, (of_many - of_few).most_common()


def calls_of(gradients: int, buckets: int, width: int, set_to_none: bool) -> Counter[str]:
    return calls_of_a_step(gradients, buckets=buckets, width=width, set_to_none=set_to_none)
