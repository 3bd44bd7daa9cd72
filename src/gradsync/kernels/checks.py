"""Checks of the arguments of kernels: they raise ValueError or TypeError, with what was got and what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

Count = TypeVar("Count", int, float)  # a number of indices, or its expected value
RowsPart = tuple[Int[Tensor, "nnz"], Float[Tensor, "nnz dim"]]
Stripes = Sequence[tuple[int, int]]  # [start, stop) of columns
SignScale = Literal["mean", "rms", "two", "one"]  # what signs are of: see `gradsync.kernels.pack_signs`

INT32_INDICES = 2**31  # tables up to this size have indices that fit int32
MAX_OWNERS = 2**16
MAX_ROTATED = 2**13  # elements of a chunk that a level-1 cache holds
OFFSET_BITS = (8, 16)
PADDING_BYTES = 8  # fewer bytes than this may follow packed positions
WORD_BITS = 64  # of a bitmap


_MOST_ELEMENTS = 1 << 62  # of a tensor: places and sums of lengths fit 64 bits


@dataclass(frozen=True)
class Sections:
    """The lengths, offsets and random seeds of sections: tensors, or slices of them, concatenated in one flat tensor.

    Kernels give each section its own scales and its own number of selected elements. The random bits of an element
    depend on its section's seed and on its index in the tensor that the section is a slice of, not on other sections.
    """

    lengths: tuple[int, ...]  # elements of each section; their sum is the length of the flat tensor
    starts: tuple[int, ...] = ()  # the place of each section's first element in its tensor; empty: 0
    seeds: tuple[int, ...] = ()  # 64 bits for each section; empty: nothing is drawn

    @property
    def places(self) -> tuple[int, ...]:
        """The index of each section's first element in the tensor that the section is a slice of; 0 by default."""
        return self.starts or (0,) * len(self.lengths)

    def __post_init__(self) -> None:
        for name, given in (("starts", self.starts), ("seeds", self.seeds)):
            if given and len(given) != len(self.lengths):
                raise ValueError(f"Sections.{name} must be one for each of {len(self.lengths)}, got {len(given)}")
        if min(min(self.lengths, default=0), min(self.starts, default=0)) < 0:
            raise ValueError(f"Sections must not have negative lengths or starts, got {self.lengths}, {self.starts}")
        if sum(self.lengths) + max(self.starts, default=0) >= _MOST_ELEMENTS:
            raise ValueError(f"Sections must end before element 2^62, got {self.lengths}, {self.starts}")
        if self.seeds and not 0 <= min(self.seeds) <= max(self.seeds) < 1 << 64:
            raise ValueError(f"Sections.seeds must be of 64 bits, got {self.seeds}")


@dataclass(frozen=True)
class PackedPositions:
    """Ascending distinct positions of elements in one part of a tensor, packed into bytes.

    Attributes:
        packed: (packed_nbytes(count, size, bits),) uint8, for positions in [0, size); some padding may follow.
        count: the number of positions.
        bits: the format: 1 a bitmap, 8 and 16 offsets as in `encode_offsets`, 32 and 64 integers of so many bits.
    """

    packed: Tensor  # (packed_nbytes(count, size, bits),) uint8; some padding may follow
    count: int
    bits: int  # the format: 1 a bitmap, 8 and 16 offsets as in `encode_offsets`, 32 and 64 integers


def describe(tensor: Tensor) -> str:
    """Returns a text with dtype, shape and device of a tensor of any shape, for error messages."""
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raises TypeError unless the tensor, of any shape, has one of the dtypes."""
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be {expected}, got {describe(tensor)}")


def check_indices(name: str, indices: Tensor) -> None:
    """Raises ValueError unless `indices` is 1-D, and TypeError unless it is int64 or int32."""
    check_dtype(name, indices, torch.int64, torch.int32)
    check_flat(name, indices)


def check_some(kernel: str, parts: Sequence[object]) -> None:
    """Raises ValueError if `parts`, the inputs of a kernel that sums or unites them, is empty."""
    if not parts:
        raise ValueError(f"{kernel} needs at least one part (it may be empty), got none")


def check_range(kernel: str, indices: Tensor, bound: int, bound_name: str, part: int = 0) -> None:
    """Raises ValueError unless `indices`, 1-D, of input number `part` are in [0, bound). Waits for the device."""
    outside = indices[(indices < 0) | (indices.long() >= bound)]  # int32 cannot be compared with a larger bound
    if len(outside) > 0:
        raise ValueError(f"{kernel}: index {outside[0]} of part {part} is outside [0, {bound_name}={bound})")


def check_size(name: str, size: int) -> None:
    """Raises ValueError if `size`, a number of rows or elements, is negative."""
    if size < 0:
        raise ValueError(f"{name} must not be negative, got {size}")


def check_floating(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
    """Raises TypeError unless the tensor, of any shape, is floating point and, if `dtype` is given, of this dtype."""
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {describe(tensor)}")
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {describe(tensor)}")


def check_shape(name: str, tensor: Tensor, *shape: int) -> None:
    """Raises ValueError unless the tensor has this shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be of shape {shape}, got {describe(tensor)}")


def check_flat(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless the tensor is 1-D."""
    if tensor.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got {describe(tensor)}")


def check_matrix(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless the tensor is 2-D, and TypeError unless it is floating point."""
    check_floating(name, tensor)
    if tensor.ndim != 2:
        raise ValueError(f"{name} must be 2-D, got {describe(tensor)}")


def section_lengths(x: Tensor, sections: Sections | None) -> tuple[int, ...]:
    """Returns the lengths of the sections that `x`, (numel,), consists of; with None, all of `x` is one section.

    Raises:
        ValueError: if the lengths do not add up to the elements of `x`.
    """
    lengths = (x.numel(),) if sections is None else sections.lengths
    if sum(lengths) != x.numel():
        raise ValueError(f"sections must be of x's {x.numel()} elements, got {sum(lengths)}")
    return lengths


def section_counts(indices: Tensor, lengths: tuple[int, ...], counts: Sequence[int] | None) -> tuple[int, ...]:
    """Returns how many elements to select of each section: `counts`, or, if None, the length of `indices`, 1-D.

    Raises:
        ValueError: if a section has fewer elements than its count, or there is not one count for each section.
    """
    if counts is None:
        if len(lengths) != 1:
            raise ValueError(f"counts must be one for each of {len(lengths)} sections, got none")
        if indices.numel() > lengths[0]:
            raise ValueError(f"indices must be of at most x's {lengths[0]} elements, got {describe(indices)}")
        return (indices.numel(),)
    if len(counts) != len(lengths):
        raise ValueError(f"counts must be one for each of {len(lengths)} sections, got {len(counts)}")
    for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        if not 0 <= count <= length:
            raise ValueError(f"counts must be within the {length} elements of section {number}, got {count}")
    return tuple(counts)


def check_index_out(name: str, out: Tensor, count: int, bound: int) -> None:
    """Raises unless `out`, an output for indices, is (count,) and of an integer dtype that holds indices < `bound`."""
    check_indices(name, out)
    check_shape(name, out, count)
    if out.dtype == torch.int32 and bound > INT32_INDICES:
        raise ValueError(f"{name} of int32 cannot hold indices up to {bound - 1}: use int64")


def check_sections(name: str, tensor: Tensor, sections: Sections) -> None:
    """Raises unless the tensor is floating point and (numel,), with numel the sum of the sections' lengths."""
    check_floating(name, tensor)
    check_shape(name, tensor, sum(sections.lengths))


def check_stripes(name: str, tensors: Sequence[Tensor], stripes: Stripes, rows: int, dim: int) -> None:
    """Raises ValueError unless each stripe of columns lies in [0, dim) and its tensor is (rows, stop - start)."""
    if len(tensors) != len(stripes):
        raise ValueError(f"one stripe per array is needed, got {len(stripes)} stripes and {len(tensors)} arrays")
    for tensor, (start, stop) in zip(tensors, stripes, strict=True):
        if not 0 <= start <= stop <= dim:
            raise ValueError(f"stripe [{start}, {stop}) is not within the {dim} columns")
        check_shape(name, tensor, rows, stop - start)


def check_owners(n: int) -> None:
    """Raises ValueError unless `n`, the number of owners (ranks that each sum one part), is in [1, MAX_OWNERS]."""
    if not 1 <= n <= MAX_OWNERS:
        raise ValueError(f"the number of owners must be in [1, {MAX_OWNERS}], got {n}")


def check_owner(owner: int, n: int) -> None:
    """Raises ValueError unless `owner`, the number of one of n owners (ranks that each sum one part), is in [0, n)."""
    check_owners(n)
    if not 0 <= owner < n:
        raise ValueError(f"owner must be in [0, {n}), got {owner}")


def check_ascending(kernel: str, name: str, indices: Tensor, *, strictly: bool = False) -> None:
    """Raises ValueError unless `indices`, 1-D, ascend; with `strictly`, equal neighbours are refused too.

    The message names the first wrong pair. Waits for the device.
    """
    before, after = indices[:-1], indices[1:]
    descents = (after <= before if strictly else after < before).nonzero().flatten()
    if len(descents) > 0:
        pair = indices[descents[0] :][:2].tolist()
        raise ValueError(f"{kernel}: {name} must ascend, got {pair[0]} before {pair[1]}")


def num_blocks(size: int, bits: int) -> int:
    """Returns how many blocks of 2^bits consecutive indices cover [0, size), in the format of `encode_offsets`.

    Raises:
        ValueError: if `bits` is not 8 or 16.
    """
    if bits not in OFFSET_BITS:
        raise ValueError(f"bits must be 8 or 16, got {bits}")
    return -(-size >> bits)


def unary_nbytes(count: Count, blocks: int) -> Count:
    """Returns the size in bytes of unary counts: a bit for each of `count` indices and one for each of `blocks`."""
    return -(-(count + blocks) // 8)


def counts_nbytes(count: Count, blocks: int, bits: int) -> Count:
    """Returns the size in bytes of the counts of indices in each block, which begin a message of `encode_offsets`."""
    return 4 * blocks if bits == 16 else min(blocks, unary_nbytes(count, blocks))


def offsets_nbytes(count: Count, size: int, bits: int) -> Count:
    """Returns the size in bytes of `count` indices in [0, size) that `encode_offsets` encodes with 8 or 16 bits."""
    return counts_nbytes(count, num_blocks(size, bits), bits) + count * (bits // 8)


def packed_nbytes(count: Count, size: int, bits: int) -> Count:
    """Returns the size in bytes of `count` positions in [0, size), in the format `bits` of `PackedPositions`."""
    if bits in OFFSET_BITS:
        return offsets_nbytes(count, size, bits)
    if bits not in (1, 32, 64):
        raise ValueError(f"bits must be 1, 8, 16, 32 or 64, got {bits}")
    return -(-size // WORD_BITS) * (WORD_BITS // 8) if bits == 1 else count * (bits // 8)


def check_each(name: str, items: Sequence[object], parts: int) -> None:
    """Raises ValueError unless `items` has one item for each of `parts` parts; `name` is for the message."""
    if len(items) != parts:
        raise ValueError(f"one of {name} for each part is needed, got {len(items)} for {parts}")


def check_packed(positions: PackedPositions, size: int) -> None:
    """Raises unless `positions.packed` has the dtype and size of `positions.count` positions in [0, size)."""
    packed, count, bits = positions.packed, positions.count, positions.bits
    check_dtype("packed", packed, torch.uint8)
    if not 0 <= count <= size:
        raise ValueError(f"there cannot be {count} positions in [0, {size})")
    nbytes = packed_nbytes(count, size, bits)
    if packed.ndim != 1 or not nbytes <= len(packed) < nbytes + PADDING_BYTES:
        raise ValueError(f"packed must be of {nbytes} bytes, got {describe(packed)}")


def check_room(positions: PackedPositions, count: int, size: int) -> None:
    """Raises unless `positions` are a buffer for `count` positions in [0, size), and `packed` is of their size."""
    check_packed(positions, size)
    if positions.count != count:
        raise ValueError(f"positions must have room for {count}, got room for {positions.count}")


def check_message(name: str, message: Tensor, count: int, size: int, bits: int) -> None:
    """Raises unless `message`, from `encode_offsets`, is uint8 of the shape (offsets_nbytes(count, size, bits),)."""
    check_dtype(name, message, torch.uint8)
    check_shape(name, message, offsets_nbytes(count, size, bits))


def check_positions(positions: Tensor) -> None:
    """Raises unless `positions`, of elements in the part of a tensor that one rank sums, are 1-D int32."""
    check_dtype("positions", positions, torch.int32)
    check_flat("positions", positions)


def check_rotated_size(size: int, n: int) -> None:
    """Raises ValueError if int32 cannot number the elements of one part, when n ranks share `size` elements evenly."""
    check_size("size", size)
    if size > n * INT32_INDICES:
        raise ValueError(f"size must be at most {n} * 2^31, for local positions to fit int32, got {size}: split it")


def check_parts(parts: Sequence[RowsPart], num_rows: int) -> None:
    """Checks the row-sparse parts given to `sum_rows`, except that their indices are in [0, num_rows).

    Raises:
        ValueError: no part, shapes that do not fit together, more than one device, a negative `num_rows`.
        TypeError: indices that are not int64 or int32, values that are not floating point or of different dtypes.
    """
    check_some("sum_rows", parts)
    check_size("num_rows", num_rows)
    first = parts[0][1]
    for number, (indices, values) in enumerate(parts):
        if indices.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"indices of part {number} must be int64 or int32, got {indices.dtype}")
        if not values.is_floating_point() or values.dtype != first.dtype:
            raise TypeError(f"values of part {number} must be {first.dtype}, floating as all parts, got {values.dtype}")
        if indices.ndim != 1 or values.ndim != 2 or len(indices) != len(values) or values.shape[1] != first.shape[-1]:
            raise ValueError(
                f"part {number} must be indices (nnz,) and values (nnz, {first.shape[-1] if first.ndim else 'dim'}), "
                f"got {tuple(indices.shape)} and {tuple(values.shape)}"
            )
        if indices.device != first.device or values.device != first.device:
            raise ValueError(f"part {number} must be on {first.device}, got {indices.device} and {values.device}")


def check_union_sum(
    lengths: Sequence[int], values: Sequence[Tensor], outs: Sequence[Tensor], stripes: Stripes | None, count: int
) -> Stripes:
    """Checks the arguments of `RowUnion.sum`, which sums row-sparse parts whose union has `count` rows.

    Args:
        lengths: the number of rows of each part.
        values: (length, dim) for each part, floating, of one dtype.
        outs: (count, columns of its stripe) for each stripe, in that dtype.
        stripes: the columns [start, stop) of each output; None: one stripe of all columns.
        count: rows of the union.

    Returns:
        The stripes; one of all columns for None.

    Raises:
        ValueError: shapes that do not fit, stripes outside the columns.
        TypeError: different dtypes.
    """
    if len(values) != len(lengths):
        raise ValueError(
            f"one values array per part of the union is needed, got {len(values)} for {len(lengths)} parts"
        )
    first = values[0]
    check_matrix("values", first)
    stripes = check_gathered(outs, stripes, count, first)
    for length, part in zip(lengths, values, strict=True):
        check_floating("values", part, first.dtype)
        check_shape("values", part, length, first.shape[1])
    return stripes


def check_gathered(outs: Sequence[Tensor], stripes: Stripes | None, count: int, values: Tensor) -> Stripes:
    """Checks that each of `outs` is (count, columns of its stripe), in the dtype of `values`, (rows, dim).

    Returns the stripes, one of all columns for None; raises ValueError for shapes, TypeError for dtypes.
    """
    stripes = [(0, values.shape[1])] if stripes is None else stripes
    check_stripes("outs", outs, stripes, count, values.shape[1])
    for out in outs:
        check_floating("outs", out, values.dtype)
    return stripes


def check_join(parts: Sequence[Tensor], stripes: Stripes, out: Tensor) -> None:
    """Checks the arguments of `join_columns`, which joins stripes of columns, and raises its errors."""
    check_matrix("out", out)
    check_stripes("parts", parts, stripes, *out.shape)
    for part in parts:
        check_floating("parts", part, out.dtype)


def check_scatter(indices: Tensor, values: Tensor, dense: Tensor) -> None:
    """Checks shapes and dtypes of the arguments of `scatter_rows`, not the indices' range, and raises its errors."""
    check_indices("indices", indices)
    check_matrix("dense", dense)
    check_floating("values", values, dense.dtype)
    check_shape("values", values, len(indices), dense.shape[1])


def rows_buffers(out: RowsPart | None, count: int, first: Tensor) -> RowsPart:
    """Returns buffers for `count` rows of a table: indices, (count,), and values, (count, dim).

    They are views of the first rows of `out`; if None, new: int64 indices, and values like `first`, (n, dim).

    Raises:
        ValueError: if `out` has fewer rows.
    """
    if out is None:
        indices = torch.empty(count, dtype=torch.int64, device=first.device)
        return indices, first.new_empty(count, first.shape[1])
    indices, values = out
    if indices.ndim != 1 or len(indices) < count or values.ndim != 2 or len(values) < count:
        raise ValueError(
            f"out must have room for {count} rows, got indices {tuple(indices.shape)} and values {tuple(values.shape)}"
        )
    return indices[:count], values[:count]


def check_block(block: int) -> None:
    """Raises ValueError unless `block`, the number of elements that share a scale, is in [0, 2^62)."""
    if not 0 <= block < _MOST_ELEMENTS:
        raise ValueError(f"block must be in [0, 2^62), got {block} (0: a section is one block)")


def section_blocks(sections: Sections, block: int) -> int:
    """Returns how many blocks of `block` elements all sections have; with 0, a section is one block.

    The last block of a section may be shorter.
    """
    check_block(block)
    return sum(-(-length // (block or max(length, 1))) for length in sections.lengths)


def sign_scales_shape(sections: Sections, *, block: int, scale: SignScale) -> tuple[int, ...]:
    """Returns the shape of `pack_signs`' scales: (blocks,), for "two" (blocks, 2), for "one" (0,): no scale is stored.

    Raises:
        ValueError: for an unknown `scale`, or a negative block; with "one" the block is not checked.
    """
    if scale not in get_args(SignScale):
        raise ValueError(f"scale must be {', '.join(get_args(SignScale))}, got {scale!r}")
    if scale == "one":
        return (0,)
    blocks = section_blocks(sections, block)
    return (blocks, 2) if scale == "two" else (blocks,)


def check_signs(words: Tensor, scales: Tensor, sections: Sections, block: int, scale: SignScale) -> None:
    """Raises unless `words`, (ceil(numel / 8),) uint8, and `scales`, float32, are as `pack_signs` writes them."""
    check_dtype("words", words, torch.uint8)
    check_shape("words", words, -(-sum(sections.lengths) // 8))
    check_floating("scales", scales, torch.float32)
    check_shape("scales", scales, *sign_scales_shape(sections, block=block, scale=scale))


def check_residuals(x: Tensor, residual: Tensor | None, next_residual: Tensor | None, dtype: torch.dtype) -> None:
    """Raises unless `residual` (to be added) and `next_residual` (an output) are both None, or both fit.

    They fit if they are of `dtype` and of `x`'s shape, (numel,).
    """
    if (residual is None) != (next_residual is None):
        raise ValueError("residual and next_residual belong together, got one of them")
    for name, tensor in (("residual", residual), ("next_residual", next_residual)):
        if tensor is not None:
            check_floating(name, tensor, dtype)
            check_shape(name, tensor, x.numel())
