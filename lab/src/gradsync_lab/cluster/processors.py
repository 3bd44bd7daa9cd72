"""Divides this machine's processors among the nodes of an emulated cluster, where they divide evenly.

Where processors are kept awake (`awake.py`), none is ever idle, so none takes waiting ranks over from another: left to
the kernel, three of four ranks shared one of two processors for milliseconds at a time.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

Shares = list[tuple[int, ...]]


def shares_of_nodes(nodes: int) -> Shares | None:
    """Returns each node's processors, of those that this process may use; None if not known or not evenly divisible."""
    return share_out(os.sched_getaffinity(0), nodes) if hasattr(os, "sched_getaffinity") else None


def share_out(processors: Collection[int], nodes: int) -> Shares | None:
    """Divides processors: returns equally many for each node, or one processor for equally many nodes each.

    Returns None where neither divides evenly.
    """
    numbers = sorted(processors)
    if len(numbers) % nodes == 0:
        each = len(numbers) // nodes
        return [tuple(numbers[node * each : (node + 1) * each]) for node in range(nodes)]
    if nodes % len(numbers) == 0:
        return [(numbers[node % len(numbers)],) for node in range(nodes)]
    return None


@contextmanager
def confined(shares: Shares | None, node: int) -> Iterator[None]:
    """Makes processes that this thread starts inside the block run on the node's processors.

    Does nothing where `shares` is None.
    """
    if shares is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, shares[node])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
