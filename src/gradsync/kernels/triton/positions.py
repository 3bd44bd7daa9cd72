"""Bitmaps that know ranks, in Triton, and their way to and from packed positions in messages.

A rank bitmap has a row of bits for each of several sets of positions, in blocks of 256, and says how many set bits are
before each block. So the rank of a position, and the position with a rank, are found within one block: elements are
gathered and scattered without lists of positions and without sorts.

A message may begin at any address, so it is read and written in bytes: the head, which says how many positions each
block has (of a bitmap, it is all there is), and an item of 1, 2, 4 or 8 bytes for each position. A table tells the
kernels of all messages at once; the host never waits here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.checks import PackedPositions, check_packed, num_blocks, packed_nbytes
from gradsync.kernels.reference.offsets import is_unary
from gradsync.kernels.triton.boundary import BLOCK, blocks, launch, on
from gradsync.kernels.triton.elements import ones_in
from gradsync.kernels.triton.ordered import place_after

_WORDS = 8  # of 32 bits, in a block of 256 positions
_COUNTED = 128  # blocks whose set bits one program counts
_SCANNED = 1024  # entries of a message's head that one program works on


@dataclass(frozen=True)
class RankBitmap:
    """Bitmaps of positions in [0, size), one for each row, with counts by which the n-th set bit is found fast.

    The rows lie end to end: block b of row r, of 256 positions, is number r * blocks + b.

    Attributes:
        words: the bits, (rows * blocks * 8,) int32.
        begins: how many bits are set before each block, and at last in all, (rows * blocks + 1,) int64.
        rows: the number of bitmaps.
        blocks: the number of blocks in a row.
    """

    words: Tensor  # (rows * blocks * 8,) int32
    begins: Tensor  # (rows * blocks + 1,) int64
    rows: int
    blocks: int  # of 256 positions, in a row

    def ends(self) -> Tensor:
        """Returns how many bits are set before each row, and at last in all rows: (rows + 1,) int64."""
        return self.begins[self.blocks * torch.arange(self.rows + 1, device=self.begins.device)]


def ranked(words: Tensor, rows: int, size: int) -> RankBitmap:
    """Returns bitmaps with counts (a `RankBitmap`) from their bits, `words`, (rows * blocks * 8,) int32.

    Bits of a row beyond its `size` positions must be 0; a block has 256 positions.
    """
    counts = torch.empty(len(words) // _WORDS, dtype=torch.int32, device=words.device)
    programs = blocks(len(counts), _COUNTED)
    launch(_count_blocks, programs, words.device, words, len(counts), counts, BLOCKS=_COUNTED, WORDS=_WORDS)
    return RankBitmap(words, before_each(counts), rows, num_blocks(size, 8))


def empty_words(rows: int, size: int, device: torch.device) -> Tensor:
    """Returns uninitialised memory for the bits of `rows` bitmaps of `size` positions each, (rows * blocks * 8,) int32.

    A block has 256 positions.
    """
    return torch.empty(rows * num_blocks(size, 8) * _WORDS, dtype=torch.int32, device=device)


def before_each(counts: Tensor) -> Tensor:
    """Returns the sum of the counts, (n,) integers, before each one, and at last that of all: (n + 1,) int64."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


@triton.jit
def _count_blocks(
    words: tl.tensor, num_blocks: tl.tensor, counts: tl.tensor, BLOCKS: tl.constexpr, WORDS: tl.constexpr
) -> None:
    """One program stores the number of set bits in each of BLOCKS blocks."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    word = tl.load(words + at, mask=(block < num_blocks)[:, None], other=0)
    tl.store(counts + block, tl.sum(ones_in(word), 1), mask=block < num_blocks)


@triton.jit
def halved(counts: tl.tensor, width: tl.constexpr, place: tl.tensor, left: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Returns which half of 2 `width` bits has the set bit that is searched: one step of a binary search in a word.

    The bit searched is the one with `left` set bits before it, counted from `place`. The result is the place where its
    half begins, and how many set bits of that half are before it. `counts` has, in every `width` bits, the number of
    set bits among these.
    """
    lower = ((counts >> place.to(tl.uint32)) & (2 * width - 1)).to(tl.int64)
    return tl.where(left >= lower, place + width, place), tl.where(left >= lower, left - lower, left)


@triton.jit
def place_of_rank(
    words: tl.tensor, begins: tl.tensor, first: tl.tensor, num_blocks: tl.tensor, rank: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the block, and the place in it, of the set bit with each `rank`: so many set bits of all rows precede it.

    Args:
        words, begins: of the `RankBitmap`.
        first, num_blocks: the blocks in which the bit is.
        rank: int64.
    """
    block = first + place_after(begins + first + 1, num_blocks, rank)
    left = rank - tl.load(begins + block)
    ones = ones_in(tl.load(words + block[:, None] * 8 + tl.arange(0, 8)[None, :]))
    before = tl.cumsum(ones, 1) <= left[:, None]
    number = tl.sum(before.to(tl.int64), 1)
    left -= tl.sum(tl.where(before, ones, 0), 1)
    bits = tl.load(words + block * 8 + number).to(tl.uint32, bitcast=True)
    pairs = bits - ((bits >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    place, left = halved((eights + (eights >> 8)) & 0x00FF00FF, 16, left * 0, left)
    place, left = halved(eights, 8, place, left)
    place, left = halved(fours, 4, place, left)
    place, left = halved(pairs, 2, place, left)
    place, left = halved(bits, 1, place, left)
    return block, 32 * number + place


@triton.jit
def rank_of_place(
    words: tl.tensor, begins: tl.tensor, block: tl.tensor, place: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Returns whether the bit at a place of each block is set, and how many set bits of all rows come before it.

    Args:
        words, begins: of the `RankBitmap`.
        block: the number of each block.
        place: the place in the block, int64.
    """
    passed = tl.maximum(place[:, None] - 32 * tl.arange(0, 8)[None, :], 0)  # bits of each word before the place
    word = tl.load(words + block[:, None] * 8 + tl.arange(0, 8)[None, :], mask=passed > 0, other=0)
    counted = word & tl.where(passed < 32, (1 << tl.minimum(passed, 31)) - 1, -1).to(tl.int32)
    bit = (tl.load(words + block * 8 + place // 32) >> (place % 32).to(tl.int32)) & 1
    return bit != 0, tl.load(begins + block) + tl.sum(ones_in(counted), 1)


@triton.jit
def bytes_at(address: tl.tensor, at: tl.tensor, width: tl.tensor, inside: tl.tensor, MOST: tl.constexpr) -> tl.tensor:
    """Returns the entries number `at` of an array of unsigned integers of `width` bytes each, as int64.

    Args:
        address: where the array begins.
        at: the numbers of the entries.
        width: at most MOST.
        inside: which entries exist; others are 0.
    """
    byte = tl.arange(0, MOST)[None, :]
    places = address.to(tl.pointer_type(tl.uint8)) + (at * width)[:, None] + byte
    found = tl.load(places, mask=inside[:, None] & (byte < width), other=0)
    return tl.sum(found.to(tl.int64) << (8 * byte).to(tl.int64), 1)


@triton.jit
def store_position(
    table: tl.tensor,
    messages: tl.tensor,
    message: tl.tensor,
    at: tl.tensor,
    position: tl.tensor,
    full: tl.tensor,
    inside: tl.tensor,
) -> None:
    """Stores positions, int64, in a message of packed positions, as its items number `at`.

    An item has the lowest bytes of its position. In messages with counts of one byte, the items of full blocks, which
    have all 256 positions, are 255, 0, 1, ..., 254.

    Args:
        table: of `message_table`, with so many `messages`.
        message: the number of the message.
        full: whether a position is in a full block.
        inside: which positions exist.
    """
    width, entry = tl.load(table + 3 * messages + message), tl.load(table + 4 * messages + message)
    item, byte = position - (full & (entry == 8)).to(tl.int64), tl.arange(0, 8)[None, :]
    places = tl.load(table + messages + message).to(tl.pointer_type(tl.uint8)) + (at * width)[:, None] + byte
    found = (item[:, None] >> (8 * byte).to(tl.int64)) & 255
    tl.store(places, found.to(tl.uint8), mask=inside[:, None] & (byte < width))


@triton.jit
def _write_heads(
    table: tl.tensor,
    messages: tl.tensor,
    words: tl.tensor,
    begins: tl.tensor,
    zeros: tl.tensor,
    blocks: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program writes some bytes of one message's head, a byte each lane, from the bitmap's row of its number.

    `zeros`: where the zero bit behind each block is in unary counts, plus all set bits and blocks before its row.
    """
    message = tl.program_id(0) % messages
    at = (tl.program_id(0) // messages).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head, row = tl.load(table + message), message.to(tl.int64) * blocks
    inside = at < tl.load(table + messages + message) - head
    width, entry = tl.load(table + 3 * messages + message), tl.load(table + 4 * messages + message)
    value = at * 0
    if width == 0:
        word = tl.load(words + row * 8 + at // 4, mask=inside, other=0)
        value = (word >> (at % 4 * 8).to(tl.int32)).to(tl.int64)
    elif entry == 1:
        base = tl.load(begins + row) + row
        block = place_after(zeros + row, blocks, base + 8 * at - 1)
        for bit in tl.static_range(8):
            zero = tl.load(zeros + row + block, mask=block < blocks, other=0) - base
            value |= ((block < blocks) & (zero != 8 * at + bit)).to(tl.int64) << bit
            block += ((block < blocks) & (zero == 8 * at + bit)).to(tl.int64)
    else:
        nbytes, covered = tl.maximum(entry // 8, 1), 1 << (8 * width - 8)  # of an entry; blocks of 256 that it counts
        first = tl.minimum(at // nbytes * covered, blocks)
        value = tl.load(begins + row + tl.minimum(first + covered, blocks), mask=inside, other=0)
        value -= tl.load(begins + row + first, mask=inside, other=0)
        value = tl.where(entry == 8, tl.minimum(value, 255), value >> (at % 4 * 8))
    tl.store(head.to(tl.pointer_type(tl.uint8)) + at, (value & 255).to(tl.uint8), mask=inside)


@triton.jit
def head_entries(table: tl.tensor, messages: tl.tensor, message: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Returns the entries number `at` of a message's head as int64; 0 behind its end.

    The head has the number of positions in each block, as numbers or, bit by bit, in unary. `table`, with so many
    `messages`, is that of `message_table`; `message` is the number of the message.
    """
    entry = tl.load(table + 4 * messages + message)
    inside = at < tl.load(table + 5 * messages + message)
    value = bytes_at(tl.load(table + message), tl.where(entry == 1, at // 8, at), (entry + 7) // 8, inside, 4)
    return tl.where(entry == 1, (value >> (at % 8)) & 1, value)


@triton.jit
def _sum_heads(table: tl.tensor, messages: tl.tensor, sums: tl.tensor, BLOCK: tl.constexpr) -> None:
    """One program stores the sum of some entries of one message's head; the sums of a message lie end to end."""
    message, chunk = tl.program_id(0) % messages, tl.program_id(0) // messages
    at = chunk.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = message.to(tl.int64) * (tl.num_programs(0) // messages) + chunk
    tl.store(sums + place, tl.sum(head_entries(table, messages, message, at), 0))


@triton.jit
def _find_ends(
    table: tl.tensor,
    messages: tl.tensor,
    sums: tl.tensor,
    blocks: tl.tensor,
    ends: tl.tensor,
    faults: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program stores for some blocks of one message how many items the message has up to each one's end.

    `sums`: those of all entries before each program's. In unary counts a block ends at a zero, and there is no one
    behind the last block's; all programs that find a fault store the same 1.
    """
    message, chunk = tl.program_id(0) % messages, tl.program_id(0) // messages
    at = chunk.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = head_entries(table, messages, message, at)
    first = message.to(tl.int64) * (tl.num_programs(0) // messages)
    total = tl.load(sums + first + chunk) - tl.load(sums + first) + tl.cumsum(value, 0)
    unary = tl.load(table + 4 * messages + message) == 1
    block = tl.where(unary, at - total, at)
    ending = (at < tl.load(table + 5 * messages + message)) & (block < blocks) & ((unary & (value != 0)) == 0)
    tl.store(ends + message.to(tl.int64) * blocks + block, total, mask=ending)
    behind = unary & (value != 0) & (at >= tl.load(table + 2 * messages + message) + blocks - 1)
    tl.store(faults, 1, mask=tl.max(behind.to(tl.int32), 0) > 0)


@triton.jit
def _add_full(table: tl.tensor, messages: tl.tensor, blocks: tl.tensor, ends: tl.tensor, BLOCK: tl.constexpr) -> None:
    """One program adds to the ends of one message's blocks the full ones before, whose count 255 stands for 256.

    A full block's first item is 255, and where it is depends on the full blocks before it: of the blocks that are
    looked at together, all with the count 255 are taken for full at first, then those whose first item is 255 at the
    place that this gives, until nothing changes. Then each one is right, as the one before it is.
    """
    message = tl.program_id(0)
    head, items = tl.load(table + message), tl.load(table + messages + message).to(tl.pointer_type(tl.uint8))
    count, entries = tl.load(table + 2 * messages + message), tl.load(table + 5 * messages + message)
    counted = tl.load(table + 4 * messages + message) == 8
    row = ends + message.to(tl.int64) * blocks
    before = entries * 0  # full blocks so far
    lacking = count - tl.load(row + blocks - 1, mask=counted & (entries > 0), other=0)
    first = tl.where(counted & (lacking != 0), 0, entries)
    while first < entries:
        at = first + tl.arange(0, BLOCK)
        value = bytes_at(head, at, entries * 0 + 1, at < entries, 1)
        end = tl.load(row + at, mask=at < entries, other=0)
        full = (value == 255).to(tl.int64)
        changes = entries * 0 + 1
        while changes > 0:
            begin = end - value + before + tl.cumsum(full, 0) - full
            fits = (value == 255) & (begin + 256 <= count)
            found = (fits & (tl.load(items + begin, mask=fits, other=0) == 255)).to(tl.int64)
            changes = tl.max((found != full).to(tl.int64), 0)
            full = found
        tl.store(row + at, end + before + tl.cumsum(full, 0), mask=at < entries)
        before += tl.sum(full, 0)
        first += BLOCK


@triton.jit
def _set_positions(
    table: tl.tensor,
    messages: tl.tensor,
    blocks: tl.tensor,
    ends: tl.tensor,
    words: tl.tensor,
    faults: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program sets the bits of some items of one message by atomic OR, or copies some words of its bitmap.

    All programs that find positions out of order or range, or counts that do not add up, store the same 1 as a fault.
    """
    message = tl.program_id(0) % messages
    at = (tl.program_id(0) // messages).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head, items = tl.load(table + message), tl.load(table + messages + message)
    count, width = tl.load(table + 2 * messages + message), tl.load(table + 3 * messages + message)
    bound, row = tl.load(table + 6 * messages + message), message.to(tl.int64) * blocks
    if width == 0:
        copied = at < (items - head) // 4
        word = bytes_at(head, at, width + 4, copied, 4)
        wrong = (word >> tl.minimum(tl.maximum(bound - 32 * at, 0), 32)) != 0
        tl.store(words + row * 8 + at, word.to(tl.int32), mask=copied)
        tl.store(faults, 1, mask=tl.max(wrong.to(tl.int32), 0) > 0)
    else:
        known = at < count
        item = bytes_at(items, at, width, known, 8)
        previous = bytes_at(items, at - 1, width, known & (at > 0), 8)
        begin = at * 0
        position = tl.where(width == 4, item.to(tl.int32).to(tl.int64), item)
        before = tl.where(width == 4, previous.to(tl.int32).to(tl.int64), previous)
        if width <= 2:
            num_blocks = tl.where(width == 2, (blocks + 255) // 256, blocks)
            block = place_after(ends + row, num_blocks, at)
            known = known & (block < num_blocks)
            begin = tl.load(ends + row + block - 1, mask=known & (block > 0), other=0)
            length = tl.load(ends + row + block, mask=known, other=0) - begin
            turn = ((length == 256) & (tl.load(table + 4 * messages + message) == 8)).to(tl.int64)
            covered = 1 << 8 * width
            position = block * covered + (item + turn) % covered
            before = block * covered + (previous + turn) % covered
            total = tl.load(ends + row + num_blocks - 1, mask=num_blocks > 0, other=0)
            tl.store(faults, 1, mask=total != count)
        inside = known & (position >= 0) & (position < bound)
        wrong = (known & (inside == 0)) | (known & (at > begin) & (position <= before))
        tl.store(faults, 1, mask=tl.max(wrong.to(tl.int32), 0) > 0)
        bit = tl.full([BLOCK], 1, tl.int32) << (position % 32).to(tl.int32)
        tl.atomic_or(words + row * 8 + position // 32, bit, mask=inside, sem="relaxed")


def message_table(messages: Sequence[PackedPositions], size: int, bounds: Sequence[int] | None = None) -> Tensor:
    """Returns a table on the host, (7, messages) int64, by which Triton kernels find their way in packed positions.

    Positions are in [0, size). A message is a head, with the number of positions in each block, and items, the lowest
    bytes of positions. Rows of the table are: address, address of the items, number of items, bytes of an item, bits of
    an entry of the head, number of these entries, and the bound of the positions, `size` without `bounds`. A bitmap has
    items of 0 bytes; only heads of counts have entries, of 1 (unary counts), 8 or 32 bits.

    Raises:
        ValueError, TypeError: for a message of another size or dtype.
    """
    rows = []
    for message, bound in zip(messages, [size] * len(messages) if bounds is None else bounds, strict=True):
        check_packed(message, size)
        address, count, width = message.packed.data_ptr(), message.count, message.bits // 8
        head = packed_nbytes(count, size, message.bits) - count * width
        entry = {1: 1 if is_unary(count, size, 8) else 8, 2: 32}.get(width, 0)
        rows.append((address, address + head, count, width, entry, 8 * head // entry if entry else 0, bound))
    return torch.tensor(rows, dtype=torch.int64).T.contiguous()


def write_heads(bitmap: RankBitmap, table: Tensor, there: Tensor) -> None:
    """Writes the heads of messages from a bitmap: the number of positions in each block, or the bitmap itself.

    Message i has the positions of row i. `table` is that of `message_table`, (7, rows) int64, on the host, and `there`
    a copy on the device.
    """
    device = bitmap.words.device
    zeros = bitmap.begins[1:] + torch.arange(len(bitmap.begins) - 1, device=device)
    arguments = there, bitmap.rows, bitmap.words, bitmap.begins, zeros, bitmap.blocks
    longest = int((table[1] - table[0]).max())
    launch(_write_heads, bitmap.rows * blocks(longest), device, *arguments, BLOCK=BLOCK)


def read_positions(table: Tensor, size: int, device: torch.device) -> tuple[RankBitmap, Tensor]:
    """Returns the positions of messages as bitmaps, and whether any message is damaged, (1,) int32 of 0 or 1.

    Positions are in [0, size). `table`: (7, messages) int64, on the host, from `message_table`.
    """
    messages, num = table.shape[1], num_blocks(size, 8)
    there, words = on(device, table), empty_words(messages, size, device).zero_()
    ends = torch.full((messages * num,), -1, dtype=torch.int64, device=device)
    faults = torch.zeros(1, dtype=torch.int32, device=device)
    if most := int(table[5].max()):
        sums = torch.empty(messages * blocks(most, _SCANNED), dtype=torch.int64, device=device)
        launch(_sum_heads, len(sums), device, there, messages, sums, BLOCK=_SCANNED)
        before = before_each(sums)
        launch(_find_ends, len(sums), device, there, messages, before, num, ends, faults, BLOCK=_SCANNED)
        launch(_add_full, messages, device, there, messages, num, ends, BLOCK=_SCANNED)
    longest = int(torch.where(table[3] == 0, (table[1] - table[0]) // 4, table[2]).max())
    arguments = there, messages, num, ends, words, faults
    launch(_set_positions, messages * blocks(max(longest, 1)), device, *arguments, BLOCK=BLOCK)
    bitmap = ranked(words, messages, size)
    return bitmap, faults | (bitmap.ends().diff() != there[2]).any()
