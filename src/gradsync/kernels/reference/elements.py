"""Kernels on single elements and their bitmaps, in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.kernels.checks import (
    WORD_BITS,
    check_floating,
    check_index_out,
    check_indices,
    check_range,
    check_shape,
    check_size,
)
from gradsync.kernels.reference.rows import is_nonzero


class NonzeroElements:
    """See `gradsync.kernels.NonzeroElements`."""

    @torch.no_grad()
    def __init__(self, x: Tensor) -> None:
        check_floating("x", x)
        if x.ndim != 1:
            raise ValueError(f"x must be 1-D, got {tuple(x.shape)}")
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


def nonzero_elements(x: Tensor) -> NonzeroElements:
    """See `gradsync.kernels.nonzero_elements`."""
    return NonzeroElements(x)


def check_words(name: str, words: Tensor) -> None:
    if words.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {words.dtype}")
    if words.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got {tuple(words.shape)}")


def _bits_of(words: Tensor) -> Tensor:
    """(words, 64) of 0 and 1."""
    return (words[:, None] >> torch.arange(WORD_BITS, device=words.device)) & 1


def encode_bitmap(indices: Tensor, size: int, out: Tensor) -> None:
    """See `gradsync.kernels.encode_bitmap`."""
    check_size("size", size)
    check_indices("indices", indices)
    check_words("out", out)
    check_shape("out", out, -(-size // WORD_BITS))
    check_range("encode_bitmap", indices, size, "size")
    bits = torch.unique(indices.long())
    out.zero_().index_add_(0, bits // WORD_BITS, 1 << bits % WORD_BITS)


def decode_bitmap(words: Tensor, out: Tensor) -> None:
    """See `gradsync.kernels.decode_bitmap`."""
    check_words("words", words)
    indices = _bits_of(words).flatten().nonzero().flatten()
    check_index_out("out", out, len(indices), len(words) * WORD_BITS)
    out.copy_(indices)


def count_bits(words: Tensor) -> int:
    """See `gradsync.kernels.count_bits`."""
    check_words("words", words)
    return int(_bits_of(words).sum())
