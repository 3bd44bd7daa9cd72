"""Finds parameters and modules that were added to or removed from a model after `attach`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence, Sized
from operator import attrgetter, is_
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
CAME = (
    "the parameter {name!r} came to the model after gradsync was attached, and nobody synchronises it; detach() first, "
    "then attach again, or let exclude name it"
)
FROZEN = (
    "the parameter {name!r} was frozen when gradsync was attached, and nobody synchronises it; detach() first, then "
    "attach again, or let exclude name it"
)
_requires_grad = attrgetter("requires_grad")


class Structure:
    """The modules of a model, and how many parameters each has, as they were when this object was made."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._tables: list[Sized] = [m._parameters for m in modules]
        self._tables += [m._modules for m in modules if not m._modules]
        self._lengths = list(map(len, self._tables))
        self._parents = [(weakref.ref(m), _children(m)) for m in modules if m._modules]
        self._freed: list[Any] = []  # modules that were freed: others may have their ids now
        self._watched = [weakref.ref(m, self._freed.append) for m in modules]  # kept, as dead references call nothing

    def has_changed(self) -> bool:
        """Whether a module was added or removed since, or has more or fewer parameters; quick while nothing has."""
        same = not self._freed and list(map(len, self._tables)) == self._lengths
        return not (same and all(_children(m()) == ids for m, ids in self._parents))


class Additions:
    """Finds parameters that came to a model after `attach`, whose gradients gradsync would not synchronise.

    A parameter may come with a module, by a new name, in place of another one or of None, or by being unfrozen.
    """

    def __init__(self, model: nn.Module, exclude: Sequence[str]) -> None:
        self._exclude = exclude
        # The parameters at `attach`; True: trainable, or left alone in any case.
        named = model.named_parameters()
        self._known = WeakIdKeyDictionary({p: p.requires_grad or matches(name, exclude) for name, p in named})
        self.generation = 0  # changes when modules are added or removed, or their entries of parameters change
        self._look(model)

    def check(self, model: nn.Module) -> str:
        """Returns an error text if a parameter came to the model or was unfrozen since `attach`; else "".

        gradsync would not synchronise such a parameter. Tensors that `functional_call` puts in place of parameters for
        one call are ignored. The check is quick while nothing has changed.
        """
        is_in_place = self._is_in_place()
        if is_in_place and not self._structure.has_changed() and not any(map(_requires_grad, self._frozen)):
            return ""
        if not is_in_place and is_called_by(stateless._functional_call.__code__):
            return ""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not self._known.get(parameter) and not matches(name, self._exclude):
                return self._text(parameter).format(name=name)
        self.generation += 1
        self._look(model)
        return ""

    def _text(self, parameter: Tensor) -> str:
        if parameter in self._known:
            return FROZEN
        entries = zip(self._places, self._present, strict=True)
        lost = (key not in table or table[key] is not was for (table, key), was in entries if was is not None)
        return REPLACED if any(lost) else CAME

    def _is_in_place(self) -> bool:
        try:  # the tables of TorchScript have no `get`
            return all(map(is_, [table[key] for table, key in self._places], self._present))
        except KeyError:
            return False

    def _look(self, model: nn.Module) -> None:
        """Remembers modules, and the entries of their tables of parameters, None included."""
        found: list[tuple[Mapping[str, Any], str, Tensor | None]] = [
            (module._parameters, key, p)
            for prefix, module in model.named_modules()
            for key, p in module._parameters.items()
            if not matches(f"{prefix}.{key}" if prefix else key, self._exclude)
        ]
        self._places = [(table, key) for table, key, _ in found]
        self._present = [p for _, _, p in found]
        present = (p for p in self._present if p is not None)
        self._frozen = [p for p in present if not (p.requires_grad or self._known.get(p))]
        self._structure = Structure(model)


class Changes(Additions):
    """Finds changes of a model's parameters and modules after `attach`.

    A parameter may move to another name or module, as pruning and parametrisations do, or be removed. A new parameter
    that nobody synchronises is an error.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter], exclude: Sequence[str]) -> None:
        super().__init__(model, exclude)
        self._wrapper = ActiveWrapper({id(p) for p in parameters})

    def check(self, model: nn.Module) -> str:
        """Returns an error text if the model was changed since `attach` so that gradsync cannot go on; else "".

        A DDP that was put around the model counts as such a change.
        """
        return self._wrapper.check() or super().check(model)


def _children(module: nn.Module | None) -> list[int]:
    return [] if module is None else list(map(id, module._modules.values()))
