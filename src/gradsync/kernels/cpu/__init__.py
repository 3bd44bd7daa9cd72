"""The native CPU kernels: checks of the arguments, number of threads, and calls into the C++ module (csrc/).

Each kernel takes, beside the arguments of its namesake in `gradsync.kernels`, `threads` (by default torch's number of
threads, and 1 where the work is small) and `module` (by default `native.load()`). No tensor is copied: what the C++
code cannot work on in place it refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradsync.kernels.choice import version


def __getattr__(name: str) -> Callable[..., Any]:
    return version("cpu", name)
