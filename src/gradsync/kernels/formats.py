"""Kernels of the index formats: bitmaps and packed offsets."""

from __future__ import annotations

from torch import Tensor

from gradsync.kernels.choice import pick


def encode_bitmap(indices: Tensor, size: int, out: Tensor) -> None:
    """Sets bit i % 64 of word i // 64 of `out`, (ceil(size / 64),) int64, for each index, and clears all others.

    Raises:
        ValueError: an index outside [0, size), before anything is written; another shape of `out`.
        TypeError: indices not int64 or int32; `out` not int64.
    """
    pick("encode_bitmap", [indices, out])(indices, size, out)


def decode_bitmap(words: Tensor, out: Tensor) -> None:
    """Writes the ascending positions of the set bits of `words` into `out`.

    Args:
        words: (n,) int64.
        out: (count_bits(words),) int64, or int32 for up to 2^31 bits.

    Raises:
        ValueError: another size of `out`, or positions beyond int32.
        TypeError: other dtypes.
    """
    pick("decode_bitmap", [words, out])(words, out)


def count_bits(words: Tensor) -> int:
    """The number of set bits of `words`, (n,) int64."""
    count: int = pick("count_bits", [words])(words)
    return count


def encode_offsets(indices: Tensor, size: int, bits: int, out: Tensor) -> None:
    """Writes ascending indices as offsets within blocks of 2^bits: between a list and a bitmap in density.

    Layout: the count of each of ceil(size / 2^bits) blocks, then the offsets, index mod 2^bits, block by block. With 16
    bits, counts are int32 and offsets uint16, in the byte order of the machine. With 8 bits, an offset is one byte, and
    counts are what is shorter:
    - a byte each: 255 counts 255 indices or, where the first offset is 255, a full block of 256, whose offsets are 255,
      0, 1, ..., 254; no 255 ascending offsets begin so;
    - a one for each index and a zero behind each block, from the lowest bit of a byte on (the upper bits of Elias and
      Fano's code; about one bit more than the entropy of the indices where a block has one or two).
    The size of a message thus follows from the number of indices alone.

    Args:
        indices: (nnz,) int64 or int32, ascending, without duplicates.
        size: all indices are in [0, size).
        bits: 8 or 16.
        out: (offsets_nbytes(nnz, size, bits),) uint8.

    Raises:
        ValueError: an index out of range or order, or a duplicate, before anything is written; other bits or sizes.
        TypeError: other dtypes.
    """
    pick("encode_offsets", [indices, out])(indices, size, bits, out)


def decode_offsets(message: Tensor, size: int, bits: int, out: Tensor) -> None:
    """The inverse of `encode_offsets`, for messages that may be damaged.

    Args:
        message: (offsets_nbytes(nnz, size, bits),) uint8.
        out: (nnz,) int64, or int32 for sizes up to 2^31.

    Raises:
        ValueError: a message of another size, or one that no nnz ascending indices of [0, size) have; `out` may then
            have been written to.
        TypeError: other dtypes.
    """
    pick("decode_offsets", [message, out])(message, size, bits, out)
