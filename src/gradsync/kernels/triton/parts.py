"""Triton kernels that split, unite and join sparse elements in messages, by rank bitmaps: without lists, without sorts.

The bitmap of a partition or a join has a row for each owner (the rank that sums its elements), that of a union one for
each message and one for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels import phases
from gradsync.kernels.checks import (
    INT32_INDICES,
    PackedPositions,
    check_each,
    check_flat,
    check_floating,
    check_owners,
    check_packed,
    check_room,
    check_rotated_size,
    check_shape,
    check_size,
    check_some,
    check_union_sum,
    packed_nbytes,
)
from gradsync.kernels.reference import parts as reference
from gradsync.kernels.reference.rotated import rotation as rotation_of
from gradsync.kernels.reference.rotated import rotation_key
from gradsync.kernels.reference.rows import accumulation_dtype
from gradsync.kernels.triton.boundary import BLOCK, addresses, bits_of, blocks, device_of, launch, on, pointee
from gradsync.kernels.triton.elements import decode_bitmap
from gradsync.kernels.triton.offsets import decode_offsets
from gradsync.kernels.triton.positions import (
    RankBitmap,
    empty_words,
    message_table,
    place_of_rank,
    rank_of_place,
    ranked,
    read_positions,
    store_position,
    write_heads,
)
from gradsync.kernels.triton.rotated import element_of, rotation
from gradsync.kernels.triton.rows import RowUnion, kind_of, narrowed, widened

_TILE = 4096  # elements whose bits one program sets
_COLUMNS = 16  # of them at most so many neighbours
_GROUP = 32  # blocks of 256 positions whose elements one program moves or sums
_LANES = 256  # elements that it moves or sums at a time


@triton.jit(do_not_specialize=["key"])
def _mark_nonzero(
    x: tl.tensor,
    count: tl.tensor,
    n: tl.tensor,
    key: tl.tensor,
    words: tl.tensor,
    row_words: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program writes the words that say which elements of some owners are not zero, at ROWS positions of each.

    Of each n neighbours, every owner has one, in a rotation of the owners: a column of the tile has one owner's.
    """
    across = (n + COLUMNS - 1) // COLUMNS
    first = (tl.program_id(0) // across).to(tl.int64) * ROWS
    owner = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    turned = owner[None, :] - rotation(first + row, n, key).to(tl.int32)[:, None]
    at = row[:, None] * n + tl.where(turned < 0, turned + n, turned)
    left = tl.minimum(count - first * n, ROWS * n).to(tl.int32)
    bits = tl.load(x + first * n + at, mask=(owner < n)[None, :] & (at < left), other=0)
    marks = ((bits << 1) != 0).to(tl.int32) << (row % 32)[:, None]
    word = tl.sum(tl.reshape(marks, [ROWS // 32, 32, COLUMNS]), 1)
    number = first // 32 + tl.arange(0, ROWS // 32)
    place = owner.to(tl.int64)[None, :] * row_words + number[:, None]
    tl.store(words + place, word, mask=(owner < n)[None, :] & (number < row_words)[:, None])


@triton.jit(do_not_specialize=["key"])
def _move(
    x: tl.tensor,
    n: tl.tensor,
    key: tl.tensor,
    words: tl.tensor,
    begins: tl.tensor,
    blocks: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    VALUE: tl.constexpr,
    JOINS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program moves the elements at an owner's positions in one group of blocks: from `x` to its values, in order.

    It writes their positions to the owner's message too. If JOINS, it moves values to `x` instead. An owner's position
    stands for one element, and its rank for one value: no two lanes write the same.
    """
    owner = tl.program_id(0) % n
    row = owner.to(tl.int64) * blocks
    first = (tl.program_id(0) // n).to(tl.int64) * GROUP
    num = tl.minimum(blocks - first, GROUP)
    begin, end = tl.load(begins + row), tl.load(begins + row + first + num)
    rank = tl.load(begins + row + first) + tl.arange(0, BLOCK)
    value = tl.load(values + owner).to(tl.pointer_type(VALUE))
    while tl.min(rank, 0) < end:
        inside = rank < end
        block, place = place_of_rank(words, begins, row + first, num, tl.minimum(rank, end - 1))
        q = (block - row) * 256 + place
        element = x + element_of(owner, q, n, key)
        if JOINS:
            tl.store(element, tl.load(value + rank - begin, mask=inside, other=0), mask=inside)
        else:
            tl.store(value + rank - begin, tl.load(element, mask=inside, other=0), mask=inside)
            full = tl.load(begins + block + 1) - tl.load(begins + block) == 256
            store_position(table, n, owner, rank - begin, q, full, inside)
        rank += BLOCK


@triton.jit
def _unite(words: tl.tensor, num_words: tl.tensor, rows: tl.tensor, union: tl.tensor, BLOCK: tl.constexpr) -> None:
    """One program writes one block of words of the union of several bitmaps of `num_words` words each."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.zeros([BLOCK], tl.int32)
    row = tl.zeros([], tl.int64)
    while row < rows:
        word |= tl.load(words + row * num_words + at, mask=at < num_words, other=0)
        row += 1
    tl.store(union + at, word, mask=at < num_words)


@triton.jit
def _sum(
    words: tl.tensor,
    begins: tl.tensor,
    blocks: tl.tensor,
    part_words: tl.tensor,
    part_begins: tl.tensor,
    num_parts: tl.tensor,
    values: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    table: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program writes sums and positions in one group of blocks: a lane adds the values at one, in the parts' order.

    `words`, `begins`: the rank bitmap of the union; `part_words`, `part_begins`: that with a row for each part.
    """
    first = tl.program_id(0).to(tl.int64) * GROUP
    num = tl.minimum(blocks - first, GROUP)
    rank, end = tl.load(begins + first) + tl.arange(0, BLOCK), tl.load(begins + first + num)
    while tl.min(rank, 0) < end:
        inside = rank < end
        block, place = place_of_rank(words, begins, first, num, tl.minimum(rank, end - 1))
        total = widened(tl.zeros([BLOCK], BITS), KIND)
        part = tl.zeros([], tl.int64)
        while part < num_parts:
            found, at = rank_of_place(part_words, part_begins, part * blocks + block, place)
            source = tl.load(values + part).to(tl.pointer_type(BITS)) - tl.load(part_begins + part * blocks)
            bits = tl.load(source + at, mask=found & inside, other=0)
            total = tl.where(found, total + widened(bits, KIND), total)
            part += 1
        tl.store(out + rank, narrowed(total * tl.load(scale), KIND), mask=inside)
        full = tl.load(begins + block + 1) - tl.load(begins + block) == 256
        store_position(table, 1, tl.zeros([], tl.int64), rank, block * 256 + place, full, inside)
        rank += BLOCK


def _move_all(
    x: Tensor, seed: int, bitmap: RankBitmap, values: Sequence[Tensor], table: Tensor, *, joins: bool
) -> None:
    """Copies the elements of all owners (summing ranks) from `x`, (numel,), to `values`, (count,) each, or back."""
    device, programs = x.device, bitmap.rows * blocks(bitmap.blocks, _GROUP)
    arguments = (
        bits_of(x), bitmap.rows, rotation_key(seed), bitmap.words, bitmap.begins, bitmap.blocks,
        on(device, addresses(values)), table,
    )  # fmt: skip
    launch(_move, programs, device, *arguments, VALUE=pointee(x), JOINS=joins, GROUP=_GROUP, BLOCK=_LANES)


class ElementPartition:
    def __init__(self, x: Tensor, n: int, seed: int) -> None:
        check_owners(n)
        check_rotated_size(x.numel(), n)
        check_floating("x", x)
        check_flat("x", x)
        self._x, self._seed, self._runs = x, seed, -(-x.numel() // n)
        words = empty_words(n, self._runs, device_of(x=x))
        columns = min(_COLUMNS, 1 << (n - 1).bit_length())
        shape = {"ROWS": _TILE // columns, "COLUMNS": columns}
        arguments = bits_of(x), len(x), n, rotation_key(seed), words, len(words) // n
        launch(_mark_nonzero, blocks(self._runs, shape["ROWS"]) * blocks(n, columns), x.device, *arguments, **shape)
        self._bitmap = ranked(words, n, self._runs)
        self.counts = [end - begin for begin, end in pairwise(self._bitmap.ends().tolist())]

    def write(self, positions: Sequence[PackedPositions], outs: Sequence[Tensor]) -> None:
        check_each("positions", positions, len(self.counts))
        check_each("outs", outs, len(self.counts))
        for count, out, packed in zip(self.counts, outs, positions, strict=True):
            check_floating("outs", out, self._x.dtype)
            check_shape("outs", out, count)
            check_room(packed, count, self._runs)
        device = device_of(x=self._x, outs=outs, packed=[packed.packed for packed in positions])
        table = message_table(positions, self._runs)
        there = on(device, table)
        write_heads(self._bitmap, table, there)
        _move_all(self._x, self._seed, self._bitmap, outs, there, joins=False)


partition_elements = ElementPartition


class ElementUnion:
    def __init__(self, parts: RankBitmap, counts: Sequence[int], union: RankBitmap, count: int, size: int) -> None:
        self._parts, self._counts, self._union, self._size = parts, counts, union, size
        self.count = count

    def sum(self, values: Sequence[Tensor], positions: PackedPositions, out: Tensor, *, scale: float = 1.0) -> None:
        check_floating("out", out)
        check_shape("out", out, self.count)
        check_room(positions, self.count, self._size)
        check_union_sum(self._counts, [v.view(-1, 1) for v in values], [out.view(-1, 1)], None, self.count)
        device = device_of(union=self._union.words, values=values, out=out, packed=positions.packed)
        table = message_table([positions], self._size)
        there = on(device, table)
        write_heads(self._union, table, there)
        arguments = (
            self._union.words, self._union.begins, self._union.blocks, self._parts.words, self._parts.begins,
            len(values), on(device, addresses(values)),
            torch.full((1,), scale, dtype=accumulation_dtype(out.dtype), device=device), bits_of(out), there,
        )  # fmt: skip
        constants = {"KIND": kind_of("out", out), "BITS": pointee(out), "GROUP": _GROUP, "BLOCK": _LANES}
        launch(_sum, blocks(self._union.blocks, _GROUP), device, *arguments, **constants)


def unite_elements(parts: Sequence[PackedPositions], size: int) -> phases.ElementUnion:
    check_some("unite_elements", parts)
    table = message_table(parts, size)
    device = device_of(packed=[part.packed for part in parts])
    read, faults = read_positions(table, size, device)
    words = empty_words(1, size, device)
    launch(_unite, blocks(len(words)), device, read.words, len(words), len(parts), words, BLOCK=BLOCK)
    union = ranked(words, 1, size)
    count, is_damaged = torch.cat([union.begins[-1:], faults]).tolist()
    if is_damaged:
        return reference.unite_elements.reference(parts, size)  # says what is wrong
    return ElementUnion(read, [part.count for part in parts], union, count, size)


def unite_messages(parts: Sequence[PackedPositions], num_rows: int) -> phases.RowUnion:
    check_some("unite_messages", parts)
    check_size("num_rows", num_rows)
    return RowUnion([_unpacked(part, num_rows) for part in parts], num_rows)


def _unpacked(part: PackedPositions, size: int) -> Tensor:
    """Returns the positions in [0, size) of a message, (count,) int32 or int64; of a list, a view of the message."""
    check_packed(part, size)
    packed = part.packed[: packed_nbytes(part.count, size, part.bits)]
    if part.bits in (32, 64):
        return packed.view(torch.int32 if part.bits == 32 else torch.int64)
    indices = packed.new_empty(part.count, dtype=torch.int32 if size <= INT32_INDICES else torch.int64)
    if part.bits == 1:
        decode_bitmap(packed.view(torch.int64), indices)
    else:
        decode_offsets(packed, size, part.bits, indices)
    return indices


def join_elements(parts: Sequence[PackedPositions], values: Sequence[Tensor], seed: int, out: Tensor) -> None:
    n, runs = len(parts), -(-out.numel() // max(len(parts), 1))
    check_owners(n)
    check_rotated_size(out.numel(), n)
    check_each("values", values, n)
    check_floating("out", out)
    check_flat("out", out)
    shift = int(rotation_of(torch.tensor(runs - 1), n, seed))
    lacking = n * runs - len(out)  # of the last n neighbours, those beyond the end, whose owners have one position less
    bounds = [runs - ((owner - shift) % n >= n - lacking) for owner in range(n)]
    table = message_table(parts, runs, bounds)
    for part, value in zip(parts, values, strict=True):
        check_floating("values", value, out.dtype)
        check_shape("values", value, part.count)
    device = device_of(out=out, values=values, packed=[part.packed for part in parts])
    bitmap, faults = read_positions(table, runs, device)
    if faults.item():
        reference.join_elements.reference(parts, values, seed, out)  # says what is wrong
        return
    out.detach().zero_()
    _move_all(out, seed, bitmap, values, on(device, table), joins=True)
