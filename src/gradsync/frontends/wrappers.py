"""Finds DistributedDataParallel around or inside a model, which must not average the same gradients as gradsync."""

from __future__ import annotations

import gc
import logging
import os
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger(__name__)

AROUND = (
    "the model is inside DistributedDataParallel, which averages its gradients already: call "
    "gradsync.attach(ddp_model) with the wrapped model, or do not wrap it"
)
INSIDE = (
    "the model contains DistributedDataParallel at {name!r}, which averages gradients of its own: attach to that one, "
    "let exclude=['{name}.*'] leave it alone, or do not wrap that part"
)
LATER = (
    "DistributedDataParallel was put around a model that gradsync is attached to, and both would average its "
    "gradients: wrap first and call gradsync.attach(ddp_model), or do not wrap it"
)
TORCHFT = (
    "torchft's DistributedDataParallel averages the gradients of this model by its manager: attach to a model without "
    "it, or leave averaging gradients to torchft"
)
_MARK = "gradsync looked"


def why_not_alone(model: nn.Module, parameters: Mapping[str, Tensor]) -> str:
    """Returns an error text if DDP, or torchft, averages gradients of these parameters as well; else "".

    `model` may be DDP itself. If any code holds the `AccumulateGrad` nodes of parameters, as DDP does, all objects of
    the process are searched (some 50 ms for 200,000); else it takes microseconds per parameter.
    """
    ours = {id(p) for p in parameters.values()}
    if _is_of_torchft(model):
        return TORCHFT
    for name, module in model.named_modules():
        if module is not model and isinstance(module, DistributedDataParallel) and _reduces(module, ours):
            return TORCHFT if _is_of_torchft(module) else INSIDE.format(name=name)
    is_wrapped = isinstance(model, DistributedDataParallel)
    if (is_wrapped and "torchft" not in sys.modules) or not any(map(_is_held, parameters.values())):
        return ""
    # An earlier wrapper of torch's own around a model that is wrapped anew does nothing.
    others = (each for each in _living() if each is not model and (_is_of_torchft(each) or not is_wrapped))
    around = [weakref.ref(found) for found in others if _reduces(found, ours)]
    if around:
        gc.collect()  # frees wrappers that nobody uses any more
    found = [ddp for ref in around if (ddp := ref()) is not None]
    if not found:
        return ""
    return TORCHFT if any(map(_is_of_torchft, found)) else AROUND


class ActiveWrapper:
    """Finds out, when a forward runs, whether DDP was put around the model after `attach`.

    Args:
        ours: ids of the parameters that gradsync synchronises.
    """

    def __init__(self, ours: Collection[int]) -> None:
        self._ours = ours
        self._harmless: weakref.ref[nn.Module] | None = None  # the last wrapper that averages none of `ours`

    def check(self) -> str:
        """Returns an error text if a DDP is in its forward that averages some of the parameters `ours`; else ""."""
        active = DistributedDataParallel._active_ddp_module
        if active is None or (self._harmless is not None and self._harmless() is active):
            return ""
        if _reduces(active, self._ours):
            return LATER
        self._harmless = weakref.ref(active)
        return ""


def warn_if_alone(process_group: dist.ProcessGroup | None) -> None:
    """Logs a warning if the process group has only this rank although the job has several.

    Nothing is exchanged then.
    """
    if dist.get_world_size(process_group) > 1:
        return
    ranks = os.environ.get("WORLD_SIZE", "1")
    reason = ""
    if "torchft" in sys.modules:
        reason = "torchft's replica groups may be of one rank each, and averaging over them is torchft's manager's"
    elif ranks.isdigit() and int(ranks) > 1:
        reason = f"WORLD_SIZE says that the job has {ranks}: give init_process_group() all of them"
    if reason:
        logger.warning("the process group has one rank, so gradsync synchronises nothing; %s", reason)


def _reduces(ddp: DistributedDataParallel, ours: Collection[int]) -> bool:
    """Whether `ddp` averages gradients of parameters with ids in `ours`; False for gradsync's DDP (no Reducer)."""
    if "reducer" not in vars(ddp):
        return False
    named = ddp.module.named_parameters()
    return any(id(p) in ours for name, p in named if p.requires_grad and name not in ddp.parameters_to_ignore)


def _is_held(parameter: Tensor) -> bool:
    """Whether other code holds the parameter's accumulation node, as DDP's Reducer and graphs do."""
    notes: Any = get_gradient_edge(parameter).node.metadata  # a dict; torch's stub declares a method
    notes[_MARK] = True
    del notes
    notes = get_gradient_edge(parameter).node.metadata
    return notes.pop(_MARK, None) is not None


def _living() -> Iterator[DistributedDataParallel]:
    """Returns all instances of DDP in this process."""
    classes = set(_subclasses(DistributedDataParallel))
    return (thing for thing in gc.get_objects() if type(thing) in classes)


def _subclasses(of: type[DistributedDataParallel]) -> Iterator[type[DistributedDataParallel]]:
    yield of
    for each in of.__subclasses__():
        yield from _subclasses(each)


def _is_of_torchft(model: nn.Module) -> bool:
    return any(c.__module__.partition(".")[0] == "torchft" for c in type(model).__mro__)
