"""The owners of single elements by hash, in plain torch operations (Zen's h0, OSDI 2025)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.kernels import phases
from gradsync.kernels.checks import (
    INT32_INDICES,
    check_ascending,
    check_index_out,
    check_indices,
    check_owners,
    check_range,
    check_size,
)
from gradsync.kernels.choice import dispatched
from gradsync.kernels.reference.rotated import mixed_seed, write_by_owner

MAX_INDEX = 2**63 - 1


def hash_key(seed: int, number: int = 0) -> int:
    """Returns the 64-bit key of one of a seed's numbered hash functions.

    Function 0 maps indices to owners (ranks that sum them), further ones to slots of hash tables.
    """
    return mixed_seed(mixed_seed(seed) + number)


def hashed(indices: Tensor, size: int, key: int) -> Tensor:
    """Hashes indices, integers of any shape, to int64 numbers in [0, size), with size < 2^31.

    The upper half of murmur3's 64-bit finaliser of index xor key, scaled to `size`.
    """
    return _shifted(finalised(indices.long() ^ signed(key)), 32) * size >> 32


def finalised(h: Tensor) -> Tensor:
    """Mixes the bits of each int64 of a tensor of any shape, by MurmurHash3's finaliser, a bijection of 64 bits."""
    h = (h ^ _shifted(h, 33)) * signed(0xFF51AFD7ED558CCD)
    h = (h ^ _shifted(h, 33)) * signed(0xC4CEB9FE1A85EC53)
    return h ^ _shifted(h, 33)


def signed(bits: int) -> int:
    """Returns the signed 64-bit number with the same bits as the unsigned number `bits`."""
    return bits - (bits >> 63 << 64)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifts int64 elements to the right by `bits` as if they were unsigned, filling with zeros."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


@dispatched("indices", "out")
def owners_by_hash(indices: Tensor, n: int, seed: int, out: Tensor) -> None:
    """Writes the owner (rank that sums it) of each index, by a hash equal on all ranks (h0 of Zen, OSDI 2025).

    The hash is MurmurHash3's 64-bit finaliser of index xor key, the key from the seed; its upper half is scaled to n.

    Args:
        indices: (nnz,) int64 or int32, not negative, in any order.
        n: owners, at most 2^16.
        out: (nnz,) int64 or int32.

    Raises:
        ValueError: a negative index, another n, another size of `out`.
        TypeError: other dtypes.
    """
    check_owners(n)
    check_indices("indices", indices)
    check_index_out("out", out, len(indices), n)
    check_range("owners_by_hash", indices, MAX_INDEX, "limit")
    out.copy_(hashed(indices, n, hash_key(seed)))


class HashedPartition:
    """Sorted indices, split by a hash among owners (ranks that sum); see `gradsync.kernels.HashedPartition`."""

    def __init__(self, indices: Tensor, size: int, n: int, seed: int) -> None:
        check_owners(n)
        check_size("size", size)
        check_indices("indices", indices)
        check_range("partition_hashed", indices, size, "size")
        check_ascending("partition_hashed", "indices", indices)
        owners = hashed(indices, n, hash_key(seed))
        self._indices, self._size = indices, size
        self._order = torch.argsort(owners, stable=True)
        self.counts: list[int] = torch.bincount(owners, minlength=n).tolist()

    @torch.no_grad()
    def write(self, values: Tensor, indices_out: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        for count, out in zip(self.counts, indices_out, strict=False):
            check_index_out("indices_out", out, count, self._size)
        write_by_owner(self._order, self.counts, values, ("indices_out", self._indices, indices_out), outs)


@dispatched("indices")
def partition_hashed(indices: Tensor, size: int, n: int, seed: int) -> phases.HashedPartition:
    """Splits sorted element indices among n owners (ranks that sum a part) by the hash of `owners_by_hash`.

    Unlike with `partition_rotated`, the elements of an owner may lie anywhere, so they are sent by their indices in the
    whole tensor, or as positions in the list of all indices of the owner (`owned_by_hash`, `positions_in`).

    Args:
        indices: (nnz,) int64 or int32, ascending.
        size: all indices are in [0, size).
        n: owners, at most 2^16.

    Raises:
        ValueError: an index out of range or order, another n.
        TypeError: other dtypes.
    """
    return HashedPartition(indices, size, n, seed)


@dispatched("device", entries="size")
def owned_by_hash(size: int, n: int, seed: int, *, device: torch.device | None = None) -> list[Tensor]:
    """Returns for each owner (rank) all indices in [0, size) that hash to it, ascending, as for Zen's hash bitmaps.

    A list is (owned,) int32, or int64 if size > 2^31. Together the lists have one number for each element, on
    every rank, so make them once per size and seed, and keep them.

    Args:
        device: where the lists are made; by default the CPU, of `triton` the current CUDA device.

    Raises:
        ValueError: a negative size, or n not in [1, 2^16].
        TypeError: native: another device than the CPU.
    """
    check_owners(n)
    check_size("size", size)
    indices = torch.arange(size, dtype=torch.int32 if size <= INT32_INDICES else torch.int64, device=device)
    owners = hashed(indices, n, hash_key(seed))
    counts: list[int] = torch.bincount(owners, minlength=n).tolist()
    return [owned.clone() for owned in indices[torch.argsort(owners, stable=True)].split(counts)]


@dispatched("owned", "indices", "out")
def positions_in(owned: Tensor, indices: Tensor, out: Tensor) -> None:
    """Writes the position of each index in `owned`, all indices of one owner (rank): the bits of its hash bitmap.

    `encode_bitmap` makes a bitmap of the positions; `owned[positions]` gives the indices back.

    Args:
        owned: (m,) int64 or int32, ascending without duplicates (which is not checked).
        indices: (nnz,) int64 or int32, ascending.
        out: (nnz,) int64, or int32 for up to 2^31 owned.

    Raises:
        ValueError: an index that is not owned or out of order, another size of `out`, which may have been written to.
        TypeError: other dtypes.
    """
    check_indices("owned", owned)
    check_indices("indices", indices)
    check_index_out("out", out, len(indices), len(owned))
    check_ascending("positions_in", "indices", indices)
    places = torch.searchsorted(owned.long(), indices.long())
    missing = indices[torch.cat([owned, owned.new_full((1,), -1)])[places] != indices]
    missing = torch.cat([indices[indices < 0], missing])
    if len(missing) > 0:
        raise ValueError(f"positions_in: index {missing[0]} is not among the {len(owned)} owned")
    out.copy_(places)
