"""Layer-wise adaptive rates, for large batches. (You, Gitman & Ginsburg, 2017)"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from .arrivals import Sections


class LARS(Optimizer):
    """SGD with momentum, where each tensor takes steps in proportion to its own norm.

        rate = lr * trust * |w| / (|g| + weight_decay * |w|);  v = momentum * v + rate * (g + weight_decay * w);  w -= v

    Tensors of one dimension or none, as biases and the scales of normalization, have the plain lr and no weight decay.
    So has a tensor whose weights or gradient are all zero.

    Where only part of a gradient arrived, as by `CoarseGrained`, the rest of it is 0, and its norm is that of a part;
    so |w| and |g| are those of the elements that arrived, or the rate would grow the less arrives. Where nothing
    arrived, momentum alone moves the weights, and with `CoarseGrained(freeze=True)` nothing does.

    Args:
        lr: the learning rate after warm-up.
        trust: share of its own norm that a tensor moves by at a learning rate of 1.
        warmup_steps: over which the learning rate rises in equal parts; counted in the state, so that training resumes.
        arrived: `Attachment.arrived`, or None where gradients arrive whole.

    Raises:
        ValueError: for settings out of their range.
        RuntimeError: when stepping, for sparse gradients.

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
        arrived: Callable[[Tensor], Sections | None] | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("trust", trust)):
            if not 0 < value < math.inf:
                raise ValueError(f"LARS.{name} must be positive and finite, got {value}")
        if not 0 <= momentum < 1:
            raise ValueError(f"LARS.momentum must be in [0, 1), got {momentum}")
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"LARS.weight_decay must be finite and not negative, got {weight_decay}")
        if type(warmup_steps) is not int or warmup_steps < 0:
            raise ValueError(f"LARS.warmup_steps must be a whole number from 0 on, got {warmup_steps!r}")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, {**defaults, "warmup_steps": warmup_steps, "steps": 0})
        self.arrived = arrived

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
            group["steps"] += 1
            rate = group["lr"] * min(1.0, group["steps"] / max(group["warmup_steps"], 1))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group, rate)
        return loss

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], rate: float) -> None:
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"LARS is for dense gradients, got {gradient.layout} of {tuple(gradient.shape)}: train tables with "
                "sparse gradients by an optimiser of their own"
            )
        update = gradient
        if parameter.dim() > 1:
            update = gradient.add(parameter, alpha=group["weight_decay"])
            rate *= self._trust(parameter, gradient, group)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity = state["momentum_buffer"].mul_(group["momentum"]).add_(update, alpha=rate)
        parameter.sub_(velocity)

    def _trust(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> float:
        sections = None if self.arrived is None else self.arrived(parameter)
        weights_norm, gradient_norm = _norm(parameter, sections), _norm(gradient, sections)
        if weights_norm == 0 or gradient_norm == 0:
            return 1.0
        trust: float = group["trust"] * weights_norm / (gradient_norm + group["weight_decay"] * weights_norm)
        return trust


def _norm(tensor: Tensor, sections: Sections | None) -> float:
    if sections is None:
        return float(tensor.norm())
    flat = tensor.reshape(-1)
    return _joined([float(flat[start:stop].norm()) for start, stop in sections])


def _joined(norms: Sequence[float]) -> float:
    return math.sqrt(sum(norm * norm for norm in norms))
