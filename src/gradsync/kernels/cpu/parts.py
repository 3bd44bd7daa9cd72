"""Native (C++) kernels that split, unite and join sparse elements in messages. Their only other memory is a bitmap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync.kernels.checks import (
    WORD_BITS,
    PackedPositions,
    check_owners,
    check_rotated_size,
    check_size,
    check_some,
)
from gradsync.kernels.cpu.boundary import plain, plains, threads_for
from gradsync.kernels.cpu.rows import RowUnion
from gradsync.kernels.native import load
from gradsync.kernels.reference.rotated import rotation_key


class ElementPartition:
    def __init__(self, x: Tensor, n: int, seed: int) -> None:
        check_owners(n)
        check_rotated_size(x.numel(), n)
        self._threads = threads_for(x.numel())
        words = _bitmap(-(-x.numel() // n), n)
        arguments = plain("x", x), n, rotation_key(seed), plain("words", words), self._threads
        self._partition: Any = load().ElementPartition(*arguments)
        self.counts: list[int] = self._partition.counts

    def write(self, positions: Sequence[PackedPositions], outs: Sequence[Tensor]) -> None:
        packed, _, bits = _split(positions)
        self._partition.write(packed, bits, plains("outs", outs), self._threads)


class ElementUnion:
    def __init__(self, parts: Sequence[PackedPositions], size: int) -> None:
        check_some("unite_elements", parts)
        check_size("size", size)
        self._threads = threads_for(size)
        words = plain("words", _bitmap(size, 1))
        self._union: Any = load().ElementUnion(*_split(parts), size, words, self._threads)
        self.count: int = self._union.count

    def sum(self, values: Sequence[Tensor], positions: PackedPositions, out: Tensor, *, scale: float = 1.0) -> None:
        packed = plain("packed", positions.packed), positions.bits
        self._union.sum(plains("values", values), scale, *packed, plain("out", out), self._threads)


partition_elements = ElementPartition
unite_elements = ElementUnion


def unite_messages(parts: Sequence[PackedPositions], num_rows: int) -> RowUnion:
    check_some("unite_messages", parts)
    check_size("num_rows", num_rows)
    items = sum(part.count for part in parts)
    return RowUnion(load().RowUnion(*_split(parts), num_rows, threads_for(items)), items)


def join_elements(parts: Sequence[PackedPositions], values: Sequence[Tensor], seed: int, out: Tensor) -> None:
    check_owners(len(parts))
    check_rotated_size(out.numel(), len(parts))
    arrays = *_split(parts), plains("values", values), rotation_key(seed), plain("out", out)
    load().join_elements(*arrays, threads_for(out.numel()))


def _split(parts: Sequence[PackedPositions]) -> tuple[list[object], list[int], list[int]]:
    """Returns three lists with an entry for each part: positions as DLPack capsules, their number, their format."""
    return plains("packed", [part.packed for part in parts]), [p.count for p in parts], [p.bits for p in parts]


def _bitmap(size: int, rows: int) -> Tensor:
    """Returns an uninitialised int64 tensor, (rows * ceil(size / 64),), for `rows` bitmaps of `size` bits each."""
    return torch.empty(rows * -(-size // WORD_BITS), dtype=torch.int64)
