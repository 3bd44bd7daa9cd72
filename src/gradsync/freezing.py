"""Keeps an optimiser's hands off elements of which no gradient arrived.

Where coarse-grained communication sends nothing, an optimiser would take a gradient of 0 for what happened: momentum
goes on to move weights by gradients of long ago, Adam's averages fade, and weight decay pulls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import memory
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
    """One parameter as it was before a step, where it is to stay."""

    def __init__(self, optimizer: Optimizer, parameter: Tensor, sections: Sections) -> None:
        self._parameter = parameter
        self._still = _between(sections, parameter.numel())
        self._weights = _Kept(parameter, self._still)
        state = _of_elements(optimizer, parameter)
        self._state = {name: _Kept(values, self._still) for name, values in state.items()}

    def restore(self, optimizer: Optimizer) -> None:
        self._weights.put_back(self._parameter)
        for name, values in _of_elements(optimizer, self._parameter).items():
            if name in self._state:
                self._state[name].put_back(values)
            else:  # made in this step
                _Kept(torch.zeros_like(values), self._still).put_back(values)


class _Kept:
    """Sections of a tensor's elements."""

    def __init__(self, tensor: Tensor, sections: Sections) -> None:
        self._sections = sections
        self._lengths = [stop - start for start, stop in sections]
        self._values = memory.empty(sum(self._lengths), tensor.dtype, tensor.device)
        if sections:
            torch._foreach_copy_(self._parts, _views(tensor.reshape(-1), sections))

    def put_back(self, tensor: Tensor) -> None:
        if not self._sections:
            return
        flat = tensor.reshape(-1)
        torch._foreach_copy_(_views(flat, self._sections), self._parts)
        if not tensor.is_contiguous():  # then flat is a copy
            tensor.copy_(flat.view(tensor.shape))

    @property
    def _parts(self) -> list[Tensor]:
        return list(self._values.split(self._lengths))


def _between(sections: Sections, numel: int) -> list[tuple[int, int]]:
    """What the sections leave out, in pieces as large as may be."""
    starts, stops = [0, *(stop for _, stop in sections)], [*(start for start, _ in sections), numel]
    return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def _views(flat: Tensor, sections: Sections) -> list[Tensor]:
    return [flat[start:stop] for start, stop in sections]


def _of_elements(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    kept = optimizer.state.get(parameter, {})
    return {name: values for name, values in kept.items() if isinstance(values, Tensor) and _alike(values, parameter)}


def _alike(values: Tensor, parameter: Tensor) -> bool:
    return values.shape == parameter.shape and values.dim() > 0
