"""`GlooGroup`: collectives over gloo that are faster than gloo's own, chosen by size and by measured links.

Measured on nodes with links of 200 Mbit to 1 Gbit (docs/concepts/collectives.md): gloo's rings pay one latency per
member, where messages that all start at once pay one in all. gloo's all-to-all, which starts all messages at once,
reaches 60-75 % of the line rate for large messages, where rounds of one message per rank reach 95 %. On links faster
than the cores that drive them, rounds only cost. All members choose alike: by sizes, a latency and a rate that are the
same on all. How an all-reduce sums depends on its size alone, so that a plan gives the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from .. import kernels
from ..costs.cluster import Placement
from ..costs.steps import Transfer
from ..costs.transport import DEFAULT_TRANSPORT, DIRECT_BYTES, Pattern
from ..tensors import allocator as memory
from .distributed import TorchGroup
from .framing import cut_messages, cut_to_lengths, end_to_end, split, swapped, with_lengths
from .group import Pending
from .links import Exchange
from .rounds import Rounds

FAST_BYTES_PER_S = 250e6  # on faster links the latency of rounds costs more than their order saves
MOST_DIRECT_BYTES = 1 << 20  # the limit of `at_once_bytes`, however high the latency: docs/concepts/collectives.md
DIRECT_EXCESS = 0.4  # share by which messages that all start at once take longer than their bytes


class GlooGroup(TorchGroup):
    """The members of a process group with the gloo backend, with collectives that are faster than gloo's own.

    Args:
        process_group: the members; None: all ranks.
        timeout_s: seconds to wait for the other members, and that making each communicator may take; operations have
            their own timeout.
        device: the device of the tensors that the members will exchange; None: the CPU.
        bytes_per_s: the rate of a member's link in each direction; None: it is measured now, by sending 5 MiB, if
            `measures`.
        placement: the node of each member; None: the members find it out together.
        what: what the members come together for, the same on all members, for error messages.
        parent: the group that this one is a subgroup of.
        places: the members' indices in `parent`.
        on_calling_thread: whether only the thread that calls issues operations. The communicators are the group's own
            all the same, as gloo's do not wait for each other.
        measures: whether to measure the links now.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float,
        device: torch.device | None = None,
        bytes_per_s: float | None = None,
        placement: Placement | None = None,
        what: str = "a group of gradsync",
        parent: TorchGroup | None = None,
        places: tuple[int, ...] | None = None,
        on_calling_thread: bool = False,
        measures: bool = True,
    ) -> None:
        self.bytes_per_s = self._given_bytes_per_s = bytes_per_s
        super().__init__(
            process_group,
            timeout_s=timeout_s,
            device=device,
            placement=placement,
            what=what,
            parent=parent,
            places=places,
            on_calling_thread=on_calling_thread,
            measures=measures,
        )

    def _open(self, process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
        super()._open(process_group, timeout_s)
        apart = self._communicator()  # for messages: a thread waits for each of them
        self._rounds = Rounds(apart, self.rank, self.size)
        self._releases.append(lambda hanging: self._rounds.stop(patience_s=0.0 if hanging else 5.0))
        self._measure_links(self._at_once, timeout_s)

    def _make_subgroup(self, places: tuple[int, ...]) -> GlooGroup:
        return GlooGroup(
            self._process_group,
            timeout_s=self._timeout_s,
            device=self._device,
            bytes_per_s=self._given_bytes_per_s,
            parent=self,
            places=places,
            measures=self._measures,
        )

    def all_reduce(self, buffer: Tensor) -> Pending[Tensor]:
        in_ring, doubles = _ways_to_sum(buffer.nbytes, self.size)
        if in_ring or (doubles and not buffer.is_cpu):
            return super().all_reduce(buffer)  # gloo's ring
        if doubles:
            total = buffer.clone()  # written to by another thread, even after this rank has given up
            return self._pending(self._rounds.all_reduce(total), lambda: buffer.copy_(total))
        return self._gather_and_sum(buffer)

    def all_gather(self, buffer: Tensor, sizes: Sequence[int] | None = None) -> Pending[list[Tensor]]:
        lengths = list(sizes) if sizes is not None else [buffer.numel()] * self.size
        largest = max(lengths) * buffer.element_size()
        if self._starts_at_once((self.size - 1) * largest):
            return self._all_to_all(buffer.repeat(self.size), [buffer.numel()] * self.size, lengths)
        if len(set(lengths)) == 1 or not buffer.is_cpu:
            return super().all_gather(buffer, lengths)  # its ring is near the line rate
        parts = split(memory.empty(sum(lengths), buffer.dtype, buffer.device), lengths)
        return self._exchange([buffer] * self.size, parts, together=self._fast)

    def all_to_all(
        self, buffer: Tensor, sent: Sequence[int], received: Sequence[int], *, largest: int | None = None
    ) -> Pending[list[Tensor]]:
        small = largest is not None and self._starts_at_once((self.size - 1) * largest * buffer.element_size())
        if small or self._fast or not buffer.is_cpu:
            return self._all_to_all(buffer, sent, received)
        return self._exchange(
            split(buffer, sent),
            split(memory.empty(sum(received), buffer.dtype, buffer.device), received),
            together=False,
        )

    def exchange(self, messages: Sequence[Tensor], bounds: Sequence[int]) -> Pending[list[Tensor]]:
        # gloo fills the first bytes of a receive that is larger than the message: only the message travels.
        outgoing, rank = with_lengths(messages, bounds), self.rank
        own, outgoing[rank] = outgoing[rank], outgoing[rank][:0]
        if self._starts_at_once((self.size - 1) * max(bounds)) or not own.is_cpu:
            return self._exchange_at_once(end_to_end(outgoing), [part.numel() for part in outgoing], own, bounds[rank])
        room = [0 if peer == rank else bounds[rank] for peer in range(self.size)]
        incoming = split(memory.empty(sum(room), own.dtype, own.device), room)
        work = self._rounds.exchange(outgoing, incoming, together=self._fast, bounded=True)
        return self._pending(work, lambda: cut_to_lengths(incoming, rank, own))

    def swap(
        self,
        outgoing: Mapping[int, Tensor],
        origins: Collection[int],
        bound: int,
        device: torch.device,
        *,
        in_pairs: bool = False,
    ) -> Pending[dict[int, Tensor]]:
        if device.type != "cpu":
            return super().swap(outgoing, origins, bound, device, in_pairs=in_pairs)
        messages = swapped(outgoing, bound)
        nothing = torch.empty(0, dtype=torch.uint8)
        sent = [messages.get(peer, nothing) for peer in range(self.size)]
        incoming = [torch.empty(bound if peer in origins else 0, dtype=torch.uint8) for peer in range(self.size)]
        work = self._rounds.exchange(sent, incoming, together=self._fast or in_pairs, bounded=True)
        return self._pending(work, lambda: cut_messages(incoming, origins))

    @property
    def _fast(self) -> bool:
        return self.bytes_per_s is not None and self.bytes_per_s >= FAST_BYTES_PER_S

    @property
    def at_once_bytes(self) -> float:
        """The most bytes that a member sends in an all-gather or all-to-all whose messages all start at once.

        A larger all-gather of equal parts goes round a ring. A larger all-to-all runs in rounds of one message per
        rank, unless links are fast.
        """
        limit = float(DIRECT_BYTES)
        if self.alpha_s is not None and self.bytes_per_s is not None:
            latency_s = self.stage_s + (self.size - 1) * self.alpha_s
            limit = max(limit, latency_s * self.bytes_per_s / DIRECT_EXCESS)
        return min(limit, float(MOST_DIRECT_BYTES))

    def _starts_at_once(self, sent_bytes: float) -> bool:
        """Whether all messages of a collective are to start at once, if each member sends at most `sent_bytes`."""
        return sent_bytes <= self.at_once_bytes

    def _exchange(self, outgoing: list[Tensor], incoming: list[Tensor], *, together: bool) -> Pending[list[Tensor]]:
        incoming[self.rank].copy_(outgoing[self.rank])
        work = self._rounds.exchange(
            [part.view(torch.uint8) for part in outgoing],
            [part.view(torch.uint8) for part in incoming],
            together=together,
        )
        return self._pending(work, lambda: incoming)

    def _gather_and_sum(self, buffer: Tensor) -> Pending[Tensor]:
        """All-reduces `buffer` in place: every member receives all members' buffers, and sums them in rank order."""
        gathered = self._all_to_all(buffer.repeat(self.size), *[[buffer.numel()] * self.size] * 2)
        return Pending(lambda timeout_s: _sum_into(buffer, gathered.wait(timeout_s)))

    def _at_once(self, nbytes: int) -> Exchange:
        """Returns an all-to-all, all messages at once: each member divides `nbytes` zeros evenly among all members."""
        lengths = [nbytes // self.size] * self.size
        buffer = torch.zeros(sum(lengths), dtype=torch.uint8, device=self._device)
        transfer = Transfer("", Pattern.ALL_TO_ALL, (float(lengths[0]),) * self.size)
        return Exchange(transfer, lambda: self._all_to_all(buffer, lengths, lengths))


@lru_cache(maxsize=1024)
def _ways_to_sum(nbytes: int, size: int) -> tuple[bool, bool]:
    """Returns whether an all-reduce of so many bytes among `size` members goes in a ring, and whether by doubling."""
    part_bytes = (float(nbytes),) * size
    doubles = size > 2 and DEFAULT_TRANSPORT.doubles(Pattern.ALL_REDUCE, part_bytes)
    return DEFAULT_TRANSPORT.passes_on(Pattern.ALL_REDUCE, part_bytes), doubles


def _sum_into(buffer: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Overwrites `buffer` with the sum of `parts` in their order, with the same bits on every processor.

    16-bit floats are summed in fp32.
    """
    if buffer.dtype in (torch.float16, torch.bfloat16):
        kernels.sum_parts(parts, buffer)
        return buffer
    total = parts[0] + parts[1] if len(parts) > 1 else parts[0]
    for part in parts[2:]:
        total += part
    return buffer.copy_(total)
