"""Triton kernels that sum, gather, scatter and join rows of 2-D tensors.

Sums take no atomics: a stable sort by row index brings the items (rows of the parts) with the same index together, in
the order of parts and occurrence, and one lane adds up one element of the result. A row index that very many items have
is thus the work of one program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels import in_steps
from gradsync.kernels.checks import (
    INT32_INDICES,
    RowsPart,
    Stripes,
    check_gathered,
    check_index_out,
    check_indices,
    check_join,
    check_matrix,
    check_range,
    check_scatter,
    check_size,
    check_some,
    check_union_sum,
)
from gradsync.kernels.reference.rows import accumulation_dtype
from gradsync.kernels.triton.boundary import (
    addresses,
    bits_of,
    blocks,
    check_contiguous,
    check_rows,
    column_table,
    common_device,
    launch,
    on,
    pointee,
    tile,
)
from gradsync.kernels.triton.ordered import FAULTS, faults_of, place_after, refuse

KINDS = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}


def kind_of(name: str, tensor: Tensor) -> str:
    """Returns "f32", "f64", "bf16" or "f16", the KIND of `widened` and `narrowed`, for a tensor of any shape.

    Raises:
        TypeError: for a dtype that the kernels do not know.
    """
    if tensor.dtype not in KINDS:
        raise TypeError(f"the Triton kernels do not know the dtype of {name}, got {tensor.dtype}: use the reference")
    return KINDS[tensor.dtype]


@triton.jit
def place_in(width: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Returns the rows and columns of this program's tile of a table, as numbers; some may lie outside its `width`."""
    tiles = (width + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    return row, column


@triton.jit
def widened(bits: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Returns the numbers of dtype KIND that have these bits, exactly, in float32 (float64 for float64)."""
    if KIND == "f32":
        number = bits.to(tl.float32, bitcast=True)
    elif KIND == "f64":
        number = bits.to(tl.float64, bitcast=True)
    elif KIND == "bf16":
        number = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        number = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return number


@triton.jit
def narrowed(number: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Returns the bits of numbers, as integers, rounded to the dtype KIND: to nearest, ties to even.

    KIND is "f32", "f64", "bf16" or "f16", as `kind_of` returns it. Numbers are float64 for "f64", else float32.
    bfloat16 is rounded by integer arithmetic, as Triton's interpreter truncates it.
    """
    if KIND == "f32":
        bits = number.to(tl.int32, bitcast=True)
    elif KIND == "f64":
        bits = number.to(tl.int64, bitcast=True)
    elif KIND == "bf16":
        wide = number.to(tl.int32, bitcast=True)
        nearest = (wide.to(tl.int64) + 0x7FFF + ((wide >> 16) & 1)) >> 16
        bits = tl.where((wide & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, nearest).to(tl.int16)
    else:
        bits = number.to(tl.float16).to(tl.int16, bitcast=True)
    return bits


@triton.jit
def _sum(
    order: tl.tensor,
    starts: tl.tensor,
    num_rows: tl.tensor,
    parts: tl.tensor,
    part_begins: tl.tensor,
    num_parts: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program sums one tile of the result: each lane adds the addends of one element, in the order of the parts.

    `order`: the items of all parts, sorted by row; `starts`: the first item of each row of the result in it. `parts`
    has two rows of num_parts numbers: addresses and row strides. `columns`: each column's number in the parts, and the
    address and row stride at which its sums are written.
    """
    row, column = place_in(width, ROWS, COLUMNS)
    source = tl.load(columns + column, mask=column < width, other=0)
    begin = tl.load(starts + row, mask=row < num_rows, other=0)
    count = tl.load(starts + row + 1, mask=row < num_rows, other=0) - begin
    total = widened(tl.zeros([ROWS, COLUMNS], BITS), KIND)
    number = tl.zeros([], tl.int64)
    longest = tl.max(count, 0)
    while number < longest:
        item = tl.load(order + begin + number, mask=number < count, other=0)
        part = place_after(part_begins, num_parts, item) - 1
        local = item - tl.load(part_begins + part)
        stride = tl.load(parts + num_parts + part)
        values = tl.load(parts + part).to(tl.pointer_type(BITS)) + local * stride
        kept = (number < count)[:, None] & (column < width)[None, :]
        bits = tl.load(values[:, None] + source[None, :], mask=kept, other=0)
        total = tl.where(kept, total + widened(bits, KIND), total)
        number += 1
    total = total * tl.load(scale)
    out = tl.load(columns + width + column, mask=column < width, other=0).to(tl.pointer_type(BITS))
    stride = tl.load(columns + 2 * width + column, mask=column < width, other=0)
    kept = (row < num_rows)[:, None] & (column < width)[None, :]
    tl.store(out[None, :] + row[:, None] * stride[None, :], narrowed(total, KIND), mask=kept)


@triton.jit
def _gather(
    rows: tl.tensor,
    num_rows: tl.tensor,
    dense: tl.tensor,
    dense_stride: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program copies one tile of the chosen `rows` of `dense` to the outputs, row i of `rows` to their row i.

    `columns` has for each copied column its number in `dense`, and the address and row stride of its output.
    """
    at, column = place_in(width, ROWS, COLUMNS)
    row = tl.load(rows + at, mask=at < num_rows, other=0)
    source = tl.load(columns + column, mask=column < width, other=0)
    out = tl.load(columns + width + column, mask=column < width, other=0).to(tl.pointer_type(BITS))
    stride = tl.load(columns + 2 * width + column, mask=column < width, other=0)
    kept = (at < num_rows)[:, None] & (column < width)[None, :]
    value = tl.load(dense + row[:, None] * dense_stride + source[None, :], mask=kept, other=0)
    tl.store(out[None, :] + at[:, None] * stride[None, :], value, mask=kept)


@triton.jit
def _join(
    columns: tl.tensor,
    width: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    out_stride: tl.tensor,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program fills one tile of `out` with columns of several parts.

    `columns` has for each column its number in `out` (no two have the same), and its address and row stride in a part.
    """
    row, column = place_in(width, ROWS, COLUMNS)
    to = tl.load(columns + column, mask=column < width, other=0)
    part = tl.load(columns + width + column, mask=column < width, other=0).to(tl.pointer_type(BITS))
    stride = tl.load(columns + 2 * width + column, mask=column < width, other=0)
    kept = (row < num_rows)[:, None] & (column < width)[None, :]
    value = tl.load(part[None, :] + row[:, None] * stride[None, :], mask=kept, other=0)
    tl.store(out + row[:, None] * out_stride + to[None, :], value, mask=kept)


@triton.jit
def _scatter(
    rows: tl.tensor,
    order: tl.tensor,
    count: tl.tensor,
    values: tl.tensor,
    values_stride: tl.tensor,
    dense: tl.tensor,
    dense_stride: tl.tensor,
    dim: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program copies rows of `values` to rows of `dense`; if several go to the same row, only the last is written.

    `rows`: sorted row indices in `dense`, which may repeat; `order`: for each entry of `rows`, the row of `values`.
    """
    at, column = place_in(dim, ROWS, COLUMNS)
    row = tl.load(rows + at, mask=at < count, other=0).to(tl.int64)
    after = tl.load(rows + at + 1, mask=at + 1 < count, other=-1).to(tl.int64)
    item = tl.load(order + at, mask=at < count, other=0)
    kept = ((at < count) & (row != after))[:, None] & (column < dim)[None, :]
    value = tl.load(values + item[:, None] * values_stride + column[None, :], mask=kept, other=0)
    tl.store(dense + row[:, None] * dense_stride + column[None, :], value, mask=kept)


@triton.jit
def _accumulate(
    rows: tl.tensor,
    order: tl.tensor,
    count: tl.tensor,
    values: tl.tensor,
    values_stride: tl.tensor,
    dense: tl.tensor,
    dense_stride: tl.tensor,
    dim: tl.tensor,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program adds rows of `values` to rows of `dense`; if several go to one row, one lane adds all, in order."""
    at, column = place_in(dim, ROWS, COLUMNS)
    row = tl.load(rows + at, mask=at < count, other=-1).to(tl.int64)
    before = tl.load(rows + at - 1, mask=(at > 0) & (at < count), other=-1).to(tl.int64)
    adding = (at < count) & (row != before)
    written = adding[:, None] & (column < dim)[None, :]
    place = dense + row[:, None] * dense_stride + column[None, :]
    total = tl.load(place, mask=written, other=0)
    while tl.max(adding.to(tl.int32), 0) > 0:
        item = tl.load(order + at, mask=adding, other=0)
        kept = adding[:, None] & (column < dim)[None, :]
        value = tl.load(values + item[:, None] * values_stride + column[None, :], mask=kept, other=0)
        total = tl.where(kept, narrowed(widened(total, KIND) + widened(value, KIND), KIND), total)
        at += 1
        adding = adding & (tl.load(rows + at, mask=at < count, other=-1).to(tl.int64) == row)
    tl.store(place, total, mask=written)


@triton.jit
def _mark_nonzero(
    dense: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    dim: tl.tensor,
    marks: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program writes to `marks`, for each row in one block of rows, 1 if any element is non-zero, else 0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    found = tl.zeros([ROWS], tl.int32)
    first = 0
    while first < dim:
        column = first + tl.arange(0, COLUMNS)
        kept = (row < num_rows)[:, None] & (column < dim)[None, :]
        bits = tl.load(dense + row[:, None] * stride + column[None, :], mask=kept, other=0)
        found = tl.maximum(found, tl.max(((bits << 1) != 0).to(tl.int32), 1))
        first += COLUMNS
    tl.store(marks + row, found, mask=row < num_rows)


class RowUnion:
    def __init__(self, indices: Sequence[Tensor], num_rows: int) -> None:
        check_some("unite_rows", indices)
        check_size("num_rows", num_rows)
        for number, part in enumerate(indices):
            check_indices(f"indices of part {number}", part)
            check_contiguous(f"indices of part {number}", part)
        self._device = common_device(indices)
        self._num_rows = num_rows
        self._lengths = [len(part) for part in indices]
        narrow = torch.int32 if num_rows <= INT32_INDICES else torch.int64  # half the passes of a radix sort
        rows, self._order = torch.sort(torch.cat([part.to(narrow) for part in indices]), stable=True)
        first = torch.ones_like(rows, dtype=torch.bool)
        first[1:] = rows[1:] != rows[:-1]
        faults = torch.zeros(FAULTS, dtype=torch.int32, device=self._device)
        for part in indices:
            faults_of(part, num_rows, faults)
        starts = first.nonzero().flatten()  # the host waits: the count is what it asked for
        if faults[0].item():
            for number, part in enumerate(indices):
                check_range("sum_rows", part, num_rows, "num_rows", number)
        self._rows = rows[starts]
        self._starts = torch.cat([starts, starts.new_full((1,), len(rows))])
        self.count = len(starts)

    def write_indices(self, out: Tensor) -> None:
        check_index_out("out", out, self.count, self._num_rows)
        common_device([self._rows, out])
        out.copy_(self._rows)

    def sum(
        self, values: Sequence[Tensor], outs: Sequence[Tensor], stripes: Stripes | None = None, *, scale: float = 1.0
    ) -> None:
        stripes = check_union_sum(self._lengths, values, outs, stripes, self.count)
        first, device = values[0], self._device
        if first.dtype not in KINDS:
            raise TypeError(f"the Triton kernels do not sum {first.dtype}: use the reference implementation")
        common_device([self._rows, *values, *outs])
        check_rows("values", *values)
        check_rows("outs", *outs, written=True)
        columns = column_table(outs, stripes)
        begins = torch.tensor([0, *self._lengths[:-1]]).cumsum(0)
        parts = on(device, [*addresses(values), *(part.stride(0) for part in values)])
        width, shape = columns.shape[1], tile(columns.shape[1])
        arguments = (
            self._order, self._starts, self.count, parts, on(device, begins), len(values), on(device, columns), width,
            torch.full((1,), scale, dtype=accumulation_dtype(first.dtype), device=device),
        )  # fmt: skip
        programs = blocks(self.count, shape["ROWS"]) * blocks(width, shape["COLUMNS"])
        launch(_sum, programs, device, *arguments, KIND=KINDS[first.dtype], BITS=pointee(first), **shape)


unite_rows = RowUnion


def sum_rows(parts: Sequence[RowsPart], num_rows: int, *, scale: float = 1.0, out: RowsPart | None = None) -> RowsPart:
    return in_steps.sum_rows(RowUnion, parts, num_rows, scale, out)


def join_columns(parts: Sequence[Tensor], stripes: Stripes, out: Tensor) -> None:
    check_join(parts, stripes, out)
    device = common_device([out, *parts])
    check_rows("parts", *parts)
    check_rows("out", out, written=True)
    table = column_table(parts, stripes)
    last = {column: number for number, column in enumerate(table[0].tolist())}  # of several stripes
    table = table[:, list(last.values())]
    width, shape = table.shape[1], tile(table.shape[1])
    programs = blocks(len(out), shape["ROWS"]) * blocks(width, shape["COLUMNS"])
    arguments = on(device, table), width, bits_of(out), len(out), out.stride(0)
    launch(_join, programs, device, *arguments, BITS=pointee(out), **shape)


def scatter_rows(indices: Tensor, values: Tensor, dense: Tensor, *, accumulate: bool) -> None:
    # Sorts the indices, unless they ascend without duplicates.
    check_scatter(indices, values, dense)
    device = common_device([indices, values, dense])
    check_contiguous("indices", indices)
    check_rows("values", values)
    check_rows("dense", dense, written=True)
    faults: list[int] = faults_of(indices, len(dense)).tolist()
    refuse(faults, "scatter_rows", indices, len(dense), "num_rows", ascending=False, strictly=False)
    if any(faults):
        rows, order = torch.sort(indices, stable=True)
    else:
        rows, order = indices, torch.arange(len(indices), device=device)
    dim = dense.shape[1]
    shape = tile(dim)
    programs = blocks(len(indices), shape["ROWS"]) * blocks(dim, shape["COLUMNS"])
    arguments = rows, order, len(rows), bits_of(values), values.stride(0), bits_of(dense), dense.stride(0), dim
    if accumulate:
        launch(_accumulate, programs, device, *arguments, KIND=KINDS[dense.dtype], **shape)
    else:
        launch(_scatter, programs, device, *arguments, **shape)


class NonzeroRows:
    def __init__(self, dense: Tensor) -> None:
        check_matrix("dense", dense)
        self._device = common_device([dense])
        check_rows("dense", dense)
        self._dense = dense
        shape = tile(dense.shape[1])
        marks = torch.empty(len(dense), dtype=torch.uint8, device=self._device)
        arguments = bits_of(dense), len(dense), dense.stride(0), dense.shape[1], marks
        launch(_mark_nonzero, blocks(len(dense), shape["ROWS"]), self._device, *arguments, **shape)
        self._rows = marks.nonzero().flatten()
        self.count = len(self._rows)

    def write_indices(self, out: Tensor) -> None:
        check_index_out("out", out, self.count, len(self._dense))
        common_device([self._rows, out])
        out.copy_(self._rows)

    def gather(self, outs: Sequence[Tensor], stripes: Stripes | None = None) -> None:
        stripes = check_gathered(outs, stripes, self.count, self._dense)
        device = common_device([self._dense, *outs])
        check_rows("outs", *outs, written=True)
        table = column_table(outs, stripes)
        width, shape = table.shape[1], tile(table.shape[1])
        programs = blocks(self.count, shape["ROWS"]) * blocks(width, shape["COLUMNS"])
        arguments = self._rows, self.count, bits_of(self._dense), self._dense.stride(0), on(device, table), width
        launch(_gather, programs, device, *arguments, BITS=pointee(self._dense), **shape)


nonzero_rows = NonzeroRows
