"""A rank's part in a route: packing messages for each collective, and taking in the messages that arrive.

Between tasks a rank holds a dense tensor, or payloads of pieces of the bucket. Payloads of several ranks that meet
travel on as bundles, and decompression sums the bundle of each piece in the order of ranks; payloads that can be added
are added when they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .. import kernels
from ..comm import Group, Pending
from ..compressors import Compressor, CompressorState, Payload
from ..costs.steps import OFFLOAD
from ..devices import host
from ..tensors import allocator as memory
from ..tensors.bucket import FlatSpec, TensorSpec
from .base import State
from .compressed import payload_of
from .legs import Held, Leg, Piece, pieces_of_member
from .parcels import dtype_of, plain, point_name, room_nbytes, spec_of, starts_of
from .tree import Kind, RouteTask

T = TypeVar("T")
R = TypeVar("R")
WHOLE = "whole"  # the state's key of the bucket's spec and step; compressors' states are of pieces only


def is_on_host(task: RouteTask, compressor: Compressor[Any]) -> bool:
    """Whether a compression or decompression task is computed on the host while gradients are on an accelerator.

    That is so for "offload" tasks. Compressors whose ranks must agree on numbers first are exempt: they read the
    gradient on the device before.
    """
    return task.choice == OFFLOAD and not compressor.traits.agrees


class RouteMethods(Protocol):
    """The methods of a `Route` by which `Transit` runs its tasks: process groups, compressors, sizes of messages."""

    def group_of(self, leg: Leg, group: Group) -> Group:
        """Returns the subgroup of `group` in which this rank runs the collective of the task `leg`."""

    def compressor_at(self, point: int) -> Compressor[Any]:
        """Returns the compressor that the route's "compress" task number `point` uses, counted from 0."""

    def keeps_fp32_at(self, point: int) -> bool:
        """Whether the "compress" task number `point`, from 0, compresses sums, in a wider dtype than gradients."""

    def item_nbytes(self, leg: Leg, held: Held, whole: FlatSpec, step: int) -> list[int]:
        """Returns the bytes of each item in the message of a task: of each payload, or of one dense range.

        Args:
            leg: the task, a collective.
            held: the elements in the message.
            whole: the layout of the bucket.
            step: the number of the training step, on which the size of payloads may depend.
        """


class Transit:
    """One rank's passage through the tasks of a route (compressions, decompressions, collectives) with one bucket.

    It holds a dense tensor or compressed payloads, which each task replaces.
    """

    def __init__(
        self,
        route: RouteMethods,
        x: Tensor,
        numel: int,
        whole: CompressorState | None,
        state: State,
        group: Group,
        scale: float,
    ) -> None:
        self.route = route
        self.x, self.values, self.behind = x, x[:numel], x[numel:]
        self.step = 0 if whole is None else whole.step
        self.spec = plain((TensorSpec((numel,), x.dtype),)) if whole is None else whole.spec
        self.state, self.group, self.rank, self.scale = state, group, group.rank, scale
        self.next_state: dict[str, Any] = dict(state) if whole is None else {WHOLE: (whole.next(),)}
        self.flags = self.behind != 0
        self.dense = self.values
        self.bundles: list[list[Payload]] = []  # of each piece
        self.template: Payload | None = None  # of the payloads that travel
        self.agreed: list[Tensor] = []  # for each piece

    def tensors(self) -> object:
        """Returns an object that holds all tensors that the next task reads, or that the last one has left.

        Whoever runs the task on another stream or thread keeps it, so that their memory is not used again.
        """
        return self.dense, self.bundles, self.template, self.agreed, dict(self.next_state)

    def compress(self, leg: Leg) -> None:
        compressor, point = self.route.compressor_at(leg.point), point_name(leg)
        held = leg.after[self.rank]
        if held is None:
            self.next_state[point] = ()
            if compressor.traits.agrees:  # the sum of such payloads is decompressed where they were made
                return
            # No elements are compressed, to get a template of the payloads that will arrive.
            spec = spec_of(self.spec, (0, 0), leg.point, leg.keep_fp32)
            nothing = memory.empty(0, spec.dtype, self.x.device)
            fresh = replace(compressor.init(spec, self.rank), step=self.step)
            self.template, _ = compressor.compress(nothing, fresh)
            return
        kept: Any = self.state[point]
        (dense,) = self._to_work(leg, [self.dense])
        if self.agreed:
            kept = [replace(part, agreed=agreed) for part, agreed in zip(kept, self.agreed, strict=True)]
            self.agreed = []
        lengths = [stop - start for start, stop in held.pieces]
        made = [compressor.compress(x, part) for x, part in zip(dense.split(lengths), kept, strict=True)]
        payloads = [replace(payload, data=self._back(leg, payload.data)) for payload, _ in made]
        self.bundles = [[payload] for payload in payloads]
        self.template = payloads[0]
        self.next_state[point] = tuple(following for _, following in made)

    def decompress(self, leg: Leg) -> None:
        held = leg.after[self.rank]
        if held is None:
            return
        compressor, dtype = self.route.compressor_at(leg.point), dtype_of(self.spec, leg.keep_fp32_after)
        in_place = held.numel == self.values.numel() and dtype is self.values.dtype
        out = self.values if in_place else memory.empty(held.numel, dtype, self.x.device)
        before = leg.before[self.rank]
        assert before is not None and self.template is not None
        scale = _counterweight(self.template, leg.added) * (self.scale if leg.scales else 1.0)
        lengths = [stop - start for start, stop in before.pieces]
        result = host.room_for(out) if is_on_host(leg.task, compressor) else out
        arrived = iter(self._to_work(leg, [payload.data for bundle in self.bundles for payload in bundle]))
        for room, bundle in zip(result.split(lengths), self.bundles, strict=True):
            compressor.sum_into(room, [replace(payload, data=next(arrived)) for payload in bundle], scale)
        host.send(result, out)
        self.dense, self.bundles = out, []

    def _to_work(self, leg: Leg, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the tensors where the task's kernels read them: those of offloaded work on the host."""
        return host.fetch(tensors) if is_on_host(leg.task, self.route.compressor_at(leg.point)) else tensors

    def _back(self, leg: Leg, made: Tensor) -> Tensor:
        """Returns a tensor that the task has made, on the device of the gradients."""
        if not is_on_host(leg.task, self.route.compressor_at(leg.point)):
            return made
        return host.sent(made, self.x.device)

    def agree(self, leg: Leg, following: Leg) -> Pending[None]:
        """Starts to share the numbers that the compressor needs from all ranks, such as scales, before the task `leg`.

        `following` is the all-reduce of payloads, whose ranks share them. Waiting for the result sets `self.agreed` to
        the maxima of `Compressor.observe` over these ranks, which `compress` then uses.
        """
        held = leg.after[self.rank]
        if held is None:
            return Pending(lambda timeout_s: None)
        compressor, kept = self.route.compressor_at(leg.point), self.state[point_name(leg)]
        lengths = [stop - start for start, stop in held.pieces]
        observed = [compressor.observe(x, part) for x, part in zip(self.dense.split(lengths), kept, strict=True)]
        found = [part for part in observed if part is not None]

        def told(all_of_them: list[Tensor]) -> None:
            self.agreed = list(torch.stack(all_of_them).amax(dim=0).split([len(part) for part in found]))

        own = torch.cat(found)
        if following.idle:
            return Pending(lambda timeout_s: told([own]))
        return _then(self.route.group_of(following, self.group).all_gather(own), told)

    def alone(self, leg: Leg) -> list[Tensor]:
        """Returns the result of a collective among this rank alone: a list with its own message, if any.

        It takes the place of `issue` there: nothing is sent.
        """
        held = leg.before[self.rank]
        if held is None:
            return []
        return [
            self._summand(leg) if leg.task.kind in (Kind.COMM, Kind.COMM_L) else self._message(leg, held, slice(None))
        ]

    def issue(self, leg: Leg) -> Pending[list[Tensor]]:
        """Starts the collective of the task `leg`; waiting for the result gives the messages to this rank.

        They are in the order of the group's members, each (bytes,) uint8; an all-reduce gives one tensor instead, the
        sum.
        """
        mine, task = leg.before[self.rank], leg.task
        if mine is None and not (task.kind.is_second and leg.after[self.rank] is not None):
            return Pending(lambda timeout_s: [])  # this rank takes no part, but has the turn too
        group, members = self.route.group_of(leg, self.group), leg.group_of(self.rank)
        if task.kind in (Kind.COMM, Kind.COMM_L):
            return _then(group.all_reduce(self._summand(leg)), lambda total: [total])
        if task.kind.is_first:
            assert mine is not None
            return self._push(leg, mine, group, members)
        before = [leg.before[rank] for rank in members]
        sizes = [0 if held is None else self._nbytes(leg, held) for held in before]
        if task.rooted:
            buffer = memory.empty(sizes[0], torch.uint8, self.x.device)
            if mine is not None:
                buffer = self._message(leg, mine, slice(None))
            return _then(group.broadcast(buffer), lambda arrived: [arrived])
        assert mine is not None
        return group.all_gather(self._message(leg, mine, slice(None)), sizes)

    def take(self, leg: Leg, arrived: list[Tensor]) -> None:
        """Reads the messages of the task `leg`, and sets the dense or compressed tensors that this rank holds next.

        `arrived` is what waiting for `issue`, or `alone`, returned.
        """
        held, kind = leg.after[self.rank], leg.task.kind
        if held is None or not arrived:
            self.dense, self.bundles = self.values[:0], []
            return
        if kind in (Kind.COMM, Kind.COMM_L):
            self._take_sum(leg, arrived[0])
            return
        sent = self._sent_here(leg, held)
        items = [self._items(leg, message, each) for message, each in zip(arrived, sent, strict=True)]
        if not kind.of_payloads:
            self._take_dense(leg, held, [parts[0] for parts in items])
            return
        pieces = [each.pieces for each in sent]
        bundles = [self._bundles(leg, parts, each) for parts, each in zip(items, pieces, strict=True)]
        if kind.is_second:
            self.bundles = [bundle for theirs in bundles for bundle in theirs]
            return
        met = [[payload for bundle in each for payload in bundle] for each in zip(*bundles, strict=True)]
        self.bundles = [[self._added(bundle)] for bundle in met] if leg.adds else met

    def result(self) -> Tensor:
        """Returns the bucket after the last task, (numel + flags,): the sum, and 1 for flags that any rank had set.

        Flags say, for example, whether a rank used a parameter.
        """
        if self.dense is not self.values:
            self.values.copy_(self.dense)
        self.behind.copy_(self.flags)
        return self.x

    def _push(self, leg: Leg, mine: Held, group: Group, members: tuple[int, ...]) -> Pending[list[Tensor]]:
        after = [leg.after[rank] for rank in members]
        sent = [0 if held is None else self._nbytes(leg, held) for held in after]
        outgoing = memory.empty(sum(sent), torch.uint8, self.x.device)
        divided = not leg.task.rooted
        for member, (room, held) in enumerate(zip(outgoing.split(sent), after, strict=True)):
            if held is not None:
                self._write(room, leg, held, pieces_of_member(mine, member, len(members), divided=divided))
        incoming = [sent[group.rank]] * group.size
        arriving = group.all_to_all(outgoing, sent, incoming, largest=max(sent))
        return arriving if after[group.rank] is not None else _then(arriving, lambda messages: [])

    def _sent_here(self, leg: Leg, held: Held) -> list[Held]:
        """Returns each arriving message's range, and its payloads' ranges; `held` is this rank's range after `leg`."""
        before = [leg.before[rank] for rank in leg.group_of(self.rank)]
        if not leg.task.kind.is_second:
            return [held] * len(before)  # each member sends what this rank goes on with
        return [each for each in before if each is not None]

    def _take_dense(self, leg: Leg, held: Held, parts: Sequence[Tensor]) -> None:
        dtype = dtype_of(self.spec, leg.keep_fp32)
        numbers = [part.view(dtype) for part in parts]
        if leg.task.kind is Kind.COMM_1:
            self.dense = memory.empty(held.numel, dtype_of(self.spec, leg.keep_fp32_after), self.x.device)
            kernels.sum_parts(numbers, self.dense, scale=self.scale if leg.scales else 1.0)
            return
        whole = held.numel == self.values.numel() and dtype is self.values.dtype
        self.dense = self.values if whole else memory.empty(held.numel, dtype, self.x.device)
        torch.cat(numbers, out=self.dense)

    def _take_sum(self, leg: Leg, total: Tensor) -> None:
        numbers, flags = total.split([len(total) - len(self.flags), len(self.flags)])
        self.flags = flags != 0
        if leg.task.kind is Kind.COMM:
            dtype = dtype_of(self.spec, leg.keep_fp32_after)
            self.dense = numbers.to(dtype) if len(self.flags) or dtype is not total.dtype else total
            return
        lengths = [payload.data.numel() for (payload,) in self.bundles]
        self.bundles = [
            [replace(payload, data=data)] for (payload,), data in zip(self.bundles, numbers.split(lengths), strict=True)
        ]

    def _summand(self, leg: Leg) -> Tensor:
        """Returns this rank's 1-D summand of an all-reduce: range or payloads, then flags (was a parameter used?)."""
        if leg.task.kind is Kind.COMM:
            if leg.scales:
                self.dense.mul_(self.scale)  # before the sum, to keep half-precision sums in range
            parts = [self.dense]
        else:
            parts = [payload.data for (payload,) in self.bundles]
            factor = 1 / _counterweight(self.bundles[0][0], leg.members)
            parts = [data * factor for data in parts] if factor != 1 else parts
        if leg.task.kind is Kind.COMM and not len(self.flags):
            return self.dense
        numbers = sum(map(len, parts))
        message = memory.empty(numbers + len(self.flags), parts[0].dtype, self.x.device)
        return torch.cat([*parts, self.flags.to(message.dtype)], out=message)

    def _added(self, bundle: Sequence[Payload]) -> Payload:
        """Adds the payloads of several ranks to one, which decodes to their sum, or in float16 to their mean."""
        first = bundle[0]
        total = memory.empty_like(first.data)
        if total.dtype.is_floating_point:
            factor = 1 / _counterweight(first, len(bundle))
            kernels.sum_parts([payload.data for payload in bundle], total, scale=factor)
        else:
            total.copy_(first.data)
            for payload in bundle[1:]:
                total += payload.data
        return replace(first, data=total)

    def _bundles(self, leg: Leg, parts: Sequence[Tensor], pieces: Sequence[Piece]) -> list[list[Payload]]:
        """Returns the payloads of each of `pieces`, made of views `parts` of a message, `leg.bundle` for each piece."""
        assert self.template is not None
        keep_fp32 = self.route.keeps_fp32_at(leg.point)
        specs = [spec_of(self.spec, piece, leg.point, keep_fp32) for piece in pieces]
        templates = [replace(self.template, spec=spec) for spec in specs]
        return [
            [payload_of(data, template) for data in parts[place * leg.bundle : (place + 1) * leg.bundle]]
            for place, template in enumerate(templates)
        ]

    def _nbytes(self, leg: Leg, held: Held) -> int:
        """Returns the bytes of a message: the elements `held`, and flags (parameter used?) if the task sends them."""
        sizes = self.route.item_nbytes(leg, held, self.spec, self.step)
        return room_nbytes(sizes, len(self.flags) if leg.carries_flags else 0)

    def _message(self, leg: Leg, held: Held, which: slice) -> Tensor:
        room = memory.empty(self._nbytes(leg, held), torch.uint8, self.x.device)
        return self._write(room, leg, held, which)

    def _write(self, room: Tensor, leg: Leg, held: Held, which: slice) -> Tensor:
        """Writes the payloads `which`, or dense `held`, and flags (was a parameter used?) to `room`; returns `room`."""
        if leg.task.kind.of_payloads:
            items = [payload.data.view(torch.uint8) for bundle in self.bundles[which] for payload in bundle]
        else:
            mine = leg.before[self.rank]
            assert mine is not None
            items = [self.dense[held.start - mine.start : held.stop - mine.start].view(torch.uint8)]
        end = 0
        for place, start in zip(items, starts_of(list(map(len, items))), strict=True):
            room[start : start + len(place)] = place
            end = start + len(place)
        if leg.carries_flags:
            room[end : end + len(self.flags)] = self.flags
        return room

    def _items(self, leg: Leg, message: Tensor, held: Held) -> list[Tensor]:
        """Returns views of a message's payloads or dense range, `held`; ORs flags (parameter used?) to `self.flags`."""
        sizes = self.route.item_nbytes(leg, held, self.spec, self.step)
        starts = starts_of(sizes)
        if leg.carries_flags:
            end = starts[-1] + sizes[-1]
            self.flags = self.flags | (message[end : end + len(self.flags)] != 0)
        return [message[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _counterweight(payload: Payload, members: int) -> float:
    """Returns the number by which a sum of `members` float16 payloads is divided, to stay in range; else 1."""
    return float(members) if payload.data.dtype is torch.float16 else 1.0


def _then(pending: Pending[T], make: Callable[[T], R]) -> Pending[R]:
    """Returns a pending operation whose result is `make` of the result of `pending`."""
    following: Pending[R] = Pending(lambda timeout_s: make(pending.wait(timeout_s)))
    following.sent_bytes = pending.sent_bytes
    return following
