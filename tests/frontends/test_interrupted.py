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
