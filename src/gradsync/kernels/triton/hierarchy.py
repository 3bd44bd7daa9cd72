"""Zen's hierarchical hashing of indices (OSDI 2025, algorithm 1) in Triton: lanes insert by compare-and-swap."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.checks import check_indices
from gradsync.kernels.hierarchy import HashedIndices, HashMemory
from gradsync.kernels.reference.hashing import MAX_INDEX, hash_key, signed
from gradsync.kernels.triton.boundary import BLOCK, blocks, device_of, launch, on
from gradsync.kernels.triton.hashing import hashed
from gradsync.kernels.triton.ordered import faults_of, refuse

_EMPTY = -1  # all ones, which no index is


@triton.jit
def _insert(
    indices: tl.tensor,
    count: tl.tensor,
    n: tl.tensor,
    slots: tl.tensor,
    serial: tl.tensor,
    keys: tl.tensor,
    rehashes: tl.tensor,
    memory: tl.tensor,
    asked: tl.tensor,
    overflow: tl.tensor,
    num_overflow: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program inserts one block of indices into the owners' hash tables, which lie end to end in `memory`.

    An index tries `rehashes` slots of its owner: a slot goes to the lane whose compare-and-swap finds it empty. One
    that gets none takes the next of `serial` places behind the owner's slots (`asked` counts the requests by owner) or,
    if none is left, of `overflow`. A compare-and-swap has no mask: a lane without an index, or one that has its slot
    already, expects -2, which no slot ever holds.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    item = tl.load(indices + at, mask=at < count, other=0)
    owner = hashed(item.to(tl.int64), n, tl.load(keys))
    begin = owner * (slots + serial)
    seeking = at < count
    number = 1
    while number <= rehashes:
        place = begin + hashed(item.to(tl.int64), slots, tl.load(keys + number))
        expected = tl.where(seeking, -1, -2).to(item.dtype)
        seeking = seeking & (tl.atomic_cas(memory + place, expected, item, sem="relaxed") != -1)
        number += 1
    turn = tl.atomic_add(asked + owner, tl.full([BLOCK], 1, tl.int64), mask=seeking, sem="relaxed")
    tl.store(memory + begin + slots + turn, item, mask=seeking & (turn < serial))
    lost = seeking & (turn >= serial)
    place = tl.atomic_add(num_overflow + tl.zeros_like(at), tl.full([BLOCK], 1, tl.int64), mask=lost, sem="relaxed")
    tl.store(overflow + place, item, mask=lost)


def hierarchical_hash(
    indices: Tensor, n: int, *, slots: int, serial: int, rehashes: int = 3, seed: int, threads: int | None = None
) -> HashedIndices:
    # Ignores `threads`: the device has its own number.
    share = HashMemory.split(n, slots=slots, serial=serial, rehashes=rehashes)
    check_indices("indices", indices)
    device = device_of(indices=indices)
    faults: list[int] = faults_of(indices, MAX_INDEX).tolist()
    refuse(faults, "hierarchical_hash", indices, MAX_INDEX, "limit", ascending=False, strictly=False)
    rows = indices.new_full((n, share.slots + share.serial), _EMPTY)
    overflow, asked = torch.empty_like(indices), torch.zeros(n + 1, dtype=torch.int64, device=device)
    keys = on(device, [signed(hash_key(seed, number)) for number in range(rehashes + 1)])
    arguments = indices, len(indices), n, share.slots, share.serial, keys, rehashes, rows, asked, overflow, asked[n:]
    launch(_insert, blocks(len(indices)), device, *arguments, BLOCK=BLOCK)
    taken = rows != _EMPTY
    sizes: list[int] = torch.cat([taken.sum(1), asked[:n].sum().view(1), asked[n:]]).tolist()
    nbytes = rows.numel() * rows.element_size() + n * 8
    return HashedIndices(list(rows[taken].split(sizes[:n])), overflow[: sizes[-1]], sizes[-2], nbytes)
