"""Buckets: segments of named parameters, seen as one flat tensor or as row-sparse tables.

Pure data: the memory of a bucket is in `gradients.py`. A flat bucket ends with flags, numbers that are summed
over ranks with the gradients: they show which parameters some rank used, and whether the ranks are at the same step.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import Sections


class Layout(StrEnum):
    """The form in which a scheme gets its bucket.

    Attributes:
        FLAT: one tensor, (numel,), of all segments end to end.
        ROWS: row-sparse tables.
    """

    FLAT = "flat"
    ROWS = "rows"


@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of one tensor, without values; for a flat tensor also which parameters lie in it.

    Attributes:
        shape: the shape.
        dtype: the dtype.
        flat: the segments of a flat bucket, without flags; None for other tensors.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    flat: FlatSpec | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Returns the shape and dtype of `tensor`, which may have any shape."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether `tensor` has this shape and dtype."""
        return tensor.dtype is self.dtype and tensor.shape == self.shape

    @property
    def numel(self) -> int:
        """The number of elements."""
        return int(torch.Size(self.shape).numel())

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.numel * self.itemsize

    @property
    def num_rows(self) -> int:
        """The size of the first dimension, which is the number of rows of a table."""
        return self.shape[0]

    @property
    def dim(self) -> int:
        """The number of elements in one row of a table."""
        return int(torch.Size(self.shape[1:]).numel())

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {str(self.dtype).removeprefix('torch.')}"


def model_digest(specs: Mapping[str, TensorSpec]) -> str:
    """Returns the SHA-256 of all parameters' names, shapes and dtypes, in the order of `specs`.

    It is equal on ranks whose parameters correspond to each other.
    """
    return hashlib.sha256("\n".join(describe_specs(specs)).encode()).hexdigest()


def describe_specs(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Returns one line for each parameter, `name: shape dtype`."""
    return [f"{name}: {spec}" for name, spec in specs.items()]


ROUND_BITS = 5  # so many low bits of their numbers of optimiser rounds the ranks compare
# By number: for each bit whether it is 1, then for each whether it is 0.
ROUND_FLAGS = [
    tuple(float(number >> place & 1 == bit) for bit in (1, 0) for place in range(ROUND_BITS))
    for number in range(2**ROUND_BITS)
]


@dataclass(frozen=True)
class StepMarks:
    """The marks that a rank sends with its gradients, by which the ranks find that one is late or out of step.

    Summed over the ranks, they tell whether some rank is late, and whether all have made equally many optimiser steps,
    which are counted modulo 32.
    """

    late: bool = False  # the rank takes part at the optimiser's step only: its backward reached no parameter
    rounds: int | None = None  # of the rank's optimiser, modulo 2**ROUND_BITS; None where no step of it was seen

    @cached_property
    def flags(self) -> tuple[float, ...]:
        """The marks as numbers to be summed over ranks: a sum above 0 means that some rank set that mark."""
        return (float(self.late), *((0.0,) * 2 * ROUND_BITS if self.rounds is None else ROUND_FLAGS[self.rounds]))


NUM_MARKS = 1 + 2 * ROUND_BITS
NO_MARKS = StepMarks()  # of a usual step


@dataclass(frozen=True)
class Segment:
    """A slice of one parameter: elements [start, stop) of the flattened parameter.

    Attributes:
        name: the parameter's name.
        start: the first element, from 0.
        stop: the element after the last.
    """

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatSpec:
    """The layout of a flat tensor: which parts of parameters lie in it, end to end, their shapes, and its dtype.

    Attributes:
        segments: the parts, in order.
        shapes: the shape of each segment: its tensor's where it is the whole tensor, else (segment.numel,).
        dtype: the dtype of the flat tensor.
        salt: a number that makes random draws for tensors of the same names differ.
    """

    segments: tuple[Segment, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    salt: int = 0

    def __post_init__(self) -> None:
        numels = [int(torch.Size(shape).numel()) for shape in self.shapes]
        if numels != [segment.numel for segment in self.segments]:
            raise ValueError(f"FlatSpec needs one shape for each segment, got {self.segments} and {self.shapes}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the fields without cached values, because hashes of names differ between processes."""
        return FlatSpec, (self.segments, self.shapes, self.dtype, self.salt)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, computed once: specs may have hundreds of segments and are looked up at every step."""
        return hash((self.segments, self.shapes, self.dtype, self.salt))

    @classmethod
    def of(cls, tensor: Tensor, name: str = "") -> FlatSpec:
        """Returns the layout of one tensor of any shape, flattened to (numel,), whose parameter is called `name`."""
        return cls((Segment(name, 0, tensor.numel()),), (tuple(tensor.shape),), tensor.dtype)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of elements in each segment."""
        return tuple(segment.numel for segment in self.segments)

    @cached_property
    def numel(self) -> int:
        """The number of elements in all segments."""
        return sum(self.lengths)

    @cached_property
    def places(self) -> Mapping[str, Sequence[tuple[int, int, Segment]]]:
        """Each parameter's segments, by its name: (index of the segment, offset in the flat tensor, segment)."""
        found: dict[str, list[tuple[int, int, Segment]]] = {}
        offset = 0
        for number, segment in enumerate(self.segments):
            found.setdefault(segment.name, []).append((number, offset, segment))
            offset += segment.numel
        return found

    @cached_property
    def sections(self) -> Sections:
        """The segments' lengths and first elements in their parameters, in the form that kernels take.

        `seeds` of the `Sections` is empty, as no random numbers are drawn for them yet.
        """
        return Sections(self.lengths, tuple(segment.start for segment in self.segments))

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.numel * self.itemsize

    def cut(self, start: int, stop: int) -> FlatSpec:
        """Returns the layout of elements [start, stop) of the flat tensor; an empty range gets one empty segment."""
        segments, shapes, offset = [], [], 0
        for segment, shape in zip(self.segments, self.shapes, strict=True):
            low, high = max(start, offset), min(stop, offset + segment.numel)
            whole = high - low == segment.numel
            if low < high or (whole and start <= offset < stop):
                first = segment.start + low - offset
                segments.append(Segment(segment.name, first, first + high - low))
                shapes.append(shape if whole else (high - low,))
            offset += segment.numel
        if not segments:
            last = self.segments[-1]
            segments, shapes = [Segment(last.name, last.stop, last.stop)], [(0,)]
        return replace(self, segments=tuple(segments), shapes=tuple(shapes))

    def with_dtype(self, dtype: torch.dtype) -> FlatSpec:
        """Returns the layout of the same segments in a flat tensor of another dtype."""
        return replace(self, dtype=dtype)


@dataclass(frozen=True)
class Bucket:
    """Parameters, or slices of them (segments), all of one dtype, whose gradients are synchronised together.

    Attributes:
        id: the bucket's id in the plan.
        segments: the slices, in order.
        tensors: the shapes and dtypes of the parameters, one for each segment.
        layout: the form in which the scheme gets the bucket.
        flags_ride: whether flags travel in the flat tensor, as the scheme sums it.
    """

    id: str
    segments: tuple[Segment, ...]
    tensors: tuple[TensorSpec, ...]
    layout: Layout
    flags_ride: bool = True

    def __post_init__(self) -> None:
        if not self.segments or len(self.segments) != len(self.tensors):
            raise ValueError(f"bucket {self.id!r} needs segments and one tensor spec for each")
        dtypes = {spec.dtype for spec in self.tensors}
        if len(dtypes) > 1:
            raise ValueError(f"bucket {self.id!r} mixes dtypes {sorted(map(str, dtypes))}; give each its own bucket")
        if self.layout is Layout.ROWS:
            for segment, spec in zip(self.segments, self.tensors, strict=True):
                if segment.numel != spec.numel or not spec.shape:
                    raise ValueError(f"bucket {self.id!r}: a row-sparse table is not cut, but {segment} cuts {spec}")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all parameters in the bucket."""
        return self.tensors[0].dtype

    @cached_property
    def numel(self) -> int:
        """The number of elements in all segments."""
        return sum(segment.numel for segment in self.segments)

    @property
    def names(self) -> list[str]:
        """The parameter of each segment."""
        return [segment.name for segment in self.segments]

    @property
    def title(self) -> str:
        """The id of the bucket and the name of its first parameter, for error messages."""
        others = f" and {len(self.segments) - 1} more" if len(self.segments) > 1 else ""
        return f"bucket {self.id!r} ({self.segments[0].name}{others})"

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The shapes and dtypes of the tensors that the scheme gets: the row-sparse tables, or one flat tensor.

        If `flags_ride`, the flat tensor ends with flags, numbers that say which parameters a rank used, for example.
        """
        if self.layout is Layout.ROWS:
            return self.tensors
        flags = self.num_flags if self.flags_ride else 0
        return (TensorSpec((self.numel + flags,), self.dtype, self.flat_spec),)

    @property
    def flat_spec(self) -> FlatSpec:
        """The layout of the segments in the bucket's flat tensor, without the flags that may lie behind them."""
        whole = [segment.numel == spec.numel for segment, spec in zip(self.segments, self.tensors, strict=True)]
        shapes = [
            spec.shape if is_whole else (segment.numel,)
            for is_whole, segment, spec in zip(whole, self.segments, self.tensors, strict=True)
        ]
        return FlatSpec(self.segments, tuple(shapes), self.dtype)

    @property
    def num_flags(self) -> int:
        """The number of flags, which are summed over the ranks with the gradients.

        One per segment says whether a rank used its parameter, one whether a value is not finite; the others are those
        of `StepMarks`.
        """
        return len(self.segments) + 1 + NUM_MARKS


def cut_by_bytes(sizes: Iterable[tuple[str, int]], first_bytes: int, enough_bytes: int) -> list[list[str]]:
    """Cuts a sequence of (name, bytes) into lists, as DDP does: a list ends with the name that makes it large enough.

    `first_bytes` are enough for the first list, `enough_bytes` for others; the last may have fewer. The first list is
    small, so that its transfer starts early, while most of backward is still to come. A name with many bytes takes
    the few before it along, as a message of their own would cost its latency and carry almost nothing.
    """
    groups: list[list[str]] = []
    filled, limit = enough_bytes, first_bytes
    for name, nbytes in sizes:
        if not groups or filled >= limit:
            limit = enough_bytes if groups else first_bytes
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    return groups


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that require gradients, by name; a tied one only once, under its first name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether the name of a parameter or buffer is one of the patterns, or fits one as a shell pattern."""
    return name in patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
