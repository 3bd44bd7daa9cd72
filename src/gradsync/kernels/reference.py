"""Every kernel in plain torch operations: the definition that the fast implementations must meet bit for bit.

Runs on any device and dtype, so it is also the fallback. `gradsync.kernels` says what each kernel promises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.kernels.checks import (
    INT32_INDICES,
    RowsPart,
    Stripes,
    check_floating,
    check_index_out,
    check_indices,
    check_owners,
    check_parts,
    check_range,
    check_shape,
    check_size,
    check_some,
    check_stripes,
    rows_buffers,
)

WORD_BITS = 64
_UNSIGNED_32 = 0xFFFFFFFF
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by itemsize


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of `dtype` are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RowUnion:
    """See `gradsync.kernels.RowUnion`."""

    def __init__(self, indices: Sequence[Tensor], num_rows: int) -> None:
        check_some("unite_rows", indices)
        check_size("num_rows", num_rows)
        for number, part in enumerate(indices):
            check_indices(f"indices of part {number}", part)
            check_range("sum_rows", part, num_rows, "num_rows", number)
        self._num_rows = num_rows
        self._parts = [part.long().contiguous() for part in indices]
        self._rows = torch.unique(torch.cat(self._parts), sorted=True)
        self.count = len(self._rows)

    def write_indices(self, out: Tensor) -> None:
        check_index_out("out", out, self.count, self._num_rows)
        out.copy_(self._rows)

    @torch.no_grad()
    def sum(
        self, values: Sequence[Tensor], outs: Sequence[Tensor], stripes: Stripes | None = None, *, scale: float = 1.0
    ) -> None:
        if len(values) != len(self._parts):
            raise ValueError(
                f"one values array per part of the union is needed, got {len(values)} for {len(self._parts)} parts"
            )
        first = values[0]
        if first.ndim != 2:
            raise ValueError(f"values must be 2-D, got {tuple(first.shape)}")
        check_floating("values", first)
        dim = first.shape[1]
        stripes = [(0, dim)] if stripes is None else stripes
        check_stripes("outs", outs, stripes, self.count, dim)
        for out in outs:
            check_floating("outs", out, first.dtype)
        total = torch.zeros(self.count, dim, dtype=accumulation_dtype(first.dtype), device=first.device)
        for indices, part in zip(self._parts, values, strict=True):
            check_floating("values", part, first.dtype)
            check_shape("values", part, len(indices), dim)
            total.index_add_(0, torch.searchsorted(self._rows, indices), part.to(total.dtype))
        total.mul_(scale)
        for out, (start, stop) in zip(outs, stripes, strict=True):
            out.copy_(total[:, start:stop])


def unite_rows(indices: Sequence[Tensor], num_rows: int) -> RowUnion:
    """See `gradsync.kernels.unite_rows`."""
    return RowUnion(indices, num_rows)


@torch.no_grad()
def sum_rows(parts: Sequence[RowsPart], num_rows: int, *, scale: float = 1.0, out: RowsPart | None = None) -> RowsPart:
    """See `gradsync.kernels.sum_rows`."""
    check_parts(parts, num_rows)
    union = RowUnion([indices for indices, _ in parts], num_rows)
    rows, total = rows_buffers(out, union.count, parts[0][1])
    union.write_indices(rows)
    union.sum([values for _, values in parts], [total], scale=scale)
    return rows, total


@torch.no_grad()
def join_columns(parts: Sequence[Tensor], stripes: Stripes, out: Tensor) -> None:
    """See `gradsync.kernels.join_columns`."""
    _check_matrix("out", out)
    check_stripes("parts", parts, stripes, *out.shape)
    for part in parts:
        check_floating("parts", part, out.dtype)
    for part, (start, stop) in zip(parts, stripes, strict=True):
        out[:, start:stop].copy_(part)


@torch.no_grad()
def scatter_rows(indices: Tensor, values: Tensor, dense: Tensor, *, accumulate: bool) -> None:
    """See `gradsync.kernels.scatter_rows`."""
    check_indices("indices", indices)
    _check_matrix("dense", dense)
    check_floating("values", values, dense.dtype)
    check_shape("values", values, len(indices), dense.shape[1])
    check_range("scatter_rows", indices, len(dense), "num_rows")
    if accumulate:
        _add_rows(indices.long(), values, dense)
        return
    rows, places = torch.unique(indices.long(), return_inverse=True)
    items = torch.arange(len(indices), device=indices.device)
    last = torch.zeros_like(rows).scatter_reduce_(0, places, items, "amax")
    dense.index_copy_(0, rows, values[last])


def _add_rows(indices: Tensor, values: Tensor, dense: Tensor) -> None:
    if dense.dtype == accumulation_dtype(dense.dtype):
        dense.index_add_(0, indices, values)
        return
    # index_add_ may round narrow types only once. Here each addition is: first all first occurrences, then all second.
    rows, order = torch.sort(indices, stable=True)
    occurrence = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)
    while len(order) > 0:
        now = occurrence == 0
        dense.index_copy_(0, rows[now], dense[rows[now]] + values[order[now]])
        rows, order, occurrence = rows[~now], order[~now], occurrence[~now] - 1


def _check_matrix(name: str, tensor: Tensor) -> None:
    check_floating(name, tensor)
    if tensor.ndim != 2:
        raise ValueError(f"{name} must be 2-D, got {tuple(tensor.shape)}")


def _nonzero(x: Tensor) -> Tensor:
    """Where any bit but the sign is set."""
    bits = x.contiguous().view(_BITS[x.element_size()])
    return (bits & torch.iinfo(bits.dtype).max) != 0


class NonzeroRows:
    """See `gradsync.kernels.NonzeroRows`."""

    @torch.no_grad()
    def __init__(self, dense: Tensor) -> None:
        _check_matrix("dense", dense)
        self._dense = dense
        self._rows = _nonzero(dense).any(dim=1).nonzero().flatten()
        self.count = len(self._rows)

    def write_indices(self, out: Tensor) -> None:
        check_index_out("out", out, self.count, len(self._dense))
        out.copy_(self._rows)

    @torch.no_grad()
    def gather(self, outs: Sequence[Tensor], stripes: Stripes | None = None) -> None:
        stripes = [(0, self._dense.shape[1])] if stripes is None else stripes
        check_stripes("outs", outs, stripes, self.count, self._dense.shape[1])
        for out in outs:
            check_floating("outs", out, self._dense.dtype)
        rows = self._dense[self._rows]
        for out, (start, stop) in zip(outs, stripes, strict=True):
            out.copy_(rows[:, start:stop])


def nonzero_rows(dense: Tensor) -> NonzeroRows:
    """See `gradsync.kernels.nonzero_rows`."""
    return NonzeroRows(dense)


class NonzeroElements:
    """See `gradsync.kernels.NonzeroElements`."""

    @torch.no_grad()
    def __init__(self, x: Tensor) -> None:
        check_floating("x", x)
        if x.ndim != 1:
            raise ValueError(f"x must be 1-D, got {tuple(x.shape)}")
        self._x = x
        self._indices = _nonzero(x).nonzero().flatten()
        self.count = len(self._indices)

    @torch.no_grad()
    def write(self, indices: Tensor, values: Tensor) -> None:
        check_index_out("indices", indices, self.count, len(self._x))
        check_floating("values", values, self._x.dtype)
        check_shape("values", values, self.count)
        indices.copy_(self._indices)
        values.copy_(self._x[self._indices])


def nonzero_elements(x: Tensor) -> NonzeroElements:
    """See `gradsync.kernels.nonzero_elements`."""
    return NonzeroElements(x)


def _check_words(name: str, words: Tensor) -> None:
    if words.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {words.dtype}")
    if words.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got {tuple(words.shape)}")


def _bits_of(words: Tensor) -> Tensor:
    """(words, 64) of 0 and 1."""
    return (words[:, None] >> torch.arange(WORD_BITS, device=words.device)) & 1


def encode_bitmap(indices: Tensor, size: int, out: Tensor) -> None:
    """See `gradsync.kernels.encode_bitmap`."""
    check_size("size", size)
    check_indices("indices", indices)
    _check_words("out", out)
    check_shape("out", out, -(-size // WORD_BITS))
    check_range("encode_bitmap", indices, size, "size")
    bits = torch.unique(indices.long())
    out.zero_().index_add_(0, bits // WORD_BITS, 1 << bits % WORD_BITS)


def decode_bitmap(words: Tensor, out: Tensor) -> None:
    """See `gradsync.kernels.decode_bitmap`."""
    _check_words("words", words)
    indices = _bits_of(words).flatten().nonzero().flatten()
    check_index_out("out", out, len(indices), len(words) * WORD_BITS)
    out.copy_(indices)


def count_bits(words: Tensor) -> int:
    """See `gradsync.kernels.count_bits`."""
    _check_words("words", words)
    return int(_bits_of(words).sum())


def rotation_key(seed: int) -> int:
    """The 32 bits of `seed` that the rotation is keyed with (splitmix64's finaliser, upper half)."""
    mixed = (seed + 0x9E3779B97F4A7C15) & (2**64 - 1)
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & (2**64 - 1)
    return (mixed ^ mixed >> 31) >> 32


def rotation(q: Tensor, n: int, seed: int) -> Tensor:
    """rho(q) in [0, n): a multiply-xorshift mix of q and the seed (murmur3's 32-bit finaliser), scaled to n."""
    h = q.long() ^ rotation_key(seed)
    h = ((h ^ h >> 16) * 0x85EBCA6B) & _UNSIGNED_32
    h = ((h ^ h >> 13) * 0xC2B2AE35) & _UNSIGNED_32
    return ((h ^ h >> 16) * n) >> 32


class RotatedPartition:
    """See `gradsync.kernels.RotatedPartition`."""

    def __init__(self, indices: Tensor, size: int, n: int, seed: int) -> None:
        check_owners(n)
        check_rotated_size(size, n)
        check_indices("indices", indices)
        check_range("partition_rotated", indices, size, "size")
        check_ascending("partition_rotated", "indices", indices)
        self._positions = indices.long() // n
        owners = (indices.long() % n + rotation(self._positions, n, seed)) % n
        self._order = torch.argsort(owners, stable=True)
        self.counts: list[int] = torch.bincount(owners, minlength=n).tolist()

    @torch.no_grad()
    def write(self, values: Tensor, positions: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        check_floating("values", values)
        check_shape("values", values, len(self._order), *values.shape[1:2])
        if not len(positions) == len(outs) == len(self.counts):
            raise ValueError(
                "one array of positions and one of values per owner are needed, "
                f"got {len(positions)} and {len(outs)} for {len(self.counts)} owners"
            )
        for count, position, out in zip(self.counts, positions, outs, strict=True):
            check_positions(position)
            check_shape("positions", position, count)
            check_floating("outs", out, values.dtype)
            check_shape("outs", out, count, *values.shape[1:2])
        by_owner = zip(positions, outs, self._order.split(self.counts), strict=True)
        for position, out, items in by_owner:
            position.copy_(self._positions[items])
            out.copy_(values[items])


def partition_rotated(indices: Tensor, size: int, n: int, seed: int) -> RotatedPartition:
    """See `gradsync.kernels.partition_rotated`."""
    return RotatedPartition(indices, size, n, seed)


@torch.no_grad()
def join_rotated(positions: Sequence[Tensor], values: Sequence[Tensor], seed: int, out: Tensor) -> None:
    """See `gradsync.kernels.join_rotated`."""
    n = len(positions)
    check_owners(n)
    if len(values) != n:
        raise ValueError(f"one array of values per array of positions is needed, got {len(values)} for {n}")
    check_floating("out", out)
    check_shape("out", out, out.numel())
    elements = [torch.empty_like(part, dtype=torch.int64) for part in positions]
    for owner, (position, value) in enumerate(zip(positions, values, strict=True)):
        check_positions(position)
        check_floating("values", value, out.dtype)
        check_shape("values", value, len(position))
        check_range("join_rotated", position, len(out), "size", owner)
        check_ascending("join_rotated", "positions", position)
        rotated_index(owner, position, n, seed, elements[owner])
        check_range("join_rotated", elements[owner], len(out), "size", owner)
    out.zero_()
    for element, value in zip(elements, values, strict=True):
        out[element] = value


def rotated_index(owner: int, positions: Tensor, n: int, seed: int, out: Tensor) -> None:
    """See `gradsync.kernels.rotated_index`."""
    check_owners(n)
    if not 0 <= owner < n:
        raise ValueError(f"owner must be in [0, {n}), got {owner}")
    check_positions(positions)
    check_range("rotated_index", positions, INT32_INDICES, "positions")
    bound = (int(positions.max()) + 1) * n if len(positions) else 0
    check_index_out("out", out, len(positions), bound)
    q = positions.long()
    out.copy_(n * q + (owner - rotation(q, n, seed)) % n)


def check_ascending(kernel: str, name: str, indices: Tensor) -> None:
    """Names the first pair that is out of order. Reads the result back to the host."""
    descents = (indices[1:] < indices[:-1]).nonzero().flatten()
    if len(descents) > 0:
        before, after = indices[descents[0] :][:2].tolist()
        raise ValueError(f"{kernel}: {name} must ascend, got {before} before {after}")


def check_positions(positions: Tensor) -> None:
    """Refuses local positions that are not 1-D int32."""
    if positions.dtype != torch.int32:
        raise TypeError(f"positions must be int32, got {positions.dtype}")
    if positions.ndim != 1:
        raise ValueError(f"positions must be 1-D, got {tuple(positions.shape)}")


def check_rotated_size(size: int, n: int) -> None:
    """Refuses a size with local positions beyond int32."""
    check_size("size", size)
    if size > n * INT32_INDICES:
        raise ValueError(f"size must be at most {n} * 2^31, for local positions to fit int32, got {size}: split it")
