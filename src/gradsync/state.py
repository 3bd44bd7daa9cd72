"""What schemes keep, by parameter: in slices for a checkpoint or another plan, and laid into a new plan's buckets.

A slice has a name of its own, `parameter[start:stop]/point` for one element for each of these elements, and with two
slashes for a tensor that goes with the segment as a whole, which another plan takes over where it fits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .bucket import Bucket, Segment, TensorSpec
from .compressors import State as CompressorState

Kept = Tensor | tuple[CompressorState, ...]  # at one compress point, see `schemes.State`
STEP = "step"  # the name under which a compressor's count of steps is kept


@dataclass(frozen=True)
class StateSlice:
    """State of elements [start, stop) of one parameter at one compress point."""

    name: str
    start: int
    stop: int
    point: str
    values: Tensor  # (stop - start,), or any shape
    whole: bool = False  # goes with the segment as a whole

    @property
    def key(self) -> str:
        """Its name in a `state_dict`."""
        return f"{self.name}[{self.start}:{self.stop}]/{'/' if self.whole else ''}{self.point}"

    @classmethod
    def from_key(cls, key: str, values: Tensor) -> StateSlice:
        """
        Raises:
            ValueError: when the key is none, or does not fit the values.
        """
        form = re.fullmatch(r"(?P<name>.*)\[(?P<start>\d+):(?P<stop>\d+)\]/(?P<whole>/?)(?P<point>[^/]+)", key)
        if form is None:
            raise ValueError(f"expected a state's key to read name[start:stop]/point, got {key!r}")
        part = cls(form["name"], int(form["start"]), int(form["stop"]), form["point"], values, bool(form["whole"]))
        if not part.whole and values.shape != (part.stop - part.start,):
            raise ValueError(f"the state {key!r} has values of shape {tuple(values.shape)}")
        return part

    def overlaps(self, segment: Segment) -> bool:
        """Whether it is of elements of this segment (of an empty parameter, of that)."""
        low, high = max(self.start, segment.start), min(self.stop, segment.stop)
        return self.name == segment.name and (low < high or self.start == self.stop == segment.start == segment.stop)

    def copy_to(self, segment: Segment, target: Tensor) -> None:
        """Lays those of its elements that the segment has into `target`, (segment.numel,)."""
        low, high = max(self.start, segment.start), min(self.stop, segment.stop)
        target[low - segment.start : high - segment.start].copy_(self.values[low - self.start : high - self.start])


def slices_of(saved: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> list[StateSlice]:
    """The slices that `Engine.state_dict` gave, for a model with parameters of these `specs`.

    Raises:
        ValueError: for another version, or state of parameters that this model does not have.
    """
    if saved.get("version") != 1:
        raise ValueError(f"expected a gradsync state of version 1, got version {saved.get('version')!r}")
    if missing := sorted({"step", "state"} - set(saved)):
        raise ValueError(f"the state has no {missing[0]!r}: it is not what state_dict() gave")
    slices = [StateSlice.from_key(key, values) for key, values in saved["state"].items()]
    for part in slices:
        if part.name not in specs:
            raise ValueError(f"the state holds {part.name!r}, which is no parameter to synchronise here")
        if part.stop > specs[part.name].numel:
            raise ValueError(
                f"the state of {part.name!r} reaches to element {part.stop}, the parameter has {specs[part.name].numel}"
            )
    return slices


def slices(bucket: Bucket, state: Mapping[str, Kept]) -> Iterator[StateSlice]:
    """Copies of what a scheme keeps of a bucket, one for each segment and compress point."""
    for point, kept in state.items():
        if isinstance(kept, Tensor):
            yield from _by_segment(point, bucket.segments, kept)
            continue
        for part in kept:
            segments = part.spec.segments
            for name, values in part.elements.items():
                yield from _by_segment(f"{point}.{name}", segments, values)
            for name, tensors in [*part.tensors.items(), (STEP, [torch.tensor(part.step)] * len(segments))]:
                for segment, tensor in zip(segments, tensors, strict=True):
                    where = segment.name, segment.start, segment.stop
                    yield StateSlice(*where, f"{point}.{name}", tensor.clone(), whole=True)


def with_slices(bucket: Bucket, state: Mapping[str, Kept], saved: Sequence[StateSlice]) -> dict[str, Kept]:
    """A fresh state of a bucket with those elements of the slices that it holds; other plans cut elsewhere.

    Writes into the tensors of `state`. What goes with a segment as a whole is taken where it has the same shape.
    """
    return {point: _with_slices(bucket, point, kept, saved) for point, kept in state.items()}


def has_place(state: Mapping[str, Kept], part: StateSlice) -> bool:
    """Whether such a state keeps what this slice has, at the same point. What is whole may begin anew."""
    points: set[str] = set()
    for point, kept in state.items():
        names = [""] if isinstance(kept, Tensor) else [f".{name}" for each in kept for name in each.elements]
        points.update(point + name for name in names)
    return part.whole or part.point in points


def _by_segment(point: str, segments: Iterable[Segment], flat: Tensor) -> Iterator[StateSlice]:
    offset = 0
    for segment in segments:
        part = flat[offset : offset + segment.numel].clone()
        yield StateSlice(segment.name, segment.start, segment.stop, point, part)
        offset += segment.numel


def _with_slices(bucket: Bucket, point: str, kept: Kept, saved: Sequence[StateSlice]) -> Kept:
    if isinstance(kept, Tensor):
        _lay(point, bucket.segments, kept, saved)
        return kept
    return tuple(_restored(point, part, saved) for part in kept)


def _lay(point: str, segments: Sequence[Segment], flat: Tensor, saved: Sequence[StateSlice]) -> None:
    offset = 0
    for segment in segments:
        for part in saved:
            if part.point == point and not part.whole and part.overlaps(segment):
                part.copy_to(segment, flat[offset : offset + segment.numel])
        offset += segment.numel


def _restored(point: str, state: CompressorState, saved: Sequence[StateSlice]) -> CompressorState:
    segments = state.spec.segments
    for name, values in state.elements.items():
        _lay(f"{point}.{name}", segments, values, saved)
    tensors = {
        name: tuple(_whole(f"{point}.{name}", *each, saved) for each in zip(segments, parts, strict=True))
        for name, parts in state.tensors.items()
    }
    steps = [_whole(f"{point}.{STEP}", segment, torch.tensor(state.step), saved) for segment in segments]
    return replace(state, tensors=tensors, step=max((int(step) for step in steps), default=state.step))


def _whole(point: str, segment: Segment, fresh: Tensor, saved: Sequence[StateSlice]) -> Tensor:
    """What was kept of the segment, else what is there."""
    for part in saved:
        fits = part.values.shape == fresh.shape and part.values.dtype is fresh.dtype
        if part.whole and part.point == point and fits and part.overlaps(segment):
            return part.values.to(fresh.device, copy=True)
    return fresh
