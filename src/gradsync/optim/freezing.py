"""Freezing: optimisers leave elements unchanged whose gradients were not exchanged in a step.

Where coarse-grained communication sends nothing, an optimiser would see a gradient of 0: momentum would go on to move
weights by gradients of long ago, Adam's moments would fade, and weight decay would shrink weights.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from ..tensors.arrivals import Arrivals, Sections, gathered, put
from ..tensors.gradients import dense_of
from .stand_ins import StandIns, left_out

# These optimisers treat every element by itself, whatever shape a parameter has. Subclasses may do otherwise.
OF_ELEMENTS = frozenset({ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop})

SEVERAL = (
    "{optimizer}.step(closure) called its closure several times, as LBFGS does, or not at all, and the plan freezes "
    "what did not arrive: expected one call, before the update. Call backward() first, then step() without a closure, "
    "or use a scheme with freeze=False"
)


class Freezing:
    """Lets optimisers change only elements that arrived (their gradients were exchanged), of weights and state.

    It is for optimisers that treat every element by itself; others compute norms and the like of whole gradients, with
    zeros where nothing arrived. State of another shape, such as Adam's count of steps, is updated as usual, except for
    0-D parameters. Call `before` and `after` around each step of an optimiser; if the step has a closure, call `before`
    when the closure has made the gradients.

    Optimisers of `OF_ELEMENTS` step smaller substitute parameters, with only the elements that arrived, which saves
    time. After a step of other optimisers, the other elements are restored from a copy of weights and state.
    """

    def __init__(self, parameters: Mapping[str, Tensor], arrivals: Callable[[], Arrivals]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._arrivals = arrivals  # arrivals of the last step
        self._under_way: dict[int, _Step] = {}  # by id of the optimiser
        self._seen: weakref.WeakKeyDictionary[Optimizer, Arrivals] = weakref.WeakKeyDictionary()  # of each's last step

    @torch.no_grad()
    def before(self, optimizer: Optimizer, *, is_watched: bool = False) -> None:
        """Prepares an optimiser's step, before the update, to change only elements whose gradients were exchanged.

        Optimisers of `OF_ELEMENTS` get smaller substitute parameters with only these elements. For other optimisers, or
        if watched, the elements that must not change are copied, and `after` restores them.

        Args:
            optimizer: the optimiser that is about to step.
            is_watched: hooks of other code must see the parameters themselves, not substitutes.
        """
        if (unfinished := self._under_way.pop(id(optimizer), None)) is not None:  # its step has raised
            unfinished.give_up()
        self._seen[optimizer] = arrivals = self._arrivals()
        if not arrivals.freeze:
            return
        ours = self._ours(optimizer)
        found = [(p, arrivals.unfrozen(self._names[id(p)])) for p in ours if p.grad is not None]
        partial = [(p, sections) for p, sections in found if sections is not None and _between(sections, p.numel())]
        if partial:
            are_dense = all(p.grad is not None and p.grad.layout is torch.strided for p, _ in partial)
            any_shape = type(optimizer) in OF_ELEMENTS and are_dense and not is_watched
            self._under_way[id(optimizer)] = (_SubstituteStep if any_shape else _RestoringStep)(optimizer, partial)

    @torch.no_grad()
    def after(self, optimizer: Optimizer) -> None:
        """Ends an optimiser's step: puts back or restores elements whose gradients were not exchanged.

        Raises:
            ValueError: if gradients were exchanged within the step after `before`, and elements had to stay unchanged.
        """
        if (step := self._under_way.pop(id(optimizer), None)) is not None:
            step.end()
        arrivals = self._arrivals()
        if arrivals.freeze and self._seen.get(optimizer) is not arrivals and self._ours(optimizer):
            raise ValueError(SEVERAL.format(optimizer=type(optimizer).__name__))

    def _ours(self, optimizer: Optimizer) -> list[Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._names]

    def give_up(self) -> None:
        """Gives optimisers whose step raised an exception their own parameters back, instead of the substitutes.

        Substitutes are the smaller parameters, with only exchanged elements, that `before` gave them for the step.
        """
        while self._under_way:
            self._under_way.popitem()[1].give_up()


class _Step(ABC):
    """An optimiser's step in progress, after which elements are unchanged whose gradients were not exchanged."""

    @abstractmethod
    def end(self) -> None: ...

    @abstractmethod
    def give_up(self) -> None:
        """Gives the optimiser back its own parameters, if it has substitutes, after a step that raised an exception."""


class _SubstituteStep(_Step):
    """A step on smaller substitutes of parameters, with only the elements whose gradients were exchanged."""

    def __init__(self, optimizer: Optimizer, partial: Iterable[tuple[Tensor, Sections]]) -> None:
        self._optimizer = optimizer
        partial = list(partial)
        # A tensor without dimensions has no parts: it stays out of the step.
        self._parts = [_ArrivedPart(optimizer, whole, sections) for whole, sections in partial if whole.dim()]
        out = [(whole, left_out(whole)) for whole, _ in partial if not whole.dim()]
        self._stand_ins = StandIns(optimizer, [*((part.whole, part.parameter) for part in self._parts), *out])

    def end(self) -> None:
        self._stand_ins.put_back()
        for part in self._parts:
            part.put_back(self._optimizer)
        self.give_up()

    def give_up(self) -> None:
        self._stand_ins.put_back()
        for part in self._parts:
            self._optimizer.state.pop(part.parameter, None)


class _ArrivedPart:
    """A substitute for one parameter: its elements whose gradients arrived, with the optimiser's state of them."""

    def __init__(self, optimizer: Optimizer, whole: Tensor, sections: Sections) -> None:
        self.whole = whole
        self._sections = sections
        self.parameter = nn.Parameter(gathered(whole, sections))
        assert whole.grad is not None
        self.parameter.grad = gathered(whole.grad, sections)
        if whole in optimizer.state:
            optimizer.state[self.parameter] = {
                name: gathered(values, sections) if _alike(values, whole) else values
                for name, values in optimizer.state[whole].items()
            }

    def put_back(self, optimizer: Optimizer) -> None:
        put(self.parameter, self._sections, self.whole)
        state = optimizer.state[self.whole]
        for name, values in optimizer.state[self.parameter].items():
            if not _alike(values, self.parameter):
                state[name] = values
                continue
            if not _alike(state.get(name), self.whole):  # state that this step made
                state[name] = _first_state(name, self.whole, optimizer).to(values.dtype)
            put(values, self._sections, state[name])


class _RestoringStep(_Step):
    """A step on whole parameters, after which elements whose gradients were not exchanged are restored from a copy."""

    def __init__(self, optimizer: Optimizer, partial: Iterable[tuple[Tensor, Sections]]) -> None:
        self._optimizer = optimizer
        self._kept = []
        for parameter, sections in partial:
            still = _between(sections, parameter.numel())
            state = {name: gathered(values, still) for name, values in self._of_elements(parameter).items()}
            self._kept.append((parameter, still, gathered(parameter, still), state))

    def end(self) -> None:
        for parameter, still, weights, state in self._kept:
            put(weights, still, parameter)
            for name, values in self._of_elements(parameter).items():
                before = state.get(name)
                if before is None:  # state that this step made
                    before = gathered(_first_state(name, parameter, self._optimizer).to(values.dtype), still)
                put(before, still, values)
                if self._optimizer.state[parameter][name] is not values:  # momentum of sparse gradients is sparse
                    self._optimizer.state[parameter][name] = values.to_sparse(1)

    def give_up(self) -> None:
        """Does nothing: other code may have changed the parameters since, which restoring would undo."""

    def _of_elements(self, parameter: Tensor) -> dict[str, Tensor]:
        kept = self._optimizer.state.get(parameter, {})
        return {name: dense_of(values) for name, values in kept.items() if _alike(values, parameter)}


def _between(sections: Sections, numel: int) -> list[tuple[int, int]]:
    """Returns the non-empty ranges [start, stop) within [0, numel) between the given sections, which are ranges too."""
    starts, stops = [0, *(stop for _, stop in sections)], [*(start for start, _ in sections), numel]
    return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def _first_state(name: str, parameter: Tensor, optimizer: Optimizer) -> Tensor:
    """Returns a parameter's state of this name before its first step: zeros, but in `Rprop` and `ASGD`."""
    if name == "step_size":
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        return torch.full_like(parameter, float(group["lr"]))
    return parameter.detach().clone() if name == "ax" else torch.zeros_like(parameter)


def _alike(values: object, parameter: Tensor) -> bool:
    return isinstance(values, Tensor) and values.shape == parameter.shape
