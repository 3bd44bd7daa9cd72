"""Optimiser steps inside backward: a bucket's parameters are stepped as soon as their gradients are accumulated.

Work on stepped parameters, such as averaging them, can then begin while backward goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..plans.plan import Plan
from ..tensors.stamp import Stamp, Writes
from .freezing import OF_ELEMENTS
from .stand_ins import StandIns, left_out

CHANGED = (
    "{what} was changed between backward and optimizer.step() ({such}?), which is too late for a plan of early "
    "parameters: they were stepped in backward; let the plan say what='parameter'"
)


def why_not_in_parts(optimizer: Optimizer) -> str:
    """Returns a message that says why the optimiser cannot step some parameters before others; "" if it can."""
    if type(optimizer) in OF_ELEMENTS:
        return ""
    known = ", ".join(sorted(each.__name__ for each in OF_ELEMENTS))
    return (
        "a plan of early parameters steps them in backward, one bucket at a time, by optimisers of which that is known "
        f"to be the same: {known}; got {type(optimizer).__name__}"
    )


def begin_state(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    """Creates the optimiser's state of a parameter by a step that changes no weights; returns False if it cannot."""
    if type(optimizer) not in OF_ELEMENTS:
        return False
    before, gradient, values = optimizer.param_groups, parameter.grad, parameter.detach().clone()
    owner = next((group for group in before if any(p is parameter for p in group["params"])), None)
    if owner is None:
        return False
    still: dict[str, Any] = {key: 0.0 for key in ("lr", "weight_decay") if key in owner}
    parameter.grad = torch.zeros_like(parameter)
    optimizer.param_groups = [{**owner, **still, "params": [parameter]}]
    try:
        _plain_step(optimizer)(optimizer)
    finally:
        optimizer.param_groups, parameter.grad = before, gradient
        parameter.detach().copy_(values)
    return True


class EarlySteps:
    """Steps some of an optimiser's parameters during backward; the optimiser's own `step` then skips these.

    The optimiser must treat every element by itself, see `why_not_in_parts`. Call `check` and `take_out` before the
    optimiser's own step, and `end` after it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._used: dict[nn.Parameter, Stamp] = {}  # marks of gradients that were used since `end`
        self._writes = Writes()  # to those gradients
        self._settings: list[dict[str, object]] = []  # of the groups, when the first gradient was used
        self._stand_ins: StandIns | None = None
        self._step = _plain_step(optimizer)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._used

    @property
    def stepped(self) -> list[nn.Parameter]:
        """The parameters that were stepped in backward since the last call of `end`."""
        return list(self._used)

    @torch.no_grad()
    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Steps the given parameters during backward, as far as they have gradients and belong to the optimiser.

        The optimiser's hooks and schedulers are not called.
        """
        if not self._used:
            self._settings = self._settings_now()
        wanted = {p for p in parameters if p.grad is not None}
        with self._of(lambda p: p in wanted):
            self._step(self._optimizer)
        self._used |= {p: Stamp.of(p.grad) for p in wanted if p.grad is not None}

    def check(self, names: Mapping[nn.Parameter, str]) -> str:
        """Returns an error message if gradients or settings changed after backward stepped parameters by them, or "".

        Whether gradients on an accelerator were changed may only be known at the next call. `names`: names of
        parameters, for the message.
        """
        if why := self.changed_before():
            return why
        changed: str | None = None
        for p, stamp in self._used.items():
            name = names.get(p, "a parameter")
            if p.grad is None or self._writes.look(name, stamp, p.grad) is True:
                changed = changed or name
        if changed is not None:
            return _changed(changed)
        for before, now in zip(self._settings, self._settings_now(), strict=False):  # there may be more groups by now
            for key in before:
                if self._used and before[key] != now.get(key):
                    return CHANGED.format(what=f"the optimiser's {key!r}", such="warm-up")
        return ""

    def changed_before(self) -> str:
        """Returns an error message if gradients had been changed before the last call of `check`; else "".

        It waits for the accelerator, for which `check` does not wait.
        """
        changed = self._writes.found()
        return "" if changed is None else _changed(changed)

    def take_out(self) -> None:
        """Removes parameters that backward has stepped already from the optimiser's parameter groups, until `put_back`.

        Call it before the optimiser's own step, which then steps only the others.
        """
        self.put_back()
        self._stand_ins = StandIns(self._optimizer, [(p, left_out(p)) for p in self._used])

    def put_back(self) -> None:
        """Undoes `take_out`: the optimiser's parameter groups get all their parameters back.

        A second call does nothing. Call it also where the optimiser's own step has raised.
        """
        if self._stand_ins is not None:
            self._stand_ins.put_back()
            self._stand_ins = None

    def end(self) -> None:
        """Restores the parameter groups after the optimiser's own step, and forgets which parameters were stepped."""
        self.put_back()
        self._used.clear()

    @contextmanager
    def _of(self, chosen: Callable[[nn.Parameter], bool]) -> Iterator[None]:
        before = self._optimizer.param_groups
        self._optimizer.param_groups = [{**g, "params": [p for p in g["params"] if chosen(p)]} for g in before]
        try:
            yield
        finally:
            self._optimizer.param_groups = before

    def _settings_now(self) -> list[dict[str, object]]:
        groups = self._optimizer.param_groups
        return [{key: _comparable(kept) for key, kept in group.items() if key != "params"} for group in groups]


class EarlyExchange:
    """The parameters that one backward steps, bucket by bucket, and the gradients that are still missing for it."""

    def __init__(self, steps: EarlySteps, plan: Plan, parameters: Mapping[str, Tensor]) -> None:
        self.steps = steps
        self.task = -1  # autograd's number of the backward that began the round
        self.is_open = False  # from that backward until the optimiser's own step
        self.unseen: set[str] = set()  # parameters that the forward of this backward did not wait for
        # Parameters that are stepped together, bucket by bucket; each parameter is in one list only.
        self._together: list[list[str]] = []
        known: set[str] = set()
        for bucket in plan.buckets:
            names = [n for n in dict.fromkeys(bucket.names) if n in parameters and n not in known]
            known.update(names)
            if names:
                self._together.append(names)
        self._place = {name: place for place, names in enumerate(self._together) for name in names}
        self._waiting: list[set[str]] = []

    def give_up(self) -> None:
        """Ends a step that failed: restores the optimiser's parameter groups, and drops stepped parameters' gradients.

        Their `grad` becomes None, as they were used.
        """
        self.steps.put_back()
        for parameter in self.steps.stepped:
            parameter.grad = None

    def begin(self) -> None:
        self._waiting = [set(names) for names in self._together]

    def arrived(self, name: str) -> list[list[str]]:
        """Notes that backward has accumulated the gradient of `name`; returns which parameters to step now.

        The result is [] or, if all gradients of the bucket are there, a list with one entry: the names of its
        parameters.
        """
        place = self._place[name]
        self._waiting[place].discard(name)
        return [] if self._waiting[place] else [self._together[place]]

    def left(self) -> list[list[str]]:
        """Returns the parameters that are not stepped when backward ends, as some gradient of their bucket is missing.

        The result has the names of each such bucket's parameters.
        """
        return [names for names, waiting in zip(self._together, self._waiting, strict=True) if waiting]


def _changed(name: str) -> str:
    return CHANGED.format(what=f"the gradient of {name!r}", such="clipping")


def _plain_step(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """Returns the `step` method of the optimiser's class without the hooks that torch wraps around it."""
    step: Callable[[Optimizer], object] = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]  # torch wraps it
    return step


def _comparable(setting: object) -> object:
    return (id(setting), setting._version) if isinstance(setting, Tensor) else setting
