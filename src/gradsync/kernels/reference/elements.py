"""Kernels on single elements and their bitmaps, in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.kernels import phases
from gradsync.kernels.checks import (
    WORD_BITS,
    check_dtype,
    check_flat,
    check_floating,
    check_index_out,
    check_indices,
    check_range,
    check_shape,
    check_size,
)
from gradsync.kernels.choice import dispatched
from gradsync.kernels.reference.rows import is_nonzero


class NonzeroElements:
    """The non-zero elements of a dense tensor, in torch; see `gradsync.kernels.NonzeroElements`."""

    @torch.no_grad()
    def __init__(self, x: Tensor) -> None:
        check_floating("x", x)
        check_flat("x", x)
        self._x = x
        self._indices = is_nonzero(x).nonzero().flatten()
        self.count = len(self._indices)

    @torch.no_grad()
    def write(self, indices: Tensor, values: Tensor) -> None:
        check_index_out("indices", indices, self.count, len(self._x))
        check_floating("values", values, self._x.dtype)
        check_shape("values", values, self.count)
        indices.copy_(self._indices)
        values.copy_(self._x[self._indices])


@dispatched("x", entries="x")
def nonzero_elements(x: Tensor) -> phases.NonzeroElements:
    """Finds the non-zero elements of `x`, (numel,) floating, by their bits: -0.0 is zero, subnormals are not."""
    return NonzeroElements(x)


def check_words(name: str, words: Tensor) -> None:
    check_dtype(name, words, torch.int64)
    check_flat(name, words)


def _bits_of(words: Tensor) -> Tensor:
    """Returns the bits of words, (n,) int64, as (n, 64) of 0 and 1, the lowest bit first."""
    return (words[:, None] >> torch.arange(WORD_BITS, device=words.device)) & 1


@dispatched("indices", "out")
def encode_bitmap(indices: Tensor, size: int, out: Tensor) -> None:
    """Writes the bitmap of `indices`: sets bit i % 64 of word i // 64 for each index i, and clears all others.

    Args:
        indices: (nnz,) int64 or int32, in any order, duplicates allowed.
        size: all indices are in [0, size).
        out: (ceil(size / 64),) int64. Overwritten.

    Raises:
        ValueError: an index outside [0, size), before anything is written; another shape of `out`.
        TypeError: indices not int64 or int32; `out` not int64.
    """
    check_size("size", size)
    check_indices("indices", indices)
    check_words("out", out)
    check_shape("out", out, -(-size // WORD_BITS))
    check_range("encode_bitmap", indices, size, "size")
    bits = torch.unique(indices.long())
    out.zero_().index_add_(0, bits // WORD_BITS, 1 << bits % WORD_BITS)


@dispatched("words", "out")
def decode_bitmap(words: Tensor, out: Tensor) -> None:
    """Writes the ascending positions of the set bits of `words` into `out`.

    Args:
        words: (n,) int64.
        out: (count_bits(words),) int64, or int32 for up to 2^31 bits.

    Raises:
        ValueError: another size of `out`, or positions beyond int32.
        TypeError: other dtypes.
    """
    check_words("words", words)
    indices = _bits_of(words).flatten().nonzero().flatten()
    check_index_out("out", out, len(indices), len(words) * WORD_BITS)
    out.copy_(indices)


@dispatched("words")
def count_bits(words: Tensor) -> int:
    """Returns the number of set bits of `words`, (n,) int64."""
    check_words("words", words)
    return int(_bits_of(words).sum())
