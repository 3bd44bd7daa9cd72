"""Native kernels on rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from gradsync.kernels.checks import RowsPart, Stripes, check_parts, check_size, check_some, rows_buffers
from gradsync.kernels.cpu.boundary import plain, plains, threads_for
from gradsync.kernels.native import load


class RowUnion:
    """See `gradsync.kernels.RowUnion`."""

    def __init__(
        self, indices: Sequence[Tensor], num_rows: int, threads: int | None = None, module: ModuleType | None = None
    ) -> None:
        check_some("unite_rows", indices)
        check_size("num_rows", num_rows)
        self._requested = threads
        self._items = sum(part.numel() for part in indices)
        self._union: Any = (module or load()).RowUnion(
            plains("indices", indices), num_rows, threads_for(threads, self._items)
        )
        self.count: int = self._union.count

    def write_indices(self, out: Tensor) -> None:
        self._union.write_indices(plain("out", out), threads_for(self._requested, self._items))

    def sum(
        self, values: Sequence[Tensor], outs: Sequence[Tensor], stripes: Stripes | None = None, *, scale: float = 1.0
    ) -> None:
        stripes = [(0, values[0].shape[-1])] if stripes is None and values else stripes or []
        threads = threads_for(self._requested, sum(part.numel() for part in values))
        self._union.sum(plains("values", values), plains("outs", outs), list(stripes), scale, threads)


def unite_rows(
    indices: Sequence[Tensor], num_rows: int, *, threads: int | None = None, module: ModuleType | None = None
) -> RowUnion:
    """See `gradsync.kernels.unite_rows`."""
    return RowUnion(indices, num_rows, threads, module)


def sum_rows(
    parts: Sequence[RowsPart],
    num_rows: int,
    *,
    scale: float = 1.0,
    out: RowsPart | None = None,
    threads: int | None = None,
    module: ModuleType | None = None,
) -> RowsPart:
    """See `gradsync.kernels.sum_rows`. Copies inputs (not outputs) whose indices or elements of a row are apart."""
    check_parts(parts, num_rows)
    union = RowUnion([indices.contiguous() for indices, _ in parts], num_rows, threads, module)
    rows, total = rows_buffers(out, union.count, parts[0][1])
    union.write_indices(rows)
    union.sum([v if v.stride(1) == 1 else v.contiguous() for _, v in parts], [total], scale=scale)
    return rows, total


def join_columns(
    parts: Sequence[Tensor],
    stripes: Stripes,
    out: Tensor,
    *,
    threads: int | None = None,
    module: ModuleType | None = None,
) -> None:
    """See `gradsync.kernels.join_columns`."""
    threads = threads_for(threads, out.numel())
    (module or load()).join_columns(plains("parts", parts), list(stripes), plain("out", out), threads)


def scatter_rows(
    indices: Tensor,
    values: Tensor,
    dense: Tensor,
    *,
    accumulate: bool,
    threads: int | None = None,
    module: ModuleType | None = None,
) -> None:
    """See `gradsync.kernels.scatter_rows`."""
    threads = threads_for(threads, values.numel())
    arrays = plain("indices", indices), plain("values", values), plain("dense", dense)
    (module or load()).scatter_rows(*arrays, accumulate, threads)


class NonzeroRows:
    """See `gradsync.kernels.NonzeroRows`."""

    def __init__(self, dense: Tensor, threads: int | None = None, module: ModuleType | None = None) -> None:
        self._threads = threads_for(threads, dense.numel())
        self._dim = dense.shape[-1] if dense.ndim else 0
        self._rows: Any = (module or load()).NonzeroRows(plain("dense", dense), self._threads)
        self.count: int = self._rows.count

    def write_indices(self, out: Tensor) -> None:
        self._rows.write_indices(plain("out", out), self._threads)

    def gather(self, outs: Sequence[Tensor], stripes: Stripes | None = None) -> None:
        stripes = [(0, self._dim)] if stripes is None else stripes
        self._rows.gather(plains("outs", outs), list(stripes), self._threads)


def nonzero_rows(dense: Tensor, *, threads: int | None = None, module: ModuleType | None = None) -> NonzeroRows:
    """See `gradsync.kernels.nonzero_rows`."""
    return NonzeroRows(dense, threads, module)
