"""The methods a training run compares: gradsync, its schemes by name, and the baselines, each tuned as its users would.

A method wraps a model so that `loss.backward()` leaves synchronised gradients, over a communicator of its own: one that
broke takes no other method along. Names are those of the records.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the types themselves.

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..attach import Attachment, attach
from ..bucket import Layout
from ..density import ParameterProfile
from ..plan import Plan
from ..planner import SPARSE_SCHEMES as PLANNED_SCHEMES
from ..planner import default_plan
from ..schemes import PowerSGD, Scheme

ONE_BUCKET_MB = 1 << 20  # larger than any model here: DDP then puts everything into one bucket


@dataclass(frozen=True)
class Method:
    """How a model is wrapped; a rank that waits for the others longer than the timeout raises.

    `sparse`: embeddings give sparse gradients. `exact`: equal to the fp32 mean.
    """

    name: str
    sparse: bool
    exact: bool
    wrap: Callable[[nn.Module, timedelta], tuple[nn.Module, Attachment | None]]


def bf16_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """DDP hook: dense buckets travel as bf16, sparse ones as they are.

    torch's own bf16 hook refuses gloo although gloo sums bf16, and its 16-bit hooks refuse sparse gradients.
    """
    buffer = bucket.buffer()
    world_size = dist.get_world_size(process_group)
    if buffer.layout is torch.sparse_coo:
        work = dist.all_reduce(buffer.div_(world_size), group=process_group, async_op=True)
        sparse: Future[Tensor] = work.get_future().then(lambda _: buffer)
        return sparse
    half = buffer.to(torch.bfloat16).div_(world_size)

    def widen(_: Any) -> Tensor:
        return buffer.copy_(half)

    widened: Future[Tensor] = dist.all_reduce(half, group=process_group, async_op=True).get_future().then(widen)
    return widened


def _itself(group: dist.ProcessGroup) -> object:
    return group


def _ddp(
    model: nn.Module,
    timeout: timedelta,
    *,
    bucket_mb: float = 25,
    hook: Any = None,
    state: Callable[[dist.ProcessGroup], object] = _itself,
) -> tuple[nn.Module, None]:
    group = dist.new_group(timeout=timeout)
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb)
    if hook is not None:
        wrapped.register_comm_hook(state(group), hook)
    return wrapped, None


def _gradsync(model: nn.Module, timeout: timedelta, *, plan: Any = None) -> tuple[nn.Module, Attachment]:
    return model, attach(model, plan=plan, timeout=timeout)


def planned(scheme: Scheme[Any], profiles: Sequence[ParameterProfile], world_size: int) -> Plan:
    """The default plan with `scheme` for the sparse tables, whatever their densities."""
    plan = default_plan(profiles, world_size)
    specs = {p.name: p.tensor for p in profiles}
    sparse = {p.name: p.density for p in profiles if p.sparse}
    buckets: list[tuple[list[str], Scheme[Any]]] = []
    for bucket in plan.buckets:
        if set(bucket.names) <= sparse.keys():
            known = [density for name in bucket.names if (density := sparse[name]) is not None]
            measured = len(known) == len(bucket.names)
            buckets.append((bucket.names, scheme.planned_for(known) if measured else scheme))
        else:
            buckets.append((bucket.names, bucket.make_scheme()))
    return Plan.make(specs, world_size, buckets)


def low_rank_planned(scheme: PowerSGD, profiles: Sequence[ParameterProfile], world_size: int) -> Plan:
    """The default plan with PowerSGD for dense floating-point buckets, sparse or not what they hold."""
    plan = default_plan(profiles, world_size, by_layout=True)
    specs = {p.name: p.tensor for p in profiles}
    buckets: list[tuple[list[str], Scheme[Any]]] = []
    for bucket in plan.buckets:
        default = bucket.make_scheme()
        fits = default.layout is Layout.FLAT and specs[bucket.names[0]].dtype.is_floating_point
        buckets.append((bucket.names, scheme if fits else default))
    return Plan.make(specs, world_size, buckets)


def _powersgd(rank: int) -> Callable[[dist.ProcessGroup], powerSGD_hook.PowerSGDState]:
    return partial(powerSGD_hook.PowerSGDState, matrix_approximation_rank=rank, start_powerSGD_iter=2)


# Measured beside the planner's choice, by the names of plans.
SPARSE_SCHEMES: dict[str, Scheme[Any]] = {s.name: s for s in PLANNED_SCHEMES}

METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("gradsync", True, True, _gradsync),
        Method("ddp_default", False, True, _ddp),
        Method("ddp_1mb", False, True, partial(_ddp, bucket_mb=1)),
        Method("ddp_100mb", False, True, partial(_ddp, bucket_mb=100)),
        Method("ddp_one_bucket", False, True, partial(_ddp, bucket_mb=ONE_BUCKET_MB)),
        Method("ddp_sparse", True, True, _ddp),
        Method("ddp_sparse_1mb", True, True, partial(_ddp, bucket_mb=1)),
        Method("ddp_bf16", False, False, partial(_ddp, hook=bf16_hook)),
        Method("ddp_fp16", False, False, partial(_ddp, hook=default_hooks.fp16_compress_hook)),
        Method("ddp_sparse_bf16", True, False, partial(_ddp, hook=bf16_hook)),
        *(
            Method(
                f"ddp_powersgd{r}", False, False, partial(_ddp, hook=powerSGD_hook.powerSGD_hook, state=_powersgd(r))
            )
            for r in (1, 2, 4)
        ),
        *(
            Method(f"powersgd{r}", True, False, partial(_gradsync, plan=partial(low_rank_planned, PowerSGD(r))))
            for r in (1, 2, 4)
        ),
        Method("gradsync_dense", False, True, _gradsync),
        *(Method(n, True, True, partial(_gradsync, plan=partial(planned, s))) for n, s in SPARSE_SCHEMES.items()),
    )
}

TORCH_SPARSE = frozenset(("ddp_sparse", "ddp_sparse_1mb", "ddp_sparse_bf16"))  # torch sums their sparse gradients

DDP = "ddp"  # the best of the bucket sweep, picked before the methods are judged
DDP_SWEEP = ("ddp_default", "ddp_1mb", "ddp_100mb", "ddp_one_bucket")


def method(name: str) -> Method:
    """The method of this name.

    Raises:
        ValueError: listing the names there are.
    """
    if name not in METHODS:
        raise ValueError(
            f"unknown method {name!r}; there are {', '.join(METHODS)} and {DDP} (the best of the bucket sweep)"
        )
    return METHODS[name]
