"""Every kernel in plain torch operations: the definition that the fast versions must meet bit for bit.

It runs on any device and dtype, so it is also the fallback. The functions in these files are decorated: a call of
`gradsync.kernels.sum_rows`, defined in `reference/rows.py`, chooses an implementation; `reference.sum_rows` runs torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradsync.kernels.choice import KERNELS


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in KERNELS:
        raise AttributeError(f"gradsync.kernels.reference has no kernel {name!r}")
    return KERNELS[name].reference
