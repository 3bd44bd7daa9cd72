"""Kernels that are composed of simpler kernels: the sum of rows, and kernels on messages of packed positions.

Messages are unpacked into lists of indices to be summed; the native kernels need no lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradsync.kernels.checks import (
    OFFSET_BITS,
    WORD_BITS,
    PackedPositions,
    RowsPart,
    check_each,
    check_floating,
    check_owners,
    check_packed,
    check_parts,
    check_rotated_size,
    check_shape,
    check_some,
    packed_nbytes,
    rows_buffers,
)
from gradsync.kernels.phases import RowUnion


def sum_rows(
    unite_rows: Callable[..., RowUnion], parts: Sequence[RowsPart], num_rows: int, scale: float, out: RowsPart | None
) -> RowsPart:
    # Sums by `unite_rows` and its result; copies inputs that are not contiguous.
    check_parts(parts, num_rows)
    union = unite_rows([indices.contiguous() for indices, _ in parts], num_rows)
    rows, total = rows_buffers(out, union.count, parts[0][1])
    union.write_indices(rows)
    union.sum([v if v.stride(1) == 1 else v.contiguous() for _, v in parts], [total], scale=scale)
    return rows, total


class Steps(NamedTuple):
    """The simpler kernels of one implementation (torch or Triton), and methods that compose larger kernels of them."""

    encode_bitmap: Callable[..., None]
    decode_bitmap: Callable[..., None]
    encode_offsets: Callable[..., None]
    decode_offsets: Callable[..., None]
    nonzero_elements: Callable[..., Any]
    partition_rotated: Callable[..., Any]
    unite_rows: Callable[..., Any]
    join_rotated: Callable[..., None]

    def encode(self, indices: Tensor, size: int, out: PackedPositions) -> None:
        """Packs ascending positions in [0, size), (count,) int32 or int64, into `out`, in the format `out.bits`."""
        check_packed(out, size)
        check_shape("indices", indices, out.count)
        packed = _without_padding(out, size)
        if out.bits == 1:
            self.encode_bitmap(indices, size, packed.view(torch.int64))
        elif out.bits in OFFSET_BITS:
            self.encode_offsets(indices, size, out.bits, packed)
        else:
            packed.view(_list_dtype(out.bits)).copy_(indices)

    def decode(self, positions: PackedPositions, size: int, dtype: torch.dtype) -> Tensor:
        """Unpacks the positions in [0, size) of a message, and returns them as (count,) in `dtype`.

        Raises:
            ValueError: for a message that is damaged or of another size.
        """
        check_packed(positions, size)
        packed = _without_padding(positions, size)
        indices = torch.empty(positions.count, dtype=dtype, device=packed.device)
        if positions.bits == 1:
            self.decode_bitmap(packed.view(torch.int64), indices)
            _check_positions(indices, size)
        elif positions.bits in OFFSET_BITS:
            self.decode_offsets(packed, size, positions.bits, indices)
        else:
            listed = packed.view(_list_dtype(positions.bits))
            _check_positions(listed, size)
            indices.copy_(listed)
        return indices

    def partition_elements(self, x: Tensor, n: int, seed: int) -> ElementPartition:
        """Splits the non-zeros of `x`, (numel,), among n owners (ranks that sum a part), by a map drawn from `seed`."""
        check_owners(n)
        check_rotated_size(x.numel(), n)
        return ElementPartition(x, n, seed, self)

    def unite_elements(self, parts: Sequence[PackedPositions], size: int) -> ElementUnion:
        """Finds the union of several messages' positions, (count,) each; see `gradsync.kernels.unite_elements`."""
        check_some("unite_elements", parts)
        return ElementUnion(parts, size, self)

    def join_elements(self, parts: Sequence[PackedPositions], values: Sequence[Tensor], seed: int, out: Tensor) -> None:
        """Writes all owners' (summing ranks') elements to `out`, (size,), at their indices, and 0 elsewhere.

        A map drawn from `seed` gives the index of a position in an owner's part.
        """
        check_owners(len(parts))
        check_rotated_size(out.numel(), len(parts))
        check_each("values", values, len(parts))
        runs = -(-out.numel() // len(parts))
        self.join_rotated([self.decode(part, runs, torch.int32) for part in parts], values, seed, out)


class ElementPartition:
    """A tensor's non-zero elements, split by owner (rank that sums them); see `gradsync.kernels.ElementPartition`."""

    def __init__(self, x: Tensor, n: int, seed: int, steps: Steps) -> None:
        self._steps, self._runs = steps, -(-x.numel() // n)
        found = steps.nonzero_elements(x)
        indices = torch.empty(found.count, dtype=torch.int64, device=x.device)
        self._values = x.new_empty(found.count)
        found.write(indices, self._values)
        self._partition = steps.partition_rotated(indices, x.numel(), n, seed)
        self.counts: list[int] = self._partition.counts

    def write(self, positions: Sequence[PackedPositions], outs: Sequence[Tensor]) -> None:
        check_each("positions", positions, len(self.counts))
        check_each("outs", outs, len(self.counts))
        lists = [torch.empty(count, dtype=torch.int32, device=self._values.device) for count in self.counts]
        self._partition.write(self._values, lists, outs)
        for indices, packed in zip(lists, positions, strict=True):
            self._steps.encode(indices, self._runs, packed)


class ElementUnion:
    """The union of the element positions in several messages; see `gradsync.kernels.ElementUnion`."""

    def __init__(self, parts: Sequence[PackedPositions], size: int, steps: Steps) -> None:
        self._steps, self._size = steps, size
        self._union = steps.unite_rows([steps.decode(part, size, torch.int64) for part in parts], size)
        self._device = parts[0].packed.device
        self.count: int = self._union.count

    def sum(self, values: Sequence[Tensor], positions: PackedPositions, out: Tensor, *, scale: float = 1.0) -> None:
        check_floating("out", out)
        check_shape("out", out, self.count)
        indices = torch.empty(self.count, dtype=torch.int64, device=self._device)
        self._union.write_indices(indices)
        self._steps.encode(indices, self._size, positions)
        self._union.sum([part.view(-1, 1) for part in values], [out.view(-1, 1)], scale=scale)


def _without_padding(positions: PackedPositions, size: int) -> Tensor:
    return positions.packed[: packed_nbytes(positions.count, size, positions.bits)]


def _list_dtype(bits: int) -> torch.dtype:
    return torch.int32 if bits == WORD_BITS // 2 else torch.int64


def _check_positions(indices: Tensor, size: int) -> None:
    """Raises ValueError unless the indices from a message, 1-D, ascend without duplicates within [0, size)."""
    if len(indices) and (int(indices[0]) < 0 or int(indices[-1]) >= size or bool((indices.diff() <= 0).any())):
        raise ValueError(f"the message is malformed: its indices do not ascend or are outside [0, size={size})")
