"""Models in shards on an accelerator, as a model: FSDP's streams, the engine's and the user's do not meet in memory.

FSDP is given streams of the model in place of those of `torch.cpu`, which are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import gradsync
from gradsync.devices import streams
from gradsync.frontends import shard_ranks
from gradsync.frontends import sharded as frontend
from gradsync.schemes import AllReduce, Scheme
from tests.frontends.test_sharded import FEEDBACK, TIMEOUT_S, batch, by_one_bucket, each_alone, meshes, sharded
from tests.stream_model import Clock, Stream, StreamModel, on_a_pretended_accelerator
from tests.world import Ranks

pytestmark = pytest.mark.streams

World = Callable[[int], Ranks]
_numbers = count()


class FsdpEvent:
    """An event of the model."""

    def __init__(self, model: StreamModel) -> None:
        self._model = model
        self.clock: Clock = {}

    def record(self, stream: FsdpStream | None = None) -> None:
        FsdpStream(self._model, self._model.current if stream is None else stream.name).record_event(self)


class FsdpStream:
    """A stream of the model with the methods of torch's that FSDP calls."""

    def __init__(self, model: StreamModel, name: Stream) -> None:
        self._model, self.name = model, name

    def record_event(self, event: FsdpEvent | None = None) -> FsdpEvent:
        event = FsdpEvent(self._model) if event is None else event
        with self._model.on(self.name):
            event.clock = self._model.snapshot()
        return event

    def wait_event(self, event: FsdpEvent) -> None:
        with self._model.on(self.name):
            self._model.order_behind(event.clock)

    def wait_stream(self, other: FsdpStream) -> None:
        self.wait_event(other.record_event())


@contextmanager
def fsdp_on(model: StreamModel) -> Iterator[None]:
    """Lets FSDP's work on CPU tensors run on streams of the model."""
    with ExitStack() as within:
        for name, value in (
            ("Stream", lambda *unused, **settings: FsdpStream(model, ("fsdp", next(_numbers)))),
            ("Event", lambda *unused, **settings: FsdpEvent(model)),
            ("current_stream", lambda *unused: FsdpStream(model, model.current)),
            ("stream", lambda stream: model.on(stream.name)),
        ):
            within.enter_context(patch.object(torch.cpu, name, value, create=True))
        for module in (frontend, shard_ranks):
            within.enter_context(patch.object(module, "streams_of", streams.streams_of))
        yield


def train(planner: Any, scheme: Scheme[Any], shares: bool = True) -> None:
    """Trains on a pretended accelerator; gradients are read, changed in place and dropped on the user's stream."""
    with on_a_pretended_accelerator() as model, fsdp_on(model):
        if not shares:
            model.share = lambda tensor: None  # type: ignore[method-assign]
        net: Any = sharded(meshes())
        gradsync.attach(net, plan=planner(scheme), timeout=TIMEOUT_S)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for net.step in range(4):
            net.set_requires_all_reduce(net.step != 2)
            net(batch(generator)).square().mean().backward()
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.to_local().detach().sub_(parameter.grad.to_local().mul_(0.1))
                    parameter.grad = None


@pytest.mark.parametrize("scheme", [AllReduce(), FEEDBACK], ids=["exact", "top-k"])
@pytest.mark.parametrize("planner", [by_one_bucket, each_alone])
def test_all_accesses_are_ordered_by_events(world: World, planner: Any, scheme: Scheme[Any]) -> None:
    world(4).run(train, planner, scheme)


def test_fsdps_memory_would_be_taken_anew_too_early(world: World) -> None:
    with pytest.raises(AssertionError, match="may take memory that was freed"):
        world(4).run(train, each_alone, AllReduce(), False)
