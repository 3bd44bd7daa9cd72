"""Formats in which a message encodes the indices of the rows or elements that it carries.

Zen (OSDI 2025) pushes integers and pulls bitmaps. In between are offsets within blocks: 16 bits a row where few are
touched, 8 bits from a density of about a twentieth of a percent up to an eighth, where the bitmap takes over. The
number of rows determines the smallest format, so that no message names its format.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import torch
from torch import Tensor

from .. import kernels
from .sparse import index_dtype

ALIGNMENT_BYTES = 8  # each field of a message begins at a multiple of this


def aligned(nbytes: float) -> float:
    """Returns `nbytes` rounded up to a multiple of 8.

    A fractional size, which is an expected one, gets the mean padding of 4 bytes instead.
    """
    if isinstance(nbytes, int) or nbytes.is_integer():
        return -(-int(nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return nbytes + ALIGNMENT_BYTES / 2


class IndexFormat(StrEnum):
    """The formats in which a message encodes positions, the indices of its rows or elements.

    Attributes:
        LIST: an integer for each row.
        OFFSETS_16: 2 bytes for each row, 4 for each block of 65536.
        OFFSETS_8: a byte for each row, and one for each block of 256, or a bit for each of both.
        BITMAP: a bit for each row of the part.
        DENSE: no positions: all rows travel, absent ones as zeros.
    """

    LIST = "list"
    OFFSETS_16 = "offsets_16"
    OFFSETS_8 = "offsets_8"
    BITMAP = "bitmap"
    DENSE = "dense"

    @lru_cache(maxsize=4096)
    def nbytes(self, count: float, length: int) -> float:
        """Returns the bytes, padded to a multiple of 8, that `count` indices in [0, length) take; 0 for DENSE.

        For a fractional count, which is an expected one, they are the mean.
        """
        return 0 if self is IndexFormat.DENSE else aligned(kernels.packed_nbytes(count, length, self.bits(length)))

    @lru_cache(maxsize=4096)
    def bits(self, length: int) -> int:
        """Returns the bits of one entry, by which kernels know the format; raises KeyError for DENSE.

        16 for OFFSETS_16, 8 for OFFSETS_8, 1 for BITMAP; for LIST 32 if indices in [0, length) fit, else 64.
        """
        listed = 8 * index_dtype(length).itemsize
        return {"list": listed, "offsets_16": 16, "offsets_8": 8, "bitmap": 1}[self]


SPARSE_FORMATS = (IndexFormat.LIST, IndexFormat.OFFSETS_16, IndexFormat.OFFSETS_8, IndexFormat.BITMAP)


@lru_cache(maxsize=4096)
def smallest(count: float, length: int, formats: tuple[IndexFormat, ...] = SPARSE_FORMATS) -> IndexFormat:
    """Returns which of `formats` encodes `count` indices in [0, length) in the fewest bytes; if equal, the first."""
    return min(formats, key=lambda each: each.nbytes(count, length))


@dataclass(frozen=True)
class Positions:
    """The encoded indices of a message's rows or elements, in the message's memory, to be written or read."""

    packed: Tensor  # the bytes that travel, uint8
    count: int
    length: int  # positions are in [0, length)
    format: IndexFormat

    @property
    def as_packed(self) -> kernels.PackedPositions:
        """The same encoded indices, in the form in which kernels write or read them in place."""
        return kernels.PackedPositions(self.packed, self.count, self.format.bits(self.length))

    def room(self) -> Tensor:
        """Returns a tensor, (count,) int32 or int64, for the caller to fill with indices and pass to `encode`.

        In the format LIST it is a view of the message itself, which saves a copy.
        """
        dtype = index_dtype(self.length)
        if self.format is IndexFormat.LIST:
            return self.packed[: self.count * dtype.itemsize].view(dtype)
        return self.packed.new_empty(self.count, dtype=dtype)

    def encode(self, indices: Tensor) -> None:
        """Writes the ascending indices, (count,), into the message."""
        if self.format is IndexFormat.BITMAP:
            kernels.encode_bitmap(indices, self.length, self.packed.view(torch.int64))
        elif self.format is IndexFormat.LIST:
            self.room().copy_(indices)
        else:
            kernels.encode_offsets(indices, self.length, self.format.bits(self.length), self._offsets)

    def decode(self) -> Tensor:
        """Returns the indices in the message, (count,) int32 or int64; in the format LIST, a view of the message."""
        indices = self.room()
        if self.format is IndexFormat.BITMAP:
            kernels.decode_bitmap(self.packed.view(torch.int64), indices)
        elif self.format is not IndexFormat.LIST:
            kernels.decode_offsets(self._offsets, self.length, self.format.bits(self.length), indices)
        return indices

    @property
    def _offsets(self) -> Tensor:
        """The bytes of `packed`, uint8, without the padding at the end; only for OFFSETS_16 and OFFSETS_8."""
        return self.packed[: kernels.offsets_nbytes(self.count, self.length, self.format.bits(self.length))]
