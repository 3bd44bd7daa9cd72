"""Methods of other systems that do not average gradients in each step: their interface, and post-local SGD."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsync.comm.shuffle import together, with_local_steps
from gradsync.costs.timeline import Task
from gradsync.engine.bucket_run import BucketStatistics
from gradsync.schemes import Scheme, Shuffled
from gradsync.tensors.arrivals import Sections

POST_LOCAL_SGD = "post_local_sgd"
USUAL_PERIOD = 4  # steps of post-local SGD from one average to the next
GRADIENT_STEPS = 4  # synchronous steps of post-local SGD before local ones; fewer than a benchmark's warm-up


class Rival(ABC):
    """The interface of another system's method, in place of a gradsync `Attachment`.

    It has no plans, so no trials of plans and no predicted times.
    """

    settled = True
    profile = None
    mixes_by: Scheme[Any] | None = None  # the scheme by which ranks average parameters; None if they do not

    @abstractmethod
    def detach(self) -> None:
        """Removes the method from the model on this rank. A second call does nothing."""

    @abstractmethod
    def consensus(self) -> None:
        """Makes all ranks' models equal. Collective, between two steps."""

    @abstractmethod
    def explain(self) -> list[str]:
        """Describes the method in words."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Returns a context manager inside which gradients are not synchronised; no optimiser may step there."""
        return nullcontext()

    def arrived(self, parameter: Tensor) -> Sections | None:
        """Returns None, which means that every element of the gradient was synchronised."""
        return None

    def statistics(self) -> list[BucketStatistics]:
        """Returns an empty list, as there are no gradsync buckets."""
        return []

    def timeline(self) -> list[Task]:
        """Returns an empty list, as nothing is recorded."""
        return []

    def predicted_timeline(self) -> list[Task]:
        """Returns an empty list, as nothing is predicted."""
        return []


class PostLocalSGD(Rival):
    """Post-local SGD: DDP for some steps, then local steps, with parameters averaged in one step of so many.

    Built from PyTorch's parts: `post_localSGD_hook` on DDP and `PeriodicModelAverager` after the optimiser's steps. All
    ranks average together; momenta stay each rank's own. The paper's warm-up is half of the training; here it is
    shorter than the steps that a benchmark does not time.

    Reference: Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, timeout: timedelta, *, every: int) -> None:
        self._inner, self._every = model, every
        self._group: dist.ProcessGroup = dist.new_group(timeout=timeout)
        self._averager = PeriodicModelAverager(every, GRADIENT_STEPS, self._group)
        self.ddp = DistributedDataParallel(model, process_group=self._group)
        # Rank 0's in each forward would be a barrier in each step; `consensus` averages them. Set here, as versions of
        # torch have different arguments for it.
        self.ddp.broadcast_buffers = False
        local = PostLocalSGDState(self._group, None, GRADIENT_STEPS, post_local_gradient_allreduce=False)
        self.ddp.register_comm_hook(local, post_localSGD_hook)
        self._hook = optimizer.register_step_post_hook(self._after_step)
        self.mixes_by = Shuffled.by(with_local_steps(together(dist.get_world_size()), every))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._averager.average_parameters(optimizer.param_groups)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Returns DDP's `no_sync`."""
        return self.ddp.no_sync()

    def consensus(self) -> None:
        average_(self._inner.parameters(), self._group)
        average_(float_buffers(self._inner), self._group)

    def detach(self) -> None:
        self._hook.remove()

    def explain(self) -> list[str]:
        return [f"all-reduce of gradients in {GRADIENT_STEPS} steps, then of parameters in one step of {self._every}"]


def post_local_sgd(
    model: nn.Module, optimizer: Optimizer, timeout: timedelta, *, every: int
) -> tuple[nn.Module, PostLocalSGD]:
    """Wraps the model in DDP for post-local SGD; returns it, and the object that averages its parameters."""
    made = PostLocalSGD(model, optimizer, timeout, every=every)
    return made.ddp, made


def float_buffers(model: nn.Module) -> list[Tensor]:
    """Returns the model's floating-point buffers, such as running statistics; counters are left out."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


@torch.no_grad()
def average_(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrites the tensors with their means over the group, by default all ranks, in one all-reduce."""
    each = list(tensors)
    if not each:
        return
    flat = flattened(each)
    dist.all_reduce(flat, group=group)
    put(flat.div_(dist.get_world_size(group)), each)


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a concatenated copy of the tensors, (elements,)."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def put(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Overwrites the tensors with their parts of `flat`, (elements,), as made by `flattened`."""
    parts = flat[: sum(t.numel() for t in tensors)].split([t.numel() for t in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
