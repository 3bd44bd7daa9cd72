"""The split of elements among owners (ranks that sum them) by rotated stripe, in plain torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.kernels import phases
from gradsync.kernels.checks import (
    INT32_INDICES,
    check_ascending,
    check_each,
    check_flat,
    check_floating,
    check_index_out,
    check_indices,
    check_owner,
    check_owners,
    check_positions,
    check_range,
    check_rotated_size,
    check_shape,
)
from gradsync.kernels.choice import dispatched

_UNSIGNED_32 = 0xFFFFFFFF


def rotation_key(seed: int) -> int:
    """Returns the 32-bit key that a seed gives to the hash function `rotation`."""
    return mixed_seed(seed) >> 32


def mixed_seed(seed: int) -> int:
    """Returns 64 bits that all depend on all bits of the seed (splitmix64's finaliser)."""
    mixed = (seed + 0x9E3779B97F4A7C15) & (2**64 - 1)
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & (2**64 - 1)
    return mixed ^ mixed >> 31


def rotation(q: Tensor, n: int, seed: int) -> Tensor:
    """Returns a random shift rho(q) in [0, n) for each q, integers of any shape, as int64.

    Element n q + r goes to owner (rank that sums it) number (r + rho(q)) mod n. The shift is a multiply-xorshift mix of
    q and a key made of the seed, scaled to n: murmur3's 32-bit finaliser with the key once more between the
    multiplications. Without that, evenly spaced q, as in a hot column, are spread less evenly than by chance.
    """
    key = rotation_key(seed)
    h = q.long() ^ key
    h = (h ^ h >> 16) * 0x85EBCA6B & _UNSIGNED_32 ^ key * 0x9E3779B9 & _UNSIGNED_32
    h = ((h ^ h >> 13) * 0xC2B2AE35) & _UNSIGNED_32
    return ((h ^ h >> 16) * n) >> 32


class RotatedPartition:
    """Sorted element indices, split by owner (the rank that sums them) as `partition_rotated` does, in torch."""

    def __init__(self, indices: Tensor, size: int, n: int, seed: int) -> None:
        check_owners(n)
        check_rotated_size(size, n)
        check_indices("indices", indices)
        check_range("partition_rotated", indices, size, "size")
        check_ascending("partition_rotated", "indices", indices)
        self._positions = indices.long() // n
        owners = (indices.long() % n + rotation(self._positions, n, seed)) % n
        self._order = torch.argsort(owners, stable=True)
        self.counts: list[int] = torch.bincount(owners, minlength=n).tolist()

    @torch.no_grad()
    def write(self, values: Tensor, positions: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        for position in positions:
            check_positions(position)
        write_by_owner(self._order, self.counts, values, ("positions", self._positions, positions), outs)


def check_dealt(
    counts: list[int], values: Tensor, places: tuple[str, Sequence[Tensor]], outs: Sequence[Tensor]
) -> None:
    """Checks the arguments of a partition's `write`: one value for each item, and outputs of each owner's size.

    Args:
        counts: the number of items (elements or rows) of each owner.
        values: (nnz,) or (nnz, dim) floating.
        places: a name for error messages, such as "positions", and the outputs of positions or indices, (count,) each.
        outs: (count,) or (count, dim) for each owner, in the dtype of `values`.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: other dtypes.
    """
    name, places_out = places
    check_floating("values", values)
    check_shape("values", values, sum(counts), *values.shape[1:2])
    if not len(places_out) == len(outs) == len(counts):
        raise ValueError(
            f"one array of {name} and one of values per owner are needed, "
            f"got {len(places_out)} and {len(outs)} for {len(counts)} owners"
        )
    for count, place, out in zip(counts, places_out, outs, strict=True):
        check_shape(name, place, count)
        check_floating("outs", out, values.dtype)
        check_shape("outs", out, count, *values.shape[1:2])


def write_by_owner(
    order: Tensor,
    counts: list[int],
    values: Tensor,
    places: tuple[str, Tensor, Sequence[Tensor]],
    outs: Sequence[Tensor],
) -> None:
    """Copies the positions (or indices) and the values of the items that each rank sums to the outputs for this rank.

    Items are elements or rows; the rank that sums one is its owner.

    Args:
        order: (nnz,) int64: the numbers of all items, the first owner's first.
        counts, values, outs: as in `check_dealt`.
        places: a name for error messages, all items' positions or indices, (nnz,), and their outputs, (count,) each.
    """
    name, all_places, places_out = places
    check_dealt(counts, values, (name, places_out), outs)
    for place, out, items in zip(places_out, outs, order.split(counts), strict=True):
        place.copy_(all_places[items])
        out.copy_(values[items])


@dispatched("indices")
def partition_rotated(indices: Tensor, size: int, n: int, seed: int) -> phases.RotatedPartition:
    """Splits sorted element indices among n owners (ranks that sum a part) by rotated stripe.

    Index n q + r belongs to owner (r + rho(q)) mod n, at position q of its part, with rho(q) drawn by the seed: the map
    of `partition_elements`, which finds the indices itself.

    Args:
        indices: (nnz,) int64 or int32, ascending.
        size: all indices are in [0, size), size <= n * 2^31.
        n: owners, at most 2^16.

    Raises:
        ValueError: an index out of range or order, another n, a size whose positions int32 cannot hold.
        TypeError: other dtypes.
    """
    return RotatedPartition(indices, size, n, seed)


def check_owned(positions: Sequence[Tensor], values: Sequence[Tensor], out: Tensor) -> int:
    """Checks each owner's positions, (count,) int32, and values, (count,) in the dtype of `out`, and counts owners.

    An owner is a rank that sums one part of the tensor.

    Returns:
        The number of owners.

    Raises:
        ValueError: shapes that do not fit; no owner, or too many.
        TypeError: other dtypes.
    """
    check_owners(len(positions))
    check_each("values", values, len(positions))
    check_floating("out", out)
    check_flat("out", out)
    for position, value in zip(positions, values, strict=True):
        check_positions(position)
        check_floating("values", value, out.dtype)
        check_shape("values", value, len(position))
    return len(positions)


@torch.no_grad()
def join_rotated(positions: Sequence[Tensor], values: Sequence[Tensor], seed: int, out: Tensor) -> None:
    """Writes the elements of all owners to `out` at their indices, zero elsewhere: the inverse of `partition_rotated`.

    An owner is a rank that sums one part of the tensor.

    Args:
        positions: for each owner (count,) int32, ascending.
        values: for each owner (count,), in the dtype of `out`.
        seed: that of `partition_rotated`.
        out: (size,) floating. Overwritten.

    Raises:
        ValueError, TypeError: as `gradsync.kernels.join_elements`.
    """
    n = check_owned(positions, values, out)
    elements = [torch.empty_like(part, dtype=torch.int64) for part in positions]
    for owner, position in enumerate(positions):
        check_range("join_rotated", position, len(out), "size", owner)
        check_ascending("join_rotated", "positions", position)
        rotated_index.reference(owner, position, n, seed, elements[owner])
        check_range("join_rotated", elements[owner], len(out), "size", owner)
    out.zero_()
    for element, value in zip(elements, values, strict=True):
        out[element] = value


@dispatched("positions", "out")
def rotated_index(owner: int, positions: Tensor, n: int, seed: int, out: Tensor) -> None:
    """Writes the index in the whole tensor of each position q in one owner's part: n q + (owner - rho(q)) mod n.

    An owner is a rank that sums one part of the tensor. This is the inverse of the map of `partition_rotated`, which
    splits a tensor's elements among n owners; rho is the function `rotation` with this seed.

    Args:
        owner: the number of the owner, in [0, n).
        positions: (count,) int32.
        n: owners, at most 2^16.
        seed: that of the map.
        out: (count,) int64, or int32 if all results fit. Overwritten.

    Raises:
        ValueError: an owner or position out of range, another size of `out`.
        TypeError: other dtypes.
    """
    check_owner(owner, n)
    check_positions(positions)
    check_range("rotated_index", positions, INT32_INDICES, "positions")
    bound = (int(positions.max()) + 1) * n if len(positions) else 0
    check_index_out("out", out, len(positions), bound)
    q = positions.long()
    out.copy_(n * q + (owner - rotation(q, n, seed)) % n)
