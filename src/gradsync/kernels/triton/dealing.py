"""Splitting of items (elements or rows) among owner ranks in Triton, by any owner map; each owner's stay in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.reference.rotated import check_dealt
from gradsync.kernels.triton.boundary import (
    addresses,
    bits_of,
    blocks,
    device_of,
    launch,
    on,
    pointee,
    tile,
)


@triton.jit
def _deal(
    order: tl.tensor,
    begins: tl.tensor,
    n: tl.tensor,
    indices: tl.tensor,
    divisor: tl.tensor,
    values: tl.tensor,
    dim: tl.tensor,
    places_out: tl.tensor,
    outs: tl.tensor,
    PLACE: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program copies one block of the items (elements or rows) of an owner, the rank that sums them.

    For item i it writes indices[i] // divisor to the owner's address in `places_out`, and values[i] to that in `outs`,
    of dtypes PLACE and VALUE. `order`: all items' numbers, the first owner's first.
    """
    owner = tl.program_id(0) % n
    begin = tl.load(begins + owner)
    count = tl.load(begins + owner + 1) - begin
    at = (tl.program_id(0) // n).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    item = tl.load(order + begin + at, mask=at < count, other=0)
    place = tl.load(indices + item, mask=at < count, other=0) // divisor
    tl.store(tl.load(places_out + owner).to(tl.pointer_type(PLACE)) + at, place, mask=at < count)
    out = tl.load(outs + owner).to(tl.pointer_type(VALUE))
    first = 0
    while first < dim:
        column = first + tl.arange(0, COLUMNS)
        kept = (at < count)[:, None] & (column < dim)[None, :]
        value = tl.load(values + item[:, None] * dim + column[None, :], mask=kept, other=0)
        tl.store(out + at[:, None] * dim + column[None, :], value, mask=kept)
        first += COLUMNS


def narrow_owners(indices: Tensor, n: int) -> Tensor:
    """Returns an uninitialised tensor, (nnz,), for the owner (rank that sums it) of each index, in the narrowest dtype.

    `indices`, (nnz,), decides the size; the integer dtype is the narrowest for n owners, as the radix sort by owner
    takes one pass for each byte.
    """
    dtype = torch.uint8 if n <= 1 << 8 else torch.int16 if n <= 1 << 15 else torch.int32
    return torch.empty(len(indices), dtype=dtype, device=indices.device)


class OwnerPartition:
    """Sorted indices of elements or rows, split by owner (the rank that sums an item).

    It is the base of `HashedPartition` and `RotatedPartition`. `write` puts out index // divisor of each item: with
    divisor n its position in the owner's part, with 1 its index.
    """

    def __init__(self, indices: Tensor, owners: Tensor, n: int, *, divisor: int, places: str) -> None:
        self._indices, self._divisor, self._places = indices, divisor, places
        ordered, self._order = torch.sort(owners, stable=True)
        numbers = torch.arange(n, device=owners.device).to(owners.dtype)
        ends = torch.searchsorted(ordered, numbers, right=True)
        self._begins = torch.cat([ends.new_zeros(1), ends])
        self.counts: list[int] = []  # until the host has read them

    def read_counts(self, faults: Tensor) -> list[int]:
        """Reads the number of items of each owner (rank that sums them) into `counts`, and returns `faults` as a list.

        `faults` are integers, 1-D. Both come with one transfer to the host.
        """
        numbers: list[int] = torch.cat([self._begins, faults]).tolist()
        begins, found = numbers[: len(self._begins)], numbers[len(self._begins) :]
        self.counts = [stop - start for start, stop in zip(begins[:-1], begins[1:], strict=True)]
        return found

    def dealt_indices(self) -> list[Tensor]:
        """Returns the indices of each owner (rank that sums them), (count,), as views of one tensor."""
        return list(self._indices[self._order].split(self.counts))

    def write(self, values: Tensor, places: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        check_dealt(self.counts, values, (self._places, places), outs)
        if len({place.dtype for place in places}) > 1:
            raise TypeError(f"{self._places} must be of one dtype, got {sorted({str(p.dtype) for p in places})}")
        device = device_of(dealt=self._indices, values=values, outs=outs, **{self._places: places})
        n, dim = len(self.counts), values.shape[1] if values.ndim == 2 else 1
        shape = tile(dim)
        arguments = (
            self._order, self._begins, n, self._indices, self._divisor, bits_of(values), dim,
            on(device, addresses(places)), on(device, addresses(outs)),
        )  # fmt: skip
        constants = {"PLACE": pointee(places[0]), "VALUE": pointee(values), **shape}
        launch(_deal, n * blocks(max(self.counts), shape["ROWS"]), device, *arguments, **constants)
