"""Owners by hash: the same map everywhere, balanced on any pattern, and exact in both directions."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from gradsync.kernels import owned_by_hash, reference, use
from gradsync.kernels.reference.hashing import hash_key
from tests.kernels.native import DTYPES, assert_same_bits, cpu, native, special_values
from tests.kernels.on_device import every
from tests.kernels.shapes import columns_of_2048, random_indices, zipf_rows


def murmur_owner(index: int, n: int, key: int) -> int:
    """Returns owners_by_hash's result as its docstring defines it, in Python's integers."""
    mask = 2**64 - 1
    h = index ^ key
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCD & mask
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53 & mask
    return ((h ^ h >> 33) >> 32) * n >> 32


@native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 7, 16, 1 << 16])
def test_owners_are_the_finaliser_of_murmur_scaled(n: int, threads: int, module: ModuleType) -> None:
    indices = torch.tensor([0, 1, 2, 255, 2**31 - 1, 2**31, 2**40 + 5, 2**63 - 2, 7, 7])
    for seed in (0, 1, -3, 2**70):
        expected = [murmur_owner(index, n, hash_key(seed)) for index in indices.tolist()]
        for dtype in (torch.int32, torch.int64):
            by_kernel, by_definition = (torch.empty(len(indices), dtype=dtype) for _ in range(2))
            cpu.owners_by_hash(indices, n, seed, by_kernel, threads=threads, module=module)
            reference.owners_by_hash(indices, n, seed, by_definition)
            assert by_kernel.tolist() == by_definition.tolist() == expected
            cpu.owners_by_hash(indices[:5].int(), n, seed, by_kernel[:5], threads=threads, module=module)
            assert by_kernel.tolist() == expected


def partition(kernels, indices: Tensor, values: Tensor, size: int, n: int, seed: int, **options):
    split = kernels.partition_hashed(indices, size, n, seed, **options)
    indices_out = [torch.empty(count, dtype=indices.dtype) for count in split.counts]
    outs = [torch.empty(count, *values.shape[1:], dtype=values.dtype) for count in split.counts]
    split.write(values, indices_out, outs)
    return indices_out, outs


@native
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("index_dtype", "dtype"), list(zip([torch.int32, torch.int64] * 2, DTYPES, strict=True)), ids=str
)
@pytest.mark.parametrize("n", [1, 3, 16])
def test_the_hashed_partition_gives_each_owner_its_elements_in_order(
    n: int, index_dtype: torch.dtype, dtype: torch.dtype, threads: int, module: ModuleType
) -> None:
    for size, density in [(0, 1.0), (64, 1.0), (10_007, 0.1)]:
        indices = random_indices(size, density)
        values = special_values(dtype)[indices % 7]
        owners = torch.tensor([murmur_owner(index, n, hash_key(5)) for index in indices.tolist()])
        for kernels, options in ((reference, {}), (cpu, {"threads": threads, "module": module})):
            found, outs = partition(kernels, indices.to(index_dtype), values, size, n, 5, **options)
            for owner in range(n):
                mine = indices[owners == owner]
                assert_same_bits(found[owner], mine.to(index_dtype))
                assert_same_bits(outs[owner], special_values(dtype)[mine % 7])


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, 3, 16])
def test_rows_are_dealt_to_owners_by_hash_as_elements_are(dim: int, dtype: torch.dtype, module: ModuleType) -> None:
    indices = random_indices(1000, 0.2)
    rows = special_values(dtype)[torch.arange(len(indices) * dim).view(len(indices), dim) % 7]
    by_kernel = partition(cpu, indices, rows, 1000, 7, 5, module=module)
    by_definition = partition(reference, indices, rows, 1000, 7, 5)
    for mine, theirs in zip([*by_kernel[0], *by_kernel[1]], [*by_definition[0], *by_definition[1]], strict=True):
        assert_same_bits(mine, theirs)


@native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 7, 100])
@pytest.mark.parametrize("size", [0, 1, 64, 5003])
def test_owned_lists_are_the_partition_of_everything(size: int, n: int, threads: int, module: ModuleType) -> None:
    everything = torch.arange(size, dtype=torch.int32)
    expected, _ = partition(reference, everything, everything.double(), size, n, 9)
    by_kernel = cpu.owned_by_hash(size, n, 9, threads=threads, module=module)
    by_definition = reference.owned_by_hash(size, n, 9)
    assert len(by_kernel) == len(by_definition) == n
    for mine, theirs, owned in zip(by_kernel, by_definition, expected, strict=True):
        assert_same_bits(mine, owned)
        assert_same_bits(theirs, owned)


@native
@pytest.mark.parametrize("density", [0.0, 0.001, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("size", [0, 1, 20_011])
def test_a_hash_bitmap_carries_an_owners_indices(size: int, density: float, module: ModuleType) -> None:
    indices = random_indices(size, density)
    owned = cpu.owned_by_hash(size, 3, 4, module=module)
    parts, _ = partition(cpu, indices, indices.double(), size, 3, 4, module=module)
    for own, part in zip(owned, parts, strict=True):
        expected = torch.searchsorted(own, part)
        for out_dtype in (torch.int32, torch.int64):
            for own_as, part_as in ((own, part), (own.long(), part.int()), (own, part.int()), (own.long(), part)):
                out = torch.full((len(part),), -7, dtype=out_dtype)
                cpu.positions_in(own_as, part_as, out, module=module)
                assert torch.equal(out.long(), expected)
                reference.positions_in(own_as, part_as, out.fill_(-7))
                assert torch.equal(out.long(), expected)
        words = torch.empty(-(-len(own) // 64), dtype=torch.int64)
        cpu.encode_bitmap(out, len(own), words, module=module)
        positions = torch.empty(cpu.count_bits(words, module=module), dtype=torch.int32)
        cpu.decode_bitmap(words, positions, module=module)
        assert torch.equal(own[positions].long(), part.long())


@native
def test_positions_of_clustered_indices_are_found(module: ModuleType) -> None:
    owned = torch.cat([torch.arange(100), torch.arange(10_000, 10_050), torch.tensor([2**40, 2**41])])
    for picked in ([0, 99, 100, 149, 150, 151], [151], [0], [98, 99], list(range(90, 152)), [5, 5, 5]):
        indices, out = owned[picked], torch.zeros(len(picked)).long()
        cpu.positions_in(owned, indices, out, module=module)
        assert out.tolist() == picked


@native
def test_positions_of_few_indices_in_a_long_list_are_found(module: ModuleType) -> None:
    owned = torch.arange(0, 3 * 100_000, 3)
    for picked in ([0], [99_999], [5, 50_000], [10, 11, 12, 99_998], [1, 16_000, 16_001, 90_000]):
        out = torch.zeros(len(picked)).int()
        cpu.positions_in(owned.int(), owned[picked], out, module=module)
        assert out.tolist() == picked
    with pytest.raises(ValueError, match="index 30001 is not among the 100000 owned"):
        cpu.positions_in(owned.int(), torch.tensor([3, 30_001]), torch.zeros(2).int(), module=module)
    with pytest.raises(ValueError, match="index 4294967296 is not among"):  # 0 in 32 bits
        cpu.positions_in(owned.int(), torch.tensor([0, 2**32]), torch.zeros(2).int(), module=module)
    with pytest.raises(ValueError, match="index 4294967296 is not among"):
        cpu.positions_in(owned.int(), torch.tensor([2**32]), torch.zeros(1).int(), module=module)


@every
def test_indices_that_are_not_owned_are_refused(kernels) -> None:
    owned, out = torch.tensor([2, 5, 9]), torch.zeros(2).long()
    for bad in ([2, 6], [5, 10], [-1, 2], [0, 2], [2, 2**40]):
        strange = next(index for index in bad if index not in (2, 5, 9))
        with pytest.raises(ValueError, match=f"positions_in: index {strange} is not among the 3 owned"):
            kernels.positions_in(owned, torch.tensor(bad), out)
    with pytest.raises(ValueError, match="positions_in: indices must ascend, got 9 before 5"):
        kernels.positions_in(owned, torch.tensor([9, 5]), out)
    with pytest.raises(ValueError, match="index 4 is not among the 0 owned"):
        kernels.positions_in(owned[:0], torch.tensor([4]), out[:1])
    with pytest.raises(ValueError, match="out must be of shape"):
        kernels.positions_in(owned, owned, out)
    with pytest.raises(TypeError, match="int64 or int32"):
        kernels.positions_in(owned.float(), owned[:2], out)


@every
def test_what_cannot_be_hashed_is_refused(kernels) -> None:
    two = torch.zeros(2)
    with pytest.raises(ValueError, match="owners_by_hash: index -1 of part 0 is outside"):
        kernels.owners_by_hash(torch.tensor([1, -1]), 2, 0, torch.zeros(2).int())
    with pytest.raises(ValueError, match="out must be of shape"):
        kernels.owners_by_hash(torch.tensor([1, 2]), 2, 0, torch.zeros(3).int())
    with pytest.raises(TypeError, match="int64 or int32"):
        kernels.owners_by_hash(torch.tensor([1, 2]), 2, 0, two)
    with pytest.raises(ValueError, match="must ascend, got 9 before 4"):
        kernels.partition_hashed(torch.tensor([1, 9, 4]), 10, 2, 0)
    for bad in (-1, 10):
        with pytest.raises(ValueError, match=rf"partition_hashed: index {bad} of part 0 is outside \[0, size=10\)"):
            kernels.partition_hashed(torch.tensor([bad]), 10, 2, 0)
    for n in (0, 2**16 + 1):
        for call in (
            lambda n: kernels.partition_hashed(torch.tensor([1]), 10, n, 0),
            lambda n: kernels.owners_by_hash(torch.tensor([1]), n, 0, torch.zeros(1).int()),
        ):
            with pytest.raises(ValueError, match=r"number of owners must be in \[1, 65536\]"):
                call(n)
    split = kernels.partition_hashed(torch.tensor([1, 1]), 10, 1, 0)
    with pytest.raises(ValueError, match="one array of indices_out"):
        split.write(two, [], [])
    with pytest.raises(TypeError, match="indices_out must be int64 or int32"):
        split.write(two, [two], [two])
    with pytest.raises(TypeError, match="outs must be"):
        split.write(two, [two.int()], [two.double()])
    with pytest.raises(ValueError, match="values must be"):
        split.write(torch.zeros(3), [two.int()], [two])
    with pytest.raises(ValueError, match="indices_out of int32 cannot hold"):
        kernels.partition_hashed(torch.tensor([1, 1]), 2**31 + 1, 1, 0).write(two, [two.int()], [two])


@every
def test_lists_of_no_owner_or_size_are_refused(kernels) -> None:
    for n in (0, 2**16 + 1):
        with pytest.raises(ValueError, match=r"number of owners must be in \[1, 65536\]"):
            kernels.owned_by_hash(10, n, 0)
    with pytest.raises(ValueError, match="size must not be negative"):
        kernels.owned_by_hash(-1, 2, 0)


def test_lists_are_made_on_the_device_that_is_named_or_refused() -> None:
    for make in (owned_by_hash, reference.owned_by_hash):
        assert make(5, 1, 0, device=torch.device("cpu"))[0].tolist() == [0, 1, 2, 3, 4]
    with use("native"), pytest.raises(TypeError, match="on the CPU, got lists .* on meta"):
        owned_by_hash(5, 1, 0, device=torch.device("meta"))


@native
def test_hashed_indices_that_are_apart_are_refused_not_copied(module: ModuleType) -> None:
    apart, two = torch.arange(4)[::2], torch.zeros(2)
    split = cpu.partition_hashed(torch.arange(2), 10, 1, 0, module=module)
    for call in (
        lambda: cpu.owners_by_hash(apart, 2, 0, torch.zeros(2).int(), module=module),
        lambda: cpu.owners_by_hash(torch.arange(2), 2, 0, apart, module=module),
        lambda: cpu.partition_hashed(apart, 10, 2, 0, module=module),
        lambda: split.write(torch.zeros(4)[::2], [two.int()], [two]),
        lambda: split.write(two, [apart], [two]),
        lambda: split.write(two, [apart.int().repeat_interleave(2)[::2]], [two]),
        lambda: split.write(two, [two.int()], [torch.zeros(4)[::2]]),
        lambda: cpu.positions_in(apart, torch.arange(2), torch.zeros(2).int(), module=module),
        lambda: cpu.positions_in(torch.arange(2), apart, torch.zeros(2).int(), module=module),
        lambda: cpu.positions_in(torch.arange(2), torch.arange(2), apart, module=module),
    ):
        with pytest.raises(TypeError, match=r"must be contiguous.*strides \(2\)"):
            call()


SIZE = 1 << 24
SEEDS = 10
# Elements, and for 16 and 128 owners the largest share of one over the mean: by hash and by rotated stripe, as
# simulated for the design of this library, in one draw each, and how far ten draws may be from that. Of one hot column,
# each of 128 owners has 64 elements: one draw is 0.06 (standard deviation) from the mean of many, which is 1.35.
IMBALANCE = {
    "uniform 1 %": (lambda: random_indices(SIZE, 0.01, seed=1), (1.013, 1.076), (1.021, 1.058), 0.03),
    "zipf rows of 256": (lambda: zipf_rows(SIZE, 256, 1000), (1.018, 1.066), (1.0, 1.0), 0.03),
    "zipf rows of 16": (lambda: zipf_rows(SIZE, 16, 20_000), (1.023, 1.068), (1.0, 1.036), 0.03),
    "dense first 1 %": (lambda: torch.arange(SIZE // 100 // 128 * 128), (1.018, 1.065), (1.0, 1.0), 0.03),
    "20 hot columns of 2048": (
        lambda: columns_of_2048(SIZE, torch.arange(7, 2048, 103)[:20]), (1.024, 1.090), (1.012, 1.083), 0.03,
    ),
    "one hot column of 2048": (
        lambda: columns_of_2048(SIZE, torch.tensor([5])), (1.072, 1.391), (1.121, 1.281), 0.08,
    ),
}  # fmt: skip


def mean_imbalance(partition_of, indices: Tensor, n: int) -> float:
    most = [max(partition_of(indices, SIZE, n, seed).counts) for seed in range(SEEDS)]
    return sum(most) / SEEDS * n / len(indices)


@pytest.mark.parametrize("shape", IMBALANCE)
def test_the_hash_is_as_balanced_as_simulated_and_the_rotated_stripe_no_less(shape: str) -> None:
    indices_of, by_hash, by_stripe, tolerance = IMBALANCE[shape]
    indices = indices_of().int()
    for n, hash_expected, stripe_expected in zip((16, 128), by_hash, by_stripe, strict=True):
        hash_found = mean_imbalance(cpu.partition_hashed, indices, n)
        stripe_found = mean_imbalance(cpu.partition_rotated, indices, n)
        assert hash_found == pytest.approx(hash_expected, abs=tolerance)
        assert stripe_found == pytest.approx(stripe_expected, abs=tolerance)
        assert stripe_found <= hash_found + 0.01
