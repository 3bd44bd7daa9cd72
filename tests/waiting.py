"""Helpers of tests that wait for other processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], bool], patience_s: float = 90.0) -> None:
    """Returns once `condition` holds; fails after `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie, as zombies may not be collected here."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in {"Z", "X"}
