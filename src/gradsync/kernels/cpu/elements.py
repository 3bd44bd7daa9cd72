"""Native kernels on single elements and their bitmaps."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from gradsync.kernels.checks import WORD_BITS, check_size
from gradsync.kernels.cpu.boundary import plain, threads_for
from gradsync.kernels.native import load


class NonzeroElements:
    """See `gradsync.kernels.NonzeroElements`."""

    def __init__(self, x: Tensor, threads: int | None = None, module: ModuleType | None = None) -> None:
        self._threads = threads_for(threads, x.numel())
        self._elements: Any = (module or load()).NonzeroElements(plain("x", x), self._threads)
        self.count: int = self._elements.count

    def write(self, indices: Tensor, values: Tensor) -> None:
        self._elements.write(plain("indices", indices), plain("values", values), self._threads)


def nonzero_elements(x: Tensor, *, threads: int | None = None, module: ModuleType | None = None) -> NonzeroElements:
    """See `gradsync.kernels.nonzero_elements`."""
    return NonzeroElements(x, threads, module)


def encode_bitmap(indices: Tensor, size: int, out: Tensor, *, module: ModuleType | None = None) -> None:
    """See `gradsync.kernels.encode_bitmap`. One thread: a second one buys nothing."""
    check_size("size", size)
    (module or load()).encode_bitmap(plain("indices", indices), size, plain("out", out))


def decode_bitmap(words: Tensor, out: Tensor, *, threads: int | None = None, module: ModuleType | None = None) -> None:
    """See `gradsync.kernels.decode_bitmap`."""
    threads = threads_for(threads, words.numel() * WORD_BITS // 8)
    (module or load()).decode_bitmap(plain("words", words), plain("out", out), threads)


def count_bits(words: Tensor, *, threads: int | None = None, module: ModuleType | None = None) -> int:
    """See `gradsync.kernels.count_bits`."""
    count: int = (module or load()).count_bits(plain("words", words), threads_for(threads, words.numel()))
    return count
