"""Native (C++) kernels that find each element's owner (the rank that sums it) by hash, and positions in its list."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradsync.kernels.checks import INT32_INDICES, check_owners, check_size
from gradsync.kernels.cpu.boundary import OwnerPartition, plain, plains, threads_for
from gradsync.kernels.native import load
from gradsync.kernels.reference.hashing import hash_key


def owners_by_hash(indices: Tensor, n: int, seed: int, out: Tensor) -> None:
    check_owners(n)
    arrays = plain("indices", indices), n, hash_key(seed), plain("out", out)
    load().owners_by_hash(*arrays, threads_for(indices.numel()))


def partition_hashed(indices: Tensor, size: int, n: int, seed: int) -> OwnerPartition:
    check_owners(n)
    check_size("size", size)
    dealt = load().HashedPartition(plain("indices", indices), size, n, hash_key(seed), threads_for(indices.numel()))
    return OwnerPartition(dealt, "indices_out")


def owned_by_hash(size: int, n: int, seed: int, *, device: torch.device | None = None) -> list[Tensor]:
    # Raises TypeError for another device than the CPU.
    check_owners(n)
    check_size("size", size)
    plain("lists", torch.empty(0, dtype=torch.int32, device=device))
    owned: Any = load().OwnedByHash(size, n, hash_key(seed), threads_for(size))
    dtype = torch.int32 if size <= INT32_INDICES else torch.int64
    lists = [torch.empty(count, dtype=dtype) for count in owned.counts]
    owned.write(plains("lists", lists))
    return lists


def positions_in(owned: Tensor, indices: Tensor, out: Tensor) -> None:
    # Runs on one thread, as each search begins where the last one ended.
    load().positions_in(plain("owned", owned), plain("indices", indices), plain("out", out))
