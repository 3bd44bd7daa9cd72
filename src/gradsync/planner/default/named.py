"""Plans made from names, as on command lines: a lossy scheme or compressor for dense buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.optim import SGD, Optimizer

from ...compressors import Compressor, Sign, Signum
from ...compressors import names as compressors
from ...optim.momentum import take_momentum
from ...plans.plan import Plan
from ...schemes import CoarseGrained, HalfPrecision, MajorityVote, PowerSGD, Scheme, SchemeOrCompressor
from ...schemes import coarse_names as coarse
from ...tensors.density import ParameterProfile
from .. import CompressingPlanner, default_plan

PlanMaker = Callable[[Sequence[ParameterProfile], int], Plan]

VOTES = ("sign", "signum")  # ranks send signs to vote with, not gradients
RATE_OF_VOTES = 0.01

# Lossy schemes of dense buckets that take no compressor of the user's choice, by name.
DENSE_SCHEMES: dict[str, Scheme[Any]] = {
    "bf16": HalfPrecision(values="bfloat16"),
    "fp16": HalfPrecision(values="float16"),
    "sign": MajorityVote(Sign()),
    "signum": MajorityVote(Signum()),
    **{f"powersgd{rank}": PowerSGD(rank) for rank in (1, 2, 4)},
}
SCHEMES_IN_WORDS = f"{', '.join(DENSE_SCHEMES)}, {coarse.NAMES_IN_WORDS}"


def dense_scheme(name: str, momentum: float = 0.0) -> Scheme[Any] | None:
    """Returns the lossy scheme of dense gradients with this name, such as `powersgd2`; None for other names.

    `momentum`: the momentum that the scheme itself applies, if it can.

    Raises:
        ValueError: for a name with a ratio out of its range.
    """
    return DENSE_SCHEMES.get(name) or coarse.coarse(name, momentum)


def is_lossy(name: str) -> bool:
    """Whether this is the name of a compressor, or of a lossy scheme of dense gradients, on command lines."""
    return dense_scheme(name) is not None or compressors.is_known(name)


def fewest_elements(name: str) -> int:
    """Returns how many elements a tensor needs to be sent by the lossy scheme of this name; smaller ones stay exact."""
    scheme = dense_scheme(name)
    return scheme.chunk if isinstance(scheme, CoarseGrained) else 0


def lossy_planner(name: str, momentum: float = 0.0) -> CompressingPlanner:
    """Returns a planner that sends dense gradients by the lossy scheme, or the compressor, with this name.

    Names are those of command lines, see `compressors.named`. `momentum`: the momentum that the scheme or compressor
    itself applies, if it can.

    Raises:
        ValueError: for an unknown name, or one with a number out of its range, such as a ratio of 2.
    """
    if (scheme := dense_scheme(name, momentum)) is not None:
        return CompressingPlanner(scheme, fewest_elements=fewest_elements(name))
    matrices_only = compressors.named(name).family.matrices_only
    return CompressingPlanner(partial(_among, name, momentum), matrices_only=matrices_only)


def lossy_of(name: str, world_size: int, momentum: float = 0.0) -> SchemeOrCompressor:
    """Returns the scheme or compressor with this name on command lines, as used in training on `world_size` ranks.

    `momentum`: the momentum that it applies itself, if it can.

    Raises:
        ValueError: for an unknown name, one with a number out of its range (a ratio of 2), or a momentum out of [0, 1).
    """
    return dense_scheme(name, momentum) or _among(name, momentum, world_size)


def _among(name: str, momentum: float, world_size: int) -> Compressor[Any]:
    return compressors.named(name, momentum=momentum, summands=world_size).trained


def fit_optimizer(name: str, optimizer: Optimizer) -> float:
    """Adapts an optimiser in place to a lossy scheme or compressor; returns the momentum to make that with.

    A scheme or compressor that applies momentum itself gets SGD's momentum of the parameters that it compresses, and
    the optimiser no longer applies it to these; parameters that stay exact keep theirs. Otherwise 0 is returned. Signs
    that ranks vote with (`sign`, `signum`) are no gradients: SGD would move every element by the whole learning rate,
    so the rate is multiplied by `RATE_OF_VOTES`. Signum has its own momentum, so optimisers keep none.

    `name`: the name on command lines; `lossy_of` or `lossy_planner` take it with the momentum.
    """
    if name in VOTES:
        for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
            group["lr"] *= RATE_OF_VOTES
    for group in optimizer.param_groups if name == "signum" else ():
        if "momentum" in group:
            group["momentum"] = 0.0
        if "betas" in group:
            group["betas"] = (0.0, *group["betas"][1:])
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if (scheme := dense_scheme(name, coarse.MOMENTUM)) is not None:
        does = isinstance(scheme, CoarseGrained) and scheme.momentum > 0
        return take_momentum(optimizer, [p for p in parameters if p.numel() >= fewest_elements(name)]) if does else 0.0
    if not compressors.is_known(name) or "momentum" not in (family := compressors.named(name).family).asks:
        return 0.0
    return take_momentum(optimizer, [p for p in parameters if p.dim() > 1 or not family.matrices_only])


def planned(scheme: Scheme[Any], profiles: Sequence[ParameterProfile], world_size: int) -> Plan:
    """Returns the default plan, but with `scheme` for the buckets of tables (parameters with sparse gradients).

    Args:
        profiles: parameters in model order, with what was measured of each.
        world_size: the number of ranks.
    """
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
            buckets.append((bucket.names, bucket.scheme))
    return Plan.make(specs, world_size, buckets)
