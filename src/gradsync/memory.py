"""Memory of large tensors on the host, lent again and again.

The system clears each page that it hands out anew, and the allocator of the C library gives large blocks back as soon
as a tensor dies: for tensors of every step that takes longer than most kernels take to fill them.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import OrderedDict, deque

import torch
from torch import Tensor

LEAST_BYTES = 1 << 18  # of a block; smaller tensors are the allocator's, which keeps what they leave
_STEPS = 8  # sizes of blocks between one power of two and the next


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.empty`, (numel,), from memory that dead tensors left where there is some."""
    if device.type != "cpu" or numel * dtype.itemsize < LEAST_BYTES:
        return torch.empty(numel, dtype=dtype, device=device)
    return _blocks.lend(numel * dtype.itemsize).view(dtype)


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """As `torch.empty_like` of a flat tensor, from such memory."""
    return empty(x.numel(), dtype or x.dtype, x.device)


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.zeros`, (numel,), from such memory."""
    return empty(numel, dtype, device).zero_()


def release() -> None:
    """Gives back to the system what no tensor uses."""
    _blocks.release()


class Blocks:
    """Blocks of memory. Each comes back by itself once the last tensor on it is gone.

    No more of them lies idle than was ever in use at once; those that lay longest go first.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forgets all blocks: those that are lent go with their tensors."""
        self._lock = threading.Lock()
        self._returned: deque[mmap.mmap] = deque()  # by whoever drops a tensor, which may be in the middle of `lend`
        self._idle: OrderedDict[int, mmap.mmap] = OrderedDict()  # by identity, the one that lay longest first
        self.idle_bytes = self.lent_bytes = self.most_lent_bytes = 0

    def lend(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8."""
        size = block_size(nbytes)
        with self._lock:
            self._take_back()
            block = self._taken(size)
            self.lent_bytes += size
            self.most_lent_bytes = max(self.most_lent_bytes, self.lent_bytes)
        if block is None:
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        lent = memoryview(block)  # which the tensors on it keep alive, and nobody else
        weakref.finalize(lent, self._returned.append, block).atexit = False
        return torch.frombuffer(lent, dtype=torch.uint8, count=nbytes)

    def release(self) -> None:
        with self._lock:
            self._take_back()
            self._idle.clear()
            self.idle_bytes = 0

    def _taken(self, size: int) -> mmap.mmap | None:
        """An idle block of that size, the one that was in use last."""
        for key in reversed(self._idle):
            if len(self._idle[key]) == size:
                self.idle_bytes -= size
                return self._idle.pop(key)
        return None

    def _take_back(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._idle[id(block)] = block
            self.lent_bytes -= len(block)
            self.idle_bytes += len(block)
        while self.idle_bytes > self.most_lent_bytes:
            _, block = self._idle.popitem(last=False)
            self.idle_bytes -= len(block)


def block_size(nbytes: int) -> int:
    """The size of a block for so many bytes: at most an eighth more, in whole pages."""
    step = max(mmap.PAGESIZE, (1 << (nbytes - 1).bit_length()) // (2 * _STEPS))
    return -(-nbytes // step) * step


_blocks = Blocks()
os.register_at_fork(after_in_child=_blocks.begin)  # another thread may have held the lock
