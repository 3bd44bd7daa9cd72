"""Zen's hierarchical hashing loses nothing, whatever collides, and fills its memory as the paper's does."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from gradsync.kernels import HashedIndices, reference
from tests.kernels.native import cpu, native
from tests.kernels.on_device import every

both = pytest.mark.parametrize("kernels", [cpu, reference], ids=["native", "reference"])

NNZ = 200_000
OWNERS = 16
# Share of the indices that reach serial memory, by slots per index, for 1 to 4 rehashes, in per cent: one index after
# the other, and in rounds (simulated for the design of this library, not the paper's numbers).
IN_TURN = {1: (36.8, 23.8, 17.7, 14.1), 2: (21.3, 7.6, 3.0, 1.2), 3: (15.0, 3.6, 0.9, 0.3), 4: (11.5, 2.0, 0.4, 0.1)}
IN_ROUNDS = {1: (36.8, 25.5, 19.8, 16.2), 2: (21.3, 9.0, 4.2, 2.0), 3: (15.0, 4.5, 1.5, 0.5), 4: (11.5, 2.7, 0.7, 0.2)}


def distinct(count: int, size: int = 1 << 26) -> Tensor:
    """Returns distinct random indices in random order."""
    drawn = torch.randint(size, (count + count // 50 + 10,), generator=torch.Generator().manual_seed(count))
    unique = torch.unique(drawn)
    return unique[torch.randperm(len(unique), generator=torch.Generator().manual_seed(1))[:count]]


def assert_nothing_lost(found: HashedIndices, indices: Tensor, n: int, seed: int) -> None:
    """Asserts that each index is there once, at its owner or in the overflow."""
    everything = torch.cat([*found.owned, found.overflow])
    assert everything.dtype == indices.dtype
    assert torch.equal(everything.sort().values, indices.sort().values)
    assert len(found.owned) == n
    for number, owned in enumerate(found.owned):
        owners = torch.empty(len(owned), dtype=torch.int32)
        reference.owners_by_hash(owned, n, seed, owners)
        assert (owners == number).all()


@native
@pytest.mark.parametrize(
    ("threads", "dtype"), [(1, torch.int64), (2, torch.int32), (8, torch.int64), (8, torch.int32)], ids=str
)
@pytest.mark.parametrize("slots", [1, 7, 100, 20_000, 80_000])
def test_no_index_is_lost_where_threads_collide(
    slots: int, dtype: torch.dtype, threads: int, module: ModuleType
) -> None:
    indices = distinct(40_000).to(dtype)
    for n in (1, 3):
        for seed in range(3):
            found = cpu.hierarchical_hash(
                indices, n, slots=slots, serial=500, rehashes=3, seed=seed, threads=threads, module=module
            )
            assert_nothing_lost(found, indices, n, seed)
            assert len(found.overflow) <= found.num_serial


@native
@pytest.mark.parametrize("threads", [2, 8])
def test_every_slot_is_taken_once_where_all_indices_want_it(threads: int, module: ModuleType) -> None:
    indices = torch.arange(100_000)
    for seed in range(5):
        found = cpu.hierarchical_hash(indices, 1, slots=3, serial=10, seed=seed, threads=threads, module=module)
        assert_nothing_lost(found, indices, 1, seed)
        assert len(found.owned[0]) == 13
        assert (found.num_serial, len(found.overflow)) == (100_000 - 3, 100_000 - 13)


@every
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_indices_without_a_place_are_returned(kernels, count: int) -> None:
    indices = distinct(count)
    found = kernels.hierarchical_hash(indices, 4, slots=200, serial=40, seed=7)
    assert_nothing_lost(found, indices, 4, 7)
    if count == 1000:
        assert [len(owned) for owned in found.owned] == [50 + 10] * 4  # all memory is full
        assert len(found.overflow) == 1000 - 240
        assert found.num_serial == 1000 - 200
    ample = kernels.hierarchical_hash(indices, 4, slots=10 * count + 1, serial=10 * count, seed=7)
    assert_nothing_lost(ample, indices, 4, 7)
    assert len(ample.overflow) == 0


@every
def test_index_zero_and_indices_given_twice_are_kept(kernels) -> None:
    indices = torch.tensor([5, 0, 5, 2**31 - 2, 0, 9], dtype=torch.int32)
    for slots, serial in ((100, 100), (1, 1), (1, 0)):
        assert_nothing_lost(kernels.hierarchical_hash(indices, 2, slots=slots, serial=serial, seed=1), indices, 2, 1)


@both
def test_slots_go_to_the_smallest_by_the_definition_and_to_the_first_where_one_thread_inserts(kernels) -> None:
    indices = torch.tensor([8, 3, 5])
    found = kernels.hierarchical_hash(indices, 1, slots=1, serial=1, rehashes=2, seed=0, threads=1)
    expected = ([3, 5], [8]) if kernels is reference else ([8, 3], [5])
    assert (found.owned[0].tolist(), found.overflow.tolist()) == expected


@every
def test_the_memory_is_what_was_asked_for(kernels) -> None:
    indices = distinct(1000)
    for dtype, width in ((torch.int32, 4), (torch.int64, 8)):
        found = kernels.hierarchical_hash(indices.to(dtype), 3, slots=2000, serial=200, seed=0)
        assert found.nbytes == 3 * (667 + 67) * width + 3 * 8


@both
@pytest.mark.parametrize("rehashes", [1, 2, 3, 4])
@pytest.mark.parametrize("slots_per_index", [1, 2, 3, 4])
def test_the_share_that_reaches_serial_memory_is_as_simulated(kernels, slots_per_index: int, rehashes: int) -> None:
    indices = distinct(NNZ)
    found = kernels.hierarchical_hash(
        indices, OWNERS, slots=slots_per_index * NNZ, serial=NNZ, rehashes=rehashes, seed=11, threads=1
    )
    expected = (IN_ROUNDS if kernels is reference else IN_TURN)[slots_per_index][rehashes - 1]
    assert 100 * found.num_serial / NNZ == pytest.approx(expected, abs=0.2)
    assert len(found.overflow) == 0


@native
def test_threads_fill_the_memory_as_one_does(module: ModuleType) -> None:
    indices = distinct(NNZ)
    found = cpu.hierarchical_hash(indices, OWNERS, slots=2 * NNZ, serial=NNZ // 5, seed=2, threads=4, module=module)
    assert 100 * found.num_serial / NNZ == pytest.approx(IN_TURN[2][2], abs=0.2)
    assert_nothing_lost(found, indices, OWNERS, 2)


@native
def test_one_thread_gives_the_same_result_again(module: ModuleType) -> None:
    indices = distinct(5000)
    first, second = (
        cpu.hierarchical_hash(indices, 3, slots=5000, serial=100, seed=4, threads=1, module=module) for _ in range(2)
    )
    assert torch.equal(torch.cat([*first.owned, first.overflow]), torch.cat([*second.owned, second.overflow]))


@every
def test_what_cannot_be_hashed_into_memory_is_refused(kernels) -> None:
    two = torch.tensor([1, 2])
    for match, indices, n, sizes in (
        ("slots must be at least 1 and serial not negative, got 0 and 5", two, 2, {"slots": 0, "serial": 5}),
        ("slots must be at least 1 and serial not negative, got 5 and -1", two, 2, {"slots": 5, "serial": -1}),
        (r"rehashes must be in \[1, 64\], got 0", two, 2, {"slots": 5, "serial": 5, "rehashes": 0}),
        (r"below 2\^31 slots, got 2147483648", two, 1, {"slots": 2**31 - 1, "serial": 1}),
        (r"number of owners must be in \[1, 65536\], got 0", two, 0, {"slots": 5, "serial": 5}),
        ("hierarchical_hash: index -1 of part 0 is outside", torch.tensor([1, -1]), 2, {"slots": 5, "serial": 5}),
    ):
        with pytest.raises(ValueError, match=match):
            kernels.hierarchical_hash(indices, n, seed=0, **sizes)
    with pytest.raises(TypeError, match="int64 or int32"):
        kernels.hierarchical_hash(torch.ones(2), 2, slots=5, serial=5, seed=0)


@native
def test_indices_that_are_apart_are_refused_not_copied(module: ModuleType) -> None:
    with pytest.raises(TypeError, match=r"must be contiguous.*strides \(2\)"):
        cpu.hierarchical_hash(torch.arange(4)[::2], 2, slots=5, serial=5, seed=0, module=module)
