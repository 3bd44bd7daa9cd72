"""16-bit models, autocast and 16-bit messages: all ranks skip an overflow and lower the loss scale together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync import Plan
from gradsync.schemes import HalfPrecision
from lab.tests.rivals.test_lazy import lazily_merged
from tests.frontends.models import Perceptron
from tests.frontends.test_chunks import BFLOAT16, EXACT, FLOAT16, LATE, by_layers
from tests.frontends.twins import assert_same_on_all_ranks
from tests.world import Ranks

World = Callable[[int], Ranks]
Plans = Callable[[nn.Module], Plan]
BAD_STEPS = (3, 4)


class Loop:
    """A mixed-precision training loop: float32 weights, and a model in float16 that copies them."""

    def __init__(self, kind: str, plan: Plans, behind_ddp: bool) -> None:
        torch.manual_seed(0)
        self.dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
        self.autocast = kind == "autocast"
        self.module = Perceptron(self.dtype)
        self.model = DistributedDataParallel(self.module) if behind_ddp else self.module
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.handle = gradsync.attach(self.model, plan=plan(self.module), timeout=10, grad_scaler=self.scaler)
        self.has_copy = self.dtype is torch.float16
        own = list(self.module.parameters())
        self.weights = [p.detach().float().requires_grad_() for p in own] if self.has_copy else own
        self.optimizer = torch.optim.SGD(self.weights, lr=0.1, momentum=0.9)

    def step(self, x: Tensor, factor: float) -> None:
        self.module.zero_grad()
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = self.model(x.to(self.dtype)).float().square().mean() * factor
        self.scaler.scale(loss).backward()
        if self.has_copy:
            for weight, p in zip(self.weights, self.module.parameters(), strict=True):
                weight.grad = p.grad.float()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.has_copy:
            with torch.no_grad():
                torch._foreach_copy_(list(self.module.parameters()), self.weights)

    @property
    def kept(self) -> dict[str, Tensor]:
        """Returns everything that a skipped step must leave unchanged."""
        states = [self.optimizer.state[weight] for weight in self.weights]  # none of what has not arrived yet
        momenta = [s.get("momentum_buffer", torch.zeros(())) for s in states]
        numbered = {f"{what} {i}": t for what, ts in (("w", self.weights), ("m", momenta)) for i, t in enumerate(ts)}
        saved = self.handle.state_dict()
        left = {key: t if "//" in key else t / saved.get("loss_scale", 1.0) for key, t in saved["state"].items()}
        return {name: t.detach().clone() for name, t in (numbered | left).items()}


def overflows(kind: str, plan: Plans, behind_ddp: bool) -> list[float]:
    """Overflows rank 1's loss in two steps, in float16 by its size alone; returns the scale after each step."""
    loop = Loop(kind, plan, behind_ddp)
    generator = torch.Generator().manual_seed(dist.get_rank())
    scales = []
    for step in range(8):
        bad = step in BAD_STEPS
        before = loop.kept if step else {}
        factor = (1e5 if loop.has_copy else torch.inf) if bad and dist.get_rank() == 1 else 1.0
        loop.step(torch.randn(4, 6, generator=generator), factor)
        after = loop.kept
        moved = [not torch.equal(after[name], values) for name, values in before.items() if values.numel()]
        assert not any(moved) if bad else step == 0 or any(moved), step
        scales.append(loop.scaler.get_scale())
    assert_same_on_all_ranks(dict(loop.module.named_parameters()))
    loop.handle.detach()
    return scales


def lazily(model: nn.Module, scheme: HalfPrecision) -> Plan:
    return lazily_merged(model, 100.0, scheme)


PLANS = {
    "late bfloat16": partial(by_layers, scheme=replace(LATE, scheme=BFLOAT16, max_age=4)),
    "late float16": partial(by_layers, scheme=replace(LATE, scheme=FLOAT16, freeze=True)),
    "exact float16": partial(by_layers, scheme=replace(EXACT, scheme=FLOAT16)),
    "lazy bfloat16": partial(lazily, scheme=BFLOAT16),
    "lazy float16": partial(lazily, scheme=FLOAT16),
}


@pytest.mark.parametrize(
    ("kind", "plan", "behind_ddp"),
    [
        ("float32", "lazy float16", False),
        ("autocast", "late float16", True),
        ("autocast", "exact float16", False),
        ("autocast", "lazy bfloat16", False),
        ("bfloat16", "late bfloat16", False),
        ("bfloat16", "lazy bfloat16", True),
        ("float16", "late float16", False),
        ("float16", "exact float16", True),
        ("float16", "lazy float16", False),
    ],
)
def test_all_ranks_skip_what_overflows_on_one_and_lower_the_scale_alike(
    world: World, kind: str, plan: str, behind_ddp: bool
) -> None:
    for scales in world(2).run(overflows, kind, PLANS[plan], behind_ddp):
        assert scales == [1024, 1024, 2048, 1024, 512, 512, 512, 1024]
