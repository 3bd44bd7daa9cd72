"""Memory is lent again once its last tensor is gone, not before, and not more of it is kept than was in use."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gradsync import memory
from gradsync.memory import LEAST_BYTES, Blocks, block_size

CPU = torch.device("cpu")
NUMEL = LEAST_BYTES  # bytes or more


def test_memory_comes_back_with_its_last_view() -> None:
    blocks = Blocks()
    lent = blocks.lend(NUMEL)
    where, view = lent.data_ptr(), lent.view(torch.float32)[5:9]
    del lent
    assert blocks.lend(NUMEL).data_ptr() != where
    del view
    assert blocks.lend(NUMEL).data_ptr() == where


def test_what_autograd_or_a_storage_holds_is_not_lent_again() -> None:
    blocks = Blocks()
    lent = blocks.lend(4 * NUMEL).view(torch.float32).fill_(2).requires_grad_()
    product = (lent * lent).sum()
    del lent
    blocks.lend(4 * NUMEL).fill_(7)
    product.backward()  # reads what it saved
    storage = blocks.lend(NUMEL).untyped_storage()
    where = storage.data_ptr()
    assert blocks.lend(NUMEL).data_ptr() != where


def test_the_block_that_was_in_use_last_is_lent_first() -> None:
    blocks = Blocks()
    first, second = blocks.lend(NUMEL), blocks.lend(NUMEL)
    where = first.data_ptr()
    del second
    blocks.lend(2 * NUMEL)
    del first
    assert blocks.lend(NUMEL).data_ptr() == where


def test_no_more_lies_idle_than_was_in_use_at_once() -> None:
    blocks = Blocks()
    for nbytes in range(NUMEL, 3 * NUMEL, NUMEL // 4):  # one after the other
        blocks.lend(nbytes)
        gc.collect()
        blocks.lend(NUMEL)
        assert blocks.idle_bytes <= blocks.most_lent_bytes <= block_size(3 * NUMEL) + block_size(NUMEL)
    blocks.release()
    assert blocks.idle_bytes == blocks.lent_bytes == 0


def test_of_what_lies_idle_the_oldest_goes() -> None:
    blocks = Blocks()
    blocks.lend(NUMEL)
    two = [blocks.lend(2 * NUMEL), blocks.lend(2 * NUMEL)]
    del two
    kept = blocks.lend(2 * NUMEL)  # five units came back, of which four may lie idle
    assert (blocks.lent_bytes, blocks.idle_bytes) == (2 * NUMEL, 2 * NUMEL)
    del kept


@pytest.mark.parametrize("nbytes", [NUMEL, NUMEL + 1, 3 * NUMEL - 5, 10**8 + 3])
def test_blocks_are_of_whole_pages_and_an_eighth_too_large_at_most(nbytes: int) -> None:
    size = block_size(nbytes)
    assert nbytes <= size <= nbytes * 9 / 8 + 4096
    assert size % 4096 == 0
    assert block_size(size) == size


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [0, 3, NUMEL + 3])
def test_tensors_are_as_torch_makes_them(numel: int, dtype: torch.dtype) -> None:
    like = memory.empty(numel, dtype, CPU)
    for made in (like, memory.empty_like(like), memory.zeros(numel, dtype, CPU)):
        assert made.shape == (numel,)
        assert made.dtype is dtype
        assert made.is_contiguous()
        assert made.data_ptr() % 64 == 0
    assert memory.empty_like(like, torch.float32).dtype is torch.float32
    assert not memory.zeros(numel, dtype, CPU).any()


def test_other_devices_have_allocators_of_their_own() -> None:
    assert memory.empty(NUMEL, torch.float32, torch.device("meta")).is_meta


def test_threads_are_lent_different_memory() -> None:
    blocks = Blocks()

    def work(number: int) -> bool:
        for _ in range(200):
            mine = blocks.lend(NUMEL).fill_(number)
            if not bool((mine[:: NUMEL // 64] == number).all()):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    blocks.release()
    assert blocks.lent_bytes == 0


def test_a_fork_has_memory_of_its_own() -> None:
    """Without what lay idle, or a lock that a thread of its parent held."""
    blocks, where = memory._blocks, memory.zeros(NUMEL, torch.uint8, CPU).data_ptr()
    lent = memory.zeros(NUMEL, torch.uint8, CPU)
    assert lent.data_ptr() == where
    del lent
    lent = memory.zeros(2 * NUMEL, torch.uint8, CPU)
    with blocks._lock:
        child = os.fork()
        if child == 0:
            lent[0] = 1
            fresh = memory.empty(NUMEL, torch.uint8, CPU)
            os._exit(0 if blocks.lent_bytes == fresh.numel() and blocks.idle_bytes == 0 else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert not lent.any()
