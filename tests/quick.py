"""Quick measurements of jobs, for tests that do not depend on the costs of kernels and links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from gradsync.comm.links import Highest
from gradsync.planner.pieces import Pieces, T, at_once
from gradsync.tuning import auto, default, links, measurement, overlap, rehearsal
from gradsync.tuning import kernels as rehearsed


def in_one_step(pieces: Pieces[T], highest: Highest) -> Pieces[T]:
    """Runs all pieces after the first step, in place of `after_steps`, so that few steps are needed."""
    yield from ()
    return at_once(pieces)


AT_ONCE: tuple[tuple[Any, str, Any], ...] = (
    (default, "after_steps", in_one_step),
    (measurement, "after_steps", in_one_step),
    (auto, "after_steps", in_one_step),
)
SMALLER: tuple[tuple[Any, str, Any], ...] = (
    (rehearsed, "planned_schemes", lambda placement: ()),
    (rehearsed, "NUMELS", (256, 1024, 4096)),
    (rehearsal, "MOST_CACHED_BYTES", 64),
    (rehearsal, "DENSE_REPEATS", 1),
    (links, "SIZES", links.SIZES[:3]),
    (links, "REPEATS", (3, 3)),
    (overlap, "EXCHANGE_RUNS", 2),
)
FEWER = SMALLER + AT_ONCE


@contextmanager
def patched(settings: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Gives names of modules other values inside, each as (module, name, value)."""
    with ExitStack() as stack:
        for module, name, value in settings:
            stack.enter_context(patch.object(module, name, value))
        yield


@contextmanager
def quickly() -> Iterator[None]:
    """Limits, inside, the measurements of kernels and links to few sizes and runs, all after one step."""
    with patched(FEWER):
        yield


def hurry() -> None:
    """Applies `quickly` until this process ends, for programs."""
    for module, name, value in FEWER:
        setattr(module, name, value)
