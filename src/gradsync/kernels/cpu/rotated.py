"""Native (C++) kernels for the owner map by rotated stripe: each n neighbours go to n ranks in a random rotation."""

from __future__ import annotations

from torch import Tensor

from gradsync.kernels.checks import check_owner, check_owners, check_rotated_size
from gradsync.kernels.cpu.boundary import OwnerPartition, plain, threads_for
from gradsync.kernels.native import load
from gradsync.kernels.reference.rotated import rotation_key


def partition_rotated(indices: Tensor, size: int, n: int, seed: int) -> OwnerPartition:
    check_owners(n)
    check_rotated_size(size, n)
    dealt = load().RotatedPartition(
        plain("indices", indices), size, n, rotation_key(seed), threads_for(indices.numel())
    )
    return OwnerPartition(dealt, "positions")


def rotated_index(owner: int, positions: Tensor, n: int, seed: int, out: Tensor) -> None:
    check_owner(owner, n)
    threads = threads_for(positions.numel())
    arrays = plain("positions", positions), n, rotation_key(seed), plain("out", out)
    load().rotated_index(owner, *arrays, threads)
