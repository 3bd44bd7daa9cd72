"""The native CPU kernels: checks of the arguments, number of threads, and calls into the C++ module (csrc/).

Each function has the name and arguments of a kernel in `gradsync.kernels`. It runs on torch's number of threads, or on
one thread for little work. No tensor is copied: one that the C++ code cannot use in place raises TypeError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradsync.kernels.choice import version


def __getattr__(name: str) -> Callable[..., Any]:
    return version("cpu", name)
