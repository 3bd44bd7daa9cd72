"""The native CPU kernels: checks of the arguments, output buffers, and calls into the C++ module (csrc/).

The module is built twice from one source, for any CPU and for AVX2; `load` picks what this machine runs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

import torch  # before the native module, so that both use torch's OpenMP runtime
from torch import Tensor

from gradsync.kernels.reference import RowsPart, accumulation_dtype, check_parts

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
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


def supports(parts: Sequence[RowsPart]) -> bool:
    """Whether the native module knows the dtype and device of all values; other parts are for the reference."""
    return all(values.dtype in _DTYPES and values.device.type == "cpu" for _, values in parts)


def sum_rows(
    parts: Sequence[RowsPart],
    num_rows: int,
    *,
    scale: float = 1.0,
    threads: int | None = None,
    module: ModuleType | None = None,
) -> RowsPart:
    """See `gradsync.kernels.sum_rows`; float32, float64 and bfloat16. Tensors that are not contiguous are copied.

    Args:
        threads: by default torch's number of threads, and 1 where the work is small.
        module: the native module, by default `load()`.
    """
    check_parts(parts, num_rows)
    if not supports(parts):
        raise TypeError(
            f"the native sum_rows takes float32, float64 or bfloat16 on the CPU, got {parts[0][1].dtype} on "
            f"{parts[0][1].device}: use the reference implementation"
        )
    dtype, dim = parts[0][1].dtype, parts[0][1].shape[1]
    if threads is None:
        elements = sum(max(values.numel(), indices.numel()) for indices, values in parts)
        threads = 1 if elements < _MIN_PARALLEL_ELEMENTS else torch.get_num_threads()

    union = (module or load()).unite([_plain(indices) for indices, _ in parts], num_rows, threads)
    rows = torch.empty(union.count, dtype=torch.int64)
    union.write_indices(rows, threads)
    total = torch.empty(union.count, dim, dtype=accumulation_dtype(dtype))
    if total.numel() > 0:
        union.sum([_plain(values) for _, values in parts], scale, total, threads)
    return rows, total.to(dtype)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous()
