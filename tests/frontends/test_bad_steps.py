"""Chunks under mixed precision and faults: a skipped step changes nothing, and a resumed run goes on as before."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync import Plan
from gradsync.schemes import CoarseGrained, HalfPrecision, Scheme
from gradsync.tensors.bucket import TensorSpec
from tests.frontends.models import Perceptron
from tests.frontends.twins import assert_same_on_all_ranks
from tests.world import Ranks

World = Callable[[int], Ranks]

LATE = CoarseGrained(ratio=0.3, chunk=8, max_age=9)
SCHEMES = {
    "late": LATE,
    "exact": replace(LATE, choice="exact", max_age=None),
    "frozen": replace(LATE, scoring="agreement", freeze=True),
    "exact frozen": replace(LATE, choice="exact", scoring="relative", freeze=True),
    "momentum": replace(LATE, momentum=0.9),
    "bfloat16": replace(LATE, scheme=HalfPrecision(values="bfloat16"), scoring="agreement"),
    "float16": replace(LATE, scheme=HalfPrecision(values="float16"), momentum=0.9),
    "exact float16": replace(LATE, scheme=HalfPrecision(values="float16"), choice="exact", freeze=True),
}
HALF = HalfPrecision(values="float16")
LOSS_SCALE = 16.0


def plan_for(model: nn.Module, scheme: Scheme[Any]) -> Plan:
    """Returns a plan of two buckets of chunks that share a parameter, and one stateless bucket for the rest."""
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    chunks = ["layers.0.weight", "layers.0.bias", ("layers.2.weight", 0, 21)], [("layers.2.weight", 21, 64)]
    rest = [name for name in specs if not name.startswith(("layers.0", "layers.2.weight"))]
    return Plan.make(specs, dist.get_world_size(), [*((part, scheme) for part in chunks), (rest, HALF)])


@dataclass(frozen=True)
class Kind:
    """A kind of run: its scheme, the dtypes of weights and autocast, and whether DDP's hook is used."""

    scheme: CoarseGrained
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    behind_ddp: bool = False


class Run:
    """A model in training with a loss scale; 16-bit weights have float32 master copies."""

    def __init__(self, kind: Kind) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.inner = Perceptron(kind.dtype)
        self.parameters = dict(self.inner.named_parameters())
        self.model = DistributedDataParallel(self.inner) if kind.behind_ddp else self.inner
        self.handle = gradsync.attach(self.model, plan=plan_for(self.inner, kind.scheme), timeout=10)
        half = kind.dtype.itemsize == 2
        self.weights = [nn.Parameter(p.detach().float()) if half else p for p in self.parameters.values()]
        momentum = 0.0 if kind.scheme.momentum else 0.9
        self.optimizer = torch.optim.SGD(self.weights, lr=0.05, momentum=momentum, weight_decay=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE, growth_interval=1000)

    def step(self, seed: int, bad: Mapping[tuple[str, int], float] | None = None) -> None:
        """Takes a step on this rank's data; `bad` is written at (parameter, element) of this rank's gradient."""
        generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
        x = torch.randn(5, 6, generator=generator).to(self.kind.dtype)
        self.inner.zero_grad()
        hooks = [self._put(name, place, value) for (name, place), value in (bad or {}).items()]
        with nullcontext() if self.kind.autocast is None else torch.autocast("cpu", self.kind.autocast):
            loss = self.model(x).float().square().mean()
        self.scaler.scale(loss).backward()
        for hook in hooks:
            hook.remove()
        for weight, p in zip(self.weights, self.parameters.values(), strict=True):
            weight.grad = p.grad if weight is p or p.grad is None else p.grad.float()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            for weight, p in zip(self.weights, self.parameters.values(), strict=True):
                p.copy_(weight)

    def _put(self, name: str, place: int, value: float) -> Any:
        def put(gradient: Tensor) -> Tensor:
            changed = gradient.flatten().clone()
            changed[place] = value
            return changed.view_as(gradient)

        return self.parameters[name].register_hook(put)

    def kept(self) -> dict[str, Tensor]:
        """Returns copies of the weights and of all state that lasts from step to step."""
        kept = {f"weight {number}": weight.detach() for number, weight in enumerate(self.weights)}
        kept |= {f"momentum {n}": s["momentum_buffer"] for n, s in self.optimizer.state_dict()["state"].items()}
        kept |= self.handle.state_dict()["state"]
        return {name: values.clone() for name, values in kept.items() if values is not None}

    def save(self) -> io.BytesIO:
        buffer = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self._parts().items()}, buffer)
        buffer.seek(0)
        return buffer

    def load(self, buffer: io.BytesIO) -> None:
        saved = torch.load(buffer, weights_only=True)
        for name, part in self._parts().items():
            part.load_state_dict(saved[name])

    def _parts(self) -> dict[str, Any]:
        return {"model": self.inner, "optimizer": self.optimizer, "scaler": self.scaler, "gradsync": self.handle}


def assert_same(kept: Mapping[str, Tensor], expected: Mapping[str, Tensor], when: str) -> None:
    """Asserts that two copies of all state agree bit by bit."""
    assert kept.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(kept[name], values), f"{name} {when}"


def steps_that_are_skipped_leave_no_trace(kind: Kind) -> None:
    """Puts non-finite values into one bucket of three, on one rank, and among unsent elements where the case allows."""
    steady, spoilt = Run(kind), Run(kind)
    for seed in range(3):
        steady.step(seed)
        spoilt.step(seed)
    cases = [("layers.0.weight", torch.inf, (1,)), ("layers.2.weight", torch.nan, (0,))]
    cases += [("layers.4.weight", -torch.inf, (1,))]
    if kind.dtype is torch.float32:
        cases += [("layers.4.weight", 1e30, (0, 1))]  # finite, but for the sum
    for seed, (name, value, ranks) in enumerate(cases, 3):
        steady.step(seed)  # with the choice that the bad step has, if it is a late one
        arrived = steady.handle.arrived(steady.parameters[name])
        place = next(at for at in range(64) if not any(low <= at < high for low, high in arrived or ()))
        before = spoilt.kept()
        spoilt.step(99, {(name, place): value} if dist.get_rank() in ranks else None)
        if arrived is not None and kind.scheme.choice == "late":
            assert spoilt.handle.arrived(spoilt.parameters[name]) == arrived
        assert spoilt.scaler.get_scale() == LOSS_SCALE / 2
        assert_same(spoilt.kept(), before, f"after {value} in {name}")
        spoilt.scaler.update(LOSS_SCALE)
        spoilt.step(seed)
        assert_same(spoilt.kept(), steady.kept(), f"a step after {value} in {name}")
    assert_same_on_all_ranks(dict(spoilt.inner.named_parameters()))
    for run in (steady, spoilt):
        run.handle.detach()


KINDS = {
    **{name: Kind(scheme) for name, scheme in SCHEMES.items()},
    "late behind DDP": Kind(SCHEMES["frozen"], behind_ddp=True),
    "exact behind DDP": Kind(SCHEMES["exact float16"], behind_ddp=True),
    "bfloat16 weights": Kind(SCHEMES["late"], torch.bfloat16),
    "float16 weights": Kind(SCHEMES["exact"], torch.float16),
    "bfloat16 autocast": Kind(SCHEMES["bfloat16"], autocast=torch.bfloat16),
    "float16 autocast": Kind(SCHEMES["float16"], autocast=torch.float16),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_steps_that_are_skipped_leave_no_trace(world: World, kind: Kind) -> None:
    world(2).run(steps_that_are_skipped_leave_no_trace, kind)
