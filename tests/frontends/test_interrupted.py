"""Ctrl-C at some line of attach leaves nothing: the model can be attached again, and no thread is left."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync.planner import AveragingPlanner
from tests.frontends.models import Perceptron
from tests.world import Ranks

World = Callable[[int], Ranks]

# Not the few lines that hand on what is attached: a Ctrl-C just there loses the handle.
PLACES = tuple(
    str(Path(gradsync.__file__).parent / place)
    for place in (
        "engine",
        "optim",
        *(f"frontends/{name}.py" for name in ("agreement", "autograd", "averaging", "ddp")),
    )
)
FEW = 12  # lines in which an attach is interrupted, spread evenly
ENDS_S = 5.0  # for a thread that was told to end
TIMEOUT_S = 6.0  # for which rank 0 waits where rank 1 never came
KEYS = 12  # of notices, where the rank that failed left before the others: docs/concepts/reliability.md


class Interrupting:
    """Raises KeyboardInterrupt before line number `at` of those that this thread comes to for the first time."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.lines = at, set[tuple[CodeType, int]]()

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PLACES) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and (place := (frame.f_code, frame.f_lineno)) not in self.lines:
            self.lines.add(place)
            if len(self.lines) == self.at:
                raise KeyboardInterrupt
        return self._line

    def run(self, job: Callable[[], Any]) -> Any:
        sys.settrace(self)
        try:
            return job()
        finally:
            sys.settrace(None)


def attach_to(frontend: str, net: nn.Module, interrupting: Interrupting) -> Any:
    """Attaches under `interrupting`, and returns the handle."""
    if frontend == "class":
        return interrupting.run(lambda: gradsync.DistributedDataParallel(net)).attachment
    if frontend == "averages":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return interrupting.run(lambda: gradsync.attach(net, optimizer, plan=AveragingPlanner()))
    if frontend == "attach":
        return interrupting.run(lambda: gradsync.attach(net))
    ddp = DistributedDataParallel(net)
    return interrupting.run(lambda: gradsync.DDPState(ddp))


def interrupted(frontend: str) -> list[str]:
    """Interrupts attaching at some of its lines, one after the other; returns what was left."""
    attach_to(frontend, Perceptron(), Interrupting()).detach()  # imports
    whole = Interrupting()
    attach_to(frontend, Perceptron(), whole).detach()
    before, problems = threading.active_count(), []
    for number in range(FEW):
        net, at = Perceptron(), 1 + number * len(whole.lines) // FEW
        with pytest.raises(KeyboardInterrupt):
            attach_to(frontend, net, Interrupting(at))
        gc.collect()
        try:
            gradsync.attach(net).detach()
        except RuntimeError as error:
            problems.append(f"line {at}: {error}")
        until_s = time.monotonic() + ENDS_S
        while threading.active_count() > before and time.monotonic() < until_s:
            time.sleep(0.01)
        if threading.active_count() > before:
            problems.append(f"line {at}: {[thread.name for thread in threading.enumerate()]}")
            before = threading.active_count()
    dist.barrier()
    return problems


@pytest.mark.parametrize("frontend", ["attach", "class", "hook", "averages"])
def test_ctrl_c_in_attach_leaves_nothing(world: World, frontend: str) -> None:
    assert world(1).run(interrupted, frontend) == [[]]


def interrupted_on_one_rank() -> list[str]:
    """Interrupts rank 1's attaching at some lines; returns what was wrong with the others' errors, or was left."""
    gradsync.attach(Perceptron(), timeout=TIMEOUT_S).detach()  # imports
    whole = Interrupting()
    whole.run(lambda: gradsync.attach(Perceptron(), timeout=TIMEOUT_S)).detach()
    lengths: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lengths, len(whole.lines))
    keys, problems = distributed_c10d._get_default_store().num_keys(), []
    for number in range(1, FEW, 4):
        net, interrupting = Perceptron(), Interrupting(number * lengths[1] // FEW if dist.get_rank() == 1 else None)
        try:
            interrupting.run(lambda net=net: gradsync.attach(net, timeout=TIMEOUT_S)).detach()  # rank 0, if it was done
        except KeyboardInterrupt:
            pass
        except RuntimeError as error:
            problems += [] if "rank 1" in str(error) else [f"{number}: {error}"]
        dist.barrier()
        gradsync.attach(net, timeout=4 * TIMEOUT_S).detach()
    dist.barrier()
    left = distributed_c10d._get_default_store().num_keys() - keys
    return problems + ([f"{left} keys"] if left > KEYS else [])


@pytest.mark.waiting
def test_the_others_hear_of_ctrl_c_in_attach_and_attach_again_with_that_rank(world: World) -> None:
    for problems in world(2).run(interrupted_on_one_rank):
        assert not problems
