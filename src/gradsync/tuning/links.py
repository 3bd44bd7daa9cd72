"""What collectives take on this job's links: timed by type, size and group, within a budget that all ranks agree on.

All members of a group start at once and wait for each other first; an exchange takes as long as on its slowest rank.
Decisions on sizes and repeats come from times that all ranks know, so that all of them issue the same operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..comm import LENGTH_BYTES, Group, Pending
from ..costs.steps import Pattern, Transfer
from ..plans.profile import CollectiveEstimate, LinkPoint, Span, SpanEstimate, spans_of
from .fitting import fit_links, median_of

BUDGET_S = 6.0  # of all exchanges together, over which the smallest sizes may be; at 200 Mbit 4 MiB fit in
SIZES = (1 << 10, 16 << 10, 128 << 10, 1 << 20, 4 << 20)  # bytes that a member sends
FEWEST_SIZES = 3  # so that a latency and a rate are told however slow the links are
REPEATS = (3, 21)  # the fewest and the most
SHARE_OF_A_SIZE = 1 / 3  # of what is left of the budget, where there are more than the fewest repeats
PATTERNS = (Pattern.ALL_REDUCE, Pattern.ALL_GATHER, Pattern.ALL_TO_ALL, Pattern.MESSAGES)

Highest = Callable[[Sequence[float]], list[float]]


@dataclass(frozen=True)
class Exchange:
    """A collective that can be issued, and what it moves."""

    transfer: Transfer
    issue: Callable[[], Pending[Any]]

    @classmethod
    def of(cls, group: Group, pattern: Pattern, nbytes: int, distances: Sequence[int] = (1,)) -> Exchange:
        """Of zeros, of which each member sends about so many bytes; messages go to the members so many places on."""
        n, others = group.size, group.size - 1

        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.uint8)

        match pattern:
            case Pattern.ALL_REDUCE:
                numel = nbytes * n // (2 * others) // 4
                numbers = torch.zeros(numel)
                return cls(Transfer("", pattern, (4.0 * numel,) * n), lambda: group.all_reduce(numbers))
            case Pattern.ALL_GATHER:
                part = zeros(nbytes // others)
                return cls(Transfer("", pattern, (float(len(part)),) * n), lambda: group.all_gather(part))
            case Pattern.ALL_TO_ALL:
                lengths = [nbytes // others] * n
                buffer, largest = zeros(sum(lengths)), lengths[0]
                transfer = Transfer("", pattern, (float(largest),) * n)
                return cls(transfer, lambda: group.all_to_all(buffer, lengths, lengths, largest=largest))
            case Pattern.MESSAGES:
                rank, message = group.rank, zeros(max(nbytes // len(distances), LENGTH_BYTES))
                outgoing = {(rank + away) % n: message.clone() for away in distances}
                origins = [(rank - away) % n for away in distances]
                size = len(message)
                hops = [(member, (member + away) % n, float(size)) for member in range(n) for away in distances]
                pairs = len(distances) == 1
                return cls(
                    Transfer.of_messages("", n, hops),
                    lambda: group.swap(outgoing, origins, size, message.device, in_pairs=pairs),
                )
            case _:
                raise ValueError(f"{pattern.value} is not measured; there are {', '.join(PATTERNS)}")

    def seconds(self, group: Group, timeout_s: float) -> float:
        """From its issue to its end on this rank, once all members are here."""
        barrier(group, timeout_s)
        began_s = time.perf_counter()
        self.issue().wait(timeout_s)
        return time.perf_counter() - began_s


def barrier(group: Group, timeout_s: float) -> None:
    """Waits for all members."""
    ones = [1] * group.size
    group.all_to_all(torch.zeros(group.size, dtype=torch.uint8), ones, ones, largest=1).wait(timeout_s)


def highest_over(group: Group, timeout_s: float) -> Highest:
    """A function that takes this rank's numbers, and gives the highest that some rank has in each place; collective."""

    def highest(mine: Sequence[float]) -> list[float]:
        parts = group.all_gather(torch.tensor(mine, dtype=torch.float64)).wait(timeout_s)
        found: list[float] = torch.stack(list(parts)).amax(dim=0).tolist()
        return found

    return highest


def groups_of(group: Group) -> dict[Span, Group]:
    """Those that are measured, as this rank sees them; collective at the first call."""
    made = {Span.ALL: lambda: group, Span.INSIDE: group.within_node, Span.ACROSS: group.across_nodes}
    return {span: made[span]() for span in spans_of(group.placement)}


def measured_links(group: Group, timeout_s: float, budget_s: float = BUDGET_S) -> tuple[SpanEstimate, ...]:
    """Of all ranks, inside nodes and across them; nothing of one rank alone. The same on every rank but for rounding.

    Collective.
    """
    groups = groups_of(group)
    highest = highest_over(group, timeout_s)
    share_s = budget_s / max(len(groups) * len(PATTERNS), 1)
    return tuple(_estimate(span, part, highest, timeout_s, share_s) for span, part in groups.items())


def _estimate(span: Span, group: Group, highest: Highest, timeout_s: float, share_s: float) -> SpanEstimate:
    points = {pattern: measured_points(group, pattern, highest, timeout_s, share_s) for pattern in PATTERNS}
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
) -> list[LinkPoint]:
    """From small to large, as long as the next size fits into what is left of the share.

    Messages between pairs, and small ones from each to all others: they tell what a further message costs.
    """
    points: list[LinkPoint] = []
    fewest, most = REPEATS
    sizes: list[tuple[int, Sequence[int]]] = [(nbytes, (group.size // 2,)) for nbytes in SIZES]
    if pattern is Pattern.MESSAGES and group.size > 2:
        sizes[:0] = [(nbytes, range(1, group.size)) for nbytes in SIZES[:FEWEST_SIZES]]
    left_s, before = share_s, (0, 0.0)
    for nbytes, distances in sizes:
        expected_s = before[1] * nbytes / before[0] if 0 < before[0] < nbytes else 0.0
        if nbytes not in SIZES[:FEWEST_SIZES] and (1 + fewest) * expected_s > left_s:
            break
        exchange = Exchange.of(group, pattern, nbytes, distances)
        (first_s,) = highest([exchange.seconds(group, timeout_s)])  # makes memory and connections: it does not count
        repeats = min(max(int(left_s * SHARE_OF_A_SIZE / first_s), fewest), most)
        times_s = highest([exchange.seconds(group, timeout_s) for _ in range(repeats)])
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
