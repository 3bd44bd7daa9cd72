"""Indices as offsets within blocks: exact for every density, of a size known beforehand, and safe from damage."""

from __future__ import annotations

from types import ModuleType

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gradsync.kernels import offsets_nbytes, reference
from tests.kernels.native import cpu, native
from tests.kernels.on_device import every
from tests.kernels.shapes import random_indices

both = pytest.mark.parametrize("kernels", [cpu, reference], ids=["native", "reference"])
formats = pytest.mark.parametrize("bits", [8, 16])
DENSITIES = [0.0, 0.0005, 0.004, 0.05, 0.3, 0.95, 1.0]
SIZES = [0, 1, 255, 256, 257, 511, 20_011, 65_535, 65_536, 65_537, 200_003]


def encoded(kernels, indices: Tensor, size: int, bits: int, **options) -> Tensor:
    """Returns the message, written at an odd address; its neighbours in memory must stay unchanged."""
    nbytes = offsets_nbytes(len(indices), size, bits)
    whole = torch.full((nbytes + 17,), 77, dtype=torch.uint8)
    kernels.encode_offsets(indices, size, bits, whole[1 : 1 + nbytes], **options)
    assert whole[0] == 77 and (whole[1 + nbytes :] == 77).all()
    return whole[1 : 1 + nbytes]


def decoded(kernels, message: Tensor, size: int, bits: int, count: int, dtype: torch.dtype, **options) -> Tensor:
    whole = torch.full((count + 16,), 77, dtype=dtype)
    kernels.decode_offsets(message, size, bits, whole[:count], **options)
    assert (whole[count:] == 77).all()
    return whole[:count].long()


def assert_round_trip(indices: Tensor, size: int, bits: int, module: ModuleType) -> None:
    message = encoded(reference, indices, size, bits)
    for dtype in (torch.int32, torch.int64):
        assert torch.equal(encoded(cpu, indices.to(dtype), size, bits, module=module), message)
        assert torch.equal(decoded(cpu, message, size, bits, len(indices), dtype, module=module), indices)
        assert torch.equal(decoded(reference, message, size, bits, len(indices), dtype), indices)


@native
@formats
@pytest.mark.parametrize("size", SIZES)
def test_offsets_give_back_their_indices(size: int, bits: int, module: ModuleType) -> None:
    for density in DENSITIES:
        assert_round_trip(random_indices(size, density), size, bits, module)


@native
@formats
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_blocks_that_are_full_or_nearly_so_give_back_their_indices(
    module: ModuleType, bits: int, data: st.DataObject
) -> None:
    blocks, block = data.draw(st.integers(1, 4), label="blocks"), 256
    kept = torch.ones(blocks, block, dtype=torch.bool)
    for row in kept:  # full, without one or some, or with one only
        missing = data.draw(st.sets(st.sampled_from([0, 1, 2, 100, 253, 254, 255]), max_size=3), label="missing")
        row[list(missing)] = False
        if data.draw(st.booleans(), label="inverted"):
            row.logical_not_()
    size = blocks * block - data.draw(st.integers(0, block - 1), label="ragged")
    assert_round_trip(kept.flatten()[:size].nonzero().flatten(), size, bits, module)


@native
@formats
def test_one_index_anywhere_gives_itself_back(bits: int, module: ModuleType) -> None:
    for index in (0, 255, 256, 65_535, 65_536, 99_999):
        assert_round_trip(torch.tensor([index]), 100_000, bits, module)
    far = torch.tensor([3, 2**31 - 1, 2**31, 2**33 - 1])
    if bits == 16:
        message = encoded(cpu, far, 2**33, bits, module=module)
        assert torch.equal(decoded(cpu, message, 2**33, bits, 4, torch.int64, module=module), far)


@every
def test_counts_are_ones_and_zeros_where_that_is_shorter(kernels) -> None:
    indices = torch.tensor([5, 255, 256, 2047])  # in 8 blocks of which 5 have none: 4 ones and 8 zeros
    message = encoded(kernels, indices, 2048, 8)
    assert message.tolist() == [0b00001011, 0b00000100, 5, 255, 0, 255]
    dense = torch.arange(256, 512)  # a full block among many empty ones: its offsets are in order
    message = encoded(kernels, dense, 256 * 400, 8)
    assert len(message) == (256 + 400) // 8 + 256 and message[-256:].tolist() == list(range(256))


@every
def test_the_layout_is_the_documented_one(kernels) -> None:
    full, nearly = torch.arange(256), torch.arange(512, 767)
    message = encoded(kernels, torch.cat([full, torch.tensor([256, 300]), nearly]), 769, 8)
    counts, offsets = message[:4].tolist(), message[4:].tolist()
    assert counts == [255, 2, 255, 0]
    assert offsets == [255, *range(255), 0, 44, *range(255)]
    message = encoded(kernels, torch.tensor([5, 65_535, 65_536 * 2 + 258]), 65_536 * 2 + 300, 16)
    assert message.tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 5, 0, 255, 255, 2, 1]
    assert len(encoded(kernels, torch.arange(65_536), 65_536, 16)) == 4 + 2 * 65_536


def test_the_size_of_a_message_follows_from_the_number_of_indices() -> None:
    assert offsets_nbytes(0, 0, 8) == offsets_nbytes(0, 0, 16) == 0
    assert offsets_nbytes(10, 257, 8) == 2 + 10
    assert offsets_nbytes(10, 65_537, 16) == 2 * 4 + 2 * 10
    with pytest.raises(ValueError, match="bits must be 8 or 16, got 12"):
        offsets_nbytes(1, 1, 12)


@every
@formats
def test_indices_that_cannot_be_encoded_are_refused_before_anything_is_written(kernels, bits: int) -> None:
    out = torch.full((offsets_nbytes(3, 600, bits),), 7, dtype=torch.uint8)
    for bad, message in (
        ([1, 5, 600], r"encode_offsets: index 600 of part 0 is outside \[0, size=600\)"),
        ([-1, 5, 6], r"encode_offsets: index -1 of part 0 is outside \[0, size=600\)"),
        ([1, 700, 6], r"encode_offsets: index 700 of part 0 is outside \[0, size=600\)"),
        ([1, 300, 6], "encode_offsets: indices must ascend, got 300 before 6"),
        ([1, 6, 6], "encode_offsets: indices must ascend, got 6 before 6"),
    ):
        for dtype in (torch.int32, torch.int64):
            with pytest.raises(ValueError, match=message):
                kernels.encode_offsets(torch.tensor(bad, dtype=dtype), 600, bits, out)
    three = torch.arange(3)
    with pytest.raises(ValueError, match="out must be of shape"):
        kernels.encode_offsets(three, 600, bits, out[:-1])
    with pytest.raises(ValueError, match="size must not be negative, got -1"):
        kernels.encode_offsets(three, -1, bits, out)
    with pytest.raises(ValueError, match="bits must be 8 or 16, got 12"):
        kernels.encode_offsets(three, 600, 12, out)
    with pytest.raises(TypeError, match="out must be uint8"):
        kernels.encode_offsets(three, 600, bits, out.int())
    with pytest.raises(TypeError, match="int64 or int32"):
        kernels.encode_offsets(three.float(), 600, bits, out)
    assert (out == 7).all()


def damaged(message: Tensor, *changes: tuple[int, int]) -> Tensor:
    copy = message.clone()
    for place, value in changes:
        copy[place] = value
    return copy


@every
def test_damaged_messages_of_8_bits_are_refused(kernels) -> None:
    indices = torch.cat([torch.arange(256), torch.tensor([300, 301, 520])])  # in blocks of 256, 2 and 1, of 3
    size, out = 530, torch.zeros(len(indices)).long()
    message = encoded(kernels, indices, size, 8)
    for changes in (
        [(1, 3)],  # a count too many
        [(1, 1)],  # one too few
        [(0, 254)],
        [(0, 0), (2, 255)],  # more than there are
        [(3, 9)],  # the full block's offsets neither 256 nor 255 in order
        [(4, 1)],
        [(3 + 255, 7)],
        [(3 + 256, 45)],  # equal
        [(3 + 256, 46)],  # descending
        [(3 + 258, 200)],  # beyond the size
        [(1, 1), (2, 2)],  # offsets of one block in another
    ):
        with pytest.raises(ValueError, match="the message is malformed"):
            kernels.decode_offsets(damaged(message, *changes), size, 8, out)
    kernels.decode_offsets(message, size, 8, out)
    assert torch.equal(out, indices)


@every
def test_damaged_messages_with_unary_counts_are_refused(kernels) -> None:
    indices = torch.tensor([5, 255, 256, 2046])
    size, out = 2047, torch.zeros(4).long()
    message = encoded(kernels, indices, size, 8)
    for changes in (
        [(0, 0b00011011)],  # a one too many
        [(0, 0b00001001)],  # one too few
        [(0, 0b00000111)],  # 256's offset in the first block
        [(1, 0b00001000), (0, 0b00001011)],  # a one behind the last zero
        [(2, 255)],  # equal
        [(5, 255)],  # beyond the size
    ):
        with pytest.raises(ValueError, match="the message is malformed"):
            kernels.decode_offsets(damaged(message, *changes), size, 8, out)
    kernels.decode_offsets(message, size, 8, out)
    assert torch.equal(out, indices)


@every
def test_damaged_messages_of_16_bits_are_refused(kernels) -> None:
    indices = torch.tensor([4, 900, 65_540])
    size, out = 70_000, torch.zeros(3).long()
    message = encoded(kernels, indices, size, 16)
    for changes in (
        [(0, 3)],
        [(0, 1)],
        [(3, 255)],  # a negative count
        [(2, 1)],  # more than there are
        [(0, 4), (4, 255), (5, 255), (6, 255), (7, 255)],  # 4 and -1
        [(9, 200)],  # descending
        [(13, 250)],  # beyond the size
    ):
        with pytest.raises(ValueError, match="the message is malformed"):
            kernels.decode_offsets(damaged(message, *changes), size, 16, out)
    kernels.decode_offsets(message, size, 16, out)
    assert torch.equal(out, indices)


@native
@formats
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_bytes_are_decoded_or_refused_as_by_the_definition(
    module: ModuleType, bits: int, data: st.DataObject
) -> None:
    size, count = data.draw(st.integers(1, 600)), data.draw(st.integers(0, 8))
    nbytes = offsets_nbytes(count, size, bits)
    message = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=nbytes, max_size=nbytes))).byte()
    results: list[Tensor | None] = []
    for kernels, options in ((reference, {}), (cpu, {"module": module})):
        try:
            results.append(decoded(kernels, message, size, bits, count, torch.int64, **options))
        except ValueError:
            results.append(None)
    assert (results[0] is None) == (results[1] is None)
    if results[0] is not None and results[1] is not None:
        assert torch.equal(results[0], results[1])
        assert torch.equal(encoded(reference, results[0], size, bits), message)


@every
@formats
def test_buffers_that_do_not_fit_a_message_are_refused(kernels, bits: int) -> None:
    message = encoded(kernels, torch.arange(3), 600, bits)
    with pytest.raises(ValueError, match="message must be of shape"):
        kernels.decode_offsets(message, 600, bits, torch.zeros(2).long())
    with pytest.raises(TypeError, match="message must be uint8"):
        kernels.decode_offsets(message.int(), 600, bits, torch.zeros(3).long())
    with pytest.raises(TypeError, match="out must be int64 or int32"):
        kernels.decode_offsets(message, 600, bits, torch.zeros(3))
    with pytest.raises(ValueError, match="out of int32 cannot hold"):
        wide = torch.zeros(offsets_nbytes(3, 2**31 + 1, bits), dtype=torch.uint8)
        kernels.decode_offsets(wide, 2**31 + 1, bits, torch.zeros(3).int())


@native
@formats
def test_offsets_that_are_apart_are_refused_not_copied(bits: int, module: ModuleType) -> None:
    message = encoded(reference, torch.arange(3), 600, bits)
    apart = message.repeat_interleave(2)[::2]
    for call in (
        lambda: cpu.encode_offsets(torch.arange(6)[::2], 600, bits, message, module=module),
        lambda: cpu.encode_offsets(torch.arange(3), 600, bits, apart, module=module),
        lambda: cpu.decode_offsets(apart, 600, bits, torch.zeros(3).long(), module=module),
        lambda: cpu.decode_offsets(message, 600, bits, torch.zeros(6).long()[::2], module=module),
    ):
        with pytest.raises(TypeError, match=r"must be contiguous.*strides \(2\)"):
            call()
