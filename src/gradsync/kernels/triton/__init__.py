"""Kernels for CUDA, in Triton: each function implements the kernel of the same name in `gradsync.kernels`.

A kernel reads its inputs once or twice (`top_k`: once for each byte of an element, then twice) and writes its outputs;
scans and sorts between kernels are torch operations on the device. The host waits for the device only to read counts
and errors, in one transfer where possible. Each output element has one writer, or takes atomic ORs or sums of integers
or one compare-and-swap, so that no kernel has a race and all but `hierarchical_hash` give the same bits in every run.
No tensor is copied: one that cannot be used in place raises TypeError.

Loops over an argument or a computed number are `while`: Triton's interpreter takes no such bound in `range`.

Triton comes with torch for CUDA and is imported with this package, which `import gradsync` does not load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton  # noqa: F401 (so that its lack is known when this package is imported)

from gradsync.kernels.choice import version


def __getattr__(name: str) -> Callable[..., Any]:
    return version("triton", name)
