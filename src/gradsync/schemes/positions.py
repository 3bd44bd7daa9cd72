"""How a message tells which rows of a table, or elements of a part, it has (Zen's hash bitmap, OSDI 2025, and others).

Zen pushes integers and pulls bitmaps. In between are offsets within blocks: 16 bits a row where few are touched, 8 bits
from a density of about half a percent up to an eighth, where the bitmap takes over. Who knows how many rows travel
knows which format is the smallest: nothing says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from .. import kernels
from ..sparse import index_dtype

ALIGNMENT_BYTES = 8
WORD_BITS = 64  # of a bitmap, the unit of the kernels


def aligned(nbytes: float) -> float:
    """`nbytes` rounded up to the alignment; exact for whole numbers, the mean for expected sizes."""
    if isinstance(nbytes, int) or nbytes.is_integer():
        return -(-int(nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return nbytes + ALIGNMENT_BYTES / 2


class IndexFormat(StrEnum):
    """The formats of positions."""

    LIST = "list"  # an integer a row
    OFFSETS_16 = "offsets_16"  # 2 bytes a row, 4 for each block of 65536
    OFFSETS_8 = "offsets_8"  # a byte a row, and one for each block of 256
    BITMAP = "bitmap"  # a bit for each row of the part
    DENSE = "dense"  # nothing tells: all rows travel, of those that are not there zeros

    def nbytes(self, count: float, length: int) -> float:
        """Size of `count` positions in [0, length), aligned; exact for whole numbers, the mean for expected ones."""
        match self:
            case IndexFormat.LIST:
                return aligned(count * index_dtype(length).itemsize)
            case IndexFormat.OFFSETS_16 | IndexFormat.OFFSETS_8:
                return aligned(kernels.offsets_nbytes(0, length, self.bits) + count * (self.bits // 8))
            case IndexFormat.BITMAP:
                return -(-length // WORD_BITS) * (WORD_BITS // 8)
            case IndexFormat.DENSE:
                return 0

    @property
    def bits(self) -> int:
        """Of an offset within its block."""
        return 16 if self is IndexFormat.OFFSETS_16 else 8


SPARSE_FORMATS = (IndexFormat.LIST, IndexFormat.OFFSETS_16, IndexFormat.OFFSETS_8, IndexFormat.BITMAP)


def smallest(count: float, length: int, formats: Sequence[IndexFormat] = SPARSE_FORMATS) -> IndexFormat:
    """The format in which so many positions take the fewest bytes; of equal ones the first."""
    return min(formats, key=lambda each: each.nbytes(count, length))


@dataclass(frozen=True)
class Positions:
    """Positions in a message: fill `indices` and `encode`, or `decode` and read them."""

    indices: Tensor  # (count,) int32 or int64, ascending: the message itself, or a buffer beside it
    packed: Tensor  # what travels, uint8
    format: IndexFormat
    length: int  # all of them are in [0, length)

    @classmethod
    def at(cls, packed: Tensor, count: int, length: int, format: IndexFormat) -> Positions:
        """Those that `packed`, of the format's size, holds or is to hold."""
        dtype = index_dtype(length)
        if format is IndexFormat.LIST:
            return cls(packed[: count * dtype.itemsize].view(dtype), packed, format, length)
        return cls(packed.new_empty(count, dtype=dtype), packed, format, length)

    def encode(self) -> None:
        """Writes the indices as they travel."""
        if self.format is IndexFormat.BITMAP:
            kernels.encode_bitmap(self.indices, self.length, self.packed.view(torch.int64))
        elif self.format in (IndexFormat.OFFSETS_8, IndexFormat.OFFSETS_16):
            kernels.encode_offsets(self.indices, self.length, self.format.bits, self._offsets)

    def decode(self) -> None:
        """Reads the indices as they came."""
        if self.format is IndexFormat.BITMAP:
            kernels.decode_bitmap(self.packed.view(torch.int64), self.indices)
        elif self.format in (IndexFormat.OFFSETS_8, IndexFormat.OFFSETS_16):
            kernels.decode_offsets(self._offsets, self.length, self.format.bits, self.indices)

    @property
    def _offsets(self) -> Tensor:
        """Without the padding."""
        return self.packed[: kernels.offsets_nbytes(len(self.indices), self.length, self.format.bits)]
