"""Zen's hierarchical hashing (OSDI 2025, algorithm 1) in plain torch operations; all indices rehash together."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.kernels.checks import check_indices, check_range
from gradsync.kernels.choice import dispatched
from gradsync.kernels.hierarchy import HashedIndices, HashMemory
from gradsync.kernels.reference.hashing import MAX_INDEX, hash_key, hashed

_EMPTY = -1  # all ones; the paper's 0 would lose index 0


@dispatched("indices")
def hierarchical_hash(
    indices: Tensor, n: int, *, slots: int, serial: int, rehashes: int = 3, seed: int, threads: int | None = None
) -> HashedIndices:
    """Splits indices among n owners (ranks that sum them) by fixed-size hash tables (Zen, OSDI 2025, algorithm 1).

    Each owner's table has slots that are filled in parallel, and a serial part. An index, whose owner is that of
    `owners_by_hash`, takes the first empty slot among those of its rehashes, else the next place of the serial part.
    The result lists each owner's indices, in an order that differs by implementation and number of threads. Unlike in
    the paper, slots are taken by compare-and-swap (the paper's write, read back and compare can lose an index), an
    empty slot holds -1, not 0, so that index 0 can be stored, and indices that find no place are returned. It is a
    rival to measure `partition_rotated` against, which needs no memory.

    Args:
        indices: (nnz,) int64 or int32, not negative, distinct (duplicates are returned as duplicates), in any order.
        n: owners, at most 2^16.
        slots: parallel slots of all owners' tables together, ceil(slots / n) for each; in the paper twice nnz.
        serial: places of the serial parts, likewise; in the paper a tenth of `slots`.
        rehashes: slots that an index may try.
        threads: native only: threads that insert at the same time; by default torch's number, and 1 for little work.

    Raises:
        ValueError: a negative index, another n, no slots, or a table of 2^31 places or more (slots and serial part).
        TypeError: other dtypes.
    """
    # In a round, all indices without a slot try the same rehash, and of those that meet in an empty slot the smallest
    # stays. The number of threads makes no difference.
    share = HashMemory.split(n, slots=slots, serial=serial, rehashes=rehashes)
    check_indices("indices", indices)
    check_range("hierarchical_hash", indices, MAX_INDEX, "limit")
    items = indices.sort().values
    owners = hashed(items, n, hash_key(seed))
    rows = items.new_full((n, share.slots + share.serial), _EMPTY)
    memory, begins = rows.view(-1), owners * rows.shape[1]
    left = torch.arange(len(items), device=items.device)  # without a slot
    for number in range(1, rehashes + 1):
        places = begins[left] + hashed(items[left], share.slots, hash_key(seed, number))
        won = _first(places, memory[places] == _EMPTY)
        memory[places[won]] = items[left[won]]
        left = left[~won]
    asked = _ranks(owners[left], n)
    fits = asked < share.serial
    memory[(begins[left] + share.slots + asked)[fits]] = items[left[fits]]
    nbytes = memory.numel() * memory.element_size() + n * 8
    return HashedIndices([row[row != _EMPTY] for row in rows], items[left[~fits]], len(left), nbytes)


def _first(places: Tensor, free: Tensor) -> Tensor:
    """Returns which items get the slot that they try, (items,) bool: the first of each slot, if the slot is free."""
    order = torch.argsort(places, stable=True)
    first = torch.ones_like(free)
    first[order[1:]] = places[order[1:]] != places[order[:-1]]
    return first & free


def _ranks(owners: Tensor, n: int) -> Tensor:
    """Returns for each item how many items of the same owner come before it, (items,) int64."""
    order = torch.argsort(owners, stable=True)
    counts = torch.bincount(owners, minlength=n)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[owners[order]]
    return ranks
