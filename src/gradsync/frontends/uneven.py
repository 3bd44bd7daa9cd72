"""Uneven inputs: ranks without further inputs take part in the other ranks' steps with zero gradients.

`torch.distributed.algorithms.join.Join` finds out, at each forward, which ranks still have inputs; while some do, the
other ranks call the hook of this module, which takes part in a step's exchanges of buffers and gradients. Gradients are
exchanged on their own thread, as with several models in one `Join` all their forwards come before the first backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ..comm import Group, dense_parts
from ..engine.engine import Engine

HAS_INPUTS, SYNCHRONIZES, BROADCASTS = 4, 2, 1  # bits that a rank sends at its forward; 0 from ranks without inputs
PIECE_BYTES = 32 << 20  # most bytes of one message
EVERY_BACKWARD = (
    "inside join() each forward of the model with gradients on must be followed by its backward before the next one, "
    "as ranks without further inputs take part in each backward; use torch.no_grad() for other forwards, or no_sync()"
)


# Hooks that `Join` may call; several where models join together.
_open: weakref.WeakSet[_ZeroStepHook] = weakref.WeakSet()


class Shadowed(Protocol):
    """The interface by which a rank without further inputs takes part in the other ranks' training steps.

    The object that synchronises the model (its frontend) has these methods.
    """

    factor: float  # scales the mean over all ranks, to get the mean over ranks with inputs
    rounds: int  # number of rounds of backward and optimiser step
    buffers_are_due: bool  # whether the next training forward broadcasts buffers

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward has run whose backward, which is to synchronise gradients, has not."""

    def broadcast_buffers(self, source: int) -> None:
        """Overwrites the model's buffers on all ranks with those of rank `source`. Collective."""

    def take_gradients(self) -> Any:
        """Removes this rank's own gradients from the parameters and returns them, for `put_gradients`."""

    def put_gradients(self, own: Any) -> None:
        """Restores this rank's own gradients, `own`, which `take_gradients` removed from the parameters."""

    def zero_step(self) -> None:
        """Takes part with zeros in the other ranks' exchange of gradients; the parameters get the averages."""

    def shared_tensors(self) -> list[Tensor]:
        """Returns the parameters and buffers that must be the same on all ranks when uneven inputs end."""


class UnevenInputs(Joinable):
    """The object that takes part for an attached model in torch's `Join` (uneven inputs); it holds the model weakly."""

    def __init__(
        self, model: nn.Module, frontend: Shadowed, engine: Engine, process_group: dist.ProcessGroup | None
    ) -> None:
        super().__init__()
        self._model = weakref.ref(model)
        self.frontend, self._engine, self._process_group = frontend, engine, process_group
        self._joinable: weakref.ref[Joinable] = weakref.ref(self)
        self._context: weakref.ref[_ZeroStepHook] | None = None  # the hook of the present `join`, or of one that failed
        self._divide_by_all = True
        self._expects_backward = False  # a forward of the present `join` announced a synchronised backward

    def join_hook(self, **settings: Any) -> JoinHook:
        return self.hook_of(self, **settings)

    def hook_of(self, joinable: Joinable, **settings: Any) -> JoinHook:
        """Returns the hook that torch's `Join` calls on ranks without further inputs, for the model.

        Args:
            joinable: the object that was given to `Join`: this one, or the model in gradsync's DDP class.
            settings: arguments of `join`, such as `divide_by_initial_world_size`.
        """
        self._joinable = weakref.ref(joinable)
        self._divide_by_all = settings.get("divide_by_initial_world_size", True)
        shadow = _ZeroStepHook(self)
        self._context, self._expects_backward = weakref.ref(shadow), False
        return shadow

    @property
    def join_device(self) -> torch.device:
        return self._engine.device

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD if self._process_group is None else self._process_group

    def forward_begins(self, *, synchronizes: bool, broadcasts: bool) -> int:
        """Tells ranks without inputs what a forward of this rank brings; returns the rank whose buffers are broadcast.

        Call it on ranks with inputs, at each forward; outside of `Join` nothing is sent.

        Args:
            synchronizes: whether the backward of this forward exchanges gradients.
            broadcasts: whether buffers are broadcast in this forward.

        Raises:
            RuntimeError: on all ranks, if `Join` is to end with the first rank without inputs, or a forward had no
                backward.
        """
        if not self._notify():
            self.frontend.factor = 1.0
            return 0
        if self._expects_backward and self.frontend.awaits_backward:  # after the message that other ranks wait for
            self._engine.peers.fail(EVERY_BACKWARD)
            raise RuntimeError(EVERY_BACKWARD)
        told = self.tell(HAS_INPUTS | SYNCHRONIZES * synchronizes | BROADCASTS * broadcasts)
        self._expects_backward = synchronizes
        return self._last_with_inputs(told)

    def forward_fails(self) -> None:
        """Announces a forward that raises on this rank, so that ranks without inputs hear of the error."""
        self._notify()

    def _notify(self) -> bool:
        """Announces a forward to `Join`; returns whether a `join` is under way, so that other ranks expect messages."""
        joinable = self._joinable()
        is_under_way = self._context is not None and self._context() is not None
        if joinable is None or not is_under_way or not joinable._join_config.enable:
            return False
        Join.notify_join_context(joinable)
        return True

    def _last_with_inputs(self, told: list[int]) -> int:
        """Returns the highest rank with inputs (`told[rank]` not 0); sets the factor of the coming step's gradients."""
        have_inputs = [rank for rank, theirs in enumerate(told) if theirs]
        self.frontend.factor = 1.0 if self._divide_by_all else len(told) / len(have_inputs)
        return have_inputs[-1]

    def tell(self, mine: int) -> list[int]:
        """Sends the byte `mine` to all ranks, and returns all ranks' bytes, in the order of ranks. Collective.

        At a forward its bits say whether the rank has inputs, synchronises gradients, and broadcasts buffers.
        """
        told = self._engine.peers.gather("who still has inputs", bytes([mine]))
        return [theirs[0] for theirs in told]

    def shadow(self) -> Callable[[], None] | None:
        """Takes part in other ranks' forward; returns what to call for their backward, None if nothing is exchanged.

        It is called on ranks without further inputs, once for each forward.
        """
        told = self.tell(0)
        source = self._last_with_inputs(told)
        if any(theirs & BROADCASTS for theirs in told):
            self.frontend.broadcast_buffers(source)
        return self.frontend.zero_step if any(theirs & SYNCHRONIZES for theirs in told) else None

    def end_step(self) -> None:
        """Waits until this rank's part in the other ranks' step, if any, is over, and it has the gradients.

        An optimiser in the same `Join`, such as a sharded one, steps on this rank too, and needs them.
        """
        hook = self._context() if self._context is not None else None
        if hook is not None:
            hook.end_step()

    def level(self, *, is_last: bool) -> None:
        """Ends a `Join`: overwrites all ranks' models with that of a rank that had inputs to the end. Collective.

        `is_last`: whether this rank is one of those.
        """
        self._context, self.frontend.factor = None, 1.0
        source = max(rank for rank, was_last in enumerate(self.tell(int(is_last))) if was_last)
        rounds = torch.tensor([self.frontend.rounds], device=self._engine.device)
        self.spread([rounds, *self.frontend.shared_tensors()], source)
        self.frontend.rounds, self.frontend.buffers_are_due = int(rounds), True

    def spread(self, tensors: list[Tensor], source: int) -> None:
        """Overwrites dense tensors with those of the rank `source`. Collective."""
        timeout_s = self._engine.timeout_s
        self._engine.peers.call("the model of a rank", lambda group: broadcast_from(group, tensors, timeout_s, source))


class _ZeroStepHook(JoinHook):
    """The hook that `Join` calls on a rank without further inputs."""

    def __init__(self, inputs: UnevenInputs) -> None:
        super().__init__()
        self._inputs = inputs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradsync join")
        self._step: Future[None] | None = None
        self._own: Any = None  # this rank's gradients, while parameters have gradients of the other ranks' steps
        _open.add(self)

    def main_hook(self) -> None:
        self.end_step()
        step = self._inputs.shadow()
        if step is not None:
            self._own = self._own or self._inputs.frontend.take_gradients()
            self._step = self._thread.submit(step)
            if len(_open) == 1:  # no other model's forward comes in between: errors are raised at once
                self.end_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        _open.discard(self)
        self.end_step()
        self._thread.shutdown()
        if self._own is not None:
            self._inputs.frontend.put_gradients(self._own)
        self._inputs.level(is_last=is_last_joiner)

    def end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.result()


@torch.no_grad()
def broadcast_from(group: Group, tensors: list[Tensor], timeout_s: float, source: int) -> None:
    """Overwrites tensors with those of the rank `source` of `group`. Collective.

    Shapes, dtypes and layouts (dense or sparse) must be the same on all ranks.
    """
    for tensor in chain.from_iterable(map(dense_parts, tensors)):
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for piece in flat.split(PIECE_BYTES) if flat.numel() else ():
            sizes = [piece.numel() if rank == source else 0 for rank in range(group.size)]
            mine = piece if group.rank == source else piece[:0]
            parts = group.all_gather(mine, sizes).wait(timeout_s)
            if group.rank != source:
                piece.copy_(parts[source])
        if group.rank != source:
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
