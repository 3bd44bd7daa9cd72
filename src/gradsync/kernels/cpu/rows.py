"""Native (C++) kernels that sum, gather, scatter and join rows of 2-D tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradsync.kernels import in_steps
from gradsync.kernels.checks import RowsPart, Stripes, check_size, check_some
from gradsync.kernels.cpu.boundary import plain, plains, threads_for
from gradsync.kernels.native import load


class RowUnion:
    def __init__(self, union: Any, items: int) -> None:
        self._union, self._items = union, items
        self.count: int = union.count

    def write_indices(self, out: Tensor) -> None:
        self._union.write_indices(plain("out", out), threads_for(self._items))

    def sum(
        self, values: Sequence[Tensor], outs: Sequence[Tensor], stripes: Stripes | None = None, *, scale: float = 1.0
    ) -> None:
        stripes = [(0, values[0].shape[-1])] if stripes is None and values else stripes or []
        threads = threads_for(sum(part.numel() for part in values))
        self._union.sum(plains("values", values), plains("outs", outs), list(stripes), scale, threads)


def unite_rows(indices: Sequence[Tensor], num_rows: int) -> RowUnion:
    check_some("unite_rows", indices)
    check_size("num_rows", num_rows)
    items = sum(part.numel() for part in indices)
    return RowUnion(load().RowUnion(plains("indices", indices), num_rows, threads_for(items)), items)


def sum_rows(parts: Sequence[RowsPart], num_rows: int, *, scale: float = 1.0, out: RowsPart | None = None) -> RowsPart:
    return in_steps.sum_rows(unite_rows, parts, num_rows, scale, out)


def join_columns(parts: Sequence[Tensor], stripes: Stripes, out: Tensor) -> None:
    threads = threads_for(out.numel())
    load().join_columns(plains("parts", parts), list(stripes), plain("out", out), threads)


def scatter_rows(indices: Tensor, values: Tensor, dense: Tensor, *, accumulate: bool) -> None:
    threads = threads_for(values.numel())
    arrays = plain("indices", indices), plain("values", values), plain("dense", dense)
    load().scatter_rows(*arrays, accumulate, threads)


class NonzeroRows:
    def __init__(self, dense: Tensor) -> None:
        self._threads = threads_for(dense.numel())
        self._dim = dense.shape[-1] if dense.ndim else 0
        self._rows: Any = load().NonzeroRows(plain("dense", dense), self._threads)
        self.count: int = self._rows.count

    def write_indices(self, out: Tensor) -> None:
        self._rows.write_indices(plain("out", out), self._threads)

    def gather(self, outs: Sequence[Tensor], stripes: Stripes | None = None) -> None:
        stripes = [(0, self._dim)] if stripes is None else stripes
        self._rows.gather(plains("outs", outs), list(stripes), self._threads)


nonzero_rows = NonzeroRows
