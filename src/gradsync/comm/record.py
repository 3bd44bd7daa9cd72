"""`RecordingGroup` counts the bytes that a rank sends in each collective, and writes them into a `Ledger`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..costs.transport import Pattern, Transport
from ..devices.streams import Moment
from .group import Group, Pending

T = TypeVar("T")


class Entry(NamedTuple):
    """One collective that a rank issued, and the bytes that the rank sends in it.

    For `all_reduce`, `all_gather` and `broadcast` the bytes are computed by the group's transport model; else they are
    the bytes of the parts or messages. Backends other than gloo pad an `exchange` to its bounds, which is not counted.

    Attributes:
        pattern: the type of the collective.
        sent_bytes: the bytes that this rank sends.
        inside: whether all members are on one node.
    """

    pattern: Pattern
    sent_bytes: float
    inside: bool = False


@dataclass
class Ledger:
    """The collectives of one rank, with their sent bytes, in the order in which the rank issued them.

    Attributes:
        entries: one for each collective, in the order of issue.
    """

    entries: list[Entry] = field(default_factory=list)

    @property
    def sent_bytes(self) -> float:
        """The bytes that this rank has sent, over all entries."""
        return sum(entry.sent_bytes for entry in self.entries)

    def take_sent_bytes(self) -> float:
        """Returns the bytes sent so far and deletes the entries, so that a long run keeps none."""
        total = self.sent_bytes
        self.entries.clear()
        return total


class RecordingGroup(Group):
    """A group that passes each operation on to the group `inner`, and writes it with its bytes into `ledger`."""

    def __init__(self, inner: Group, ledger: Ledger) -> None:
        self.inner = inner
        self.ledger = ledger
        self.rank = inner.rank
        self.members = inner.members
        self.alpha_s, self.stage_s, self.bytes_per_s = inner.alpha_s, inner.stage_s, inner.bytes_per_s
        self._placement = inner.placement
        self._inside = inner.size > 1 and inner.placement.num_nodes == 1
        self._equal_parts: dict[tuple[Pattern, int], float] = {}  # bytes sent where all members' buffers have one size
        self._subgroups: dict[tuple[int, ...], RecordingGroup] = {}

    @property
    def at_once_bytes(self) -> float:
        return self.inner.at_once_bytes

    @property
    def transport(self) -> Transport:
        return self.inner.transport

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def payload_device(self) -> torch.device:
        return self.inner.payload_device

    def reach(self, moment: Moment, timeout_s: float) -> None:
        self.inner.reach(moment, timeout_s)

    def subgroup(self, places: tuple[int, ...]) -> Group:
        """Returns the group of the members at indices `places`, whose operations go into this group's `ledger` too."""
        if len(places) == self.size:
            return self
        if places not in self._subgroups:
            self._subgroups[places] = RecordingGroup(self.inner.subgroup(places), self.ledger)
        return self._subgroups[places]

    def all_reduce(self, buffer: Tensor) -> Pending[Tensor]:
        sent_bytes = self._sent_of_equal_parts(Pattern.ALL_REDUCE, buffer)
        return self._written(Pattern.ALL_REDUCE, sent_bytes, self.inner.all_reduce(buffer))

    def all_gather(self, buffer: Tensor, sizes: Sequence[int] | None = None) -> Pending[list[Tensor]]:
        if sizes is None:
            sent_bytes = self._sent_of_equal_parts(Pattern.ALL_GATHER, buffer)
        else:
            sent_bytes = self._sent_bytes(Pattern.ALL_GATHER, [numel * buffer.element_size() for numel in sizes])
        return self._written(Pattern.ALL_GATHER, sent_bytes, self.inner.all_gather(buffer, sizes))

    def all_to_all(
        self, buffer: Tensor, sent: Sequence[int], received: Sequence[int], *, largest: int | None = None
    ) -> Pending[list[Tensor]]:
        sent_bytes = (sum(sent) - sent[self.rank]) * buffer.element_size()
        return self._written(
            Pattern.ALL_TO_ALL, sent_bytes, self.inner.all_to_all(buffer, sent, received, largest=largest)
        )

    def exchange(self, messages: Sequence[Tensor], bounds: Sequence[int]) -> Pending[list[Tensor]]:
        sent_bytes = sum(message.numel() for peer, message in enumerate(messages) if peer != self.rank)
        return self._written(Pattern.ALL_TO_ALL, sent_bytes, self.inner.exchange(messages, bounds))

    def swap(
        self,
        outgoing: Mapping[int, Tensor],
        origins: Collection[int],
        bound: int,
        device: torch.device,
        *,
        in_pairs: bool = False,
    ) -> Pending[dict[int, Tensor]]:
        sent_bytes = sum(message.numel() for message in outgoing.values())
        swap = self.inner.swap(outgoing, origins, bound, device, in_pairs=in_pairs)
        return self._written(Pattern.MESSAGES, sent_bytes, swap)

    def broadcast(self, buffer: Tensor) -> Pending[Tensor]:
        sent_bytes = self._sent_of_equal_parts(Pattern.BROADCAST, buffer)
        return self._written(Pattern.BROADCAST, sent_bytes, self.inner.broadcast(buffer))

    def barrier(self, what: str, timeout_s: float, *, detail: str = "") -> None:
        self.inner.barrier(what, timeout_s, detail=detail)

    def announce_failure(self, text: str, ranks: Collection[int] | None = None) -> None:
        self.inner.announce_failure(text, ranks)

    def close(self) -> None:
        self.inner.close()

    def _sent_of_equal_parts(self, pattern: Pattern, buffer: Tensor) -> float:
        """Returns the bytes this member sends in a `pattern` collective of buffers as large as this one."""
        sent_bytes = self._equal_parts.get((pattern, buffer.nbytes))
        if sent_bytes is None:
            sent_bytes = self._sent_bytes(pattern, [buffer.nbytes] * self.size)
            self._equal_parts[pattern, buffer.nbytes] = sent_bytes
        return sent_bytes

    def _sent_bytes(self, pattern: Pattern, part_bytes: Sequence[float]) -> float:
        """Computes the bytes this member sends in a `pattern` collective where member j has `part_bytes[j]`."""
        return sum(nbytes for _, nbytes in self.transport.sends(pattern, part_bytes, self.rank))

    def _written(self, pattern: Pattern, sent_bytes: float, pending: Pending[T]) -> Pending[T]:
        pending.sent_bytes = float(sent_bytes)
        self.ledger.entries.append(Entry(pattern, pending.sent_bytes, self._inside))
        return pending
