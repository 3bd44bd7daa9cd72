"""The native CPU kernels: checks of the arguments, number of threads, and calls into the C++ module (csrc/).

The module is built twice from one source, for any CPU and for AVX2; `load` picks what this machine runs. Each function
takes, beside the arguments of its namesake in `gradsync.kernels`, `threads` (by default torch's number of threads, and
1 where the work is small) and `module` (by default `load()`). No tensor is copied: what the C++ code cannot work on in
place it refuses.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import torch  # before the native module, so that both use torch's OpenMP runtime
from torch import Tensor
from torch.utils import dlpack

from gradsync.kernels.checks import RowsPart, Stripes, check_owners, check_parts, check_size, check_some, rows_buffers
from gradsync.kernels.reference import WORD_BITS, check_rotated_size, rotation_key

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_MIN_PARALLEL_ELEMENTS = 1 << 16  # starting threads costs more than they save below


@functools.cache
def load() -> ModuleType:
    """The fastest native module that this machine runs.

    Raises:
        ImportError: gradsync was installed where it could not be compiled; the message says what to do.
    """
    try:
        base = importlib.import_module("gradsync.kernels._kernels_base")
        return importlib.import_module("gradsync.kernels._kernels_avx2") if base.has_avx2() else base
    except ImportError as error:
        raise ImportError(
            f"the native kernels are not built ({error}): install a C++17 compiler and the Python headers, "
            "then install gradsync again"
        ) from error


def supports(tensors: Iterable[Tensor], entries: int = 0) -> bool:
    """Whether the native module knows the dtypes and device, and takes tables of so many rows or elements."""
    return all(t.dtype in _DTYPES and _is_plain(t) for t in tensors) and entries <= load().MAX_BITS


def _is_plain(tensor: Tensor) -> bool:
    """Whether memory holds its elements as they are: not on a device, not sparse, not negated by a mere mark."""
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_neg()


def _threads(requested: int | None, elements: int) -> int:
    if requested is not None:
        return requested
    return 1 if elements < _MIN_PARALLEL_ELEMENTS else torch.get_num_threads()


def _plain(name: str, tensor: Tensor) -> object:
    """The tensor's memory, without autograd, for one call; the C++ side checks dtype, shape and strides.

    As a DLPack capsule, which nanobind would else ask the tensor for in Python: 2 of the 2.5 us that an array costs.
    """
    if not _is_plain(tensor):
        negated = ", a negative view" if tensor.is_neg() else ""
        raise TypeError(
            f"the native kernels take dense tensors on the CPU, got {name} {tensor.dtype} {tensor.layout} on "
            f"{tensor.device}{negated}: use the reference implementation"
        )
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"the native kernels do not know the dtype of {name}, got {tensor.dtype}: use the reference")
    return dlpack.to_dlpack(tensor.detach())  # type: ignore[attr-defined]  # documented, but not in its __all__


def _plains(name: str, tensors: Sequence[Tensor]) -> list[object]:
    return [_plain(name, tensor) for tensor in tensors]


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
            _plains("indices", indices), num_rows, _threads(threads, self._items)
        )
        self.count: int = self._union.count

    def write_indices(self, out: Tensor) -> None:
        self._union.write_indices(_plain("out", out), _threads(self._requested, self._items))

    def sum(
        self, values: Sequence[Tensor], outs: Sequence[Tensor], stripes: Stripes | None = None, *, scale: float = 1.0
    ) -> None:
        stripes = [(0, values[0].shape[-1])] if stripes is None and values else stripes or []
        threads = _threads(self._requested, sum(part.numel() for part in values))
        self._union.sum(_plains("values", values), _plains("outs", outs), list(stripes), scale, threads)


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
    threads = _threads(threads, out.numel())
    (module or load()).join_columns(_plains("parts", parts), list(stripes), _plain("out", out), threads)


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
    threads = _threads(threads, values.numel())
    plain = _plain("indices", indices), _plain("values", values), _plain("dense", dense)
    (module or load()).scatter_rows(*plain, accumulate, threads)


class NonzeroRows:
    """See `gradsync.kernels.NonzeroRows`."""

    def __init__(self, dense: Tensor, threads: int | None = None, module: ModuleType | None = None) -> None:
        self._threads = _threads(threads, dense.numel())
        self._dim = dense.shape[-1] if dense.ndim else 0
        self._rows: Any = (module or load()).NonzeroRows(_plain("dense", dense), self._threads)
        self.count: int = self._rows.count

    def write_indices(self, out: Tensor) -> None:
        self._rows.write_indices(_plain("out", out), self._threads)

    def gather(self, outs: Sequence[Tensor], stripes: Stripes | None = None) -> None:
        stripes = [(0, self._dim)] if stripes is None else stripes
        self._rows.gather(_plains("outs", outs), list(stripes), self._threads)


def nonzero_rows(dense: Tensor, *, threads: int | None = None, module: ModuleType | None = None) -> NonzeroRows:
    """See `gradsync.kernels.nonzero_rows`."""
    return NonzeroRows(dense, threads, module)


class NonzeroElements:
    """See `gradsync.kernels.NonzeroElements`."""

    def __init__(self, x: Tensor, threads: int | None = None, module: ModuleType | None = None) -> None:
        self._threads = _threads(threads, x.numel())
        self._elements: Any = (module or load()).NonzeroElements(_plain("x", x), self._threads)
        self.count: int = self._elements.count

    def write(self, indices: Tensor, values: Tensor) -> None:
        self._elements.write(_plain("indices", indices), _plain("values", values), self._threads)


def nonzero_elements(x: Tensor, *, threads: int | None = None, module: ModuleType | None = None) -> NonzeroElements:
    """See `gradsync.kernels.nonzero_elements`."""
    return NonzeroElements(x, threads, module)


def encode_bitmap(indices: Tensor, size: int, out: Tensor, *, module: ModuleType | None = None) -> None:
    """See `gradsync.kernels.encode_bitmap`. One thread: a second one buys nothing."""
    check_size("size", size)
    (module or load()).encode_bitmap(_plain("indices", indices), size, _plain("out", out))


def decode_bitmap(words: Tensor, out: Tensor, *, threads: int | None = None, module: ModuleType | None = None) -> None:
    """See `gradsync.kernels.decode_bitmap`."""
    threads = _threads(threads, words.numel() * WORD_BITS // 8)
    (module or load()).decode_bitmap(_plain("words", words), _plain("out", out), threads)


def count_bits(words: Tensor, *, threads: int | None = None, module: ModuleType | None = None) -> int:
    """See `gradsync.kernels.count_bits`."""
    count: int = (module or load()).count_bits(_plain("words", words), _threads(threads, words.numel()))
    return count


class RotatedPartition:
    """See `gradsync.kernels.RotatedPartition`."""

    def __init__(
        self,
        indices: Tensor,
        size: int,
        n: int,
        seed: int,
        threads: int | None = None,
        module: ModuleType | None = None,
    ) -> None:
        check_owners(n)
        check_rotated_size(size, n)
        self._partition: Any = (module or load()).RotatedPartition(
            _plain("indices", indices), size, n, rotation_key(seed), _threads(threads, indices.numel())
        )
        self.counts: list[int] = self._partition.counts

    def write(self, values: Tensor, positions: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        self._partition.write(_plain("values", values), _plains("positions", positions), _plains("outs", outs))


def partition_rotated(
    indices: Tensor, size: int, n: int, seed: int, *, threads: int | None = None, module: ModuleType | None = None
) -> RotatedPartition:
    """See `gradsync.kernels.partition_rotated`."""
    return RotatedPartition(indices, size, n, seed, threads, module)


def join_rotated(
    positions: Sequence[Tensor],
    values: Sequence[Tensor],
    seed: int,
    out: Tensor,
    *,
    threads: int | None = None,
    module: ModuleType | None = None,
) -> None:
    """See `gradsync.kernels.join_rotated`."""
    check_owners(len(positions))
    plain = _plains("positions", positions), _plains("values", values), rotation_key(seed), _plain("out", out)
    (module or load()).join_rotated(*plain, _threads(threads, out.numel()))


def rotated_index(
    owner: int,
    positions: Tensor,
    n: int,
    seed: int,
    out: Tensor,
    *,
    threads: int | None = None,
    module: ModuleType | None = None,
) -> None:
    """See `gradsync.kernels.rotated_index`."""
    check_owners(n)
    if not 0 <= owner < n:
        raise ValueError(f"owner must be in [0, {n}), got {owner}")
    threads = _threads(threads, positions.numel())
    plain = _plain("positions", positions), n, rotation_key(seed), _plain("out", out)
    (module or load()).rotated_index(owner, *plain, threads)
