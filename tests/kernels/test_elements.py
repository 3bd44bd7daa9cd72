"""Kernels on single elements: found in a dense tensor, as bitmaps, and by owner; native bits equal the definition's."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from gradsync.kernels import reference
from gradsync.kernels.reference.rotated import rotation
from tests.kernels.native import DTYPES, assert_same_bits, cpu, native, special_values
from tests.kernels.on_device import every
from tests.kernels.shapes import columns_of_2048, random_indices, zipf_rows

both = pytest.mark.parametrize("kernels", [cpu, reference], ids=["native", "reference"])
DENSITIES = [0.0, 0.01, 0.04, 0.06, 0.5, 0.95, 1.0]  # on both sides of the native decoder's two ways
SIZES = [0, 1, 63, 64, 65, 127, 4096, 20_011]


def guarded(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns a buffer of `count` entries, and the whole, whose last 16 entries must stay unchanged."""
    whole = torch.full((count + 16,), 77, dtype=dtype)
    return whole[:count], whole


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("density", DENSITIES)
def test_nonzero_elements_equal_the_definition(density: float, dtype: torch.dtype, module: ModuleType) -> None:
    specials = special_values(dtype)
    for size in SIZES:
        x = torch.zeros(size, dtype=dtype)
        x[::3] = -0.0
        chosen = random_indices(size, density)
        x[chosen] = specials[torch.arange(len(chosen)) % len(specials)]
        expected = torch.tensor([i for i, value in enumerate(x.tolist()) if value != 0], dtype=torch.int64)
        found = [cpu.nonzero_elements(x, threads=threads, module=module) for threads in (1, 2, 5)]
        for elements in (*found, reference.nonzero_elements(x)):
            assert elements.count == len(expected)
            for index_dtype in (torch.int32, torch.int64):
                (indices, all_indices), (values, all_values) = (
                    guarded(len(expected), index_dtype),
                    guarded(len(expected), dtype),
                )
                elements.write(indices, values)
                assert torch.equal(indices.long(), expected)
                assert_same_bits(values, x[expected])
                assert (all_indices[-16:] == 77).all() and (all_values[-16:] == 77).all()


@every
def test_outputs_that_do_not_fit_the_elements_are_refused(kernels) -> None:
    found = kernels.nonzero_elements(torch.ones(3))
    with pytest.raises(ValueError, match="indices must be"):
        found.write(torch.zeros(2).long(), torch.zeros(3))
    with pytest.raises(ValueError, match="values must be"):
        found.write(torch.zeros(3).long(), torch.zeros(2))
    with pytest.raises(TypeError, match="values must be"):
        found.write(torch.zeros(3).long(), torch.zeros(3).double())
    with pytest.raises(TypeError, match="int64 or int32"):
        found.write(torch.zeros(3), torch.zeros(3))
    with pytest.raises(TypeError, match="x must be float"):
        kernels.nonzero_elements(torch.ones(3).int())


@native
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("size", SIZES)
def test_a_bitmap_gives_back_its_indices(size: int, density: float, module: ModuleType) -> None:
    indices = random_indices(size, density)
    words, by_definition = (torch.full((-(-size // 64),), -1) for _ in range(2))
    shuffled = torch.cat([indices.flip(0), indices[:5]]).int()
    cpu.encode_bitmap(shuffled, size, words, module=module)
    reference.encode_bitmap(indices, size, by_definition)
    assert torch.equal(words, by_definition)
    bits = [i for w, word in enumerate(words.tolist()) for i in range(64 * w, 64 * w + 64) if word >> i % 64 & 1]
    assert bits == indices.tolist()
    assert reference.count_bits(words) == len(indices)
    for threads in (1, 2, 5):
        assert cpu.count_bits(words, threads=threads, module=module) == len(indices)
        for dtype in (torch.int32, torch.int64):
            out, whole = guarded(len(indices), dtype)
            cpu.decode_bitmap(words, out, threads=threads, module=module)
            assert torch.equal(out.long(), indices)
            assert (whole[-16:] == 77).all()
    for dtype in (torch.int32, torch.int64):
        out = torch.zeros(len(indices), dtype=dtype)
        reference.decode_bitmap(words, out)
        assert torch.equal(out.long(), indices)


@every
def test_bad_bitmaps_are_refused_before_anything_is_written(kernels) -> None:
    words = torch.zeros(2).long()
    for bad in (-1, 100):
        with pytest.raises(ValueError, match=rf"encode_bitmap: index {bad} of part 0 is outside \[0, size=100\)"):
            kernels.encode_bitmap(torch.tensor([3, bad]), 100, words)
    with pytest.raises(ValueError, match="out must be"):
        kernels.encode_bitmap(torch.tensor([3]), 129, words)
    with pytest.raises(TypeError, match="out must be int64"):
        kernels.encode_bitmap(torch.tensor([3]), 100, words.int())
    assert words.tolist() == [0, 0]
    words[0] = 5
    with pytest.raises(ValueError, match="out must be"):
        kernels.decode_bitmap(words, torch.zeros(3).long())
    with pytest.raises(TypeError, match="words must be int64"):
        kernels.count_bits(words.int())


def partition(kernels, indices: Tensor, values: Tensor, size: int, n: int, seed: int, **options):
    split = kernels.partition_rotated(indices, size, n, seed, **options)
    positions = [torch.empty(count, dtype=torch.int32) for count in split.counts]
    outs = [torch.empty(count, *values.shape[1:], dtype=values.dtype) for count in split.counts]
    split.write(values, positions, outs)
    return positions, outs


@native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 16, 100])
@pytest.mark.parametrize("size", [0, 1, 64, 5003])
def test_the_rotated_partition_is_a_bijection_with_its_inverse(
    size: int, n: int, threads: int, module: ModuleType
) -> None:
    indices, values = torch.arange(size), torch.arange(size).double()
    positions, outs = partition(cpu, indices, values, size, n, 5, threads=threads, module=module)
    back = []
    for owner, (position, out) in enumerate(zip(positions, outs, strict=True)):
        assert (position.diff() > 0).all()  # no two elements in one place
        assert len(position) == 0 or position[-1] < -(-size // n)  # equal capacity
        by_kernel, by_definition = torch.empty(len(position), dtype=torch.int32), torch.empty(len(position)).long()
        cpu.rotated_index(owner, position, n, 5, by_kernel, threads=threads, module=module)
        reference.rotated_index(owner, position, n, 5, by_definition)
        assert torch.equal(by_kernel.long(), by_definition)
        assert torch.equal(by_definition, out.long())
        back.append(by_definition)
    assert torch.equal(torch.cat(back).sort().values, indices)


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 16])
def test_the_native_partition_equals_its_definition(n: int, dtype: torch.dtype, module: ModuleType) -> None:
    for size, density in [(0, 1.0), (64, 1.0), (10_007, 0.1)]:
        indices = random_indices(size, density)
        values = special_values(dtype)[indices % 7]
        for seed in (0, 1, -3, 2**70):
            expected = partition(reference, indices, values, size, n, seed)
            for threads in (1, 2, 5):
                got = partition(cpu, indices.int(), values, size, n, seed, threads=threads, module=module)
                for mine, theirs in zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True):
                    assert_same_bits(mine, theirs)


@native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, 3, 16])
def test_rows_are_dealt_to_owners_as_elements_are(
    dim: int, dtype: torch.dtype, threads: int, module: ModuleType
) -> None:
    indices = random_indices(1000, 0.2)
    rows = special_values(dtype)[torch.arange(len(indices) * dim).view(len(indices), dim) % 7]
    by_kernel = partition(cpu, indices, rows, 1000, 7, 5, threads=threads, module=module)
    by_definition = partition(reference, indices, rows, 1000, 7, 5)
    for mine, theirs in zip([*by_kernel[0], *by_kernel[1]], [*by_definition[0], *by_definition[1]], strict=True):
        assert mine.shape == theirs.shape
        assert_same_bits(mine, theirs)
    with pytest.raises(ValueError, match=r"outs must be of shape"):
        split = cpu.partition_rotated(indices, 1000, 1, 5, threads=threads, module=module)
        split.write(rows, [torch.empty(len(indices)).int()], [torch.empty(len(indices), dim + 1, dtype=dtype)])
    apart = torch.empty(len(indices), dim + 1, dtype=dtype)[:, :dim]
    if dim > 0:
        with pytest.raises(TypeError, match="values must be contiguous"):
            split.write(apart, [torch.empty(len(indices)).int()], [rows.clone()])


@native
@pytest.mark.parametrize("n", [1, 3, 1 << 12])
def test_the_partition_is_exact_up_to_the_last_position_of_int32(n: int, module: ModuleType) -> None:
    size = n * 2**31
    indices = torch.tensor([0, size // 3, size - n, size - 1][1 if n == 1 else 0 :]).unique()
    values = indices.double()
    got = partition(cpu, indices, values, size, n, 9, module=module)
    expected = partition(reference, indices, values, size, n, 9)
    for mine, theirs in zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True):
        assert_same_bits(mine, theirs)
    owner = next(owner for owner, values_of in enumerate(got[1]) if size - 1 in values_of)
    out = torch.empty(len(got[0][owner]), dtype=torch.int64)
    cpu.rotated_index(owner, got[0][owner], n, 9, out, module=module)
    assert torch.equal(out, got[1][owner].long())
    for kernels in (cpu, reference):
        with pytest.raises(ValueError, match=r"at most .* \* 2\^31"):
            kernels.partition_rotated(indices, size + 1, n, 9)


SIZE = 1 << 22
BALANCE = {  # indices, largest max / mean at 16 owners, mean over seeds: as for random placement; whole runs are even
    "uniform 1 %": (lambda: random_indices(SIZE, 0.01, seed=1), 1.05),
    "zipf rows of 256": (lambda: zipf_rows(SIZE, 256, 400), 1.0),
    "zipf rows of 16": (lambda: zipf_rows(SIZE, 16, 6000), 1.0),
    "dense first 1 %": (lambda: torch.arange(SIZE // 100 // 16 * 16), 1.0),
    "20 hot columns of 2048": (lambda: columns_of_2048(SIZE, torch.arange(7, 2048, 103)[:20]), 1.05),
    "one hot column of 2048": (lambda: columns_of_2048(SIZE, torch.tensor([5])), 1.2),
}


@both
@pytest.mark.parametrize("shape", BALANCE)
def test_no_pattern_loads_one_owner(shape: str, kernels) -> None:
    indices, largest = BALANCE[shape][0](), BALANCE[shape][1]
    loads = []
    for seed in range(8):
        counts = kernels.partition_rotated(indices, SIZE, 16, seed=seed).counts
        assert sum(counts) == len(indices)
        loads.append(max(counts) * 16 / len(indices))
    assert sum(loads) / len(loads) <= largest


def test_rotations_of_neighbours_are_uniform_and_change_with_the_seed() -> None:
    turns = torch.stack([rotation(torch.arange(70_000), 7, seed) for seed in (0, 1)])
    assert turns.min() == 0 and turns.max() == 6
    pairs = torch.bincount(turns[0, 1:] * 7 + turns[0, :-1], minlength=49)  # 1428 expected, deviation 38
    assert (pairs - 70_000 / 49).abs().max() < 6 * 38
    assert 0.1 < (turns[0] == turns[1]).double().mean() < 0.19


@every
def test_indices_that_cannot_be_partitioned_are_refused(kernels) -> None:
    with pytest.raises(ValueError, match="must ascend, got 9 before 4"):
        kernels.partition_rotated(torch.tensor([1, 9, 4]), 10, 2, 0)
    for bad in (-1, 10):
        with pytest.raises(ValueError, match=rf"partition_rotated: index {bad} of part 0 is outside \[0, size=10\)"):
            kernels.partition_rotated(torch.tensor([bad]), 10, 2, 0)
    for n in (0, 2**16 + 1):
        with pytest.raises(ValueError, match=r"number of owners must be in \[1, 65536\]"):
            kernels.partition_rotated(torch.tensor([1]), 10, n, 0)
    with pytest.raises(TypeError, match="int64 or int32"):
        kernels.partition_rotated(torch.tensor([1.0]), 10, 2, 0)
    split = kernels.partition_rotated(torch.tensor([1, 1]), 10, 1, 0)
    two = torch.zeros(2)
    with pytest.raises(ValueError, match="one array of positions"):
        split.write(two, [], [])
    with pytest.raises(TypeError, match="positions must be int32"):
        split.write(two, [two.long()], [two])
    with pytest.raises(TypeError, match="outs must be"):
        split.write(two, [two.int()], [two.double()])
    with pytest.raises(ValueError, match="values must be"):
        split.write(torch.zeros(3), [two.int()], [two])


@every
def test_positions_that_have_no_index_are_refused(kernels) -> None:
    out = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"owner must be in \[0, 3\), got 3"):
        kernels.rotated_index(3, torch.tensor([0, 1], dtype=torch.int32), 3, 0, out)
    with pytest.raises(ValueError, match="rotated_index: index -1"):
        kernels.rotated_index(0, torch.tensor([0, -1], dtype=torch.int32), 3, 0, out)
    with pytest.raises(ValueError, match="use int64"):
        kernels.rotated_index(0, torch.tensor([0, 2**30], dtype=torch.int32), 3, 0, out)
    with pytest.raises(TypeError, match="positions must be int32"):
        kernels.rotated_index(0, torch.tensor([0, 1]), 3, 0, out)


@native
def test_elements_that_are_apart_are_refused_not_copied(module: ModuleType) -> None:
    apart = torch.arange(6)[::2]
    for call in (
        lambda: cpu.nonzero_elements(apart.double().repeat_interleave(2)[::2], module=module),
        lambda: cpu.encode_bitmap(apart, 64, torch.zeros(1).long(), module=module),
        lambda: cpu.encode_bitmap(torch.arange(3), 150, torch.zeros(6).long()[::2], module=module),
        lambda: cpu.decode_bitmap(apart, torch.zeros(3).long(), module=module),
        lambda: cpu.partition_rotated(apart, 10, 2, 0, module=module),
        lambda: cpu.rotated_index(0, apart.int().repeat_interleave(2)[::2], 2, 0, torch.zeros(3).long(), module=module),
        lambda: cpu.rotated_index(0, torch.arange(3).int(), 2, 0, torch.zeros(6).long()[::2], module=module),
        lambda: cpu.decode_bitmap(torch.tensor([7]), torch.zeros(6).long()[::2], module=module),
        lambda: cpu.count_bits(apart, module=module),
        lambda: cpu.unite_rows([apart], 10, module=module),
        lambda: cpu.scatter_rows(apart, torch.ones(3, 2), torch.ones(5, 2), accumulate=True, module=module),
        lambda: cpu.nonzero_elements(torch.ones(3), module=module).write(torch.zeros(6).long()[::2], torch.zeros(3)),
        lambda: cpu.nonzero_elements(torch.ones(3), module=module).write(torch.zeros(3).long(), torch.zeros(6)[::2]),
        lambda: cpu.partition_rotated(torch.arange(3), 3, 1, 0, module=module).write(
            torch.ones(6)[::2], [torch.zeros(3).int()], [torch.zeros(3)]
        ),
        lambda: cpu.partition_rotated(torch.arange(3), 3, 1, 0, module=module).write(
            torch.ones(3), [torch.zeros(6).int()[::2]], [torch.zeros(3)]
        ),
        lambda: cpu.partition_rotated(torch.arange(3), 3, 1, 0, module=module).write(
            torch.ones(3), [torch.zeros(3).int()], [torch.zeros(6)[::2]]
        ),
    ):
        with pytest.raises(TypeError, match=r"must be contiguous.*strides \(2\)"):
            call()
