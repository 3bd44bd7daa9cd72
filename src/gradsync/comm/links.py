"""Timed collectives of zeros between the members of a group, by which latency and rate of links are measured.

`measured_link` measures a group's links briefly when the group opens; `tuning.links` times collectives for profiles,
`tuning.rates` pairs of nodes. All members start an exchange together, and it ends with the slowest member. Of a few
repeats the quickest counts, since disturbances only make them longer; profiles have more repeats and take medians.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..costs.steps import Pattern, Transfer
from ..devices import streams
from .framing import LENGTH_BYTES
from .group import Group, Pending

PATTERNS = (Pattern.ALL_REDUCE, Pattern.ALL_GATHER, Pattern.ALL_TO_ALL, Pattern.MESSAGES)
SAMPLE_BYTES = (4 << 10, 1 << 20)  # a member sends in the two all-to-alls of `measured_link`
DEVICE_SAMPLE_BYTES = (16 << 20, 64 << 20)  # in place of the larger one, between accelerators
CLEARLY_LONGER = 3.0
SAMPLES = 5  # repeats in `measured_link`

Highest = Callable[[Sequence[float]], list[float]]


@dataclass(frozen=True)
class Exchange:
    """A repeatable collective of zeros, to time links: `issue` starts it, `transfer` has its sizes in bytes."""

    transfer: Transfer
    issue: Callable[[], Pending[Any]]

    @classmethod
    def of(cls, group: Group, pattern: Pattern, nbytes: int, distances: Sequence[int] = (1,)) -> Exchange:
        """Returns a collective of zeros, of the given pattern, in which each member of the group sends about `nbytes`.

        Args:
            pattern: the type of collective.
            distances: for `Pattern.MESSAGES`: member r sends to the members (r + distance) mod size.

        Raises:
            ValueError: for `Pattern.BROADCAST`.
        """
        n, others, device = group.size, group.size - 1, group.payload_device
        match pattern:
            case Pattern.ALL_REDUCE:
                numel = nbytes * n // (2 * others) // 4
                numbers = torch.zeros(numel, device=device)
                return cls(Transfer("", pattern, (4.0 * numel,) * n), lambda: group.all_reduce(numbers))
            case Pattern.ALL_GATHER:
                part = _zeros(nbytes // others, device)
                return cls(Transfer("", pattern, (float(len(part)),) * n), lambda: group.all_gather(part))
            case Pattern.ALL_TO_ALL:
                lengths = [nbytes // others] * n
                buffer, largest = _zeros(sum(lengths), device), lengths[0]
                transfer = Transfer("", pattern, (float(largest),) * n)
                return cls(transfer, lambda: group.all_to_all(buffer, lengths, lengths, largest=largest))
            case Pattern.MESSAGES:
                peers = {member: [(member + away) % n for away in distances] for member in range(n)}
                return cls.of_messages(group, peers, nbytes // len(distances))
            case _:
                raise ValueError(f"{pattern.value} is not measured; there are {', '.join(PATTERNS)}")

    @classmethod
    def of_messages(cls, group: Group, peers: Mapping[int, Sequence[int]], nbytes: int) -> Exchange:
        """Returns an exchange of zeros in which each member sends one message of `nbytes` to each of its `peers`.

        `peers` maps senders to receivers, the same on all members; members without messages must take part too.
        """
        size = max(nbytes, LENGTH_BYTES)
        hops = [(member, to, float(size)) for member, others in peers.items() for to in others]
        outgoing = {to: _zeros(size, group.payload_device) for to in peers.get(group.rank, ())}
        origins = [member for member, others in peers.items() if group.rank in others]
        in_pairs = all(len(others) == 1 for others in peers.values())

        def issue() -> Pending[Any]:
            return group.swap(outgoing, origins, size, group.payload_device, in_pairs=in_pairs)

        return cls(Transfer.of_messages("", group.size, hops), issue)

    def seconds(self, group: Group, timeout_s: float) -> float:
        """Runs the exchange once, after a barrier, and returns its seconds on this rank; all members must call it.

        On an accelerator these are the device's seconds, for which the host waits.

        Raises:
            GroupError: when another rank died or stopped answering.
        """
        clock = streams.streams_of(group.payload_device)
        barrier(group, timeout_s)
        began = clock.moment()
        self.issue().wait(timeout_s)
        ended = clock.moment()
        group.reach(ended, timeout_s)
        return ended.since(began)


def measured_link(group: Group, all_to_all: Callable[[int], Exchange], timeout_s: float) -> tuple[float, float, float]:
    """Measures latency and rate of the group's links, sending at most about 5 MiB per member; all members must call it.

    Between accelerators, whose links are faster, members may send up to 400 MiB.

    Args:
        all_to_all: returns, for a number of bytes per member, an all-to-all whose messages all start at once.
        timeout_s: seconds that each exchange may take.

    Returns:
        Seconds per further message, seconds per operation, bytes per second: the slowest member's, the same on all.
    """
    highest = highest_over(group, timeout_s)
    small, large = map(all_to_all, SAMPLE_BYTES)
    exchanges = [small, large]
    if group.size > 2:
        exchanges.append(Exchange.of(group, Pattern.MESSAGES, LENGTH_BYTES, (group.size // 2,)))
    small_s, large_s, *one_s = (min(e.seconds(group, timeout_s) for _ in range(SAMPLES)) for e in exchanges)
    if group.payload_device.type != "cpu":
        for nbytes in DEVICE_SAMPLE_BYTES:  # its links are so fast that latency hides all bytes of a smaller exchange
            shortest_s, longest_s = highest([small_s, large_s])
            if longest_s > CLEARLY_LONGER * shortest_s:
                break
            large = all_to_all(nbytes)
            large_s = min(large.seconds(group, timeout_s) for _ in range(SAMPLES))
    # A large exchange hides latency behind its bytes, so only the difference of both tells the rate.
    byte_s = max(large_s - small_s, 1e-6) / (large.transfer.busiest_bytes - small.transfer.busiest_bytes)
    small_s, one_message_s, byte_s = highest([small_s, *(one_s or [0.0]), byte_s])
    return *latencies(small_s, one_message_s, group.size - 1), 1 / byte_s


def latencies(small_s: float, one_message_s: float, messages: int) -> tuple[float, float]:
    """Returns the latency of links, from two timed small exchanges: seconds per further message, seconds per operation.

    Args:
        small_s: seconds of the exchange in which each member sends `messages` messages.
        one_message_s: seconds of the exchange in which each member sends one; unused if `messages` is 1.
        messages: the number of messages that each member sends in the former.
    """
    alpha_s = max(small_s - one_message_s, 0.0) / (messages - 1) if messages > 1 else small_s
    return alpha_s, max(small_s - messages * alpha_s, 0.0)


def highest_over(group: Group, timeout_s: float) -> Highest:
    """Returns a function that takes a list of numbers and returns its elementwise maximum over all members.

    It is a collective: all members must call it together.
    """

    def highest(mine: Sequence[float]) -> list[float]:
        parts = group.all_gather(torch.tensor(mine, dtype=torch.float64, device=group.device)).wait(timeout_s)
        found: list[float] = torch.stack(list(parts)).amax(dim=0).tolist()
        return found

    return highest


def barrier(group: Group, timeout_s: float) -> None:
    """Blocks until all members of the group have called this, by a small all-to-all on the links that are timed."""
    ones = [1] * group.size
    group.all_to_all(_zeros(group.size, group.device), ones, ones, largest=1).wait(timeout_s)


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    """Returns zeros, (count,) uint8."""
    return torch.zeros(count, dtype=torch.uint8, device=device)
