"""Layer-wise adaptive rates, for large batches. (You, Gitman & Ginsburg, 2017)"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..inputs.settings import Decay, NonNegativeFinite, NonNegativeInt, PositiveFinite, PositiveInt, argument
from ..kernels import accumulation_dtype
from ..tensors.arrivals import Sections, gathered, put

SETTINGS: dict[str, Any] = {
    "lr": PositiveFinite,
    "trust": PositiveFinite,
    "momentum": Decay,
    "weight_decay": NonNegativeFinite,
    "warmup_steps": NonNegativeInt,
    "decay_steps": PositiveInt | None,
}


class LARS(Optimizer):
    """SGD with momentum, where each tensor takes steps in proportion to its own norm.

        rate = lr * trust * |w| / (|g| + weight_decay * |w|);  v = momentum * v + rate * (g + weight_decay * w);  w -= v

    Tensors of one dimension or none, as biases and the scales of normalization, have the plain lr and no weight decay,
    and so has a tensor whose weights are all zero. A tensor whose gradient is all zero is moved by momentum alone.

    Where only part of a gradient is exchanged, as by `CoarseGrained`, |w| and |g| are norms of the elements that
    arrived, or the rate would grow the less arrives. Only their weights decay: they move as if they were the whole
    layer. All other elements are moved by momentum alone, and with `CoarseGrained(freeze=True)` by nothing.

    Args:
        lr: the learning rate after warm-up.
        trust: share of its own norm that a tensor moves by at a learning rate of 1.
        warmup_steps: steps over which the learning rate rises in equal parts; counted in the state, so that training
            resumes.
        decay_steps: steps, warm-up included, after which the learning rate is 0: it falls by the square of the share of
            these steps that is left; None: it does not fall.
        arrived: `Attachment.arrived`, which returns the elements of a gradient that were exchanged; None: all are. It
            may be set later, and is neither copied with the optimiser nor saved in a checkpoint.

    Raises:
        ValueError: for settings out of their range, in parameter groups too.
        RuntimeError: when stepping, for sparse gradients, before anything has changed.

    Example:
        >>> handle = gradsync.attach(model, plan=planner)                                     # doctest: +SKIP
        >>> optimizer = LARS(model.parameters(), lr=8.0, arrived=handle.arrived)              # doctest: +SKIP
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust: float = 1e-3,
        warmup_steps: int = 0,
        decay_steps: int | None = None,
        arrived: Callable[[Tensor], Sections | None] | None = None,
    ) -> None:
        self.arrived = arrived
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, {**defaults, "warmup_steps": warmup_steps, "decay_steps": decay_steps, "steps": 0})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("arrived", None)  # a copy has groups and state only

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                _require_dense(parameter)
        for group in self.param_groups:
            group["steps"] += 1
            rate = group["lr"] * _share(group["steps"], group["warmup_steps"], group["decay_steps"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group, rate)
        return loss

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], rate: float) -> None:
        sections = None if self.arrived is None else self.arrived(parameter)
        weights: Tensor = parameter
        if sections is not None:
            weights, gradient = gathered(parameter, sections), gathered(gradient, sections)
        if parameter.dim() > 1:
            trust = _trust(weights, gradient, group["trust"], group["weight_decay"])
            update = gradient.add(weights, alpha=group["weight_decay"]).mul_(rate * trust)
        else:
            update = gradient.mul(rate)
        if sections is not None:
            arrived, update = update, torch.zeros_like(parameter)
            put(arrived, sections, update)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        parameter.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(update))


def _share(steps: int, warmup_steps: int, decay_steps: int | None) -> float:
    """Returns the factor in [0, 1] of the learning rate, by warm-up and decay, in step number `steps`, from 1 on."""
    left = 1.0 if decay_steps is None else max(1 - (steps - 1) / decay_steps, 0.0)
    return min(1.0, steps / max(warmup_steps, 1)) * left**2


def _trust(weights: Tensor, gradient: Tensor, trust: float, decay: float) -> Tensor:
    """Returns a tensor's factor of the learning rate, 0-D, on the weights' device, so that the host need not wait."""
    wide = accumulation_dtype(weights.dtype)
    weights_norm, gradient_norm = (torch.linalg.vector_norm(x, dtype=wide) for x in (weights, gradient))
    ratio = trust * weights_norm / (gradient_norm + decay * weights_norm)
    return torch.where(gradient_norm == 0, 0.0, torch.where(weights_norm == 0, 1.0, ratio))


def _require_dense(parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise RuntimeError(
            f"LARS is for dense gradients, got {parameter.grad.layout} of {tuple(parameter.shape)}: train tables with "
            "sparse gradients by an optimiser of their own"
        )


def _check(settings: Mapping[str, Any]) -> None:
    """Checks the settings of one parameter group of the optimiser.

    Raises:
        ValueError: naming the setting.
    """
    for name, annotation in SETTINGS.items():
        argument(f"LARS.{name}", settings[name], annotation)
