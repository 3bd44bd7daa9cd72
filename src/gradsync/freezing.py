"""Keeps an optimiser's hands off elements of which no gradient arrived.

Where coarse-grained communication sends nothing, an optimiser would take a gradient of 0 for what happened: momentum
goes on to move weights by gradients of long ago, Adam's averages fade, and weight decay pulls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from .arrivals import Arrivals, Sections


class Freezing:
    """Takes back what optimisers do outside of what arrived, to weights and to their own state of the same shape.

    For optimisers that treat every element by itself; what others compute of a whole tensor they compute with zeros in
    the gradient. Numbers that an optimiser has for a whole tensor, as Adam's count of steps, go on. It costs a copy of
    the weights and of the state. `before` and `after` are hooks of an optimiser's step.
    """

    def __init__(self, parameters: Mapping[str, Tensor], arrivals: Callable[[], Arrivals]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._arrivals = arrivals  # of the last step
        self._under_way: dict[int, list[_Frozen]] = {}  # by optimiser

    @torch.no_grad()
    def before(self, optimizer: Optimizer, *_: object) -> None:
        arrivals = self._arrivals()
        if not arrivals.freeze:
            return
        ours = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._names]
        found = [(p, arrivals.unfrozen(self._names[id(p)])) for p in ours if p.grad is not None]
        self._under_way[id(optimizer)] = [
            _Frozen(optimizer, p, sections) for p, sections in found if sections is not None
        ]

    @torch.no_grad()
    def after(self, optimizer: Optimizer, *_: object) -> None:
        for frozen in self._under_way.pop(id(optimizer), ()):
            frozen.restore(optimizer)


class _Frozen:
    """One parameter as it was before a step."""

    def __init__(self, optimizer: Optimizer, parameter: Tensor, sections: Sections) -> None:
        moves = torch.zeros(parameter.numel(), dtype=torch.bool, device=parameter.device)
        for start, stop in sections:
            moves[start:stop] = True
        self._moves = moves.view(parameter.shape)
        self._parameter = parameter
        self._weights = parameter.clone()
        self._state = {name: values.clone() for name, values in _of_elements(optimizer, parameter).items()}

    def restore(self, optimizer: Optimizer) -> None:
        torch.where(self._moves, self._parameter, self._weights, out=self._parameter)
        for name, values in _of_elements(optimizer, self._parameter).items():
            if name in self._state:
                torch.where(self._moves, values, self._state[name], out=values)
            else:  # made in this step
                values.masked_fill_(~self._moves, 0)


def _of_elements(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    kept = optimizer.state.get(parameter, {})
    return {name: values for name, values in kept.items() if isinstance(values, Tensor) and _alike(values, parameter)}


def _alike(values: Tensor, parameter: Tensor) -> bool:
    return values.shape == parameter.shape and values.dim() > 0
