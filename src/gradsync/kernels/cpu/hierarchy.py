"""Zen's hierarchical hashing of indices (OSDI 2025, algorithm 1) by CPU threads that insert by compare-and-swap."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradsync.kernels.cpu.boundary import plain, plains, threads_for
from gradsync.kernels.hierarchy import HashedIndices, HashMemory
from gradsync.kernels.native import load
from gradsync.kernels.reference.hashing import hash_key


def hierarchical_hash(
    indices: Tensor, n: int, *, slots: int, serial: int, rehashes: int = 3, seed: int, threads: int | None = None
) -> HashedIndices:
    share = HashMemory.split(n, slots=slots, serial=serial, rehashes=rehashes)
    keys = [hash_key(seed, number) for number in range(1, rehashes + 1)]
    threads = threads_for(indices.numel()) if threads is None else threads
    memory: Any = load().Hierarchy(
        plain("indices", indices), n, hash_key(seed), share.slots, share.serial, keys, threads
    )
    owned = [indices.new_empty(count) for count in memory.counts]
    overflow = indices.new_empty(memory.num_overflow)
    memory.write(plains("owned", owned), plain("overflow", overflow))
    return HashedIndices(owned, overflow, memory.num_serial, memory.nbytes)
