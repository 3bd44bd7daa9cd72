"""An allocator of large tensors on the host, which reuses memory once the tensors on it are gone.

The operating system clears each page that it hands out anew, and the allocator of the C library gives large blocks
back as soon as a tensor dies: for tensors of every step that takes longer than most kernels take to fill them.
"""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

LEAST_BYTES = 1 << 18  # of a block; torch's own allocator reuses the memory of smaller tensors
KEPT_FOR = 1000  # lendings after which idle blocks of a size that nobody asked for go back to the system
_STEPS = 8  # sizes of blocks from one power of two to the next
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a fork writes to pages of its own


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns an uninitialised tensor, (numel,), in reused memory if there is any; the tensor cannot be resized."""
    if device.type != "cpu" or numel * dtype.itemsize < LEAST_BYTES:
        return torch.empty(numel, dtype=dtype, device=device)
    return _blocks.lend(numel * dtype.itemsize).view(dtype)


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns an uninitialised tensor with as many elements as `x`, (x.numel(),), in reused memory if there is any."""
    return empty(x.numel(), dtype or x.dtype, x.device)


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of zeros, (numel,), in reused memory if there is any."""
    return empty(numel, dtype, device).zero_()


def release() -> None:
    """Gives memory that no tensor uses back to the operating system."""
    _blocks.release()


class Blocks:
    """A pool of memory blocks; a block returns to the pool by itself once the last tensor on it is gone.

    There is no lock: a finaliser that closes an engine, and so calls `release`, may run in the middle of any method.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[mmap.mmap]] = {}  # by size in bytes
        self._asked: dict[int, int] = {}  # for each size, the number of the lending that last asked for it
        self._lendings = 0

    def lend(self, nbytes: int) -> Tensor:
        """Returns an uninitialised tensor, (nbytes,) uint8, in a free block of the pool or, if none fits, a new one.

        The block becomes free again once no tensor refers to it.

        Raises:
            MemoryError: the system does not have that much memory.
        """
        size = block_size(nbytes)
        self._lendings += 1
        self._asked[size] = self._lendings
        if self._lendings % KEPT_FOR == 0:
            self._drop_sizes_nobody_asks_for()
        try:
            block = self._idle[size].pop()
        except (KeyError, IndexError):
            block = self._new(size)
        borrowed = memoryview(block)  # kept alive by the tensors on it alone
        weakref.finalize(borrowed, self._take_back, block).atexit = False
        return torch.frombuffer(borrowed, dtype=torch.uint8, count=nbytes)

    def release(self) -> None:
        self._idle.clear()

    def _take_back(self, block: mmap.mmap) -> None:
        self._idle.setdefault(len(block), []).append(block)

    def _new(self, size: int) -> mmap.mmap:
        try:
            return mmap.mmap(-1, size, flags=_FLAGS)
        except OSError:
            self.release()
        try:
            return mmap.mmap(-1, size, flags=_FLAGS)
        except OSError as error:
            raise MemoryError(f"the system has no {size} bytes of memory for a tensor") from error

    def _drop_sizes_nobody_asks_for(self) -> None:
        for size, last in list(self._asked.items()):
            if self._lendings - last >= KEPT_FOR:
                self._idle.pop(size, None)
                self._asked.pop(size, None)


def block_size(nbytes: int) -> int:
    """Returns `nbytes` rounded up to a multiple of a sixteenth of the next power of two, or of a page if that is more.

    From `LEAST_BYTES` on, the smallest block of the pool, this adds at most an eighth.
    """
    step = max(mmap.PAGESIZE, (1 << (nbytes - 1).bit_length()) // (2 * _STEPS))
    return -(-nbytes // step) * step


_blocks = Blocks()
