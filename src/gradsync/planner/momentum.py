"""Momentum that compressors keep on each rank: an optimiser that has its own would apply it a second time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..compressors import MomentumCorrection
from ..plan import Plan


def take_momentum(optimizer: Optimizer, parameters: Iterable[Tensor]) -> float:
    """Takes the momentum of these parameters from an optimiser that has it as SGD does, and says how much it was.

    For parameters that travel under MomentumCorrection. They move to parameter groups of their own, which are as theirs
    were but for the momentum; the optimiser's other parameters keep it. 0 where there was none to take.
    """
    wanted, given = {id(p) for p in parameters}, 0.0
    for group in list(optimizer.param_groups):
        taken = [p for p in group["params"] if id(p) in wanted]
        if taken and (momentum := group.get("momentum", 0.0)):
            group["params"] = [p for p in group["params"] if id(p) not in wanted]
            optimizer.add_param_group({**group, "params": taken, "momentum": 0.0})
            given = momentum
    return given


def check_momentum(plan: Plan, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    """
    Raises:
        ValueError: for a parameter to which both its compressor and the optimiser would apply momentum.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for bucket in plan.buckets:
        correction = _correction_in(bucket.make_scheme())
        if correction is None:
            continue
        for name in bucket.names:
            if momentum := groups.get(id(parameters[name]), {}).get("momentum", 0.0):
                raise ValueError(
                    f"{name!r} travels under MomentumCorrection, which has a momentum of {correction.momentum} "
                    f"on each rank, and the optimiser would apply {momentum} on top of it: set its momentum to 0 there "
                    "(gradsync.planner.take_momentum), or use ErrorFeedback"
                )


def _correction_in(part: object) -> MomentumCorrection[Any] | None:
    """The first one anywhere in a scheme."""
    if isinstance(part, MomentumCorrection):
        return part
    settings = fields(part) if is_dataclass(part) else ()
    found = (_correction_in(getattr(part, setting.name)) for setting in settings)
    return next((correction for correction in found if correction is not None), None)
