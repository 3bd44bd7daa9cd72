"""What came to a model, or went from it, after gradsync was attached."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Sized

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .bucket import matches


class Additions:
    """Finds parameters that came to a model after `attach`: each rank would keep its own gradients of them."""

    def __init__(self, model: nn.Module, exclude: Sequence[str]) -> None:
        self._exclude = exclude
        self._known = WeakIdKeyDictionary({parameter: True for parameter in model.parameters()})
        self._remember(model)

    def check(self, model: nn.Module) -> str:
        """What is wrong, or nothing; costs next to nothing while no module has changed."""
        if list(map(len, self._tables)) == self._lengths and all(_children(m()) == ids for m, ids in self._parents):
            return ""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter not in self._known and not matches(name, self._exclude):
                return (
                    f"the parameter {name!r} came to the model after gradsync was attached, and nobody synchronises "
                    "it; detach() first, then attach again, or let exclude name it"
                )
        self._remember(model)
        return ""

    def _remember(self, model: nn.Module) -> None:
        """No module, which would live on, and with it what is attached to it."""
        modules = list(model.modules())
        self._tables: list[Sized] = [m._parameters for m in modules]
        self._tables += [m._modules for m in modules if not m._modules]
        self._lengths = list(map(len, self._tables))
        self._parents = [(weakref.ref(m), _children(m)) for m in modules if m._modules]


class Changes:
    """Finds what came to a model, or went from it, after `attach`."""

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter], exclude: Sequence[str]) -> None:
        self._additions = Additions(model, exclude)
        ours = {id(p) for p in parameters}
        self._places = [
            (module._parameters, key, p)
            for module in model.modules()
            for key, p in module._parameters.items()
            if p is not None and id(p) in ours
        ]

    def check(self, model: nn.Module) -> str:
        """What is wrong, or nothing."""
        if any(parameters.get(key) is not p for parameters, key, p in self._places):
            return (
                "a parameter of the model was replaced after gradsync was attached; detach() first, then attach again"
            )
        return self._additions.check(model)


def _children(module: nn.Module | None) -> list[int]:
    return [] if module is None else list(map(id, module._modules.values()))
