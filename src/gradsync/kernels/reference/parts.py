"""Kernels on messages of non-zero elements (packed positions and values), composed of other kernels' definitions.

Messages are unpacked into lists of indices to be summed; the native and Triton kernels need no lists.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.kernels import phases
from gradsync.kernels.checks import (
    OFFSET_BITS,
    WORD_BITS,
    PackedPositions,
    check_each,
    check_floating,
    check_owners,
    check_packed,
    check_room,
    check_rotated_size,
    check_shape,
    check_size,
    check_some,
    packed_nbytes,
)
from gradsync.kernels.choice import dispatched
from gradsync.kernels.reference.elements import decode_bitmap, encode_bitmap, nonzero_elements
from gradsync.kernels.reference.offsets import decode_offsets, encode_offsets
from gradsync.kernels.reference.rotated import join_rotated, partition_rotated
from gradsync.kernels.reference.rows import unite_rows


def _encode(indices: Tensor, size: int, out: PackedPositions) -> None:
    """Packs ascending positions in [0, size), (count,) int32 or int64, into `out`, in the format `out.bits`."""
    check_room(out, len(indices), size)
    packed = _without_padding(out, size)
    if out.bits == 1:
        encode_bitmap.reference(indices, size, packed.view(torch.int64))
    elif out.bits in OFFSET_BITS:
        encode_offsets.reference(indices, size, out.bits, packed)
    else:
        packed.view(_list_dtype(out.bits)).copy_(indices)


def _decode(positions: PackedPositions, size: int, dtype: torch.dtype) -> Tensor:
    """Unpacks the positions in [0, size) of a message, and returns them as (count,) in `dtype`.

    Raises:
        ValueError: for a message that is damaged or of another size.
    """
    check_packed(positions, size)
    packed = _without_padding(positions, size)
    indices = torch.empty(positions.count, dtype=dtype, device=packed.device)
    if positions.bits == 1:
        decode_bitmap.reference(packed.view(torch.int64), indices)
        _check_positions(indices, size)
    elif positions.bits in OFFSET_BITS:
        decode_offsets.reference(packed, size, positions.bits, indices)
    else:
        listed = packed.view(_list_dtype(positions.bits))
        _check_positions(listed, size)
        indices.copy_(listed)
    return indices


def _without_padding(positions: PackedPositions, size: int) -> Tensor:
    return positions.packed[: packed_nbytes(positions.count, size, positions.bits)]


def _list_dtype(bits: int) -> torch.dtype:
    return torch.int32 if bits == WORD_BITS // 2 else torch.int64


def _check_positions(indices: Tensor, size: int) -> None:
    """Raises ValueError unless the indices from a message, 1-D, ascend without duplicates within [0, size)."""
    if len(indices) and (int(indices[0]) < 0 or int(indices[-1]) >= size or bool((indices.diff() <= 0).any())):
        raise ValueError(f"the message is malformed: its indices do not ascend or are outside [0, size={size})")


class ElementPartition:
    """A tensor's non-zero elements, split by owner (rank that sums them); see `gradsync.kernels.ElementPartition`."""

    def __init__(self, x: Tensor, n: int, seed: int) -> None:
        check_owners(n)
        check_rotated_size(x.numel(), n)
        self._runs = -(-x.numel() // n)
        found = nonzero_elements.reference(x)
        indices = torch.empty(found.count, dtype=torch.int64, device=x.device)
        self._values = x.new_empty(found.count)
        found.write(indices, self._values)
        self._partition = partition_rotated.reference(indices, x.numel(), n, seed)
        self.counts: list[int] = self._partition.counts

    def write(self, positions: Sequence[PackedPositions], outs: Sequence[Tensor]) -> None:
        check_each("positions", positions, len(self.counts))
        check_each("outs", outs, len(self.counts))
        lists = [torch.empty(count, dtype=torch.int32, device=self._values.device) for count in self.counts]
        self._partition.write(self._values, lists, outs)
        for indices, packed in zip(lists, positions, strict=True):
            _encode(indices, self._runs, packed)


class ElementUnion:
    """The union of the element positions in several messages; see `gradsync.kernels.ElementUnion`."""

    def __init__(self, parts: Sequence[PackedPositions], size: int) -> None:
        check_some("unite_elements", parts)
        self._size = size
        self._union = unite_rows.reference([_decode(part, size, torch.int64) for part in parts], size)
        self._device = parts[0].packed.device
        self.count: int = self._union.count

    def sum(self, values: Sequence[Tensor], positions: PackedPositions, out: Tensor, *, scale: float = 1.0) -> None:
        check_floating("out", out)
        check_shape("out", out, self.count)
        indices = torch.empty(self.count, dtype=torch.int64, device=self._device)
        self._union.write_indices(indices)
        _encode(indices, self._size, positions)
        self._union.sum([part.view(-1, 1) for part in values], [out.view(-1, 1)], scale=scale)


@dispatched("x", entries="x")
def partition_elements(x: Tensor, n: int, seed: int) -> phases.ElementPartition:
    """Finds the non-zero elements of `x` and splits them among n owners (ranks that sum a part) by rotated stripe.

    Element i = n q + r belongs to owner (r + rho(q)) mod n, at position q of its part: each run of n neighbours goes to
    n different owners in a rotation that the seed decides, so that neither dense regions nor hot columns overload an
    owner, and the positions q of an owner ascend. All ranks compute the same map. Zero is tested as in `nonzero_rows`.

    Args:
        x: (numel,) floating, numel <= n * 2^31.
        n: owners, at most 2^16.

    Raises:
        ValueError: another n, a size whose positions int32 cannot hold; native: more than 2^34 elements.
        TypeError: other dtypes.
    """
    return ElementPartition(x, n, seed)


@dispatched("parts", entries="num_rows")
def unite_messages(parts: Sequence[PackedPositions], num_rows: int) -> phases.RowUnion:
    """Finds the rows that occur in any of several messages with rows of one table: the first phase of their sum.

    It is `unite_rows` of their positions.

    Args:
        parts: packed positions from messages, which may be damaged.
        num_rows: all positions are in [0, num_rows).

    Raises:
        ValueError: a damaged message or one of another size, no part; native: more than 2^34 rows or 2^32 - 1
            positions.
    """
    check_some("unite_messages", parts)
    check_size("num_rows", num_rows)
    return unite_rows.reference([_decode(part, num_rows, torch.int64) for part in parts], num_rows)


@dispatched("parts", entries="size")
def unite_elements(parts: Sequence[PackedPositions], size: int) -> phases.ElementUnion:
    """Finds the union of the element positions in several messages, all in [0, size): the first phase of their sum.

    Args:
        parts: packed positions from messages, which may be damaged.

    Raises:
        ValueError: a message of another size, or a malformed one; no part; native: a size above 2^34.
        TypeError: other dtypes.
    """
    return ElementUnion(parts, size)


@dispatched("parts", "values", "out", entries="out")
def join_elements(parts: Sequence[PackedPositions], values: Sequence[Tensor], seed: int, out: Tensor) -> None:
    """Writes the elements of all owners to their places in `out`, zero elsewhere: the inverse of `partition_elements`.

    An owner is a rank that sums one part of the tensor.

    Args:
        parts: for each owner, packed positions from its message, which may be damaged.
        values: for each owner (count,), in the dtype of `out`.
        seed: that of `partition_elements`.
        out: (size,) floating; overwritten.

    Raises:
        ValueError: a message of another size or a malformed one, or a position without an element in `out`, before
            anything is written; no owner, or too many.
        TypeError: other or different dtypes.
    """
    check_owners(len(parts))
    check_rotated_size(out.numel(), len(parts))
    check_each("values", values, len(parts))
    runs = -(-out.numel() // len(parts))
    join_rotated([_decode(part, runs, torch.int32) for part in parts], values, seed, out)
