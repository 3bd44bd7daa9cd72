"""One rank of a case: it trains the case's model, and traces what it brings to each exchange and gets from it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync.comm import Group
from gradsync.engine.engine import Engine
from gradsync.engine.guard import Verification
from gradsync.tensors.bucket import TensorSpec, trainable_parameters

from .case import Case
from .models import FuzzModel
from .trace import StepTrace, Tensors, Trace, bytes_of, digest_of, gradients_of

TIMEOUT_S = 30.0  # of one operation among ranks
CLIP = 0.5
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adam": torch.optim.Adam,
}


def traced(case: Case, model: FuzzModel, make: Callable[[], Subject], rank: int) -> Trace:
    """Runs one rank of a case on the subject that `make` puts around `model`; returns what the rank saw.

    Errors of the library end the trace, which names them; others are raised.
    """
    trace, subject = Trace(), None
    try:
        subject = make()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = OPTIMIZERS[case.optimizer](parameters, lr=0.02)
        for step in range(case.steps):
            if step == case.reload_at:
                subject.reload()
            trace.steps.append(_step(case, subject, model, optimizer, rank, step))
    except (RuntimeError, ValueError, TypeError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        trace.error = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    finally:
        if subject is not None:
            subject.close()
    return trace


class Subject(Protocol):
    """A model with gradsync on it, in one of its frontends or under the engine alone."""

    def backward(self, step: int, micro: int, *, last: bool) -> None:
        """Runs one micro-batch forward and backward; the last one of a step also exchanges gradients."""

    def brought(self, step: int) -> tuple[Tensors, list[str], Tensors | None]:
        """Returns own gradients, the names that backwards reached, and DDP's gradients, of the step's exchange."""

    def stepped(self) -> None:
        """Takes note of the optimiser's step."""

    def reload(self) -> None:
        """Saves schemes' state, and begins anew with it."""

    def state(self) -> Tensors: ...

    def sent(self) -> dict[str, list[float | None]]: ...

    def close(self) -> None: ...


def _step(
    case: Case, subject: Subject, model: FuzzModel, optimizer: torch.optim.Optimizer, rank: int, step: int
) -> StepTrace:
    model.freeze(step)
    if case.zero != "never":
        optimizer.zero_grad(set_to_none=case.zero == "none")
    for micro in range(case.micro):
        subject.backward(step, micro, last=micro == case.micro - 1)
    own, used, ddp = subject.brought(step)
    got = gradients_of(model)
    dense = {name: p.grad for name, p in model.named_parameters() if _is_dense(p.grad)}
    strides = {name: list(gradient.stride()) for name, gradient in dense.items()}
    finite = all(bool(gradient.to_dense().isfinite().all()) for gradient in got.values())
    if finite and case.what == "gradient":
        if case.clip:
            _clip(model)
        optimizer.step()
        subject.stepped()
    digest = digest_of(_parameters(model))
    trace = StepTrace(own, used, got, ddp, subject.state(), subject.sent(), strides, digest, finite)
    if case.written is not None and (case.written.step, case.written.rank) == (step, rank):
        with torch.no_grad():
            next(p for p in model.parameters() if p.requires_grad and p.numel()).add_(1.0)
    return trace


def _is_dense(gradient: Tensor | None) -> TypeGuard[Tensor]:
    return gradient is not None and gradient.layout is torch.strided


def _clip(model: nn.Module) -> None:
    """Clips gradients by their norm, as `torch.nn.utils.clip_grad_norm_`, which takes no sparse ones."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([gradient.to_dense().double().norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(min(1.0, CLIP / float(norm.clamp(min=CLIP))))


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


class Reached:
    """The names of parameters whose gradients backwards have reached."""

    def __init__(self, model: nn.Module) -> None:
        self.names: set[str] = set()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._noted(name))

    def _noted(self, name: str) -> Callable[[Tensor], None]:
        return lambda parameter: self.names.add(name)

    def taken(self) -> list[str]:
        """Returns the names since the last call."""
        names, self.names = sorted(self.names), set()
        return names


class EngineSubject:
    """The engine without a frontend, in one thread of a rank: gradients are loaded in a random order."""

    def __init__(self, case: Case, model: FuzzModel, group: Group) -> None:
        self._case, self._model, self._group = case, model, group
        self._parameters = trainable_parameters(model)
        self._specs = {name: TensorSpec.of(p) for name, p in self._parameters.items()}
        self._reached = Reached(model)
        self._rng = Random(f"{case.ready} {group.rank}")
        self._engine = self._made()
        self._brought: tuple[Tensors, list[str]] = {}, []

    def _made(self) -> Engine:
        plan = self._case.plan(self._specs)
        assert plan is not None
        plan.check(self._specs, self._case.size)
        announced = frozenset(name for name in self._specs if self._model.is_announced(name))
        verification = Verification(self._case.verify_every)
        settings: dict[str, Any] = {"timeout_s": TIMEOUT_S, "sparse_names": announced, "verification": verification}
        return Engine(self._parameters, self._group, plan, **settings)

    def backward(self, step: int, micro: int, *, last: bool) -> None:
        loss = self._model(step, self._group.rank, micro)
        if loss.requires_grad:
            loss.backward()
        if last:
            self._exchange(step)

    def _exchange(self, step: int) -> None:
        mixes, used = self._case.what == "parameter", self._reached.taken()
        own = _parameters(self._model) if mixes else gradients_of(self._model)
        self._brought = {name: tensor.clone() for name, tensor in own.items()}, used
        names = list(self._parameters)
        self._rng.shuffle(names)
        self._engine.begin()
        resting = {name for name in names if self._engine.rests(name)}
        for name in names:
            if name in resting:
                continue
            parameter = self._parameters[name]
            value = parameter.detach() if mixes else parameter.grad
            self._engine.load(name, value, used=mixes or name in used)
        self._engine.finish()
        for name in names:
            if mixes or self._engine.used(name):
                self._take(name, mixes=mixes, rests=name in resting)

    @torch.no_grad()
    def _take(self, name: str, *, mixes: bool, rests: bool) -> None:
        parameter = self._parameters[name]
        if mixes:
            if not rests:
                parameter.copy_(self._engine.unload(name, None, sparse=False))
            parameter.grad = parameter.detach().clone()  # where traces look for results
            return
        out = parameter.grad if _is_dense(parameter.grad) else None
        sparse = name in self._engine.sparse_names
        parameter.grad = self._engine.unload(name, out, sparse=sparse).clone()

    def brought(self, step: int) -> tuple[Tensors, list[str], Tensors | None]:
        return *self._brought, None

    def stepped(self) -> None:
        self._engine.stepped()

    def reload(self) -> None:
        saved = self._engine.state_dict()
        self._engine = self._made()
        with self._engine.at_barrier("loading"):
            self._engine.load_state_dict(saved)

    def state(self) -> Tensors:
        state: Tensors = self._engine.state_dict()["state"]
        return state

    def sent(self) -> dict[str, list[float | None]]:
        return bytes_of(self._engine.running_plan.statistics())

    def close(self) -> None:
        self._engine.close()


class FrontendSubject:
    """A frontend on one process of a rank; copies of the model, one of them under DDP, take the same steps beside."""

    def __init__(self, case: Case, model: FuzzModel) -> None:
        self._case, self._model, self._rank = case, model, dist.get_rank()
        self._specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(model).items()}
        self._alone, self._ddp_model = FuzzModel(case), FuzzModel(case)
        self._reached = Reached(self._alone)
        self._ddp = self._under_ddp(self._ddp_model) if case.ddp else None
        self._called: nn.Module = self._under_ddp(model) if case.frontend == "ddp_hook" else model
        self._attach()
        self._brought: tuple[Tensors, list[str], Tensors | None] = {}, [], None

    def _under_ddp(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, find_unused_parameters=True)

    def _attach(self) -> None:
        settings: dict[str, Any] = {
            "plan": self._case.plan(self._specs),
            "timeout": TIMEOUT_S,
            "verify_every": self._case.verify_every,
        }
        if self._case.frontend == "class":
            wrapped = gradsync.DistributedDataParallel(self._model, find_unused_parameters=True, **settings)
            self._called, self._handle = wrapped, wrapped.attachment
        else:
            self._handle = gradsync.attach(self._called, **settings)

    def _no_sync(self) -> AbstractContextManager[None]:
        if self._case.frontend == "attach":
            return self._handle.no_sync()
        assert isinstance(self._called, DistributedDataParallel)  # of which gradsync's class is a subclass
        return self._called.no_sync()

    def backward(self, step: int, micro: int, *, last: bool) -> None:
        if micro == 0:
            self._follow(step)
        for model, no_sync in self._trained():
            with nullcontext() if last else no_sync():
                model(step, self._rank, micro).backward()
        if last:
            ddp = gradients_of(self._ddp_model) if self._ddp is not None else None
            self._brought = gradients_of(self._alone), self._reached.taken(), ddp

    def _trained(self) -> Iterator[tuple[nn.Module, Callable[[], AbstractContextManager[None]]]]:
        yield self._alone, nullcontext
        if self._ddp is not None:
            yield self._ddp, self._ddp.no_sync
        yield self._called, self._no_sync

    @torch.no_grad()
    def _follow(self, step: int) -> None:
        """Gives the copies the model's weights and gradients."""
        for copy in (self._alone, self._ddp_model):
            copy.freeze(step)
            for theirs, ours in zip(copy.parameters(), self._model.parameters(), strict=True):
                theirs.copy_(ours)
                theirs.grad = None if ours.grad is None else ours.grad.detach().clone()

    def brought(self, step: int) -> tuple[Tensors, list[str], Tensors | None]:
        return self._brought

    def stepped(self) -> None:
        """Does nothing: the frontend sees the optimiser's steps itself."""

    def reload(self) -> None:
        saved = self._handle.state_dict()
        self._handle.detach()
        self._attach()
        self._handle.load_state_dict(saved)

    def state(self) -> Tensors:
        state: Tensors = self._handle.state_dict()["state"]
        return state

    def sent(self) -> dict[str, list[float | None]]:
        return bytes_of(self._handle.statistics())

    def close(self) -> None:
        self._handle.detach()
