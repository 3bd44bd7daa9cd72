"""Gradients or parameters: both ways to average are tried on real steps, and the faster one stays.

Gradients are averaged first, until their plan has settled. Then a block of steps is timed, and another one in which
parameters are averaged in groups; ranks compare the times of the slowest one, so all decide alike. Averaging in groups
loses something of each step, so it must be clearly faster.
"""

from __future__ import annotations

import logging
import statistics
import weakref
from collections.abc import Generator
from itertools import pairwise
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ..devices.streams import Moment
from ..engine.engine import Engine
from ..planner import default_plan
from ..planner.averaging.regroup import CLEARLY
from ..plans.plan import Plan
from .torch_hooks import ModelHook, OptimizerStep, after_optimizer_steps, is_backward, uncompiled

logger = logging.getLogger(__name__)

BLOCK_STEPS = 12  # least number of steps to time, of each way
EXACT_STEPS = 3  # most steps in which residuals are sent before the trial

Steps = Generator[None, Moment, float]  # resumed after each step with the moment of its end; returns seconds


class Parameters(Protocol):
    """The interface by which a trial puts averaging of parameters in the place of averaging of gradients, and back."""

    def prepare(self, most_s: float) -> int:
        """Makes a plan of averaging; returns after how many exchanges its groups of ranks repeat, 0 if it is no use.

        It is no use without groups, or if its training steps are expected to take more than `most_s` seconds.
        Collective; all ranks get the same number.
        """

    def begin(self) -> bool:
        """Begins to average parameters; returns False, on all ranks, if some rank cannot. Collective."""

    def wait(self) -> None:
        """Waits until no exchange is under way."""

    def end(self) -> None:
        """Sets parameters and optimiser state to their means over the ranks; goes back to averaging of gradients."""

    def keep(self) -> None:
        """Gives up averaging of gradients for good: parameters are averaged from now on."""


class GradientsOrParameters:
    """A trial on real training steps whether averaging parameters is clearly faster than averaging gradients.

    If it is, parameters are averaged from then on. A change from one to the other waits for the next forward, as an
    optimiser's hooks cannot add hooks to it.

    Args:
        engine: averages the gradients.
        model: the model, held weakly.
        optimizer: its optimiser, after whose steps time is taken.
        parameters: begins and ends the averaging of parameters.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer: Optimizer, parameters: Parameters) -> None:
        self._engine = engine
        self._model = weakref.ref(model)
        self._parameters = parameters
        self._before: Plan | None = None  # the plan of gradients to go back to, once the trial has changed it
        self._is_begun = False  # averaging of parameters
        self._trial = self._tried()
        next(self._trial)
        self._stepped: Moment | None = None  # when the last step ended; None once it was taken into account
        self.made = False
        hook = uncompiled(ModelHook)(self, GradientsOrParameters._before_forward)
        self._handles = [
            after_optimizer_steps(self, GradientsOrParameters._after_optimizer_step, optimizer),
            model.register_forward_pre_hook(hook, prepend=True),  # first: the hook may change the frontend
        ]

    def remove(self) -> None:
        """Ends the trial, if it is not over: what is averaged at present, gradients or parameters, stays."""
        self.made = True
        for handle in self._handles:
            handle.remove()
        self._trial.close()

    def decline(self, why: str) -> None:
        """Ends the trial, if it is not over, in favour of averaged gradients. Collective, between two steps."""
        if not self.made:
            logger.info("averaged gradients stay: %s", why)
            self.remove()
            self._go_back()

    def _after_optimizer_step(self, step: OptimizerStep) -> None:
        if not step.is_inner:
            self._stepped = self._engine.moment()

    def _before_forward(self, model: nn.Module) -> None:
        if self._stepped is None or self.made or not torch.is_grad_enabled() or is_backward():
            return
        try:
            self._trial.send(self._stepped)
        except StopIteration:
            self.remove()
        self._stepped = None

    def _tried(self) -> Generator[None, Moment, None]:
        """Runs the trial; each yield waits for one step and receives the moment when it ended."""
        engine, parameters = self._engine, self._parameters
        while True:
            while not engine.settled:
                yield
            gradients_s = yield from _timed(BLOCK_STEPS)
            if engine.settled:
                break
        gradients_s = self._slowest(gradients_s)
        cycle = parameters.prepare(CLEARLY * gradients_s)
        if not cycle:
            logger.info("averaged gradients stay: some rank refuses, or no groups are expected to be faster")
            return
        self._before = engine.plan
        if not ((yield from self._residuals_sent()) and parameters.begin()):
            self._go_back()
            return
        self._is_begun = True
        for _ in range(cycle + 1):  # warm-up, as groups and memory are new
            yield
        parameters_s = yield from _timed(cycle * -(-BLOCK_STEPS // cycle))
        parameters.wait()
        parameters_s = self._slowest(parameters_s)
        said = f"{gradients_s * 1e3:.1f} ms a step with averaged gradients, {parameters_s * 1e3:.1f} with parameters"
        if parameters_s < CLEARLY * gradients_s:
            logger.info("parameters are averaged from now on: %s", said)
            parameters.keep()
        else:
            logger.info("averaged gradients stay: %s", said)
            self._go_back()

    def _residuals_sent(self) -> Generator[None, Moment, bool]:
        """Runs exact steps until no rank has residuals of compressors left; returns False if some cannot be sent."""
        engine = self._engine
        if engine.sent_all():
            return True
        exact = engine.followers([default_plan(list(engine.profiles.values()), engine.group.size)])
        if not exact:
            logger.info("averaged gradients stay: the residual of a table has no place in an exact step")
            return False
        engine.propose(exact)
        for _ in range(EXACT_STEPS):
            yield
            if engine.sent_all():
                return True
        logger.info("averaged gradients stay: residuals are left of parameters that %d steps did not use", EXACT_STEPS)
        return False

    def _go_back(self) -> None:
        """Averages gradients again, by the plan before the trial. Collective."""
        if self._is_begun:
            self._parameters.end()
        if self._before is not None:
            self._engine.propose([self._before])

    def _slowest(self, seconds: float) -> float:
        """Returns the largest `seconds` of all ranks, on all ranks. Collective."""
        mine = torch.tensor([seconds], dtype=torch.float64, device=self._engine.device)
        timeout_s = self._engine.timeout_s
        parts = self._engine.peers.call("times of steps", lambda group: group.all_gather(mine).wait(timeout_s))
        return max(float(part) for part in parts)


def _timed(steps: int) -> Steps:
    """Yields once per step; returns the mean seconds of `steps` steps, so that rare slow ones (other traffic) count."""
    ends = []
    for _ in range(steps + 1):
        ends.append((yield))
    return statistics.fmean(after.since(before) for before, after in pairwise(ends))
