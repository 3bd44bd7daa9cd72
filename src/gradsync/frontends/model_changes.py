"""Finds parameters and modules that were added to or removed from a model after `attach`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence, Sized
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import stateless
from torch.utils.weak import WeakIdKeyDictionary

from ..tensors.bucket import matches
from .torch_hooks import is_called_by
from .wrappers import ActiveWrapper

REPLACED = (
    "a parameter of the model was replaced after gradsync was attached ({name!r}, as load_state_dict(assign=True) and "
    "weight_norm do), and nobody synchronises the new one; detach() first, then attach again"
)


class Structure:
    """The modules of a model, and how many parameters each has, as they were when this object was made."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._tables: list[Sized] = [m._parameters for m in modules]
        self._tables += [m._modules for m in modules if not m._modules]
        self._lengths = list(map(len, self._tables))
        self._parents = [(weakref.ref(m), _children(m)) for m in modules if m._modules]
        self._freed: list[Any] = []  # modules that were freed: others may have their ids now
        self._modules = [weakref.ref(m, self._freed.append) for m in modules]

    def has_changed(self) -> bool:
        """Whether a module was added or removed since, or has more or fewer parameters; quick while nothing has."""
        same = not self._freed and list(map(len, self._tables)) == self._lengths
        return not (same and all(_children(m()) == ids for m, ids in self._parents))


class Additions:
    """Finds parameters that were added to a model after `attach`, whose gradients gradsync would not synchronise."""

    def __init__(self, model: nn.Module, exclude: Sequence[str]) -> None:
        self._exclude = exclude
        self._known = WeakIdKeyDictionary({parameter: True for parameter in model.parameters()})
        named = model.named_parameters()
        self._frozen = [(n, weakref.ref(p)) for n, p in named if not (p.requires_grad or matches(n, exclude))]
        self.generation = 0  # changes when modules are added or removed
        self._structure = Structure(model)

    def check(self, model: nn.Module) -> str:
        """Returns an error text if a parameter was added to the model or unfrozen since `attach`; else "".

        gradsync would not synchronise such a parameter. The check is quick while no module has changed.
        """
        for name, frozen in self._frozen:
            parameter = frozen()
            if parameter is not None and parameter.requires_grad:
                return (
                    f"the parameter {name!r} was frozen when gradsync was attached, and nobody synchronises it; "
                    "detach() first, then attach again, or let exclude name it"
                )
        if not self._structure.has_changed():
            return ""
        if name := self.added(model):
            return (
                f"the parameter {name!r} came to the model after gradsync was attached, and nobody synchronises "
                "it; detach() first, then attach again, or let exclude name it"
            )
        self.generation += 1
        self._structure = Structure(model)
        return ""

    def added(self, model: nn.Module) -> str:
        """Returns the name of a trainable parameter that was added to the model after `attach`; else ""."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter not in self._known and not matches(name, self._exclude):
                return name
        return ""


class Changes:
    """Finds changes of a model's parameters and modules after `attach`.

    A parameter may move to another name or module, as pruning and parametrisations do, or be removed. A new parameter
    that nobody synchronises is an error. Tensors that `functional_call` puts in place of parameters for one call are
    ignored.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter], exclude: Sequence[str]) -> None:
        self._additions = Additions(model, exclude)
        self._ours = {id(p) for p in parameters}
        self._wrapper = ActiveWrapper(self._ours)
        self._moves = 0
        self._find_places(model)

    @property
    def generation(self) -> int:
        """A number that changes whenever modules were added or removed, or parameters have moved to other modules."""
        return self._additions.generation + self._moves

    def check(self, model: nn.Module) -> str:
        """Returns an error text if the model was changed since `attach` so that gradsync cannot go on; else "".

        A DDP that was put around the model counts as such a change.
        """
        if why := self._wrapper.check():
            return why
        if self._are_in_place():
            return self._additions.check(model)
        if is_called_by(stateless._functional_call.__code__):
            return ""
        if name := self._additions.added(model):
            return REPLACED.format(name=name)
        self._moves += 1
        self._find_places(model)
        return self._additions.check(model)

    def _are_in_place(self) -> bool:
        try:  # the tables of TorchScript have no `get`
            return all(map(is_, [table[key] for table, key in self._places], self._present))
        except KeyError:
            return False

    def _find_places(self, model: nn.Module) -> None:
        found: list[tuple[Mapping[str, Any], str, Tensor]] = [
            (module._parameters, key, p)
            for module in model.modules()
            for key, p in module._parameters.items()
            if p is not None and id(p) in self._ours
        ]
        self._places = [(table, key) for table, key, _ in found]
        self._present = [p for _, _, p in found]


def _children(module: nn.Module | None) -> list[int]:
    return [] if module is None else list(map(id, module._modules.values()))
