"""Native (C++) kernels that find non-zero elements, and that convert indices to bitmaps and back."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradsync.kernels.checks import WORD_BITS, check_size
from gradsync.kernels.cpu.boundary import plain, threads_for
from gradsync.kernels.native import load


class NonzeroElements:
    def __init__(self, x: Tensor) -> None:
        self._threads = threads_for(x.numel())
        self._elements: Any = load().NonzeroElements(plain("x", x), self._threads)
        self.count: int = self._elements.count

    def write(self, indices: Tensor, values: Tensor) -> None:
        self._elements.write(plain("indices", indices), plain("values", values), self._threads)


nonzero_elements = NonzeroElements


def encode_bitmap(indices: Tensor, size: int, out: Tensor) -> None:
    # Runs on one thread, as more are not faster.
    check_size("size", size)
    load().encode_bitmap(plain("indices", indices), size, plain("out", out))


def decode_bitmap(words: Tensor, out: Tensor) -> None:
    threads = threads_for(words.numel() * WORD_BITS // 8)
    load().decode_bitmap(plain("words", words), plain("out", out), threads)


def count_bits(words: Tensor) -> int:
    count: int = load().count_bits(plain("words", words), threads_for(words.numel()))
    return count
