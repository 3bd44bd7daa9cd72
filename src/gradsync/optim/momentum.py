"""Momentum that is coupled to compressors: each rank may keep it instead of the optimiser, and it must be applied once.

In deep gradient compression, as in 1-bit Adam, gradients pass one momentum, each rank's own, before the compressor; the
optimiser applies what arrives. Momentum in the optimiser would be a second one, whether it sums up gradients as SGD
does or takes a running mean of them as Adam does by the first of its betas. So one of the two must be 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer

from ..compressors import Compressor, Sign
from ..plans.plan import Plan
from ..schemes import Scheme


def take_momentum(optimizer: Optimizer, parameters: Iterable[Tensor]) -> float:
    """Sets SGD's momentum of these parameters to 0, for a compressor to apply it instead, and returns the old value.

    Parameters that share a parameter group with others move to a group of their own, the same but for the momentum; the
    others keep theirs. Momentum buffers of the parameters are dropped: in the compressor momentum begins anew, and its
    settings say whether it is Nesterov's. A checkpoint of the optimiser has parameter groups: take momentum before
    loading. The result is 0 if there was none, and for optimisers other than SGD, which are left unchanged: they apply
    momentum to something else than the gradient's sum.

    Raises:
        ValueError: before anything has changed, for parameters whose groups have different momenta, for dampening, and
            where parameters would have to move although a scheduler was made for the groups.
    """
    if not isinstance(optimizer, SGD):
        return 0.0
    wanted = {id(p) for p in parameters}
    concerned = [group for group in optimizer.param_groups if any(id(p) in wanted for p in group["params"])]
    momenta = sorted({group["momentum"] for group in concerned})
    if len(momenta) > 1:
        raise ValueError(
            f"the parameters have momenta of {', '.join(map(str, momenta))} in the optimiser, and one was expected: "
            "take that of each alone, and give each a compressor of its own, or set them alike"
        )
    if not any(momenta):
        return 0.0
    if any(group["dampening"] for group in concerned):
        raise ValueError("the optimiser has dampening, which compressors' momentum has not: set it to 0")
    alone: list[dict[str, Any]] = []
    shared: list[dict[str, Any]] = []
    for group in concerned:
        (alone if all(id(p) in wanted for p in group["params"]) else shared).append(group)
    if any("initial_lr" in group for group in shared):  # schedulers add this key
        raise ValueError(
            f"a scheduler was made for the optimiser's {len(optimizer.param_groups)} parameter groups, and "
            f"{len(shared)} of them would have to be parted: take momentum before the scheduler is made"
        )
    for p in [p for group in concerned for p in group["params"] if id(p) in wanted]:
        optimizer.state.get(p, {}).pop("momentum_buffer", None)
    for group in alone:
        group.update(_WITHOUT_MOMENTUM)
    for group in shared:
        optimizer.add_param_group(_part(group, wanted))
    return float(momenta[0])


class MomentumCheck:
    """Checks that no parameter gets momentum twice: from its gradient's compressor and from the optimiser.

    Call `check` before every step: plans change, and schedulers cycle momentum. Without a compressor that has momentum
    a check costs nothing, else a look at each parameter group, and at the parameters of groups that have momentum.

    Args:
        parameters: the model's parameters by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        self._plan: Plan | None = None
        self._kept: dict[int, tuple[str, str, float]] = {}  # by id of the parameter: its name, who keeps which momentum

    def check(self, plan: Plan, optimizer: Optimizer) -> None:
        """Checks, before a step, that no parameter gets momentum from both its bucket's compressor and the optimiser.

        `plan`: the plan in use, whose schemes have the compressors.

        Raises:
            ValueError: for a parameter to which both would apply momentum.
        """
        if plan is not self._plan:
            self._plan, self._kept = plan, self._kept_by(plan)
        if not self._kept:
            return
        for group in optimizer.param_groups:
            if momentum := momentum_of(group):
                self._require_none(group["params"], momentum)

    def _kept_by(self, plan: Plan) -> dict[int, tuple[str, str, float]]:
        found = ((bucket.names, _momentum_in(bucket.scheme)) for bucket in plan.buckets)
        return {id(self._parameters[name]): (name, *kept) for names, kept in found if kept for name in names}

    def _require_none(self, parameters: Iterable[Tensor], momentum: float) -> None:
        for parameter in parameters:
            if id(parameter) in self._kept:
                name, keeper, kept = self._kept[id(parameter)]
                raise ValueError(
                    f"{name!r} travels under {keeper}, which has a momentum of {kept} on "
                    f"each rank, and the optimiser would apply {momentum} on top of it: set that to 0 (SGD's is taken "
                    "by gradsync.optim.take_momentum, Adam's is the first of betas, schedulers that cycle it have "
                    "cycle_momentum=False), or use a compressor without"
                )


def without_means(plan: Plan) -> frozenset[str]:
    """Returns the parameters whose averaged gradients estimate no mean: their schemes apply momentum, or count signs.

    If such a result is still in `.grad` at the next exchange, momentum is applied to it again, or its sign outvotes the
    new gradient's.
    """
    buckets = (b for b in plan.buckets if _momentum_in(b.scheme) is not None or _sends_signs(b.scheme))
    return frozenset(name for bucket in buckets for name in bucket.names)


def momentum_of(group: Mapping[str, Any]) -> float:
    """Returns the momentum of an optimiser's parameter group: its `momentum`, or the first of its betas, else 0."""
    return float(group.get("momentum") or next(iter(group.get("betas") or ()), 0.0))


_WITHOUT_MOMENTUM = {"momentum": 0.0, "nesterov": False}  # SGD refuses Nesterov's without momentum


def _part(group: dict[str, Any], wanted: set[int]) -> dict[str, Any]:
    """Takes parameters with ids in `wanted` out of an optimiser's parameter group; returns a group of them.

    The new group has the same settings but no momentum, and is not yet in the optimiser.
    """
    apart = [id(p) in wanted for p in group["params"]]
    new = {**group, **_WITHOUT_MOMENTUM}
    for key in ("params", "param_names"):
        if key in group:
            of_each = list(zip(group[key], apart, strict=True))
            new[key] = [one for one, goes in of_each if goes]
            group[key] = [one for one, goes in of_each if not goes]
    return new


def _momentum_in(part: object) -> tuple[str, float] | None:
    """Returns the class name and the momentum of the first part of a scheme that has one; None: no part has.

    Parts are the scheme itself, and schemes and compressors in its settings. A part has momentum if a setting of that
    name is a number other than 0, whoever wrote the part.
    """
    momentum = getattr(part, "momentum", None)
    if isinstance(part, Compressor | Scheme) and isinstance(momentum, int | float) and momentum:
        return type(part).__name__, momentum
    return next((found for found in map(_momentum_in, _inner(part)) if found is not None), None)


def _sends_signs(part: object) -> bool:
    """Whether the scheme, or a compressor in its settings, sends signs without magnitudes."""
    return isinstance(part, Sign) or any(map(_sends_signs, _inner(part)))


def _inner(part: object) -> Iterable[object]:
    """Returns the settings of a scheme or compressor, or the members of a tuple; () for anything else."""
    if isinstance(part, tuple):
        return part
    return [getattr(part, setting.name) for setting in fields(part)] if is_dataclass(part) else ()
