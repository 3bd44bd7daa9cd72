"""Which of this machine's processors the ranks of each node run on: a share of them, where that comes out even.

Of processors that are kept awake (`awake.py`) none is ever idle, and an idle one is what takes waiting ranks over from
another: left to the kernel, three of four ranks shared one of two processors for milliseconds at a time.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

Shares = list[tuple[int, ...]]


def shares_of_nodes(nodes: int) -> Shares | None:
    """The processors of each node, of those that this process may use; see `share_out`."""
    return share_out(os.sched_getaffinity(0), nodes) if hasattr(os, "sched_getaffinity") else None


def share_out(processors: Collection[int], nodes: int) -> Shares | None:
    """As many processors for each node, or one for as many nodes each; None where neither comes out even."""
    numbers = sorted(processors)
    if len(numbers) % nodes == 0:
        each = len(numbers) // nodes
        return [tuple(numbers[node * each : (node + 1) * each]) for node in range(nodes)]
    if nodes % len(numbers) == 0:
        return [(numbers[node % len(numbers)],) for node in range(nodes)]
    return None


@contextmanager
def confined(shares: Shares | None, node: int) -> Iterator[None]:
    """What this thread starts inside the block runs on the node's share, if there are shares."""
    if shares is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, shares[node])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
