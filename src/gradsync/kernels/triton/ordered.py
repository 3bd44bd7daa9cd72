"""Triton kernels that check in one pass whether indices ascend in range, and that search sorted entries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.checks import check_ascending, check_range
from gradsync.kernels.triton.boundary import BLOCK, blocks, launch

FAULTS = 3  # outside the range; less than the one before; equal to the one before


@triton.jit
def place_after(entries: tl.tensor, count: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Returns how many of the first `count` numbers at `entries`, ascending, are at most each int64 `key`.

    Each lane makes a binary search.
    """
    low = tl.zeros_like(key)
    high = low + count
    while tl.max(high - low) > 0:
        middle = (low + high) // 2
        searching = low < high
        before = tl.load(entries + middle, mask=searching, other=0).to(tl.int64) <= key
        high = tl.where(searching & (before == 0), middle, high)
        low = tl.where(searching & before, middle + 1, low)
    return low


@triton.jit
def _find_faults(
    indices: tl.tensor, count: tl.tensor, bound: tl.tensor, faults: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program checks one block of indices: it sets three flags in `faults` to 1, or leaves them.

    They stand for an index outside [0, bound), less than the one before, and equal to it, as in `faults_of`.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + at, mask=at < count, other=0).to(tl.int64)
    before = tl.load(indices + at - 1, mask=(at > 0) & (at < count), other=-1).to(tl.int64)
    before = tl.where((at > 0) & (at < count), before, index - 1)
    tl.store(faults, 1, mask=tl.max(((at < count) & ((index < 0) | (index >= bound))).to(tl.int32), 0) > 0)
    tl.store(faults + 1, 1, mask=tl.max((index < before).to(tl.int32), 0) > 0)
    tl.store(faults + 2, 1, mask=tl.max((index == before).to(tl.int32), 0) > 0)


def faults_of(indices: Tensor, bound: int, faults: Tensor | None = None) -> Tensor:
    """Returns three flags for the faults of `indices`, 1-D, as (3,) int32 of 0 and 1 on the device.

    They say whether any index is outside [0, bound), below the one before, or equal to the one before. If `faults` is
    given, the flags are set in it.
    """
    faults = torch.zeros(FAULTS, dtype=torch.int32, device=indices.device) if faults is None else faults
    arguments = indices, len(indices), bound, faults
    launch(_find_faults, blocks(len(indices)), indices.device, *arguments, BLOCK=BLOCK)
    return faults


def refuse(
    faults: list[int], kernel: str, indices: Tensor, bound: int, bound_name: str, *, ascending: bool, strictly: bool
) -> None:
    """Raises the ValueError of the reference implementation if `indices`, 1-D, have a fault.

    Args:
        faults: the three flags of `faults_of`: outside [0, bound), below the one before, equal to the one before.
        kernel: its name, for the message.
        indices: the indices in question.
        bound, bound_name: the bound, and its name for the message.
        ascending: whether an index below the one before is a fault.
        strictly: whether an index equal to the one before is one, too.
    """
    outside, descends, repeats = faults
    if outside:
        check_range(kernel, indices, bound, bound_name)
    if ascending and (descends or (strictly and repeats)):
        check_ascending(kernel, "indices", indices, strictly=strictly)
