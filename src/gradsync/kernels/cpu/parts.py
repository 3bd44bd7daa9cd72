"""The native kernels on messages of elements. Beside the messages there is one bitmap, in a tensor of torch's."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gradsync.kernels.checks import WORD_BITS, PackedPositions, check_owners, check_rotated_size, check_size, check_some
from gradsync.kernels.cpu.boundary import load, plain, plains, threads_for
from gradsync.kernels.reference.rotated import rotation_key


class ElementPartition:
    """See `gradsync.kernels.ElementPartition`."""

    def __init__(self, x: Tensor, n: int, seed: int, threads: int | None, module: ModuleType | None) -> None:
        check_owners(n)
        check_rotated_size(x.numel(), n)
        self._threads = threads_for(threads, x.numel())
        words = _bitmap(-(-x.numel() // n), n)
        arguments = plain("x", x), n, rotation_key(seed), plain("words", words), self._threads
        self._partition: Any = (module or load()).ElementPartition(*arguments)
        self.counts: list[int] = self._partition.counts

    def write(self, positions: Sequence[PackedPositions], outs: Sequence[Tensor]) -> None:
        packed, _, bits = _split(positions)
        self._partition.write(packed, bits, plains("outs", outs), self._threads)


class ElementUnion:
    """See `gradsync.kernels.ElementUnion`."""

    def __init__(
        self, parts: Sequence[PackedPositions], size: int, threads: int | None, module: ModuleType | None
    ) -> None:
        check_some("unite_elements", parts)
        check_size("size", size)
        self._threads = threads_for(threads, size)
        words = plain("words", _bitmap(size, 1))
        self._union: Any = (module or load()).ElementUnion(*_split(parts), size, words, self._threads)
        self.count: int = self._union.count

    def sum(self, values: Sequence[Tensor], positions: PackedPositions, out: Tensor, *, scale: float = 1.0) -> None:
        packed = plain("packed", positions.packed), positions.bits
        self._union.sum(plains("values", values), scale, *packed, plain("out", out), self._threads)


def partition_elements(
    x: Tensor, n: int, seed: int, *, threads: int | None = None, module: ModuleType | None = None
) -> ElementPartition:
    """See `gradsync.kernels.partition_elements`."""
    return ElementPartition(x, n, seed, threads, module)


def unite_elements(
    parts: Sequence[PackedPositions], size: int, *, threads: int | None = None, module: ModuleType | None = None
) -> ElementUnion:
    """See `gradsync.kernels.unite_elements`."""
    return ElementUnion(parts, size, threads, module)


def join_elements(
    parts: Sequence[PackedPositions],
    values: Sequence[Tensor],
    seed: int,
    out: Tensor,
    *,
    threads: int | None = None,
    module: ModuleType | None = None,
) -> None:
    """See `gradsync.kernels.join_elements`."""
    check_owners(len(parts))
    check_rotated_size(out.numel(), len(parts))
    arrays = *_split(parts), plains("values", values), rotation_key(seed), plain("out", out)
    (module or load()).join_elements(*arrays, threads_for(threads, out.numel()))


def _split(parts: Sequence[PackedPositions]) -> tuple[list[object], list[int], list[int]]:
    """Their bytes, counts and bits, as the native module takes them."""
    return plains("packed", [part.packed for part in parts]), [p.count for p in parts], [p.bits for p in parts]


def _bitmap(size: int, rows: int) -> Tensor:
    """Room for so many rows of bits, whole words each."""
    return torch.empty(rows * -(-size // WORD_BITS), dtype=torch.int64)
