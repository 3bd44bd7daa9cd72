"""Cuts state of schemes into slices of parameters, for checkpoints and new plans, and copies slices into new buckets.

A slice's key is `parameter[start:stop]/point` if it has one number for each element; `point` is the compress point. Two
slashes mark a tensor that belongs to the segment as a whole, such as PowerSGD's factors, which another plan loads if
its shape fits. A tensor that belongs to all segments of a bucket together has the key of the first segment.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from ..compressors import RESIDUAL, SENT, CompressorState, copies_at
from ..kernels import accumulation_dtype
from ..tensors.bucket import Bucket, Segment

CARRIED = "owed"
"""The compress point of carried residuals, as checkpoints name it."""
# Digits of other scripts, and more of them than any tensor has elements, are no index.
KEY = r"(?P<name>.*)\[(?P<start>[0-9]{1,18}):(?P<stop>[0-9]{1,18})\]/(?P<whole>/?)(?P<point>[^/]+)"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Kept = Tensor | tuple[CompressorState, ...]
"""The state that a scheme keeps at one compress point, see `schemes.State`."""


@dataclass(frozen=True)
class StateSlice:
    """Part of what a scheme or compressor keeps between steps, as a residual, for a range of a parameter's elements.

    Attributes:
        name: the parameter.
        start, stop: the range of elements of the flattened parameter.
        point: which tensor it is: the place in the scheme where a compressor runs (its compress point), and a name.
        values: (stop - start,), one number for each element; any shape if `whole`.
        whole: whether the tensor belongs to the range as a whole, such as a factor of PowerSGD.
    """

    name: str
    start: int
    stop: int
    point: str
    values: Tensor
    whole: bool = False

    @property
    def key(self) -> str:
        """The key of the slice in a `state_dict`, `parameter[start:stop]/point`, with two slashes if it is `whole`."""
        return f"{self.name}[{self.start}:{self.stop}]/{'/' if self.whole else ''}{self.point}"

    @property
    def digest(self) -> str:
        """The SHA-256 of the values' bytes, in hexadecimal, by which ranks compare their state."""
        content = self.values.cpu().reshape(-1).contiguous().view(torch.uint8)
        return hashlib.sha256(content.numpy().tobytes()).hexdigest()

    @classmethod
    def from_key(cls, key: str, values: Tensor) -> StateSlice:
        """Returns the slice of saved state with these values, for the parameter and range that the `key` names.

        Args:
            key: as the property `key` gives it: `parameter[start:stop]/point`.
            values: floating, (stop - start,); any shape if the key has two slashes.

        Raises:
            ValueError: if the key is malformed or does not fit the shape, or values are not dense, floating and finite.
        """
        form = re.fullmatch(KEY, key, re.DOTALL) if isinstance(key, str) else None
        if form is None:
            raise ValueError(f"expected a state's key to read name[start:stop]/point, got {key!r}")
        _require_values(key, values)
        start, stop, values = int(form["start"]), int(form["stop"]), values.detach()
        if stop < start:
            raise ValueError(f"expected a state's key to read name[start:stop]/point, got {key!r}, which ends early")
        part = cls(form["name"], start, stop, form["point"], values, bool(form["whole"]))
        if not part.whole and values.shape != (part.stop - part.start,):
            raise ValueError(f"the state {key!r} has values of shape {tuple(values.shape)}")
        return part

    def overlaps(self, segment: Segment) -> bool:
        """Whether this slice of state and a bucket's segment share elements of one parameter.

        If both are empty, whether they are at the same place.
        """
        low, high = max(self.start, segment.start), min(self.stop, segment.stop)
        return self.name == segment.name and (low < high or self.start == self.stop == segment.start == segment.stop)

    def overlap(self, segment: Segment) -> int:
        """Returns how many elements this slice of state and a bucket's segment share; 0 if of different parameters."""
        return max(min(self.stop, segment.stop) - max(self.start, segment.start), 0) if self.overlaps(segment) else 0

    def copy_to(self, segment: Segment, target: Tensor) -> None:
        """Copies the values of elements that lie in `segment`, too, to their places in `target`, (segment.numel,)."""
        low, high = max(self.start, segment.start), min(self.stop, segment.stop)
        target[low - segment.start : high - segment.start].copy_(self.values[low - self.start : high - self.start])


def _require_values(key: str, values: object) -> None:
    """Checks that values are a dense tensor of finite floating-point numbers, not on the meta device.

    Raises:
        ValueError: naming the key.
    """
    tensor = values if isinstance(values, Tensor) else None
    if tensor is None or tensor.layout is not torch.strided or tensor.dtype not in DTYPES or tensor.is_meta:
        kind = type(values).__name__ if tensor is None else f"{tensor.dtype} {tensor.layout} on {tensor.device.type}"
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"the state {key!r} must be a dense floating-point tensor, got {kind}; there are {names}")
    finite = tensor.detach().isfinite()
    if not finite.all():
        first = int((~finite).reshape(-1).nonzero()[0])
        raise ValueError(
            f"the state {key!r} holds {float(tensor.detach().reshape(-1)[first])} at element {first} of its values: no "
            "step would be finite again; take an earlier checkpoint, or leave the key out, to begin anew without it"
        )


def slices(bucket: Bucket, state: Mapping[str, Kept]) -> Iterator[StateSlice]:
    """Yields copies of what a bucket's scheme and compressors keep between steps, cut into slices by parameter.

    `state`: their state by compress point, the place in the scheme where a compressor runs.
    """
    for point, kept in state.items():
        if isinstance(kept, Tensor):
            yield from _by_segment(point, bucket.segments, kept)
            continue
        for part in kept:
            segments = part.spec.segments
            for name, values in part.elements.items():
                yield from _by_segment(f"{point}.{name}", segments, values)
            for name, tensors in part.tensors.items():
                for segment, tensor in zip(segments, tensors, strict=True):
                    where = segment.name, segment.start, segment.stop
                    yield StateSlice(*where, f"{point}.{name}", tensor.clone(), whole=True)
            for name, tensor in part.together.items():
                where = segments[0].name, segments[0].start, segments[0].stop
                yield StateSlice(*where, f"{point}.{name}", tensor.clone(), whole=True)


def at_step(state: Mapping[str, Kept], step: int) -> dict[str, Kept]:
    """Returns a bucket's state with compressors' step numbers set to `step`, so that they are the same on all ranks.

    The state is what the bucket's scheme and compressors keep between steps. Random numbers and schedules of
    compressors depend on the step number.
    """
    if not state:
        return {}
    return {
        point: kept if isinstance(kept, Tensor) else tuple(replace(part, step=step) for part in kept)
        for point, kept in state.items()
    }


def rescaled(state: Mapping[str, Kept], factor: float) -> dict[str, Kept]:
    """Returns a bucket's state for a loss scale `factor` times as large: residuals and the like are multiplied by it.

    The state is what the bucket's scheme and compressors keep between steps. Tensors that belong to a parameter as a
    whole, such as PowerSGD's factors, stay.
    """
    return {
        point: kept * factor
        if isinstance(kept, Tensor)
        else tuple(
            replace(part, elements={name: values * factor for name, values in part.elements.items()}) for part in kept
        )
        for point, kept in state.items()
    }


def arrived(state: Mapping[str, Kept], bucket: Bucket) -> list[tuple[int, int]] | None:
    """Returns the ranges [start, stop) of the bucket's elements that were exchanged in the step that made `state`.

    None: all were. The state is what the bucket's scheme and compressors keep. Only state of the whole bucket is read
    (None without it), as state of a part is known to one rank only.
    """
    if not state:
        return None
    parts = (part for kept in state.values() if not isinstance(kept, Tensor) for part in kept)
    return next((part.arrived for part in parts if part.spec.numel == bucket.numel), None)


def without(state: Mapping[str, Kept], before: Mapping[str, Kept], names: Collection[str]) -> dict[str, Kept]:
    """Returns what a bucket's scheme and compressors keep after a step, except for the parameters `names`.

    Those keep the values of `before` the step: no rank used them, so their state must not change.
    """
    return {point: _without(kept, before[point], names) for point, kept in state.items()}


def with_slices(bucket: Bucket, state: Mapping[str, Kept], saved: Sequence[StateSlice]) -> dict[str, Kept]:
    """Returns a bucket's new `state` with saved values copied in, for the elements that lie in the bucket.

    It overwrites the tensors of `state`; the slices may have been cut for another plan's buckets. A tensor that belongs
    to a whole segment is copied if its shape and dtype are the same. Residuals of sums that this rank no longer
    computes are still to be sent: they are added to the residual of the rank's own gradient, if the state has one, by
    equal shares where several ranks kept the same one.

    Args:
        bucket: the bucket of the new plan.
        state: what its scheme and compressors keep, by compress point (the place in the scheme where a compressor
            runs).
        saved: slices of a checkpoint or of another plan's state.
    """
    found = _by_parameter(bucket, saved)
    taken = {point: _with_slices(bucket, point, kept, found) for point, kept in state.items()}
    for part in chain(*found.values()):
        point, _, name = part.point.partition(".")
        sent = taken.get(SENT)
        copies = _copies(point)
        if part.whole or not copies or not name or not isinstance(sent, tuple):
            continue
        rest = part.values / copies
        for segment in _segments_of(taken.get(point, ()), name, part.name):
            low, high = max(part.start, segment.start), min(part.stop, segment.stop)
            if low < high:
                rest[low - part.start : high - part.start] = 0
        _add(replace(part, values=rest, point=name), sent)
    return taken


def left_to_send(part: StateSlice) -> bool:
    """Whether the slice of state is a residual: parts of gradients or sums that were left out and can be sent later.

    Any plan can send them, unlike other state, which belongs to a scheme or compressor.
    """
    point, _, name = part.point.partition(".")
    return not part.whole and name == RESIDUAL and (point == SENT or _copies(point) > 0)


def carried_residual(bucket: Bucket, state: Mapping[str, Kept], saved: Sequence[StateSlice]) -> Tensor | None:
    """Returns the residuals that a former plan left to be sent and for which the bucket's new state has no place.

    The result is (bucket.numel,), 0 elsewhere, in units of the gradient, in the dtype in which sums accumulate; None if
    all are 0. The engine adds it to the next gradients.

    Args:
        bucket: a flat bucket of the new plan.
        state: what its scheme and compressors keep.
        saved: the former plan's state, in slices by parameter.
    """
    places = bucket.flat_spec.places
    flat: Tensor | None = None
    for part in filter(left_to_send, chain(*_by_parameter(bucket, saved).values())):
        point, _, name = part.point.partition(".")
        values = part.values / (_copies(point) or 1)  # each of several ranks with the same state adds a share
        # Residuals have their place there, see `with_slices`.
        sent = _segments_of(state.get(SENT, ()), RESIDUAL, part.name)
        for segment in (*sent, *_segments_of(state.get(point, ()), name, part.name)):
            if part.overlap(segment):
                low, high = max(part.start, segment.start), min(part.stop, segment.stop)
                values[low - part.start : high - part.start] = 0
        for _, offset, segment in places[part.name]:
            low, high = max(part.start, segment.start), min(part.stop, segment.stop)
            if part.overlap(segment) and values[low - part.start : high - part.start].any():
                if flat is None:
                    flat = torch.zeros(bucket.numel, dtype=accumulation_dtype(bucket.dtype))
                room = flat[offset + low - segment.start : offset + high - segment.start]
                room += values[low - part.start : high - part.start].to(room)
    return flat


def _by_parameter(bucket: Bucket, saved: Iterable[StateSlice]) -> dict[str, list[StateSlice]]:
    """Returns the saved slices that belong to the bucket's parameters, by parameter name."""
    found: dict[str, list[StateSlice]] = {name: [] for name in bucket.names}
    for part in saved:
        if part.name in found:
            found[part.name].append(part)
    return found


def carried_slices(bucket: Bucket, flat: Tensor) -> Iterator[StateSlice]:
    """Yields the residual that a former plan left to be sent, cut into one slice of state per segment of the bucket.

    `flat`: the residual, (bucket.numel,).
    """
    return _by_segment(f"{CARRIED}.{RESIDUAL}", bucket.segments, flat)


def _copies(point: str) -> int:
    """Returns how many ranks keep equal copies of a residual of sums over ranks, to divide it by; CARRIED counts as 1.

    0 means that no sums are compressed at this point, as at SENT, where each rank keeps the residual of its gradient.
    """
    return 1 if point == CARRIED else copies_at(point)


def has_place(states: Iterable[Mapping[str, Kept]], part: StateSlice) -> bool:
    """Whether buckets keep a tensor for every element of a slice of saved state, so that it can be loaded.

    For a tensor that belongs to a parameter as a whole, whether one of the same name is kept, even if its shape differs
    and loading drops the slice.

    Args:
        states: for each bucket, what its scheme and compressors keep between steps.
        part: the saved slice.
    """
    point, _, name = part.point.partition(".")
    if part.whole:
        kept_there = [state[point] for state in states if point in state]
        parts = [each for kept in kept_there if not isinstance(kept, Tensor) for each in kept]
        return any(name in each.tensors or name in each.together for each in parts)
    points = {point, SENT} if _copies(point) else {point}
    found = 0
    for state in states:
        if isinstance(state.get(part.point), Tensor):
            return True
        kept = {at: state[at] for at in points if at in state}
        inside = (_segments_of(each, name, part.name) for each in kept.values())
        found += max((sum(map(part.overlap, segments)) for segments in inside), default=0)
    return found >= part.stop - part.start


def dtype_at(states: Iterable[Mapping[str, Kept]], part: StateSlice) -> torch.dtype | None:
    """Returns the dtype of the tensor into which a slice of saved state can be loaded; None if there is no such tensor.

    Args:
        states: for each bucket, what its scheme and compressors keep between steps.
        part: the saved slice.
    """
    point, _, name = part.point.partition(".")
    for state in states:
        if not part.whole and isinstance(kept := state.get(part.point), Tensor):
            return kept.dtype
        for at in (point, SENT) if _copies(point) else (point,):
            if not isinstance(parts := state.get(at, ()), Tensor):
                found = (dtype for each in parts if (dtype := _dtype_in(each, name, part)) is not None)
                if (dtype := next(found, None)) is not None:
                    return dtype
    return None


def _dtype_in(kept: CompressorState, name: str, part: StateSlice) -> torch.dtype | None:
    inside = [number for number, _, segment in kept.spec.places.get(part.name, ()) if part.overlaps(segment)]
    if not part.whole:
        return kept.elements[name].dtype if name in kept.elements and inside else None
    if inside and name in kept.tensors:
        return kept.tensors[name][inside[0]].dtype
    return kept.together[name].dtype if name in kept.together and part.overlaps(kept.spec.segments[0]) else None


def keeps_values(state: Mapping[str, Kept]) -> bool:
    """Whether a bucket's scheme and compressors keep tensors, so that a checkpoint needs the state of every rank.

    True, to be safe, also if this rank sums no part of the bucket and so has no tensors: other ranks may have some.
    """
    return any(
        isinstance(kept, Tensor) or not kept or any(part.elements or part.tensors or part.together for part in kept)
        for kept in state.values()
    )


def _segments_of(kept: Kept, name: str, parameter: str) -> list[Segment]:
    """Returns the segments of a parameter for whose elements compressors keep a tensor called `name`."""
    if isinstance(kept, Tensor):
        return []
    inside = (part.spec.places.get(parameter, ()) for part in kept if name in part.elements)
    return [segment for places in inside for _, _, segment in places]


def _add(part: StateSlice, kept: tuple[CompressorState, ...]) -> None:
    """Adds the values of a slice to the kept tensor that `part.point` names, at the same elements."""
    for state in kept:
        if part.point not in state.elements:
            continue
        for _, offset, segment in state.spec.places.get(part.name, ()):
            if part.overlap(segment):
                low, high = max(part.start, segment.start), min(part.stop, segment.stop)
                target = state.elements[part.point][offset : offset + segment.numel]
                addend = part.values[low - part.start : high - part.start].to(target.device)
                target[low - segment.start : high - segment.start] += addend


def _without(kept: Kept, before: Kept, names: Collection[str]) -> Kept:
    if isinstance(kept, Tensor) or isinstance(before, Tensor):
        return kept
    return tuple(_part_without(*parts, names) for parts in zip(kept, before, strict=True))


def _part_without(state: CompressorState, before: CompressorState, names: Collection[str]) -> CompressorState:
    state, offset = state.unused(names), 0
    if not names:
        return state
    elements = {name: values.clone() for name, values in state.elements.items()}
    for segment in state.spec.segments:
        if segment.name in names:
            for name, values in elements.items():
                values[offset : offset + segment.numel] = before.elements[name][offset : offset + segment.numel]
        offset += segment.numel
    tensors = {
        name: tuple(
            old if segment.name in names else new
            for segment, new, old in zip(state.spec.segments, kept, before.tensors[name], strict=True)
        )
        for name, kept in state.tensors.items()
    }
    return replace(state, elements=elements, tensors=tensors)


def _by_segment(point: str, segments: Iterable[Segment], flat: Tensor) -> Iterator[StateSlice]:
    offset = 0
    for segment in segments:
        part = flat[offset : offset + segment.numel].clone()
        yield StateSlice(segment.name, segment.start, segment.stop, point, part)
        offset += segment.numel


Found = Mapping[str, Sequence[StateSlice]]  # slices by the names of their parameters


def _with_slices(bucket: Bucket, point: str, kept: Kept, saved: Found) -> Kept:
    if isinstance(kept, Tensor):
        _lay(point, bucket.segments, kept, saved)
        return kept
    return tuple(_restored(point, part, saved) for part in kept)


def _lay(point: str, segments: Sequence[Segment], flat: Tensor, saved: Found) -> None:
    offset = 0
    for segment in segments:
        for part in saved.get(segment.name, ()):
            if part.point == point and not part.whole and part.overlaps(segment):
                part.copy_to(segment, flat[offset : offset + segment.numel])
        offset += segment.numel


def _restored(point: str, state: CompressorState, saved: Found) -> CompressorState:
    segments = state.spec.segments
    for name, values in state.elements.items():
        _lay(f"{point}.{name}", segments, values, saved)
    tensors = {
        name: tuple(_whole(f"{point}.{name}", *each, saved) for each in zip(segments, parts, strict=True))
        for name, parts in state.tensors.items()
    }
    together = {name: _whole(f"{point}.{name}", segments[0], each, saved) for name, each in state.together.items()}
    return replace(state, tensors=tensors, together=together)


def _whole(point: str, segment: Segment, fresh: Tensor, saved: Found) -> Tensor:
    """Returns a copy of the saved tensor for the whole segment, or `fresh` if none of its shape and dtype was saved."""
    for part in saved.get(segment.name, ()):
        fits = part.values.shape == fresh.shape and part.values.dtype is fresh.dtype
        if part.whole and part.point == point and fits and part.overlaps(segment):
            return part.values.to(fresh.device, copy=True)
    return fresh
