"""Messages of a route: the specs of a bucket's pieces, and the offsets of payloads and flags in a message."""

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
    """Returns the layout of a flat bucket as one nameless run of elements, with the flags at its end.

    Flags are numbers that say, for example, whether a rank used a parameter. `specs` has the bucket's shape and dtype,
    as its only entry.
    """
    (flat,) = specs
    return FlatSpec.of(torch.empty(flat.numel, dtype=flat.dtype, device="meta"))


@lru_cache(maxsize=4096)
def spec_of(whole: FlatSpec, piece: Piece, point: int, keep_fp32: bool) -> FlatSpec:
    """Returns the layout (`FlatSpec`) of elements [start, stop) = `piece` of the bucket with layout `whole`.

    Its dtype is the bucket's or, with `keep_fp32`, that of sums: float32, or float64 for float64. `point`, the place of
    the compression in its route, is added to `FlatSpec.salt`, so that each compression draws other random numbers.
    """
    spec = whole.cut(*piece)
    return replace(spec, dtype=dtype_of(whole, keep_fp32), salt=spec.salt + point)


def dtype_of(whole: FlatSpec, keep_fp32: bool) -> torch.dtype:
    return kernels.accumulation_dtype(whole.dtype) if keep_fp32 else whole.dtype


def point_name(leg: Leg) -> str:
    """Returns the key under which a `Route` keeps the state of one of its compressions, that of the task `leg`.

    It is "sent" for the route's first compression, and "sums", "sums 2" and so on for later ones. If 4 ranks compress
    copies of one sum over all ranks, the key ends in " of 4", and a first one is "sums of 4".
    """
    if leg.point == 0 and leg.copies == 1:
        return SENT
    return sums_point(max(leg.point, 1), leg.copies)


def starts_of(sizes: Sequence[int]) -> list[int]:
    """Returns the byte offsets of the items of a message that have these sizes in bytes, one behind the other.

    Offsets are multiples of 8, so that an item can be viewed in any dtype.
    """
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + int(aligned(size)))
    return starts[:-1]


def room_nbytes(sizes: Sequence[int], flags: int) -> int:
    """Returns the bytes of a message: items with these sizes in bytes, and `flags` flags, a byte each, behind them.

    A flag says, for example, whether a rank used a parameter. Each item is padded to a multiple of 8 bytes.
    """
    return int(sum(map(aligned, sizes[:-1])) + aligned(sizes[-1] + flags))
