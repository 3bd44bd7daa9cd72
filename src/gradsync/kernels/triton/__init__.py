"""The kernels for CUDA, in Triton: each function is the version of the kernel in `gradsync.kernels` with its name.

A kernel reads its inputs once or twice (`top_k`: as often as they have digits) and writes its outputs; scans and sorts
between kernels are torch operations on the device, as are all of `select_above` and `count_above`. The host waits only
where the contract makes it: for counts and for errors, together in one transfer where they come together. Each output
element has one writer, or takes atomic ORs or sums of integers or one compare-and-swap, so that no kernel has a race
and all but `hierarchical_hash` give the same bits in every run. No tensor is copied: what cannot be worked on in place
is refused.

Loops over what a program is given or has computed are `while`: Triton's interpreter cannot count to it by `range`.

Triton comes with torch for CUDA and is imported with this package, which `import gradsync` does not load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton  # noqa: F401 (so that its lack is known when this package is imported)

from gradsync.kernels.choice import version


def __getattr__(name: str) -> Callable[..., Any]:
    return version("triton", name)
