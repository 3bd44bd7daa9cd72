"""Triton kernels for the owner map by rotated stripe: each n neighbours go to n ranks in a random rotation."""

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
    check_owner,
    check_owners,
    check_positions,
    check_range,
    check_rotated_size,
)
from gradsync.kernels.reference import rotated as reference
from gradsync.kernels.reference.rotated import check_owned, rotation_key
from gradsync.kernels.triton.boundary import (
    BLOCK,
    addresses,
    bits_of,
    blocks,
    check_contiguous,
    common_device,
    device_of,
    launch,
    on,
    pointee,
)
from gradsync.kernels.triton.dealing import OwnerPartition, narrow_owners
from gradsync.kernels.triton.ordered import FAULTS, faults_of, refuse


@triton.jit
def rotation(q: tl.tensor, n: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Returns rho(q) in [0, n), as int64, a hash of q: the rotation of owners among elements n q to n q + n - 1."""
    h = (q ^ key).to(tl.uint32)
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) ^ (key.to(tl.uint32) * 0x9E3779B9)
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return ((h ^ (h >> 16)).to(tl.int64) * n) >> 32


@triton.jit
def element_of(owner: tl.tensor, q: tl.tensor, n: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Returns the index, int64, in the whole tensor of the element at position q among one owner's elements."""
    return n * q + (owner + n - rotation(q, n, key)) % n


@triton.jit(do_not_specialize=["key"])
def _rotated_owners(
    indices: tl.tensor, count: tl.tensor, n: tl.tensor, key: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program writes the owner (a rank) of each index in a block: (index % n + rotation(index // n)) % n."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + at, mask=at < count, other=0).to(tl.int64)
    q = index // n
    tl.store(out + at, (index % n + rotation(q, n, key)) % n, mask=at < count)


@triton.jit(do_not_specialize=["owner", "key"])
def _rotated_indices(
    owner: tl.tensor,
    positions: tl.tensor,
    count: tl.tensor,
    n: tl.tensor,
    key: tl.tensor,
    out: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program converts one block of positions among an owner's elements to indices in the whole tensor."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    q = tl.load(positions + at, mask=at < count, other=0).to(tl.int64)
    tl.store(out + at, element_of(owner, q, n, key), mask=at < count)


@triton.jit(do_not_specialize=["key"])
def _find_joint_faults(
    positions: tl.tensor,
    counts: tl.tensor,
    n: tl.tensor,
    key: tl.tensor,
    size: tl.tensor,
    faults: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program checks range and order of one block of an owner's positions; all store the same 1 for a fault."""
    owner = tl.program_id(0) % n
    count = tl.load(counts + owner)
    at = (tl.program_id(0) // n).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    entries = tl.load(positions + owner).to(tl.pointer_type(tl.int32))
    q = tl.load(entries + at, mask=inside, other=0).to(tl.int64)
    before = tl.load(entries + at - 1, mask=inside & (at > 0), other=0).to(tl.int64)
    element = element_of(owner, q, n, key)
    tl.store(faults, 1, mask=tl.max((inside & ((q < 0) | (element >= size))).to(tl.int32), 0) > 0)
    tl.store(faults + 1, 1, mask=tl.max((inside & (at > 0) & (q < before)).to(tl.int32), 0) > 0)


@triton.jit(do_not_specialize=["key"])
def _join(
    positions: tl.tensor,
    values: tl.tensor,
    counts: tl.tensor,
    n: tl.tensor,
    key: tl.tensor,
    out: tl.tensor,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program copies one block of an owner's values to `out`, each to the index that its position stands for.

    Position q is that of the owner's q-th element; `element_of` gives its index. No two programs write the same one, as
    owner and position determine it, and of neighbours with equal positions only the last one is written.
    """
    owner = tl.program_id(0) % n
    count = tl.load(counts + owner)
    at = (tl.program_id(0) // n).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    entries = tl.load(positions + owner).to(tl.pointer_type(tl.int32))
    q = tl.load(entries + at, mask=at < count, other=0).to(tl.int64)
    after = tl.load(entries + at + 1, mask=at + 1 < count, other=-1).to(tl.int64)
    value = tl.load(tl.load(values + owner).to(tl.pointer_type(VALUE)) + at, mask=at < count, other=0)
    tl.store(out + element_of(owner, q, n, key), value, mask=(at < count) & (q != after))


class RotatedPartition(OwnerPartition):
    def __init__(self, indices: Tensor, size: int, n: int, seed: int) -> None:
        check_owners(n)
        check_rotated_size(size, n)
        check_indices("indices", indices)
        device = device_of(indices=indices)
        owners = narrow_owners(indices, n)
        arguments = indices, len(indices), n, rotation_key(seed), owners
        launch(_rotated_owners, blocks(len(indices)), device, *arguments, BLOCK=BLOCK)
        super().__init__(indices, owners, n, divisor=n, places="positions")
        faults = self.read_counts(faults_of(indices, size))
        refuse(faults, "partition_rotated", indices, size, "size", ascending=True, strictly=False)

    def write(self, values: Tensor, places: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        for position in places:
            check_positions(position)
        super().write(values, places, outs)


partition_rotated = RotatedPartition


def join_rotated(positions: Sequence[Tensor], values: Sequence[Tensor], seed: int, out: Tensor) -> None:
    """Writes all owners' values to `out`, (size,), 0 elsewhere, as `reference.rotated.join_rotated`.

    The value with position q goes to element q among those of its owner (a rank), which the seed determines.
    """
    n = check_owned(positions, values, out)
    device = device_of(out=out, positions=positions, values=values)
    counts = [len(position) for position in positions]
    tables = [on(device, table) for table in (addresses(positions), addresses(values), counts)]
    programs, key = n * blocks(max(counts)), rotation_key(seed)
    faults = tables[0].new_zeros(FAULTS)
    launch(_find_joint_faults, programs, device, tables[0], tables[2], n, key, len(out), faults, BLOCK=BLOCK)
    if any(faults.tolist()):
        _refuse_join(positions, seed, len(out))
    out.detach().zero_()
    arguments = *tables, n, key, bits_of(out)
    launch(_join, programs, device, *arguments, VALUE=pointee(out), BLOCK=BLOCK)


def _refuse_join(positions: Sequence[Tensor], seed: int, size: int) -> None:
    """Raises ValueError for the first owner (rank) with a position that is out of range or less than the one before.

    Position q is that of the owner's q-th element, whose index in the whole tensor `rotated_index` finds by the seed.
    Position and index must be in [0, size).
    """
    for owner, position in enumerate(positions):
        check_range("join_rotated", position, size, "size", owner)
        check_ascending("join_rotated", "positions", position)
        elements = position.long()
        reference.rotated_index(owner, position, len(positions), seed, elements)
        check_range("join_rotated", elements, size, "size", owner)


def rotated_index(owner: int, positions: Tensor, n: int, seed: int, out: Tensor) -> None:
    check_owner(owner, n)
    check_positions(positions)
    device = common_device([positions, out])
    check_contiguous("positions", positions)
    smallest, largest = torch.stack(positions.aminmax()).tolist() if len(positions) else (0, -1)
    if smallest < 0:
        check_range("rotated_index", positions, INT32_INDICES, "positions")
    check_index_out("out", out, len(positions), (largest + 1) * n)
    check_contiguous("out", out)
    arguments = owner, positions, len(positions), n, rotation_key(seed), out
    launch(_rotated_indices, blocks(len(positions)), device, *arguments, BLOCK=BLOCK)
