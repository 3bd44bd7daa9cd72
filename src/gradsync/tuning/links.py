"""Measures link costs for profiles: times collectives of each type, size and group of ranks, within a time budget.

The number of sizes and repeats follows from times that all ranks have exchanged, so that all issue the same operations.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..comm import Group
from ..comm.links import PATTERNS, Exchange, Highest, highest_over
from ..costs.steps import Pattern
from ..planner.pieces import Pieces
from ..plans.profile import CollectiveEstimate, LinkPoint, Span, SpanEstimate, spans_of
from .fitting import fit_links, load_scipy, median_of

BUDGET_S = 6.0  # for all exchanges together; the smallest sizes may exceed the budget, 4 MiB fit in at 200 Mbit/s
SIZES = (1 << 10, 16 << 10, 128 << 10, 1 << 20, 4 << 20)  # bytes that a member sends
DEVICE_SIZES = (32 << 20, 128 << 20)  # beyond these, between accelerators
FEWEST_SIZES = 3  # timed however slow links are, so that latency and rate can be told apart
REPEATS = (3, 21)  # the fewest and the most
SHARE_OF_A_SIZE = 1 / 3  # of the time left, for the repeats of one size beyond the fewest


def measured_links(group: Group, timeout_s: float, budget_s: float = BUDGET_S) -> Pieces[tuple[SpanEstimate, ...]]:
    """Measures the costs of the links among all ranks and, if nodes have several ranks, inside and across nodes.

    Collective. It is a generator that makes one exchange at each `next`; its result is empty for a single rank. All
    ranks fit costs to the same times, and may round differently.

    Args:
        group: all ranks.
        timeout_s: seconds to wait for the other ranks.
        budget_s: seconds that all exchanges together may take; the smallest sizes may exceed it.

    Raises:
        GroupError: when another rank died or stopped answering.
    """
    yield from load_scipy()
    groups = groups_of(group)
    highest = highest_over(group, timeout_s)
    share_s = budget_s / max(len(groups) * len(PATTERNS), 1)
    found = []
    for span, part in groups.items():
        found.append((yield from _estimate(span, part, highest, timeout_s, share_s)))
    return tuple(found)


def groups_of(group: Group) -> dict[Span, Group]:
    """Returns the groups of ranks whose links are measured; none for a single rank. The first call is collective.

    ALL has all ranks. Where nodes have several ranks, equally many on each, there are two more: INSIDE has this node's
    ranks, ACROSS on each node the rank of the same index.
    """
    made = {Span.ALL: lambda: group, Span.INSIDE: group.within_node, Span.ACROSS: group.across_nodes}
    return {span: made[span]() for span in spans_of(group.placement)}


def _estimate(span: Span, group: Group, highest: Highest, timeout_s: float, share_s: float) -> Pieces[SpanEstimate]:
    points = {}
    for pattern in PATTERNS:
        points[pattern] = yield from measured_points(group, pattern, highest, timeout_s, share_s)
    link, each = fit_links(points, group.size)
    return SpanEstimate(
        span=span,
        size=group.size,
        at_once_bytes=group.at_once_bytes,
        link=link,
        collectives={p: CollectiveEstimate(link=each[p], points=tuple(points[p])) for p in PATTERNS},
    )


def measured_points(
    group: Group, pattern: Pattern, highest: Highest, timeout_s: float, share_s: float
) -> Pieces[list[LinkPoint]]:
    """Times one collective at growing sizes: the three smallest, and more while the next fits into `share_s` seconds.

    It is a generator that makes one exchange at each `next`. `Pattern.MESSAGES` is timed with one message per rank. At
    small sizes it is also timed with one to each other rank: the difference is the cost of a further message.

    Args:
        group: the ranks that exchange.
        pattern: the kind of collective.
        highest: returns the maximum of numbers over all ranks, also of other groups; collective.
        timeout_s: seconds to wait for the other ranks.
        share_s: seconds that the exchanges may take.
    """
    points: list[LinkPoint] = []
    fewest, most = REPEATS
    larger = () if group.payload_device.type == "cpu" else DEVICE_SIZES
    sizes: list[tuple[int, Sequence[int]]] = [(nbytes, (group.size // 2,)) for nbytes in (*SIZES, *larger)]
    if pattern is Pattern.MESSAGES and group.size > 2:
        sizes[:0] = [(nbytes, range(1, group.size)) for nbytes in SIZES[:FEWEST_SIZES]]
    left_s, before = share_s, (0, 0.0)
    for nbytes, distances in sizes:
        expected_s = before[1] * nbytes / before[0] if 0 < before[0] < nbytes else 0.0
        if nbytes not in SIZES[:FEWEST_SIZES] and (1 + fewest) * expected_s > left_s:
            break
        exchange = Exchange.of(group, pattern, nbytes, distances)
        (first_s,) = highest([exchange.seconds(group, timeout_s)])  # makes memory and connections: it does not count
        yield
        repeats = min(max(int(left_s * SHARE_OF_A_SIZE / first_s), fewest), most)
        mine_s = []
        for _ in range(repeats):
            mine_s.append(exchange.seconds(group, timeout_s))
            yield
        times_s = highest(mine_s)
        left_s -= first_s + sum(times_s)
        transfer, found = exchange.transfer, median_of(times_s)
        before = nbytes, found.value
        points.append(
            LinkPoint(
                part_bytes=transfer.part_bytes[0],
                rounds=transfer.rounds,
                busiest_bytes=transfer.busiest_bytes,
                seconds=found,
            )
        )
    return points
