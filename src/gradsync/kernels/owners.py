"""Kernels that deal indices to owners: by rotated stripe, by hash, and by Zen's hierarchical hashing."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.kernels.choice import pick
from gradsync.kernels.hierarchy import HashedIndices
from gradsync.kernels.phases import HashedPartition, RotatedPartition


def partition_rotated(indices: Tensor, size: int, n: int, seed: int) -> RotatedPartition:
    """Splits sorted indices among n owners by rotated stripe: i = n q + r is owner (r + rho(q)) mod n's q-th.

    As `partition_elements` does, which finds the indices itself.

    Args:
        indices: (nnz,) int64 or int32, ascending.
        size: all indices are in [0, size), size <= n * 2^31.
        n: owners, at most 2^16.

    Raises:
        ValueError: an index out of range or order, another n, a size whose positions int32 cannot hold.
        TypeError: other dtypes.
    """
    partition: RotatedPartition = pick("partition_rotated", [indices])(indices, size, n, seed)
    return partition


def rotated_index(owner: int, positions: Tensor, n: int, seed: int, out: Tensor) -> None:
    """The elements at local positions q of one owner in `partition_rotated`: n q + (owner - rho(q)) mod n.

    Args:
        positions: (count,) int32.
        out: (count,) int64, or int32 where all results fit.

    Raises:
        ValueError: an owner or position out of range, another size of `out`.
        TypeError: other dtypes.
    """
    pick("rotated_index", [positions, out])(owner, positions, n, seed, out)


def owners_by_hash(indices: Tensor, n: int, seed: int, out: Tensor) -> None:
    """The owner of each index by hash, h0 of Zen (OSDI 2025): the same on all ranks.

    MurmurHash3's 64-bit finaliser of the index, xored with a key that the seed gives, scaled to n by its upper half.

    Args:
        indices: (nnz,) int64 or int32, not negative, in any order.
        n: owners, at most 2^16.
        out: (nnz,) int64 or int32.

    Raises:
        ValueError: a negative index, another n, another size of `out`.
        TypeError: other dtypes.
    """
    pick("owners_by_hash", [indices, out])(indices, n, seed, out)


def partition_hashed(indices: Tensor, size: int, n: int, seed: int) -> HashedPartition:
    """Splits sorted element indices among n owners by hash, as `owners_by_hash` says.

    Beside `partition_rotated`: an owner's elements may lie anywhere, so they travel by their indices in the whole, or
    as positions in the list of all that it may own (`owned_by_hash`, `positions_in`).

    Args:
        indices: (nnz,) int64 or int32, ascending.
        size: all indices are in [0, size).
        n: owners, at most 2^16.

    Raises:
        ValueError: an index out of range or order, another n.
        TypeError: other dtypes.
    """
    partition: HashedPartition = pick("partition_hashed", [indices])(indices, size, n, seed)
    return partition


def owned_by_hash(size: int, n: int, seed: int, *, device: torch.device | None = None) -> list[Tensor]:
    """Per owner all indices of [0, size) that hash to it, ascending: the lists behind the hash bitmaps of Zen.

    Together they are as large as an int32 (from 2^31 elements on, int64) for each element, on every rank: made once per
    size and seed, and kept.

    Args:
        device: where the lists are made; by default the CPU, of `triton` the current CUDA device.

    Raises:
        ValueError: a negative size, or n not in [1, 2^16].
        TypeError: native: another device than the CPU.
    """
    like = [] if device is None else [torch.empty(0, dtype=torch.int32, device=device)]
    owned: list[Tensor] = pick("owned_by_hash", like, size)(size, n, seed, device=device)
    return owned


def positions_in(owned: Tensor, indices: Tensor, out: Tensor) -> None:
    """The positions of an owner's indices in the list of all that it may own: the bits of its hash bitmap.

    `encode_bitmap` makes them a bitmap; back, the indices are `owned[positions]`.

    Args:
        owned: (m,) int64 or int32, ascending without duplicates (which is not checked).
        indices: (nnz,) int64 or int32, ascending.
        out: (nnz,) int64, or int32 for up to 2^31 owned.

    Raises:
        ValueError: an index that is not owned or out of order, another size of `out`, which may have been written to.
        TypeError: other dtypes.
    """
    pick("positions_in", [owned, indices, out])(owned, indices, out)


def hierarchical_hash(
    indices: Tensor, n: int, *, slots: int, serial: int, rehashes: int = 3, seed: int, threads: int | None = None
) -> HashedIndices:
    """Splits indices among n owners as Zen does (OSDI 2025, algorithm 1): by hashing into memory of a fixed size.

    The owner is that of `owners_by_hash`. In the owner's memory, an index takes the first slot that is empty of those
    that its rehashes name, else the next place of a serial part. Unlike in the paper, slots are taken by compare-and-
    swap (its write, read back and compare can lose an index), empty is all ones and indices begin with 0, and what
    finds no place is returned. A rival to measure `partition_rotated` against, which needs no memory. Which index has
    which slot differs by implementation and number of threads; together, all that is returned is what was given.

    Args:
        indices: (nnz,) int64 or int32, not negative, distinct (what occurs twice is returned twice), in any order.
        n: owners, at most 2^16.
        slots: of the parallel memory of all owners, each of which has ceil(slots / n); the paper: twice nnz.
        serial: of the serial memory, likewise; the paper: a tenth of `slots`.
        rehashes: slots that an index may try.
        threads: native: how many insert at the same time; by default torch's number, and 1 for little work.

    Raises:
        ValueError: a negative index, another n, no slots, or more than 2^31 - 1 for one owner.
        TypeError: other dtypes.
    """
    found: HashedIndices = pick("hierarchical_hash", [indices])(
        indices, n, slots=slots, serial=serial, rehashes=rehashes, seed=seed, threads=threads
    )
    return found
