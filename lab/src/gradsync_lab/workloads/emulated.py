"""A workload that sleeps instead of computing: each gradient appears at the time measured in a step that ran alone.

Ranks that share the cores of one machine slow each other's computation down, and the computation of schemes slows them
further; on nodes of their own they would not. With sleeps, only exchanges and schemes keep cores busy. Runs with
emulated computation measure the time of steps and nothing of learning: the gradients of a few real batches are
repeated, and no weight changes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.optim import Optimizer

from .base import Batch, Workload

BATCHES = 4  # real batches whose gradients appear in turns
UNCOUNTED_STEPS = 3
MEASURED_STEPS = 10


class ComputeTimes(BaseModel):
    """Seconds of a training step's parts; `ready_s` is when each gradient is accumulated, from backward's begin on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    forward_s: float
    ready_s: dict[str, float]
    backward_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


def measured_times(workload: Workload, *, sparse: bool, steps: int = MEASURED_STEPS) -> ComputeTimes:
    """Returns the median times of a training step of one rank in one thread, measured with nothing else running.

    Args:
        sparse: as for `Workload.model`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = workload.model(sparse=sparse)
        watch = _GradientTimer(model)
        optimizer = workload.optimizer(model)
        batches = workload.batches(0, 1, seed=0)
        seen = [watch.step(workload, optimizer, next(batches)) for _ in range(UNCOUNTED_STEPS + steps)]
    finally:
        torch.set_num_threads(threads)
    counted = seen[UNCOUNTED_STEPS:]
    names = set.intersection(*(set(times.ready_s) for times in counted))
    return ComputeTimes(
        forward_s=statistics.median(times.forward_s for times in counted),
        ready_s={name: statistics.median(times.ready_s[name] for times in counted) for name in names},
        backward_s=statistics.median(times.backward_s for times in counted),
        optimizer_s=statistics.median(times.optimizer_s for times in counted),
    )


class _GradientTimer:
    """Runs training steps of a model and records when each gradient is accumulated."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._ready_at_s: dict[str, float] = {}
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(self._noting(name))

    def _noting(self, name: str) -> Any:
        def note(_: Tensor) -> None:
            self._ready_at_s[name] = time.perf_counter()

        return note

    def step(self, workload: Workload, optimizer: Optimizer, batch: Batch) -> ComputeTimes:
        self._ready_at_s.clear()
        began_s = time.perf_counter()
        loss = workload.loss(self.model, batch)
        optimizer.zero_grad()
        backward_s = time.perf_counter()
        loss.backward()
        ended_s = time.perf_counter()
        optimizer.step()
        return ComputeTimes(
            forward_s=backward_s - began_s,
            ready_s={name: at_s - backward_s for name, at_s in self._ready_at_s.items()},
            backward_s=ended_s - backward_s,
            optimizer_s=time.perf_counter() - ended_s,
        )


@dataclass(frozen=True)
class Emulated:
    """A workload that sleeps for the measured times of real steps instead of computing.

    `times` has them by whether embeddings' gradients are sparse.
    """

    workload: Workload
    times: dict[bool, ComputeTimes]
    rank: int
    world_size: int
    _known: dict[tuple[bool, int], list[dict[str, Tensor]]] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        return self.workload.batch_size

    def model(self, *, sparse: bool, seed: int = 0) -> nn.Module:
        """Returns the workload's model with a forward that sleeps; backward returns gradients at measured times."""
        model = self.workload.model(sparse=sparse, seed=seed)
        model.forward = _SleepingForward(model, self._gradients(sparse, seed), self.times[sparse])
        return model

    def _gradients(self, sparse: bool, seed: int) -> list[dict[str, Tensor]]:
        """Returns this rank's gradients, by parameter, of a few batches; computed once and shared by all models."""
        if (sparse, seed) in self._known:
            return self._known[sparse, seed]
        model = self.workload.model(sparse=sparse, seed=seed)
        batches = self.workload.batches(self.rank, self.world_size, seed)
        found = self._known.setdefault((sparse, seed), [])
        for _ in range(BATCHES):
            model.zero_grad()
            self.workload.loss(model, next(batches)).backward()
            found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        return found

    def batches(self, rank: int, world_size: int, seed: int, start_step: int = 0) -> Iterator[Batch]:
        """Yields batches of one tensor: the step's number, a scalar."""
        step = start_step
        while True:
            yield (torch.tensor(step),)
            step += 1

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns a zero, a scalar, whose backward returns the recorded gradients at their measured times."""
        loss: Tensor = model(batch[0])
        return loss

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Returns an optimizer whose step only sleeps, for the measured time."""
        assert isinstance(model.forward, _SleepingForward)
        return _SleepingOptimizer(model, model.forward.times.optimizer_s)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns no measures, as nothing was learnt."""
        return {}


class _SleepingOptimizer(Optimizer):
    def __init__(self, model: nn.Module, step_s: float) -> None:
        super().__init__(model.parameters(), {"lr": 0.0})
        self._step_s = step_s

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch has overloads; no closure is ever given
        time.sleep(self._step_s)


class _SleepingForward:
    """The forward of an emulated model: sleeps for the measured time, and returns a zero with a sleeping backward."""

    def __init__(self, model: nn.Module, gradients: list[dict[str, Tensor]], times: ComputeTimes) -> None:
        self._parameters = dict(model.named_parameters())
        self._gradients, self.times = gradients, times

    def __call__(self, step: Tensor) -> Tensor:
        asleep = _Clock()
        # Copied here: autograd takes over memory without other references, as it does for real gradients.
        gradients = {n: g.clone() for n, g in self._gradients[int(step) % len(self._gradients)].items()}
        clock = _Clock()
        token = _node(_EndOfBackward, torch.zeros((), requires_grad=True), clock, self.times.backward_s)
        by_readiness = sorted(gradients, key=lambda name: self.times.ready_s.get(name, 0.0))
        for name in reversed(by_readiness):
            ready_s = self.times.ready_s.get(name, 0.0)
            token = _node(_Ready, self._parameters[name], token, gradients.pop(name), clock, ready_s)
        asleep.sleep_until(self.times.forward_s)
        return _node(_StartClock, token, clock)


def _node(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    made: Tensor = function.apply(*arguments)
    return made


class _Clock:
    """A clock that counts from its construction, or from the latest call of `start`."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._began_s = time.perf_counter()

    def sleep_until(self, at_s: float) -> None:
        left_s = self._began_s + at_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class _StartClock(torch.autograd.Function):
    """The autograd node that backward runs first: it restarts the `_Clock` of `_Ready` and `_EndOfBackward`."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, clock: _Clock) -> Tensor:
        ctx.clock = clock
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Any, ...]:
        ctx.clock.start()
        return incoming[0], None


class _Ready(torch.autograd.Function):
    """An autograd node that sleeps in backward until the parameter's gradient is due, and then returns the gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, token: Tensor, gradient: Tensor, clock: _Clock, at_s: float) -> Tensor:
        ctx.gradient, ctx.clock, ctx.at_s = gradient, clock, at_s
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Any, ...]:
        gradient, ctx.gradient = ctx.gradient, None
        ctx.clock.sleep_until(ctx.at_s)
        return gradient, incoming[0], None, None, None


class _EndOfBackward(torch.autograd.Function):
    """The autograd node that backward runs last: it sleeps from the last gradient to the measured end of backward."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, clock: _Clock, at_s: float) -> Tensor:
        ctx.clock, ctx.at_s = clock, at_s
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Any, ...]:
        ctx.clock.sleep_until(ctx.at_s)
        return incoming[0], None, None
