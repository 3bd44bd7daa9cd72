"""Memory is reused once its last tensor is gone, not before, and is returned to the system when it is not used."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap

import pytest
import torch

from gradsync.tensors import allocator as memory
from gradsync.tensors.allocator import LEAST_BYTES, Blocks, block_size

CPU = torch.device("cpu")
NUMEL = LEAST_BYTES  # bytes or more


def test_memory_comes_back_with_its_last_view() -> None:
    blocks = Blocks()
    borrowed = blocks.lend(NUMEL)
    where, view = borrowed.data_ptr(), borrowed.view(torch.float32)[5:9]
    del borrowed
    assert blocks.lend(NUMEL).data_ptr() != where
    del view
    assert blocks.lend(NUMEL).data_ptr() == where


def test_what_autograd_or_a_storage_holds_is_not_reused() -> None:
    blocks = Blocks()
    borrowed = blocks.lend(4 * NUMEL).view(torch.float32).fill_(2).requires_grad_()
    product = (borrowed * borrowed).sum()
    del borrowed
    blocks.lend(4 * NUMEL).fill_(7)
    product.backward()  # reads what it saved
    storage = blocks.lend(NUMEL).untyped_storage()
    where = storage.data_ptr()
    assert blocks.lend(NUMEL).data_ptr() != where


def idle_bytes(blocks: Blocks) -> int:
    return sum(size * len(idle) for size, idle in list(blocks._idle.items()))


def test_the_block_that_was_in_use_last_is_reused_first() -> None:
    blocks = Blocks()
    first, second = blocks.lend(NUMEL), blocks.lend(NUMEL)
    where = first.data_ptr()
    del second
    blocks.lend(2 * NUMEL)
    del first
    assert blocks.lend(NUMEL).data_ptr() == where


def test_what_nobody_asks_for_any_more_goes_back_and_so_does_all_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "KEPT_FOR", 10)
    blocks = Blocks()
    blocks.lend(4 * NUMEL)
    assert idle_bytes(blocks) == 4 * NUMEL
    for _ in range(20):
        blocks.lend(NUMEL)
    assert idle_bytes(blocks) == NUMEL
    blocks.release()
    assert idle_bytes(blocks) == 0


def test_a_finaliser_may_release_all_in_the_middle_of_lending() -> None:
    """A finaliser does so when it closes the engine of a collected model."""

    class Interrupted(dict[int, list[mmap]]):
        def __getitem__(self, size: int) -> list[mmap]:
            blocks.release()
            return super().__getitem__(size)

    blocks = Blocks()
    blocks._idle = Interrupted()
    for _ in range(3):
        blocks.lend(NUMEL).fill_(1)


def test_where_the_system_has_no_memory_idle_blocks_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Blocks()
    blocks.lend(NUMEL)
    given = []

    def scarce(fileno: int, size: int, **options: int) -> mmap:
        given.append(idle_bytes(blocks))
        if size > NUMEL and len(given) != 2:
            raise OSError(errno.ENOMEM, "no memory")
        return mmap(fileno, size, **options)

    monkeypatch.setattr(memory.mmap, "mmap", scarce)
    blocks.lend(2 * NUMEL)
    assert given == [NUMEL, 0]
    with pytest.raises(MemoryError, match=f"no {4 * NUMEL} bytes"):
        blocks.lend(4 * NUMEL)
    blocks.lend(NUMEL)


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


def test_threads_borrow_different_memory() -> None:
    blocks = Blocks()

    def work(number: int) -> bool:
        for _ in range(200):
            mine = blocks.lend(NUMEL).fill_(number)
            if not bool((mine[:: NUMEL // 64] == number).all()):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert idle_bytes(blocks) <= 8 * NUMEL  # a thread holds the one before until it has the next


def test_a_fork_writes_to_pages_of_its_own() -> None:
    borrowed = memory.zeros(NUMEL, torch.uint8, CPU)
    child = os.fork()
    if child == 0:
        borrowed[0] = 1
        fresh = memory.empty(NUMEL, torch.uint8, CPU)
        fresh[0] = 1
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert not borrowed.any()
