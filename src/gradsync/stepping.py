"""Optimiser steps inside backward: parameters are stepped as soon as their gradients are there, a bucket at a time.

What is to be done with parameters after the step, as averaging them, can then begin while backward goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from .freezing import OF_ELEMENTS

CHANGED = (
    "the gradient of {name!r} was changed between backward and optimizer.step() (clipping?), which is too late for a "
    "plan of early parameters: they were stepped in backward; let the plan say what='parameter'"
)


def why_not_in_parts(optimizer: Optimizer) -> str:
    """Why the optimiser cannot step some parameters before others; nothing if it can."""
    if type(optimizer) in OF_ELEMENTS:
        return ""
    known = ", ".join(sorted(each.__name__ for each in OF_ELEMENTS))
    return (
        "a plan of early parameters steps them in backward, one bucket at a time, by optimisers of which that is known "
        f"to be the same: {known}; got {type(optimizer).__name__}"
    )


class EarlySteps:
    """Steps an optimiser's parameters part by part; its own `step` then has only the others left.

    For optimisers that treat every element by itself, see `why_not_in_parts`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._versions: dict[nn.Parameter, int] = {}  # of the gradients that were used, since `step` was called last
        self._step: Callable[[Optimizer], object] = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._versions

    @torch.no_grad()
    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Those of them that have gradients and are the optimiser's. Its hooks and schedulers see nothing of it."""
        wanted = {p for p in parameters if p.grad is not None}
        with self._of(lambda p: p in wanted):
            self._step(self._optimizer)
        self._versions |= {p: p.grad._version for p in wanted if p.grad is not None}

    def check(self, names: Mapping[nn.Parameter, str]) -> str:
        """Before the optimiser's own step: what is wrong, or nothing."""
        for p, version in self._versions.items():
            if p.grad is not None and p.grad._version != version:
                return CHANGED.format(name=names.get(p, "a parameter"))
        return ""

    @contextmanager
    def _of(self, chosen: Callable[[nn.Parameter], bool]) -> Iterator[None]:
        before = self._optimizer.param_groups
        self._optimizer.param_groups = [{**g, "params": [p for p in g["params"] if chosen(p)]} for g in before]
        try:
            yield
        finally:
            self._optimizer.param_groups = before

    def take_out(self) -> Callable[[], None]:
        """What was stepped already leaves the optimiser's groups, until the function that is returned is called."""
        groups = [(group, group["params"]) for group in self._optimizer.param_groups]
        for group, params in groups:
            group["params"] = [p for p in params if p not in self._versions]

        def put_back() -> None:
            for group, params in groups:
                group["params"] = params
            self._versions.clear()

        return put_back
