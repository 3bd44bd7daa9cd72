"""Triton kernels for the owner map by rotated stripe: each n neighbours go to n ranks in a random rotation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.checks import (
    INT32_INDICES,
    check_index_out,
    check_indices,
    check_owner,
    check_owners,
    check_positions,
    check_range,
    check_rotated_size,
)
from gradsync.kernels.reference.rotated import rotation_key
from gradsync.kernels.triton.boundary import (
    BLOCK,
    blocks,
    check_contiguous,
    common_device,
    device_of,
    launch,
)
from gradsync.kernels.triton.dealing import OwnerPartition, narrow_owners
from gradsync.kernels.triton.ordered import faults_of, refuse


@triton.jit
def rotation(q: tl.tensor, n: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Returns rho(q) in [0, n), as int64, a hash of q: by how much elements n q to n q + n - 1 are rotated.

    Element n q + r belongs to owner (rank that sums it) number (r + rho(q)) mod n.
    """
    h = (q ^ key).to(tl.uint32)
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) ^ (key.to(tl.uint32) * 0x9E3779B9)
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return ((h ^ (h >> 16)).to(tl.int64) * n) >> 32


@triton.jit
def element_of(owner: tl.tensor, q: tl.tensor, n: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Returns the index, int64, in the whole tensor of the element at position q among those that rank `owner` sums."""
    turned = owner - rotation(q, n, key)
    return n * q + tl.where(turned < 0, turned + n, turned)


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
