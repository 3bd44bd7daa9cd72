"""Methods that average parameters, by name: variants of DS-Sync, and methods to compare them with."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from gradsync.comm.shuffle import together, with_local_steps
from gradsync.compressors import BlockInt, Cast, Compressor
from gradsync.planner import AveragingPlanner
from gradsync.planner.averaging.plan import filled
from gradsync.plans.plan import Plan, What
from gradsync.schemes import Scheme
from gradsync.tensors.bucket import TensorSpec, trainable_parameters

from ..rivals.gossip import Gossip

DS_SYNC = "ds_sync"
COMPRESSORS: dict[str, Compressor[Any]] = {"bf16": Cast("bfloat16"), "int8": BlockInt(8)}
NAMES_IN_WORDS = (
    f"{DS_SYNC}, with _gN for groups of up to N nodes, _hK for averages after up to K steps (_h1: after each), _mK for "
    "momenta averaged in one round of K (_m0: never), _early for steps inside backward, "
    f"{' or '.join(f'_{name}' for name in COMPRESSORS)} for the payload; local_sgdK, all ranks together after K "
    "steps; gossip_ring; one_peer_exponential"
)
ABLATIONS = ("static", "stale")  # groups that never change; averages of the parameters before the step
ABLATIONS_IN_WORDS = "ds_sync_static, with groups that never change, and ds_sync_stale, which averages before the step"
USUAL_MOMENTUM_EVERY = 4


@dataclass(frozen=True)
class AveragingMethod:
    """A method that averages parameters: its plan by model and number of ranks, and how often it averages momenta.

    `ablations` name parts of the method that are switched off, to show their effect; they work in simulations only.
    """

    plan: Callable[[nn.Module, int], Plan | AveragingPlanner]
    momentum_every: int = 0
    ablations: tuple[str, ...] = ()


def averaging_method(name: str) -> AveragingMethod | None:
    """Returns the method of this name that averages parameters; None for other names.

    Raises:
        ValueError: the name has an unknown ending.
    """
    if name == "gossip_ring":
        return AveragingMethod(partial(_everything_by, lambda size: Gossip.ring()))
    if name == "one_peer_exponential":
        return AveragingMethod(partial(_everything_by, Gossip.one_peer_exponential))
    if match := re.fullmatch(r"local_sgd(\d+)", name):
        every = int(match[1])
        return AveragingMethod(lambda model, size: AveragingPlanner(schedule=with_local_steps(together(size), every)))
    base, *endings = name.removeprefix(DS_SYNC).split("_")
    if not name.startswith(DS_SYNC) or base:
        return None
    planner = AveragingPlanner(momentum_every=USUAL_MOMENTUM_EVERY)
    for ending in endings:
        planner = planner if ending in ABLATIONS else _with(planner, ending, name)
    ablations = tuple(ending for ending in endings if ending in ABLATIONS)
    return AveragingMethod(lambda model, size: planner, planner.momentum_every, ablations)


def _with(planner: AveragingPlanner, ending: str, name: str) -> AveragingPlanner:
    if ending == "early":
        return replace(planner, early=True)
    if ending in COMPRESSORS:
        return replace(planner, compressor=COMPRESSORS[ending])
    if match := re.fullmatch(r"m(\d+)", ending):
        return replace(planner, momentum_every=int(match[1]))
    if match := re.fullmatch(r"h(\d+)", ending):
        return replace(planner, most_local_steps=int(match[1]))
    if match := re.fullmatch(r"g(\d+)", ending):
        return replace(planner, largest=int(match[1]))
    raise ValueError(f"unknown ending _{ending} of {name!r}; there are {NAMES_IN_WORDS}")


def _everything_by(scheme: Callable[[int], Scheme[Any]], model: nn.Module, size: int) -> Plan:
    """Returns the plan that averages parameters and float buffers by one scheme."""
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(model).items()}
    buffers = {n: TensorSpec.of(b) for n, b in model.named_buffers() if b.is_floating_point() and b.numel()}
    specs |= dict(sorted(buffers.items()))
    return Plan.make(specs, size, [(names, scheme(size)) for names in filled(list(specs), specs)], what=What.PARAMETER)
