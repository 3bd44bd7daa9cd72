"""Messages of elements, made, summed and joined without lists of indices: the definition's bits, safe on bad input."""

from __future__ import annotations

import importlib
from itertools import cycle
from types import ModuleType

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gradsync.kernels import PackedPositions, packed_nbytes, reference
from tests.kernels.native import DTYPES, assert_same_bits, cpu, native, special_values
from tests.kernels.on_device import DEVICE, TRITON, every
from tests.kernels.shapes import random_indices

BITS = (1, 8, 16, 32, 64)
DENSITIES = [0.0, 0.0005, 0.01, 0.3, 1.0]  # on both sides of unary counts, and of the native decoders' ways


def room_for(count: int, size: int, bits: int) -> PackedPositions:
    """Returns a buffer filled with 77, to show that padding stays unchanged."""
    return PackedPositions(torch.full((-(-packed_nbytes(count, size, bits) // 8) * 8,), 77).byte(), count, bits)


def sparse(size: int, density: float, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Returns a tensor with special values at random places and zeros of both signs."""
    indices = random_indices(size, density)
    x = torch.zeros(size, dtype=dtype)
    x[::3] = -0.0
    x[indices] = special_values(dtype)[2:][(indices + seed) % 5]
    return x


def partitioned(
    kernels, x: Tensor, n: int, bits: tuple[int, ...], **options
) -> tuple[list[PackedPositions], list[Tensor]]:
    """Returns for each owner its packed positions, in alternating formats, and its values."""
    split = kernels.partition_elements(x, n, 3, **options)
    runs = -(-len(x) // n)
    parts = [room_for(count, runs, bits[owner % len(bits)]) for owner, count in enumerate(split.counts)]
    values = [x.new_full((count,), 77) for count in split.counts]
    split.write(parts, values)
    return parts, values


def assert_same_parts(got: list[PackedPositions], expected: list[PackedPositions]) -> None:
    assert [(part.count, part.bits) for part in got] == [(part.count, part.bits) for part in expected]
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine.packed, theirs.packed)


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 3, 8, 70])
def test_messages_are_the_definitions_and_join_to_the_tensor(n: int, dtype: torch.dtype, module: ModuleType) -> None:
    cases = [(0, 1.0), (1, 1.0), (64, 0.0), *((70_021, density) for density in DENSITIES)]
    for (size, density), threads in zip(cases, cycle((3, 1)), strict=False):
        options = {"threads": threads, "module": module}
        x = sparse(size, density, dtype)
        parts, values = partitioned(cpu, x, n, BITS, **options)
        expected = partitioned(reference, x, n, BITS)
        assert_same_parts(parts, expected[0])
        for mine, theirs in zip(values, expected[1], strict=True):
            assert_same_bits(mine, theirs)
        for kernels, more in ((cpu, options), (reference, {})):
            whole = torch.full((size + 16,), 77, dtype=dtype)
            kernels.join_elements(parts, values, 3, whole[:size], **more)
            assert_same_bits(whole[:size], torch.where(x == 0, torch.zeros_like(x), x))
            assert (whole[size:] == 77).all()


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_those_of_the_definition(dtype: torch.dtype, module: ModuleType) -> None:
    shares = [(8, 1.0), (1, 0.0), (16, 1.0), (32, 0.01)]  # of the density, in a format each
    for size in (0, 1, 4095, 140_021):
        for density, threads in zip(DENSITIES, cycle((3, 1)), strict=False):
            tensors = [sparse(size, density * share, dtype, bits) for bits, share in shares]
            split = [partitioned(reference, x, 1, (bits,)) for x, (bits, _) in zip(tensors, shares, strict=True)]
            parts, values = [part for (part,), _ in split], [value for _, (value,) in split]
            native_union = cpu.unite_elements(parts, size, threads=threads, module=module)
            unions = native_union, reference.unite_elements(parts, size)
            assert unions[0].count == unions[1].count
            for bits in BITS:
                outs = []
                for union in unions:
                    outs.append((room_for(union.count, size, bits), torch.full((union.count,), 77, dtype=dtype)))
                    union.sum(values, *outs[-1], scale=0.25)
                assert_same_parts([outs[0][0]], [outs[1][0]])
                assert_same_bits(outs[0][1], outs[1][1])


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_messages_are_summed_as_rows_of_their_positions(dtype: torch.dtype, module: ModuleType) -> None:
    for size in (0, 1, 4095, 140_021, 2**31 + 9):
        indices = [random_indices(min(size, 5000), share) + max(0, size - 5000) for share in (1.0, 0.3, 0.01, 0.1, 0.0)]
        bits = (32 if size < 2**31 else 64, 8, 16, 1 if size < 2**31 else 64, 8)
        parts = [room_for(len(rows), size, each) for rows, each in zip(indices, bits, strict=True)]
        for rows, part in zip(indices, parts, strict=True):
            pack(rows, size, part)
        values = [special_values(dtype)[2:][rows % 5].view(-1, 1).repeat(1, 3) for rows in indices]
        expected = reference.unite_rows(indices, size)
        for threads in (3, 1):
            unions = (
                cpu.unite_messages(parts, size, threads=threads, module=module),
                reference.unite_messages(parts, size),
            )
            for union in unions:
                assert union.count == expected.count
                sums = [torch.full((union.count, 3), 77, dtype=dtype) for _ in range(2)]
                lists = [torch.empty(union.count, dtype=torch.int64) for _ in range(2)]
                for one, rows, total in zip((union, expected), lists, sums, strict=True):
                    one.write_indices(rows)
                    one.sum(values, [total], scale=0.5)
                assert torch.equal(*lists)
                assert_same_bits(*sums)


@every
def test_damaged_messages_of_rows_are_refused(kernels) -> None:
    right = room_for(3, 5, 32)
    pack(torch.tensor([0, 2, 4]), 5, right)
    too_high = torch.tensor([0, 2, 5]).int().view(torch.uint8)
    assert kernels.unite_messages([right], 5).count == 3
    for wrong, message in (
        (PackedPositions(right.packed[:8], 3, 32), "packed must be of 12 bytes|of shape"),
        (PackedPositions(right.packed, 3, 12), "bits must be 1, 8, 16, 32 or 64, got 12"),
        (PackedPositions(right.packed, 6, 1), "there cannot be 6 positions"),
        (PackedPositions(too_high, 3, 32), "the message is malformed|outside"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.unite_messages([right, wrong], 5)
    with pytest.raises(ValueError, match="unite_messages needs at least one part"):
        kernels.unite_messages([], 5)


def pack(indices: Tensor, size: int, part: PackedPositions) -> None:
    """Writes ascending indices in [0, size) into a message."""
    if part.bits == 1:
        reference.encode_bitmap(indices, size, part.packed.view(torch.int64))
    elif part.bits in (8, 16):
        reference.encode_offsets(indices, size, part.bits, part.packed[: packed_nbytes(part.count, size, part.bits)])
    else:
        dtype = torch.int32 if part.bits == 32 else torch.int64
        part.packed[: part.count * part.bits // 8].view(dtype).copy_(indices)


@native
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_bytes_are_joined_or_refused_as_by_the_definition(module: ModuleType, data: st.DataObject) -> None:
    size, bits = data.draw(st.integers(1, 3000), label="size"), data.draw(st.sampled_from(BITS), label="bits")
    runs, count = -(-size // 2), data.draw(st.integers(0, 8), label="count")
    values = [torch.ones(min(count, runs)), torch.ones(0)]
    nbytes = packed_nbytes(len(values[0]), runs, bits)
    few = st.sampled_from([0, 0, 0, 1, 2, 3, 7, 200])
    message = torch.tensor(data.draw(st.lists(few, min_size=nbytes, max_size=nbytes), label="bytes"))
    parts = [PackedPositions(message.byte(), len(values[0]), bits), room_for(0, runs, 32)]
    results: list[Tensor | None] = []
    for kernels, options in ((reference, {}), (cpu, {"module": module, "threads": 2})):
        out = torch.full((size,), 7.0)
        try:
            kernels.join_elements(parts, values, 3, out, **options)
            results.append(out)
        except ValueError:
            assert (out == 7).all()
            results.append(None)
    assert (results[0] is None) == (results[1] is None)
    if results[0] is not None and results[1] is not None:
        assert torch.equal(results[0], results[1])


def listed(positions: list[int] | Tensor, bits: int = 32) -> PackedPositions:
    numbers = torch.as_tensor(positions).to(torch.int32 if bits == 32 else torch.int64)
    return PackedPositions(numbers.view(torch.uint8), len(numbers), bits)


def crowded(bits: int, size: int, count: int) -> PackedPositions:
    """Returns a message whose counts give its first block more positions than the block holds."""
    part = room_for(count, size, bits)
    part.packed.zero_()
    if bits == 16:
        part.packed[: 4 * -(-size // 65536)].view(torch.int32)[0] = count
    else:
        part.packed[: count // 8] = 255  # unary counts: ones, then zeros
    return part


DAMAGED = {
    "a negative one within": (listed([5, 4500, -1, 8000]), 9000),
    "a descent between chunks": (listed([1, 5000, 2, 6000]), 8192),
    "two descents that even out": (listed([1, 9000, 5000, 8191, 12000]), 16384),
    "beyond 32 bits": (listed([1, 2**32 + 5, 7000], 64), 9000),
    "below 32 bits": (listed([1, 5000 - 2**32, 7000], 64), 9000),
    "all alike": (listed([3] * 20_000), 40_000),
    "all alike, 64 bits": (listed([3] * 20_000, 64), 40_000),
    "all in the first block of 256": (crowded(8, 10_000_000, 100_000), 10_000_000),
    "all in the first block of 65536": (crowded(16, 10_000_000, 100_000), 10_000_000),
}


@native
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_parts_are_refused_however_many_positions_they_claim(
    name: str, threads: int, module: ModuleType
) -> None:
    part, size = DAMAGED[name]
    options = {"threads": threads, "module": module}
    with pytest.raises(ValueError, match="the message is malformed"):
        cpu.unite_elements([part], size, **options)
    out = torch.full((size,), 7.0)
    with pytest.raises(ValueError, match="the message is malformed"):
        cpu.join_elements([part], [torch.ones(part.count)], 0, out, **options)
    assert (out == 7).all()


@every
def test_parts_that_cannot_be_joined_are_refused_before_anything_is_written(kernels) -> None:
    size, n = 10, 3
    parts, values = partitioned(reference, torch.arange(1.0, 11.0), n, (32,))
    lists = [part.packed[: 4 * part.count].view(torch.int32).tolist() for part in parts]
    out = torch.full((size,), 7.0)

    longest = max(range(n), key=lambda owner: len(lists[owner]))
    for owner in set(range(n)) - {longest}:  # the last run of 3 has one element: two owners have nothing in it
        beyond = [listed([*p, size // n] if o == owner else p) for o, p in enumerate(lists)]
        more = [torch.cat([v, torch.ones(1)]) if o == owner else v for o, v in enumerate(values)]
        with pytest.raises(ValueError, match=rf"index \d+ of part {owner} is outside .*size=10"):
            kernels.join_elements(beyond, more, 3, out)
    for bad in ([-1, *lists[0][1:]], lists[0][::-1], [9, *lists[0][1:]]):
        with pytest.raises(ValueError, match="the message is malformed"):
            kernels.join_elements([listed(bad), *parts[1:]], values, 3, out)
    with pytest.raises(ValueError, match="one of values for each part is needed, got 2 for 3"):
        kernels.join_elements(parts, values[:2], 3, out)
    with pytest.raises(ValueError, match="values must be"):
        kernels.join_elements(parts, [values[0][:1], *values[1:]], 3, out)
    with pytest.raises(TypeError, match="values must be"):
        kernels.join_elements(parts, [value.double() for value in values], 3, out)
    with pytest.raises(ValueError, match="out must be"):
        kernels.join_elements(parts, values, 3, out.view(2, 5))
    with pytest.raises(ValueError, match=r"number of owners must be in \[1, 65536\]"):
        kernels.join_elements([], [], 3, out)
    assert (out == 7).all()


@every
def test_buffers_that_do_not_fit_positions_are_refused(kernels) -> None:
    x = torch.tensor([1.0, 0.0, 2.0, 0.0, 3.0])
    split = kernels.partition_elements(x, 1, 0)
    right, values = room_for(3, 5, 32), torch.zeros(3)
    for wrong, message in (
        (PackedPositions(right.packed[:8], 3, 32), "packed must be of 12 bytes|of shape"),
        (PackedPositions(torch.zeros(24).byte(), 3, 32), "packed must be of 12 bytes"),
        (PackedPositions(right.packed, 3, 12), "bits must be 1, 8, 16, 32 or 64, got 12"),
    ):
        with pytest.raises(ValueError, match=message):
            split.write([wrong], [values])
        with pytest.raises(ValueError, match=message):
            kernels.unite_elements([wrong], 5)
    with pytest.raises(ValueError, match="there cannot be 6 positions"):
        kernels.unite_elements([PackedPositions(right.packed, 6, 1)], 5)
    with pytest.raises(ValueError, match="unite_elements needs at least one part"):
        kernels.unite_elements([], 5)
    with pytest.raises(TypeError, match="packed must be uint8"):
        kernels.unite_elements([PackedPositions(torch.zeros(12).int(), 3, 32)], 5)
    with pytest.raises(ValueError, match="one of outs for each part is needed, got 0 for 1"):
        split.write([right], [])
    with pytest.raises(ValueError, match="outs must be"):
        split.write([right], [values[:2]])
    with pytest.raises(TypeError, match="outs must be"):
        split.write([right], [values.double()])
    split.write([right], [values])
    union = kernels.unite_elements([right], 5)
    with pytest.raises(ValueError, match="out must be"):
        union.sum([values], right, values[:2])
    with pytest.raises(TypeError, match="(values|outs) must be"):
        union.sum([values.double()], right, values)
    with pytest.raises(ValueError, match="number of owners"):
        kernels.partition_elements(x, 0, 0)
    with pytest.raises(TypeError, match="x must be"):
        kernels.partition_elements(x.int(), 1, 0)


def clustered(lengths: list[int], size: int) -> Tensor:
    """Returns a tensor whose blocks of 256 begin with so many elements that are not zero, and end with zeros."""
    x = torch.zeros(-(-size // 256), 256)
    for block, length in enumerate(lengths):
        x[block, :length] = torch.arange(1.0, length + 1)
    return x.flatten()[:size]


# Full and nearly full blocks of 256 between others, for counts of one byte; more blocks than are scanned together.
PATTERNS = {
    "nothing": torch.zeros(0),
    "one": torch.ones(1),
    "zeros": torch.tensor([0.0, -0.0]).repeat(400),
    "sparse": sparse(5 * 600 + 2, 0.01, torch.float32),
    "dense": sparse(5 * 600 + 2, 0.3, torch.float32),
    "all": sparse(5 * 513, 1.0, torch.float32),
    "clusters": clustered([256, 255, 0, 256, 256, 7, 255, 254, 256], 2300),
    "few far apart": sparse(300_000, 0.0005, torch.float32),
    "clusters far apart": torch.cat([torch.zeros(290_000 // 256 * 256), clustered([255, 256, 255] + [256] * 31, 8704)]),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", PATTERNS)
def test_messages_on_a_device_are_the_definitions_and_join_to_the_tensor(name: str) -> None:
    x = PATTERNS[name]
    for n in (5, 1) if len(x) < 1000 else (5,) if len(x) < 10_000 else (1,):
        for bits in (BITS, (8, 1, 16, 64, 32)) if n > 1 else ((8,),):
            made = [partitioned(kernels, x, n, bits) for kernels in (TRITON, reference)]
            assert_same_parts(made[0][0], made[1][0])
            for mine, theirs in zip(made[0][1], made[1][1], strict=True):
                assert_same_bits(mine, theirs)
        whole = torch.full((len(x) + 16,), 77.0)
        TRITON.join_elements(*made[1], 3, whole[: len(x)])
        assert_same_bits(whole[: len(x)], torch.where(x == 0, torch.zeros_like(x), x))
        assert (whole[len(x) :] == 77).all()


@pytest.mark.interpreted
@pytest.mark.parametrize(("n", "size", "dtype"), list(zip((2, 16, 17, 40), (1100, 16, 600, 39), DTYPES, strict=True)))
def test_any_number_of_owners_gets_its_elements_from_a_device(n: int, size: int, dtype: torch.dtype) -> None:
    """One owner more than a tile has columns, or more owners than elements; elements begin at an odd place."""
    x = torch.cat([torch.ones(1, dtype=dtype), sparse(size, 0.5, dtype)])[1:]
    made = [partitioned(kernels, x, n, (8, 16)) for kernels in (TRITON, reference)]
    assert_same_parts(made[0][0], made[1][0])
    for mine, theirs in zip(made[0][1], made[1][1], strict=True):
        assert_same_bits(mine, theirs)
    out = torch.full_like(x, 77)
    TRITON.join_elements(*made[1], 3, out)
    assert_same_bits(out, torch.where(x == 0, torch.zeros_like(x), x))


@pytest.mark.interpreted
def test_the_most_owners_are_counted_on_a_device_as_by_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes tiles one after the other: there they have as many columns as Triton allows."""
    home = importlib.import_module("gradsync.kernels.triton.parts")
    if DEVICE.type == "cpu":
        monkeypatch.setattr(home, "_COLUMNS", 1 << 12)
        monkeypatch.setattr(home, "_TILE", 1 << 20)
    x, n = sparse(100_000, 0.01, torch.float16), 1 << 16
    assert TRITON.partition_elements(x, n, 3).counts == reference.partition_elements(x, n, 3).counts


@pytest.mark.interpreted
@pytest.mark.parametrize("name", PATTERNS)
def test_sums_on_a_device_are_those_of_the_definition(name: str) -> None:
    x = PATTERNS[name]
    tensors = [x, x.flip(0), sparse(len(x), 0.02, torch.float32)] if len(x) < 10_000 else [x, x.roll(1000)]
    for dtype, bits in zip(DTYPES, (8, 16, 1, 64), strict=True) if len(x) < 1000 else ((torch.float32, 8),):
        split = [partitioned(reference, t.to(dtype), 1, (b,)) for t, b in zip(tensors, (8, 1, 16), strict=False)]
        parts, values = [part for (part,), _ in split], [value for _, (value,) in split]
        outs = []
        for kernels in (TRITON, reference):
            union = kernels.unite_elements(parts, len(x))
            outs.append((room_for(union.count, len(x), bits), torch.full((union.count,), 77, dtype=dtype)))
            union.sum(values, *outs[-1], scale=0.3)
        assert_same_parts([outs[0][0]], [outs[1][0]])
        assert_same_bits(outs[0][1], outs[1][1])


def error_of(call, *arguments) -> str:
    """Returns the message of the ValueError that the call raises, or nothing."""
    try:
        call(*arguments)
    except ValueError as error:
        return str(error).replace("on cuda:0", "on cpu")
    return ""


@pytest.mark.interpreted
@pytest.mark.parametrize("bits", BITS)
def test_damage_has_the_same_error_on_a_device(bits: int) -> None:
    """Each byte of a short message takes some values that are wrong, and some that are not."""
    size, n = 523, 2
    x = sparse(size, 0.03, torch.float32)
    parts, values = partitioned(reference, x, n, (bits,))
    generator, found = torch.Generator().manual_seed(bits), set()
    for trial in range(12):
        packed = parts[trial % 2].packed.clone()
        used = packed_nbytes(parts[trial % 2].count, -(-size // n), bits)
        at = int(torch.randint(used, (1,), generator=generator)) if trial % 3 else trial // 3 % used
        packed[at] = int(torch.randint(256, (1,), generator=generator)) if trial % 4 else packed[at] ^ 1 << trial % 8
        damaged = list(parts)
        damaged[trial % 2] = PackedPositions(packed, parts[trial % 2].count, bits)
        outs = [torch.full((size,), 7.0) for _ in range(2)]
        errors = [
            error_of(kernels.join_elements, damaged, values, 3, out)
            for kernels, out in zip((TRITON, reference), outs, strict=True)
        ]
        assert errors[0] == errors[1]
        assert_same_bits(*outs)
        errors = [error_of(kernels.unite_elements, damaged, -(-size // n)) for kernels in (TRITON, reference)]
        assert errors[0] == errors[1]
        found.add(bool(errors[0]))
    assert True in found


@pytest.mark.interpreted
@pytest.mark.parametrize("name", [name for name, (part, _) in DAMAGED.items() if part.count < 20_000])
def test_what_lies_is_refused_by_a_device(name: str) -> None:
    part, size = DAMAGED[name]
    error = error_of(reference.unite_elements, [part], size)
    assert error_of(TRITON.unite_elements, [part], size) == error != ""
