"""The elements of parameters for which a training step brought gradients: all, unless a scheme sends only some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import allocator as memory
from .bucket import Bucket

Sections = Sequence[tuple[int, int]]
"""Ranges of elements of a flattened tensor, as [start, stop), ascending."""


@dataclass(frozen=True)
class Arrival:
    """The elements of one bucket for which a training step brought synchronised gradients.

    They are all elements, unless a lossy scheme such as `CoarseGrained` sent only some of them in this step.
    """

    bucket: Bucket
    sections: Sections | None  # of the bucket's elements; None: all
    frozen: bool  # whether optimisers must leave the other elements alone


class Arrivals:
    """The elements of each parameter for which a training step brought synchronised gradients.

    They are all elements, unless a lossy scheme such as `CoarseGrained` sent only some in this step. `buckets`: what
    arrived in each bucket.
    """

    def __init__(self, buckets: Iterable[Arrival] = ()) -> None:
        self._partial: dict[str, list[Arrival]] = {}
        buckets = list(buckets)
        names = {name for each in buckets if each.sections is not None for name in each.bucket.names}
        for each in buckets if names else ():
            for name in names.intersection(each.bucket.names):
                self._partial.setdefault(name, []).append(each)

    @property
    def freeze(self) -> bool:
        """Whether optimisers must leave some elements and their state unchanged, as no gradient was sent for these."""
        return any(each.frozen and each.sections is not None for found in self._partial.values() for each in found)

    def of(self, name: str) -> Sections | None:
        """Returns the ranges [start, stop) of the parameter's elements for which gradients arrived; None if for all."""
        if name not in self._partial:
            return None
        return sorted(section for each in self._partial[name] for section in _within(name, each.bucket, each.sections))

    def unfrozen(self, name: str) -> Sections | None:
        """Returns the ranges [start, stop) of the parameter's elements that an optimiser may change; None if all."""
        found = self._partial.get(name, ())
        if not any(each.frozen for each in found):
            return None
        freed = ((each.bucket, each.sections if each.frozen else None) for each in found)
        return sorted(section for each in freed for section in _within(name, *each))


def gathered(tensor: Tensor, sections: Sections) -> Tensor:
    """Returns a copy of the elements of `tensor` in `sections`, end to end, (elements,).

    `sections`: ascending ranges [start, stop) of the flattened `tensor`, which may have any shape.
    """
    lengths = [stop - start for start, stop in sections]
    elements = memory.empty(sum(lengths), tensor.dtype, tensor.device)
    if lengths:
        flat = tensor.detach().reshape(-1)
        torch._foreach_copy_(list(elements.split(lengths)), [flat[start:stop] for start, stop in sections])
    return elements


def put(elements: Tensor, sections: Sections, tensor: Tensor) -> None:
    """Writes `elements`, (elements,), which `gathered` returned, back into the ranges `sections` of `tensor`.

    `sections`: ascending ranges [start, stop) of the flattened `tensor`, which may have any shape and is overwritten
    there.
    """
    if not sections:
        return
    flat = tensor.detach().reshape(-1)
    parts = [flat[start:stop] for start, stop in sections]
    torch._foreach_copy_(parts, list(elements.detach().split([len(part) for part in parts])))
    if flat.data_ptr() != tensor.data_ptr():  # reshape made a copy, as the tensor is not contiguous
        tensor.detach().copy_(flat.view(tensor.shape))


def _within(name: str, bucket: Bucket, sections: Sections | None) -> Iterator[tuple[int, int]]:
    """Yields the ranges of the parameter's own elements that `sections` of its bucket contain; None: all of it."""
    offset = 0
    for segment in bucket.segments:
        if segment.name == name:
            for first, last in ((0, bucket.numel),) if sections is None else sections:
                low, high = max(first, offset), min(last, offset + segment.numel)
                if low < high:
                    yield segment.start + low - offset, segment.start + high - offset
        offset += segment.numel
