"""Runs native kernels of an installed wheel without torch, and prints digests of what they wrote, as JSON.

Its argument is the folder of libgomp, which torch would bring. Prints one line; arrays are from numpy.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

NUMEL = 100_003


def module(path: Path) -> ModuleType:
    """Imports a native module from its file, without the packages around it, which need torch."""
    name = path.name.partition(".")[0]
    spec = importlib.util.spec_from_file_location(name, path, loader=ExtensionFileLoader(name, str(path)))
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def written(kernels: Any, dtype: str) -> Iterator[np.ndarray]:
    """Yields what some kernels write for elements of a dtype, in arrays of several shapes and dtypes."""
    x = (np.arange(NUMEL, dtype=np.int64) * 2654435761 % 100_003 - 50_001).astype(dtype) / np.dtype(dtype).type(16)
    indices, values = np.zeros(1000, np.int32), np.zeros(1000, dtype)
    kernels.top_k(x, indices, values, [NUMEL], [1000], None, None, 2)
    yield from (indices, values)
    norms = np.zeros(-(-NUMEL // 512))
    kernels.squared_norms(x, [NUMEL], 512, norms, 2)
    yield norms
    total = np.zeros(NUMEL, dtype)
    kernels.sum_parts([x, x[::-1].copy()], total, 0.5, 2)
    yield total


def main(site: Path, gomp: str) -> None:
    """Prints digests by module and dtype; a module for AVX2 runs only where the machine has it."""
    ctypes.CDLL(gomp, mode=ctypes.RTLD_GLOBAL)
    suffix = next(each for each in EXTENSION_SUFFIXES if (site / f"kernels/_kernels_base{each}").exists())
    base = module(site / f"kernels/_kernels_base{suffix}")
    found = {"base": base} | ({"avx2": module(site / f"kernels/_kernels_avx2{suffix}")} if base.has_avx2() else {})
    module(site / f"planner/_search{suffix}")
    print(
        json.dumps(
            {
                f"{name} {dtype}": [hashlib.sha256(each.tobytes()).hexdigest()[:12] for each in written(kernels, dtype)]
                for name, kernels in found.items()
                for dtype in ("float16", "float32", "float64")
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
