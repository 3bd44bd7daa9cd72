"""Triton kernels that find the owner of each element (the rank that sums it) by hash (Zen's h0, OSDI 2025)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.checks import (
    INT32_INDICES,
    check_ascending,
    check_index_out,
    check_indices,
    check_owners,
    check_size,
)
from gradsync.kernels.reference.hashing import MAX_INDEX, hash_key, signed
from gradsync.kernels.triton.boundary import (
    BLOCK,
    blocks,
    default_device,
    device_of,
    launch,
)
from gradsync.kernels.triton.dealing import OwnerPartition, narrow_owners
from gradsync.kernels.triton.ordered import faults_of, place_after, refuse

_DEALT_AT_ONCE = 1 << 27  # elements: torch sorts less than 2^31, and takes several int64 for each while it does


@triton.jit
def finalised(h: tl.tensor) -> tl.tensor:
    """Returns murmur3's 64-bit finaliser of `h`, a bijective hash of uint64 numbers."""
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53
    return h ^ (h >> 33)


@triton.jit
def hashed(index: tl.tensor, size: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Returns for each int64 index its hash, int64 in [0, size), as `reference.hashing.hashed`."""
    h = finalised((index ^ key).to(tl.uint64, bitcast=True))
    return ((h >> 32).to(tl.int64) * size) >> 32


@triton.jit(do_not_specialize=["key"])
def _hash_owners(
    indices: tl.tensor, count: tl.tensor, n: tl.tensor, key: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program writes the owner in [0, n) of each index in one block, the hash of the index."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + at, mask=at < count, other=0).to(tl.int64)
    tl.store(out + at, hashed(index, n, key), mask=at < count)


@triton.jit
def _find_positions(
    owned: tl.tensor,
    num_owned: tl.tensor,
    indices: tl.tensor,
    count: tl.tensor,
    out: tl.tensor,
    missing: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program writes the position in sorted `owned` of each index in one block; an absent index sets `missing`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + at, mask=at < count, other=0).to(tl.int64)
    place = place_after(owned, num_owned, index) - 1
    found = tl.load(owned + place, mask=(at < count) & (place >= 0), other=-1).to(tl.int64)
    strange = (at < count) & ((index < 0) | (found != index))
    tl.store(missing, 1, mask=tl.max(strange.to(tl.int32), 0) > 0)
    tl.store(out + at, place, mask=at < count)


def _write_owners(indices: Tensor, n: int, seed: int, out: Tensor) -> None:
    arguments = indices, len(indices), n, signed(hash_key(seed)), out
    launch(_hash_owners, blocks(len(indices)), indices.device, *arguments, BLOCK=BLOCK)


def owners_by_hash(indices: Tensor, n: int, seed: int, out: Tensor) -> None:
    check_owners(n)
    check_indices("indices", indices)
    check_index_out("out", out, len(indices), n)
    device_of(indices=indices, out=out)
    faults: list[int] = faults_of(indices, MAX_INDEX).tolist()
    refuse(faults, "owners_by_hash", indices, MAX_INDEX, "limit", ascending=False, strictly=False)
    _write_owners(indices, n, seed, out)


class HashedPartition(OwnerPartition):
    def __init__(self, indices: Tensor, size: int, n: int, seed: int) -> None:
        check_owners(n)
        check_size("size", size)
        check_indices("indices", indices)
        device_of(indices=indices)
        owners = narrow_owners(indices, n)
        _write_owners(indices, n, seed, owners)
        super().__init__(indices, owners, n, divisor=1, places="indices_out")
        self._size = size
        faults = self.read_counts(faults_of(indices, size))
        refuse(faults, "partition_hashed", indices, size, "size", ascending=True, strictly=False)

    def write(self, values: Tensor, places: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        for count, out in zip(self.counts, places, strict=False):
            check_index_out("indices_out", out, count, self._size)
        super().write(values, places, outs)


partition_hashed = HashedPartition


def owned_by_hash(size: int, n: int, seed: int, *, device: torch.device | None = None) -> list[Tensor]:
    check_owners(n)
    check_size("size", size)
    begins = range(0, max(size, 1), _DEALT_AT_ONCE)
    parts = [_owned_from(begin, min(begin + _DEALT_AT_ONCE, size), size, n, seed, device) for begin in begins]
    return [torch.cat(lists) for lists in zip(*parts, strict=True)]


def _owned_from(begin: int, stop: int, size: int, n: int, seed: int, device: torch.device | None) -> list[Tensor]:
    """Returns for each of n owners the indices in [begin, stop) that hash to it, ascending, (count,) int32 or int64."""
    dtype = torch.int32 if size <= INT32_INDICES else torch.int64
    everything = torch.arange(begin, stop, dtype=dtype, device=device or default_device())
    owners = narrow_owners(everything, n)
    _write_owners(everything, n, seed, owners)
    split = OwnerPartition(everything, owners, n, divisor=1, places="indices")
    split.read_counts(everything.new_empty(0))
    return split.dealt_indices()


def positions_in(owned: Tensor, indices: Tensor, out: Tensor) -> None:
    check_indices("owned", owned)
    check_indices("indices", indices)
    check_index_out("out", out, len(indices), len(owned))
    device = device_of(owned=owned, indices=indices, out=out)
    missing = torch.zeros(1, dtype=torch.int32, device=device)
    arguments = owned, len(owned), indices, len(indices), out, missing
    launch(_find_positions, blocks(len(indices)), device, *arguments, BLOCK=BLOCK)
    _, descends, _, is_missing = torch.cat([faults_of(indices, MAX_INDEX), missing]).tolist()
    if descends:
        check_ascending("positions_in", "indices", indices)
    if is_missing:
        strange = indices[~torch.isin(indices.long(), owned.long())]
        raise ValueError(f"positions_in: index {strange[0]} is not among the {len(owned)} owned")
