"""The state that an engine keeps from step to step, beside step and plan: schemes' state, in units of a loss scale.

It lies in the running plan's buckets. Here it is told as a `state_dict`, examined with the other ranks before anything
changes, taken over from a checkpoint, and held to the job's loss scale.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..plans.plan import OF
from ..state import NOT_STRICT, VERSION, Origin, Saved, examined, refusal, without_state
from ..tensors.bucket import TensorSpec, model_digest
from .bucket_run import BucketRuns
from .loss_scale import LossScale
from .peers import Peers, said
from .plan_control import PlanController, Resumption
from .running_plan import RunningPlan

logger = logging.getLogger(__name__)

LOADING = "loading of state"


class EngineState:
    """The state that a running plan's schemes keep from step to step, such as residuals, and its way into checkpoints.

    Residuals are gradients that are still to be sent, so the state is in units of the loss scale. A change of the state
    that fails midway leaves it neither old nor new, and it can no longer be saved.

    Args:
        running_plan: has the state in its buckets.
        controller: tells which plans are on trial, and whether training can go on with a checkpoint's plan.
        peers: runs collectives between the ranks.
        parameters: the parameters by name.
        specs: their shapes and dtypes.

    Attributes:
        loss_scale: what gradients are multiplied by; None: no scaler was given.
    """

    def __init__(
        self,
        running_plan: RunningPlan,
        controller: PlanController,
        peers: Peers,
        parameters: Mapping[str, Tensor],
        specs: Mapping[str, TensorSpec],
    ) -> None:
        self._running_plan, self._controller, self._peers = running_plan, controller, peers
        self._parameters, self._specs = parameters, specs
        self.loss_scale: LossScale | None = None
        self._scale: float | None = None  # in whose units state is
        self._is_torn = False  # a load, or a change of plans, has failed midway: state is neither the old nor the new

    # In each step.

    def look_at_scale(self) -> None:
        """Begins to copy the loss scale to the host, if schemes keep state that must follow it in the coming step."""
        if self.loss_scale is not None and self._running_plan.runs.have_state:
            self.loss_scale.look()

    def follow_scale(self) -> None:
        """Multiplies state, such as residuals, by the ratio of the present loss scale to the one in whose units it is.

        Call it when a step begins. If there is no state, nothing is done: state that arises later is in units of the
        loss scale at that time.
        """
        if self.loss_scale is None:
            return
        if self._running_plan.runs.have_state:
            self._rescale(self.loss_scale.value())
        else:
            self._scale = None

    def _rescale(self, scale: float) -> None:
        """Multiplies residuals by `scale`, the present loss scale, over the loss scale that they were computed with."""
        if self._scale is not None and scale != self._scale:
            for run in self._running_plan.runs:
                run.rescale(scale / self._scale)
        self._scale = scale

    # In checkpoints.

    def require_whole(self) -> None:
        """Checks that there is state to save.

        Raises:
            RuntimeError: if the engine was closed, or if a load or a change of plans has failed midway.
        """
        if self._peers.is_closed:
            raise RuntimeError("gradsync was detached from this model, and its state is gone: call state_dict() before")
        if self._is_torn:
            raise RuntimeError(
                f"there is no whole state to save, as what changes it has failed midway: {self._peers.failure}; "
                "detach() and attach again on every rank, then load a checkpoint"
            )

    def entries(self, step: int) -> dict[str, Any]:
        """Returns the entries of a checkpoint after `step` steps: the plan, and the state that its schemes keep.

        The state consists of tensors by parameter, range of elements and kind. With it goes what the first steps
        showed of gradients, if the plan follows from that.
        """
        group, runs = self._peers.group, self._running_plan.runs
        plan = next(iter(self._controller.on_trial), self._running_plan.plan)  # a trial is not for keeping
        origin = Origin(group.rank, group.size, self._parameters_digest(), runs.keep_values)
        state = {
            "version": VERSION,
            **origin.entries(),
            "step": step,
            "plan": plan.to_json(),
            "state": {part.key: part.values for part in runs.state_slices()},
        }
        if (observed := self._controller.observations()) is not None:
            state["observed"] = observed.to_json()
        return state if self._scale is None else {**state, "loss_scale": self._scale}

    def examine(self, state: object, *, strict: bool) -> tuple[Saved, Resumption | None]:
        """Checks what is to be loaded; all ranks raise if one refuses it. Collective, and nothing changes.

        Args:
            state: what `Engine.state_dict` returned, from a file perhaps.
            strict: whether state of another rank, number of ranks or model is refused.

        Returns:
            The checked state, and the checkpoint's plan if training can go on with it, else None.

        Raises:
            TypeError, ValueError, RuntimeError: on all ranks, if one refuses its state, or if ranks load different
                steps.
        """
        saved: Saved | None = None
        resumption: Resumption | None = None
        problem: Exception | None = None
        alike = ""
        try:
            saved = examined(state, self._specs, strict=strict)
            assert isinstance(state, Mapping)
            resumption = self._controller.resumption(state)
            alike = f"step {saved.step}{'' if resumption is None else f', {resumption}'}"
            alike += "" if saved.scale is None else f", loss scale {saved.scale:g}"
            alike += "" if strict else ", not strict"
        except Exception as error:  # told to all, then raised
            problem = error
        self._peers.agree(LOADING, problem, alike)
        assert saved is not None
        origins = [Origin(**entries) for entries in self._peers.tell(LOADING, saved.origin.entries())]
        if strict and (why := refusal(origins, self._parameters_digest())):
            raise ValueError(f"{LOADING}: {why}")
        group, origin = self._peers.group, saved.origin
        if origin.per_rank and (origin.rank, origin.world) != (group.rank, group.size):
            logger.info("the state of rank %d of %d is dropped, but for its step", origin.rank, origin.world)
            saved = without_state(saved)
        return saved, resumption

    def place_for(self, saved: Saved, resumption: Resumption | None, *, strict: bool) -> BucketRuns:
        """Returns the buckets that will hold the saved state: the present ones, or new ones of a checkpoint's plan.

        Args:
            saved: the state, as `examine` returned it.
            resumption: the checkpoint's plan, if training goes on with it.
            strict: whether state that these buckets' schemes cannot keep, or of another dtype, is refused.

        Raises:
            ValueError, RuntimeError: on all ranks, if one refuses the state.
        """
        running = self._running_plan
        runs = running.runs
        problem: Exception | None = None
        try:
            if resumption is not None and (running.is_outdated or resumption.plan.digest != running.plan.digest):
                runs = running.runs_of(resumption.plan)  # beside the present ones, which stay if there is no place
            if strict:
                runs.require_place(saved.slices, f"load it under a plan as it was saved by, or drop it by {NOT_STRICT}")
                runs.require_dtypes(saved.slices)
        except Exception as error:  # told to all, then raised
            problem = error
        self._peers.agree(LOADING, problem)
        return runs

    def take_over(self, saved: Saved) -> None:
        """Replaces all state in the running plan's buckets by the saved state, as `examine` returned it. Collective."""
        peers, runs = self._peers, self._running_plan.runs
        what = "state that is the same on all ranks"
        runs.restore(saved.slices, lambda mine: peers.gather(what, mine))
        self._scale = saved.scale
        if self.loss_scale is None and saved.scale is not None:  # the coming gradients have none that is known here
            self._rescale(1.0)
            self._scale = None
        self._running_plan.agree_on_carried()

    @contextmanager
    def all_or_none(self, where: str) -> Iterator[None]:
        """Runs a block that changes state on all ranks; an error in it stops all synchronisation.

        State that was changed in part can no longer be saved. `where` names the change in the errors that the other
        ranks raise.
        """
        try:
            yield
        except BaseException as error:  # an interruption, too
            self._is_torn = True
            self._peers.fail(f"{where}: {said(error)}")
            raise

    def _parameters_digest(self) -> str:
        """Returns the SHA-256 of the parameters' names, shapes and dtypes, whatever the order of registration.

        Buffers and optimiser states that a plan averages are left out.
        """
        names = sorted(n for n, p in self._parameters.items() if isinstance(p, nn.Parameter) and OF not in n)
        return model_digest({name: self._specs[name] for name in names})
