"""Quick measurements of jobs, for tests that do not depend on the costs of kernels and links."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from gradsync.tuning import kernels as rehearsed
from gradsync.tuning import links, overlap, rehearsal

FEWER: tuple[tuple[Any, str, Any], ...] = (
    (rehearsed, "planned_schemes", lambda placement: ()),
    (rehearsed, "NUMELS", (256, 1024, 4096)),
    (rehearsal, "MOST_CACHED_BYTES", 64),
    (rehearsal, "DENSE_REPEATS", 1),
    (links, "SIZES", links.SIZES[:3]),
    (links, "REPEATS", (3, 3)),
    (overlap, "EXCHANGE_RUNS", 2),
)


@contextmanager
def quickly() -> Iterator[None]:
    """Limits, inside, the measurements of kernels and links to few sizes and runs."""
    with ExitStack() as stack:
        for module, name, value in FEWER:
            stack.enter_context(patch.object(module, name, value))
        yield


def hurry() -> None:
    """Applies `quickly` until this process ends, for programs."""
    for module, name, value in FEWER:
        setattr(module, name, value)
