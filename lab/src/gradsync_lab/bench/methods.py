"""The methods that a training run compares: gradsync, its schemes by name, and baselines, each tuned as its users
would.

A method wraps a model so that `loss.backward()` leaves synchronised gradients. Each method has its own communicator, so
that a broken one affects no other method. Names are those of the records.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the types themselves.

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from torch.optim import Optimizer

from gradsync.comm import torch_group
from gradsync.compressors import names as compressors
from gradsync.frontends.attach import Attachment, attach
from gradsync.frontends.reduce_scatter import TAKEN as REDUCE_SCATTER_TAKES
from gradsync.planner import SPARSE_SCHEMES as PLANNED_SCHEMES
from gradsync.planner import CompressingPlanner
from gradsync.planner.default.named import DENSE_SCHEMES, SCHEMES_IN_WORDS, is_lossy, lossy_planner, planned
from gradsync.schemes import AllReduce, Hierarchical, ReduceScatter, Scheme
from gradsync.schemes import coarse_names as coarse
from gradsync.tuning.auto import AutoPlanner

from . import averaging
from .automatic import AUTOMATIC, ENDINGS_IN_WORDS, Automatic, automatic, in_shards
from .parameter_server import USUAL_STALENESS, parameter_servers
from .rivals import POST_LOCAL_SGD, USUAL_PERIOD, Rival, post_local_sgd
from .shards import Sharding

# Prefixes of names: how the model is put into shards between whose replicas gradsync exchanges gradients.
IN_SHARDS = {"sharded_": Sharding(), "bf16_sharded_": Sharding(torch.bfloat16)}
COMPRESSED_FSDP = "fsdp_reduce_"  # prefix of a compressor's name

ONE_BUCKET_MB = 1 << 20  # larger than any model here: DDP then puts everything into one bucket


@dataclass(frozen=True)
class Method:
    """A benchmark method: a function that wraps a model and its optimiser, and its properties.

    `wrap` gets the timeout after which a rank that waits for others raises an error.

    - `sparse`: whether embeddings give sparse gradients.
    - `exact`: whether synchronised gradients equal the fp32 mean.
    - `lossy`: the name of the one compressor or scheme for dense gradients; optimiser settings are adapted to it.
    """

    name: str
    sparse: bool
    exact: bool
    wrap: Callable[[nn.Module, Optimizer, timedelta], tuple[nn.Module, Attachment | Rival | None]]
    lossy: str | None = None
    averages: bool = False  # averages parameters after the optimiser's steps, instead of gradients
    sharding: Sharding | None = None  # of a model in shards
    in_step: bool = True  # synchronous: each step is as slow as the slowest rank's


def bf16_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """DDP hook that sends dense buckets as bf16 and sparse ones as they are.

    torch's own bf16 hook refuses gloo although gloo sums bf16, and torch's 16-bit hooks refuse sparse gradients.
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


def int8_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """DDP hook that gathers buckets as 8-bit integers with one scale each; every rank decodes all ranks' buckets.

    torch's `quantization_pertensor_hook` does the same but needs CUDA. There and here, rounding errors are lost.
    """
    buffer = bucket.buffer()
    world_size = dist.get_world_size(process_group)
    scale = (buffer.abs().max() / 127).clamp_min(torch.finfo(torch.float32).tiny).float()
    message = torch.cat([scale.view(1).view(torch.int8), (buffer / scale).round_().to(torch.int8)])
    messages = [torch.empty_like(message) for _ in range(world_size)]

    def decode(_: Any) -> Tensor:
        buffer.zero_()
        for each in messages:
            buffer.add_(each[4:], alpha=float(each[:4].view(torch.float32)) / world_size)
        return buffer

    work = dist.all_gather(messages, message, group=process_group, async_op=True)
    decoded: Future[Tensor] = work.get_future().then(decode)
    return decoded


def _ddp(
    model: nn.Module,
    optimizer: Optimizer,
    timeout: timedelta,
    *,
    bucket_mb: float = 25,
    views: bool = False,
    static: bool = False,
    hook: Any = None,
    state: Callable[[dist.ProcessGroup], object] = _itself,
) -> tuple[nn.Module, None]:
    group = dist.new_group(timeout=timeout)
    wrapped = DistributedDataParallel(
        model,
        process_group=group,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=views,
        static_graph=static,
    )
    if hook is not None:
        wrapped.register_comm_hook(state(group), hook)
    return wrapped, None


def _gradsync(
    model: nn.Module, optimizer: Optimizer, timeout: timedelta, *, plan: Any = None
) -> tuple[nn.Module, Attachment]:
    return model, attach(model, plan=plan, timeout=timeout)


def _as_it_is(model: nn.Module, optimizer: Optimizer, timeout: timedelta) -> tuple[nn.Module, None]:
    """Leaves a model in shards to torch's FSDP."""
    return model, None


def _averaging(
    model: nn.Module, optimizer: Optimizer, timeout: timedelta, *, of: averaging.AveragingMethod
) -> tuple[nn.Module, Attachment]:
    return model, attach(model, optimizer, of.plan(model, dist.get_world_size()), timeout=timeout)


def _hierarchical(nodes_per_rack: int | None, model: nn.Module, optimizer: Optimizer, timeout: timedelta) -> Any:
    """Wraps a model with gradsync so that gradients are summed inside racks, then between them; None: two racks."""
    group = torch_group(None, timeout_s=timeout.total_seconds())
    placement = group.placement
    group.close()
    per_node, nodes = placement.ranks_per_node or 1, placement.num_nodes
    in_rack = nodes_per_rack or max(nodes // 2, 1)
    scheme = Hierarchical(ReduceScatter(), AllReduce(), per_node, nodes_per_rack=in_rack)
    return _gradsync(model, optimizer, timeout, plan=CompressingPlanner(scheme))


def _automatic(
    planner: Callable[[int], AutoPlanner], model: nn.Module, optimizer: Optimizer, timeout: timedelta
) -> Any:
    """Wraps a model with gradsync and a new planner; planners keep measurements, so models must not share one."""
    made = planner(dist.get_world_size())
    return model, attach(model, None if made.averaging is None else optimizer, made, timeout=timeout)


def planning(name: str, of: Automatic) -> Method:
    return Method(name, True, of.exact, partial(_automatic, of.planner), of.lossy)


def lossy(name: str, momentum: float = 0.0) -> Method:
    """Returns the method gradsync with this compressor or scheme for dense gradients, and default plans for tables.

    Args:
        momentum: the momentum that `fit_optimizer` took from the optimiser.

    Raises:
        ValueError: the name is unknown, or has a number that its compressor does not take.
    """
    return Method(name, True, False, partial(_gradsync, plan=lossy_planner(name, momentum)), name)


def _powersgd(rank: int) -> Callable[..., tuple[nn.Module, None]]:
    """Returns a function that wraps a model in DDP with torch's PowerSGD hook for this matrix rank and a single bucket.

    The hook waits for collectives in callbacks, which run on gloo's two threads, so two buckets may wait for each other
    for ever.
    """
    state = partial(powerSGD_hook.PowerSGDState, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    return partial(_ddp, bucket_mb=ONE_BUCKET_MB, hook=powerSGD_hook.powerSGD_hook, state=state)


BUCKETS_MB: dict[str, float] = {
    "": 25,
    "_1mb": 1,
    "_100mb": 100,
    "_one_bucket": ONE_BUCKET_MB,
}  # by the ending of a method's name
SPARSE_BUCKETS_MB = {size: BUCKETS_MB[size] for size in ("", "_1mb")}  # the rest beside tables is a few MB
# Endings of names and settings of `_ddp`: gradients that are views of buckets, and a graph that never changes.
DDP_LINES: dict[str, dict[str, Any]] = {"": {}, "_views": {"views": True}, "_static": {"views": True, "static": True}}


def _lines(stem: str, sizes: Mapping[str, float], *, sparse: bool) -> list[Method]:
    """Returns the methods of DDP with each of these bucket sizes and `DDP_LINES`; `stem_default` is torch's default."""
    return [
        Method(f"{stem}{size + ending or '_default'}", sparse, True, partial(_ddp, bucket_mb=mb, **settings))
        for ending, settings in DDP_LINES.items()
        for size, mb in sizes.items()
    ]


# Schemes measured in addition to the planner's choice, by their names in plans.
SPARSE_SCHEMES: dict[str, Scheme[Any]] = {s.name: s for s in PLANNED_SCHEMES}

METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("gradsync", True, True, _gradsync),
        Method("auto", True, True, partial(_gradsync, plan="auto")),
        *_lines("ddp", BUCKETS_MB, sparse=False),
        *_lines("ddp_sparse", SPARSE_BUCKETS_MB, sparse=True),
        Method("ddp_bf16", False, False, partial(_ddp, hook=bf16_hook)),
        *(
            Method(f"ddp_bf16{size}_views", False, False, partial(_ddp, bucket_mb=mb, views=True, hook=bf16_hook))
            for size, mb in BUCKETS_MB.items()
        ),
        Method("ddp_fp16", False, False, partial(_ddp, hook=default_hooks.fp16_compress_hook)),
        Method("ddp_int8", False, False, partial(_ddp, hook=int8_hook)),
        Method("ddp_sparse_bf16", True, False, partial(_ddp, hook=bf16_hook)),
        *(Method(f"ddp_powersgd{rank}", False, False, _powersgd(rank)) for rank in (1, 2, 4)),
        Method("gradsync_dense", False, True, _gradsync),
        Method("hsdp", False, True, _as_it_is, sharding=Sharding()),
        Method("hsdp_bf16", False, False, _as_it_is, sharding=Sharding(torch.bfloat16)),
        Method("fsdp", False, True, _as_it_is, sharding=Sharding(replicated=False)),
        Method("fsdp_bf16", False, False, _as_it_is, sharding=Sharding(torch.bfloat16, replicated=False)),
        *(planning(name, each) for name, each in AUTOMATIC.items()),
        *(Method(n, True, True, partial(_gradsync, plan=partial(planned, s))) for n, s in SPARSE_SCHEMES.items()),
        *map(lossy, (*DENSE_SCHEMES, *coarse.USUAL)),
    )
}

# Names for the best of several settings of DDP: in 32 and in 16 bits, and with sparse gradients of tables, which torch
# sums; the best is chosen before methods are compared.
DDP, DDP_16BIT, DDP_SPARSE = "ddp", "ddp_16bit", "ddp_sparse"
SWEEPS: dict[str, tuple[str, ...]] = {
    DDP: tuple(line.name for line in _lines(DDP, BUCKETS_MB, sparse=False)),
    DDP_16BIT: ("ddp_bf16", *(f"ddp_bf16{size}_views" for size in BUCKETS_MB)),
    DDP_SPARSE: tuple(line.name for line in _lines(DDP_SPARSE, SPARSE_BUCKETS_MB, sparse=True)),
}
TORCH_SPARSE = frozenset((*SWEEPS[DDP_SPARSE], "ddp_sparse_bf16"))  # torch sums their sparse gradients

RIVALS_IN_WORDS = (
    f"asp and ssp, parameter servers, sspN with workers N steps apart at most ({USUAL_STALENESS} by default); "
    f"post_local_sgd, post_local_sgdK with parameters averaged in one step of K ({USUAL_PERIOD} by default); "
    "hierarchical, sums in each of two racks first, hierarchicalN in racks of N nodes; "
    "sharded_NAME, gradsync's method NAME between replicas of a model that hsdp puts into shards inside nodes, and "
    "bf16_sharded_NAME of one that hsdp_bf16 does; "
    f"{COMPRESSED_FSDP}NAME, shards over all ranks with gradsync's reduce-scatter by the compressor NAME"
)


def _rival(name: str) -> Method | None:
    """Returns method `asp`, `sspN` (N: staleness) or `post_local_sgdK` (K: period); None for others, N < 1, K < 2."""
    if name == "asp":
        return Method(name, False, False, partial(parameter_servers, staleness=None), in_step=False)
    if (match := re.fullmatch(r"ssp(\d*)", name)) and (staleness := int(match[1] or USUAL_STALENESS)) > 0:
        return Method(name, False, False, partial(parameter_servers, staleness=staleness), in_step=False)
    if (match := re.fullmatch(rf"{POST_LOCAL_SGD}(\d*)", name)) and (every := int(match[1] or USUAL_PERIOD)) > 1:
        return Method(name, False, False, partial(post_local_sgd, every=every))
    return None


def _in_shards(name: str, momentum: float) -> Method | None:
    """Returns method `sharded_NAME` or `bf16_sharded_NAME`, gradsync's NAME between replicas, or `fsdp_reduce_NAME`.

    It returns None for other names.

    Raises:
        ValueError: NAME does not exchange dense gradients by gradsync, or is no compressor for a reduce-scatter.
    """
    if name.startswith(COMPRESSED_FSDP):
        compressor = compressors.named(name.removeprefix(COMPRESSED_FSDP)).bare
        if not isinstance(compressor, REDUCE_SCATTER_TAKES):
            raise ValueError(f"{name}: a reduce-scatter keeps no residual; use bf16, fp16, int8, int4, fp8 or fp8_e5m2")
        return Method(name, False, False, _as_it_is, sharding=Sharding(replicated=False, compressor=compressor))
    prefix = next((prefix for prefix in IN_SHARDS if name.startswith(prefix)), None)
    if prefix is None:
        return None
    inner, sharding = method(name.removeprefix(prefix), momentum), IN_SHARDS[prefix]
    if inner.averages or getattr(inner.wrap, "func", inner.wrap) not in (_gradsync, _automatic):
        raise ValueError(f"{name}: {inner.name} does not exchange gradients by gradsync, as a model in shards needs")
    wrap = inner.wrap
    if isinstance(wrap, partial) and wrap.func is _automatic:
        wrap = partial(_automatic, partial(in_shards, *wrap.args))
    exact = inner.exact and sharding.reduces_in is torch.float32
    return replace(inner, name=name, wrap=wrap, sparse=False, exact=exact, sharding=sharding)


def method(name: str, momentum: float = 0.0) -> Method:
    """Returns the method of this name: one of `METHODS`, gradsync with a compressor, or with a search for one.

    Args:
        momentum: the momentum that `fit_optimizer` took from the optimiser.

    Raises:
        ValueError: the name is unknown, and the message lists the names; or it has a number that its compressor does
            not take; or the method that it names for a model in shards cannot have one.
    """
    if name in METHODS and not momentum:
        return METHODS[name]
    if (sharded := _in_shards(name, momentum)) is not None:
        return sharded
    if (averages := averaging.averaging_method(name)) is not None:
        if averages.ablations:
            raise ValueError(f"{name} is for `gradsync bench converge` only: it is deliberately worse")
        return Method(name, False, False, partial(_averaging, of=averages), averages=True)
    if (rival := _rival(name)) is not None:
        return rival
    if match := re.fullmatch(r"hierarchical(\d*)", name):
        return Method(name, False, True, partial(_hierarchical, int(match[1] or 0) or None))
    if (planned_for := automatic(name, momentum)) is not None:
        return planning(name, planned_for)
    if not is_lossy(name):
        raise ValueError(
            f"unknown method {name!r}; there are {', '.join(METHODS)} and {DDP}, {DDP_SPARSE} and {DDP_16BIT} (the "
            f"best of DDP's settings, also with sparse gradients, and in 16 bits), "
            f"{SCHEMES_IN_WORDS}; averages of parameters: {averaging.NAMES_IN_WORDS}; "
            f"{RIVALS_IN_WORDS}; compressors: {compressors.NAMES_IN_WORDS}; "
            f"and searches: {ENDINGS_IN_WORDS}"
        )
    return lossy(name, momentum)
