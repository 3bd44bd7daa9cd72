"""Plans of methods that a run compares: the default one with another scheme for tables, or for dense buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer

from ..bucket import Bucket, FlatSpec, Layout, Segment, TensorSpec
from ..cluster import Placement
from ..compressors import Compressor, Sign, Signum, SparseMessage, Summand
from ..density import ParameterProfile
from ..plan import Plan
from ..planner import default_plan
from ..schemes import (
    AllReduce,
    CompressedAllGather,
    CompressedAllReduce,
    CompressedTwoWay,
    HalfPrecision,
    MajorityVote,
    PowerSGD,
    Scheme,
    Sparsified,
)
from ..steps import transfers
from . import compressors

PlanMaker = Callable[[Sequence[ParameterProfile], int], Plan]
SchemeOf = Callable[[FlatSpec, int], Scheme[Any]]  # of a dense bucket among so many ranks


# Schemes of dense buckets that are not those which `carried` chooses for a compressor, by the names of methods.
DENSE_SCHEMES: dict[str, Scheme[Any]] = {
    "bf16": HalfPrecision(values="bfloat16"),
    "fp16": HalfPrecision(values="float16"),
    "sign": MajorityVote(Sign()),
    "signum": MajorityVote(Signum()),
    **{f"powersgd{rank}": PowerSGD(rank) for rank in (1, 2, 4)},
}


def lossy_planner(name: str, momentum: float = 0.0) -> PlanMaker:
    """What makes the plans of a method: one of `DENSE_SCHEMES`, or a compressor, see `compressors.named`.

    Raises:
        ValueError: for an unknown name, or a number that the compressor does not take.
    """
    if name in DENSE_SCHEMES:
        return partial(dense_planned, lambda spec, world_size: DENSE_SCHEMES[name], False)
    matrices_only = compressors.named(name).family.matrices_only
    return partial(dense_planned, partial(_carried_of, name, momentum), matrices_only)


def _carried_of(name: str, momentum: float, spec: FlatSpec, world_size: int) -> Scheme[Any]:
    return carried(compressors.named(name, momentum=momentum, summands=world_size).trained, spec, world_size)


def give_up_momentum(name: str, optimizer: Optimizer) -> float:
    """Takes from the optimiser the momentum that the method does by itself, and says how much it was.

    Nothing, 0, for methods that do none, and of optimisers without momentum as SGD has it. Parameters that travel dense
    keep it: what their ranks would each do, the optimiser does with the mean.
    """
    if name in DENSE_SCHEMES or not compressors.is_known(name):
        return 0.0
    family, given = compressors.named(name).family, 0.0
    if "momentum" not in family.asks:
        return 0.0
    for group in list(optimizer.param_groups):
        if momentum := group.get("momentum", 0.0):
            taken = [p for p in group["params"] if p.dim() > 1 or not family.matrices_only]
            kept = [p for p in group["params"] if all(p is not other for other in taken)]
            group["params"] = kept
            optimizer.add_param_group({**group, "params": taken, "momentum": 0.0})
            given = momentum
    return given


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


def dense_planned(
    scheme_of: SchemeOf, matrices_only: bool, profiles: Sequence[ParameterProfile], world_size: int
) -> Plan:
    """The default plan with the scheme of `scheme_of` for dense floating-point buckets, sparse or not what they hold.

    `matrices_only`: tensors of one dimension leave their buckets for one that is summed as it is, at the end: they are
    small, and their compressor says that they are not for it.
    """
    plan = default_plan(profiles, world_size, by_layout=True)
    specs = {p.name: p.tensor for p in profiles}
    buckets: list[tuple[list[str], Scheme[Any]]] = []
    apart: dict[Any, list[str]] = {}
    for bucket in plan.buckets:
        default, dtype = bucket.make_scheme(), specs[bucket.names[0]].dtype
        if default.layout is not Layout.FLAT or not dtype.is_floating_point:
            buckets.append((bucket.names, default))
            continue
        chosen = [name for name in bucket.names if not matrices_only or is_matrix(specs[name])]
        if others := [name for name in bucket.names if name not in chosen]:
            apart.setdefault(dtype, []).extend(others)
        if chosen:
            buckets.append((chosen, scheme_of(flat_spec_of(chosen, specs), world_size)))
    buckets += [(names, AllReduce()) for names in apart.values()]
    return Plan.make(specs, world_size, buckets)


def is_matrix(tensor: TensorSpec) -> bool:
    """Whether it is of those that compressors for matrices take."""
    return len(tensor.shape) > 1


def flat_spec_of(names: Sequence[str], specs: dict[str, TensorSpec]) -> FlatSpec:
    """The tensors end to end."""
    segments = tuple(Segment(name, 0, specs[name].numel) for name in names)
    return Bucket("", segments, tuple(specs[name] for name in names), Layout.FLAT).flat_spec


def carried(compressor: Compressor[Any], spec: FlatSpec, world_size: int) -> Scheme[Any]:
    """The scheme that carries a compressor's payloads with the fewest bytes over the busiest link.

    Numbers that can be summed go by all-reduce, messages are gathered or, from some number of ranks on, sent to owners
    who compress their sums; what is left of few elements is gathered or summed as such. Owners do not compress sums of
    sparsifiers: these would be sparse twice over.
    """
    ways: list[Scheme[Any]] = [CompressedAllGather(compressor)]
    if issubclass(compressor.payload, SparseMessage):
        ways.append(Sparsified(compressor))
    elif issubclass(compressor.payload, Summand) and world_size <= (compressor.most_summands or world_size):
        return CompressedAllReduce(compressor)
    elif not compressor.agrees:
        ways.append(CompressedTwoWay(compressor))
    return min(ways, key=lambda way: busiest_bytes(way, spec, world_size))


def busiest_bytes(scheme: Scheme[Any], spec: FlatSpec, world_size: int) -> float:
    """What one step of a flat scheme moves over the busiest link, each rank on a node of its own."""
    whole = TensorSpec((spec.numel,), spec.dtype, spec)
    steps = scheme.steps((whole,), (), Placement.one_per_node(world_size))
    return sum(transfer.busiest_bytes for transfer in transfers(steps))
