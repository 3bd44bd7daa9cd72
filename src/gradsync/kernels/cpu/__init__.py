"""The native CPU kernels: checks of the arguments, number of threads, and calls into the C++ module (csrc/).

A kernel takes the arguments of its namesake in `gradsync.kernels`. It runs on torch's number of threads, and on one
where the work is small. No tensor is copied: what the C++ code cannot work on in place it refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradsync.kernels.choice import version


def __getattr__(name: str) -> Callable[..., Any]:
    return version("cpu", name)
