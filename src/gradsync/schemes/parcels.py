"""What travels on a route: specs of the pieces of a bucket, and messages of payloads with flags behind the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from .. import kernels
from ..compressors import SENT, sums_point
from ..tensors.bucket import FlatSpec, TensorSpec
from ..tensors.index_formats import aligned
from .legs import Leg, Piece


def plain(specs: tuple[TensorSpec, ...]) -> FlatSpec:
    """One tensor of which nothing is known, with what lies behind it."""
    (flat,) = specs
    return FlatSpec.of(torch.empty(flat.numel, dtype=flat.dtype, device="meta"))


@lru_cache(maxsize=4096)
def spec_of(whole: FlatSpec, piece: Piece, point: int, keep_fp32: bool) -> FlatSpec:
    """Of a piece; what is drawn for sums is not what was drawn for what they are of."""
    spec = whole.cut(*piece)
    return replace(spec, dtype=dtype_of(whole, keep_fp32), salt=spec.salt + point)


def dtype_of(whole: FlatSpec, keep_fp32: bool) -> torch.dtype:
    return kernels.accumulation_dtype(whole.dtype) if keep_fp32 else whole.dtype


def point_name(leg: Leg) -> str:
    """Where a compression keeps its state: what is sent first belongs to this rank alone, unless it is a sum of all
    ranks that several of them hold."""
    if leg.point == 0 and leg.copies == 1:
        return SENT
    return sums_point(max(leg.point, 1), leg.copies)


def starts_of(sizes: Sequence[int]) -> list[int]:
    """Where items begin in a message: all of them where any element type can be viewed."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + int(aligned(size)))
    return starts[:-1]


def room_nbytes(sizes: Sequence[int], flags: int) -> int:
    """Bytes of a message of these items, with a byte for each flag behind the last one."""
    return int(sum(map(aligned, sizes[:-1])) + aligned(sizes[-1] + flags))
