"""The controller decides which plan runs: it asks the planner and holds all ranks to the same plan.

The first plan follows from the model alone. After the first step, at times the second, the planner is asked again, with
what all ranks observed: ready order, layouts, densities. If the planner then returns several plans, the best guess
first, each runs for some steps and the fastest stays (`trial.py`). A planner that measures the network does so between
the steps that follow, is then asked once more, and again while training goes on. A planner that measures the whole job
begins when a first planner's plan has been found so.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..comm import Group, gather_numbers
from ..costs.cost_model import CostModel
from ..devices.streams import Moment
from ..plans.observations import Observations
from ..plans.plan import Plan, What
from ..plans.profile import Profile
from ..tensors.density import ParameterProfile
from .bucket_run import BucketRuns
from .drift import LOOK_STEPS, Drift
from .loss_scale import why_not_scaled
from .observation import Observer
from .trial import Trial, slowest

logger = logging.getLogger(__name__)

Planner = Callable[[Sequence[ParameterProfile], int], Plan | Sequence[Plan]]
"""A planner: takes the profiles of all parameters and the number of ranks, and returns a plan, or plans to try."""

Call = Callable[[str, Callable[[Group], Any]], Any]  # `Peers.call`

# A table that no module announced travels dense at first, and so do dense gradients with many zeros: their rows show in
# the second step.
MAX_OBSERVATIONS = 2
LAYOUT_STEPS = 100  # in which ranks agree whether gradients are sparse that no rank has seen before
ASK_AGAIN_STEPS = 8  # between two questions whether the job can be measured now; to ask takes a small exchange


class Follows(Enum):
    """A planner's answer when an engine asks it to measure the engine's job (`ProposingPlanner.follow`)."""

    NO = auto()  # the plan stays
    LATER = auto()  # another job is measured, or the first plan not found yet: it is to be asked again
    NOW = auto()  # the coming steps are measured


@runtime_checkable
class ProposingPlanner(Protocol):
    """A planner that measures a job while its steps run by another planner's plan, and then proposes other plans."""

    def __call__(self, profiles: Sequence[ParameterProfile], world_size: int) -> Plan | Sequence[Plan]: ...

    def first_planner(self) -> Planner:
        """Returns the planner for the steps before plans are proposed; one engine's own if it measures anything."""

    settings: str  # what may be proposed: the plan of a checkpoint is gone on with under the same

    def follow(self, engine: Any) -> Follows:
        """Begins to measure the coming steps of the engine, and returns `Follows.NOW`.

        It returns `LATER` if it must be asked again, as it measures another model or the engine is still choosing its
        first plan, and `NO` if the present plan stays.
        When a measurement ends, the planner calls `engine.propose(plans)` on all ranks.
        """

    def resume(self, engine: Any, profile: Profile) -> None:
        """Is called when the engine goes on with a checkpoint's plan, so that nothing needs to be measured for now.

        `profile`: the measurements that the plan was made from.
        """

    def close(self, engine: Any) -> None:
        """Is called when the engine is closed: ends the measurement of its job, if one is under way."""

    def profile_of(self, engine: Any) -> Profile | None:
        """Returns the profile (measurements) that the engine's plans were made from; None before a measurement."""


@runtime_checkable
class RevisingPlanner(Protocol):
    """A planner that measures the network and may revise its plan while training runs.

    `measure` is called if the first steps show sparse gradients or many zeros. It is also called if there are several
    nodes, each with equally many ranks and more than one.
    """

    cost: CostModel | None  # once measured

    def __call__(self, profiles: Sequence[ParameterProfile], world_size: int) -> Plan | Sequence[Plan]: ...

    def measure(self, group: Group, timeout_s: float) -> Iterator[None]:
        """Measures the network between training steps, a piece at each `next` of the returned iterator. Collective.

        All ranks call `next` at once, when a step has ended. `timeout_s`: seconds to wait for the other ranks.
        """

    def revise(self, plan: Plan, before: Sequence[ParameterProfile], now: Sequence[ParameterProfile]) -> Plan:
        """Returns the plan for the densities `now` of gradients: `plan`, or one with other schemes for its buckets.

        `before`: the densities that `plan` was made from. All ranks get the same arguments, and must return the same
        plan.
        """


@dataclass(frozen=True)
class Resumption:
    """A checkpoint's plan with which training goes on, and what it was made from.

    That is a profile (measurements), or what the first steps showed of gradients.
    """

    plan: Plan
    source: Profile | Observations
    usual_step_s: float | None = None  # as drift counts; None: it is to be seen

    def __str__(self) -> str:
        measured = hashlib.sha256(f"{self.source.digest} {self.usual_step_s}".encode()).hexdigest()
        return f"plan {self.plan.digest[:12]} by measurement {measured[:12]}"


class PlanController:
    """Chooses the next step's plan, `plan`, after each step; a `Plan` that the user gave stays.

    A planner is asked once the first steps have shown gradients' layouts and densities. If it returns several plans,
    they run alternately on real steps, and the fastest stays.

    Args:
        plan: the plan, or the planner that makes plans.
        observer: records layouts and densities of gradients.
        group: the ranks.
        call: runs a collective operation between two steps, see `Peers.call`.
        device: where gradients are.
        timeout_s: seconds to wait for the other ranks.

    Attributes:
        plan: the plan of the next step.
        is_scaled: whether gradients are multiplied by a loss scale, which the results of all plans must follow.
    """

    def __init__(
        self,
        plan: Plan | Planner,
        observer: Observer,
        group: Group,
        call: Call,
        *,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._planner = None if isinstance(plan, Plan) else plan
        self._proposer = plan if isinstance(plan, ProposingPlanner) else None
        self._follows = Follows.NO  # else plans are going to be proposed
        self._steps_to_ask = 0
        self._drift = Drift()
        self._observer = observer
        self._group = group  # to be talked to by `call` only
        self._call = call
        self._device = device
        self._timeout_s = timeout_s
        self._observations_left = 0 if isinstance(plan, Plan) else MAX_OBSERVATIONS
        self._layouts_left = LAYOUT_STEPS
        self._steps_to_look = LOOK_STEPS
        self._measurement: Iterator[None] | None = None  # of the network, under way
        self._trial: Trial[Plan] | None = None
        self._known_to_plan: list[ParameterProfile] = []  # when the plan was made
        self.is_scaled = False
        self.plan = plan if isinstance(plan, Plan) else self._planned()[0]
        self._check(self.plan)
        if self._proposer is not None:
            self._planner = self._proposer.first_planner()
        # It revises its own plans only, and none that are proposed.
        self._reviser = self._planner if isinstance(self._planner, RevisingPlanner) else None

    @property
    def settled(self) -> bool:
        """Whether no observation, measurement or trial is left that may change the plan."""
        return not self.is_choosing and self._follows is Follows.NO

    @property
    def is_choosing(self) -> bool:
        """Whether gradients are observed, the network is measured, or plans are on trial."""
        return self._observations_left > 0 or self._measurement is not None or self._trial is not None

    @property
    def may_propose(self) -> bool:
        """Whether the planner may measure the job, again and again, and propose other plans."""
        return self._proposer is not None

    @property
    def looks(self) -> bool:
        """Whether the gradients of this step are sampled for zeros, by which plans are made or revised."""
        return self._observations_left > 0 or (self._reviser is not None and self._steps_to_look == 1)

    @property
    def on_trial(self) -> list[Plan]:
        """The plans that are tried alternately now, the best guess first; empty without a trial."""
        return [] if self._trial is None else self._trial.candidates

    @property
    def measured_cost(self) -> CostModel | None:
        """The costs of links and kernels by which the plan was made; None without a measurement of these alone."""
        return None if self._reviser is None else self._reviser.cost

    def step_ended(self, runs: BucketRuns, now: Moment) -> None:
        """Counts a step that has ended now, and may change `plan`; collective when the ranks have something to decide.

        `runs`: the buckets of the step's plan, with their gradients.

        Raises:
            ValueError: for a plan that is not for this model.
            RuntimeError: on all ranks, when they made different plans.
        """
        if self._observations_left:
            self._observe(runs)
            return
        if self._layouts_left and self._observer.unseen and self.plan.what is What.GRADIENT:
            self._layouts_left -= 1
            self._observer.agree_on_layouts(lambda mine: self._gather("layouts of gradients", mine))
        if self._measurement is not None:
            self._measure(self._measurement)
            if self._measurement is None:
                self._plan_anew()
        elif self._trial is not None:
            self._try(self._trial, now)
        elif self._reviser is not None and self._reviser.cost is not None and self._follows is not Follows.NOW:
            self._look_again(self._reviser, runs)

    def follow(self, engine: Any) -> None:
        """Asks the planner, if it is a `ProposingPlanner`, to measure the coming steps of this engine. Collective."""
        if self._proposer is not None:
            self._follows = self._proposer.follow(engine)
            self._steps_to_ask = ASK_AGAIN_STEPS

    def asks_again(self) -> bool:
        """Counts a step after the first plan was found; returns whether to call `follow` again, which said `LATER`."""
        if self._follows is not Follows.LATER or self.is_choosing:
            return False
        self._steps_to_ask -= 1
        return self._steps_to_ask == 0

    def follow_loss_scale(self) -> None:
        """Refuses, from now on, plans whose results do not follow the loss scale by which gradients are multiplied.

        Raises:
            ValueError: if the present plan is such a one.
        """
        self.is_scaled = True
        self._check(self.plan)

    def close(self, engine: Any) -> None:
        """Tells the planner that this engine makes no further step."""
        if self._proposer is not None:
            self._proposer.close(engine)

    def profile_of(self, engine: Any) -> Profile | None:
        """Returns the profile (measurements) that the plan was made from; None if the job was not measured."""
        return None if self._proposer is None else self._proposer.profile_of(engine)

    def state_of(self, engine: Any) -> dict[str, Any] | None:
        """Returns what a checkpoint keeps of a plan made by measurements; None without one, and before it has settled.

        It holds the measurements (profile), the planner's settings, and the usual seconds of a step.
        """
        profile = self.profile_of(engine)
        if self._proposer is None or profile is None or not self.settled:
            return None
        settings, usual_step_s = self._proposer.settings, self._drift.usual_s
        return {"profile": profile.to_json(), "settings": settings, "usual_step_s": usual_step_s}

    def observations(self) -> Observations | None:
        """Returns what a checkpoint keeps of the first steps, by which its plan is made again when it is loaded.

        None where no planner plans by these steps alone, and while plans are on trial.
        """
        if not self._plans_by_observations or self._trial is not None:
            return None
        return Observations.of(self._known(), self.plan.digest, self._observations_left)

    @property
    def _plans_by_observations(self) -> bool:
        """Whether plans follow from what the first steps show of gradients alone, without measurements."""
        return self._planner is not None and self._proposer is None and self._reviser is None

    def resumption(self, state: Mapping[str, Any]) -> Resumption | None:
        """Returns the plan of an engine's `state_dict`, with what it was made from; None if this job cannot go on so.

        It can if the planner makes the plan again of what the first steps had shown of this model's gradients. If the
        plan was made by measurements, it can if the planner has the same settings, and model, nodes and kind of device
        are the same.

        Raises:
            ValueError: for a value that `state_dict` did not give.
        """
        if self._plans_by_observations and "observed" in state:
            return self._resumption_by_observations(state["observed"])
        saved = state.get("planned")
        if self._proposer is None or saved is None:
            return None
        if not isinstance(saved, Mapping) or set(saved) != {"profile", "settings", "usual_step_s"}:
            raise ValueError(f"the state's 'planned' is not what state_dict() gave: got {str(saved)[:80]}")
        usual_step_s = saved["usual_step_s"]
        if usual_step_s is not None and not (isinstance(usual_step_s, float) and usual_step_s > 0):
            raise ValueError(f"the state's usual_step_s must be a number of seconds above 0, got {usual_step_s!r}")
        profile = Profile.from_json(saved["profile"])
        if why := self._why_not_resumable(profile, saved["settings"]):
            logger.info("the saved plan is not gone on with: %s", why)
            return None
        plan = Plan.from_json(state["plan"])
        self._check(plan)
        return Resumption(plan, profile, usual_step_s)

    def _resumption_by_observations(self, saved: object) -> Resumption | None:
        if not isinstance(saved, str):
            raise ValueError(f"the state's 'observed' is not what state_dict() gave: got {str(saved)[:80]}")
        observed = Observations.from_json(saved)
        found = {p.name: p for p in observed.parameter_profiles()}
        if not self._observer.fits(found):
            logger.info("plans are made anew, as the state's first steps were those of a model with other gradients")
            return None
        plans = self._plans_for([found[name] for name in self._observer.profiles])
        plan = plans[0] if len(plans) == 1 else next((p for p in plans if p.digest == observed.plan), None)
        return None if plan is None else Resumption(plan, observed)

    def resume(self, engine: Any, resumption: Resumption) -> None:
        """Goes on with the plan of a checkpoint, as if the first steps had led to it; nothing is measured or tried."""
        source = resumption.source
        if isinstance(source, Profile):
            assert self._proposer is not None
            self._proposer.resume(engine, source)
        known = {p.name: p for p in source.parameter_profiles()}
        self._observer.take({name: known[name] for name in self._observer.profiles})
        self._observations_left = source.steps_left if isinstance(source, Observations) else 0
        self._follows = Follows.NO
        self._measurement = self._trial = self._reviser = None
        self._drift = Drift(resumption.usual_step_s)
        self._switch_to(resumption.plan)

    def propose(self, plans: Sequence[Plan]) -> None:
        """Tries these plans, the best guess first, in the coming steps; the fastest stays. Collective.

        Raises:
            ValueError: for a plan that is not for this model.
            RuntimeError: on all ranks, when they propose different plans.
        """
        for plan in plans:
            self._check(plan)
        self._require_same(plans)
        self._follows, self._observations_left = Follows.NO, 0
        self._measurement = self._reviser = None
        self._trial = Trial(plans) if len(plans) > 1 else None
        self._drift = Drift()
        self._switch_to(plans[0])

    def drifted(self, began: Moment, ended: Moment) -> bool:
        """Counts a step under a plan that is no longer on trial; returns whether step times have changed for good.

        Collective when it is time to compare the ranks' median step times. `began`, `ended`: the begin and end of the
        step.
        """
        if self._proposer is None or not self.settled or not self._drift.step_ended(began, ended):
            return False
        medians_s = self._gather("times of steps", torch.tensor([self._drift.median_s], dtype=torch.float64))
        return self._drift.judge(max(float(part) for part in medians_s))

    def leave_out_step(self) -> None:
        """Begins to time the plan on trial again, as a step listener (a measurement) delayed the last exchange."""
        if self._trial is not None:
            self._trial.interrupt()

    def _why_not_resumable(self, profile: Profile, settings: str) -> str:
        """Returns why a plan made from this profile does not fit this job; "" if it fits."""
        assert self._proposer is not None
        if settings != self._proposer.settings:
            return "it was made under other constraints"
        try:
            profile.check({name: known.tensor for name, known in self._observer.profiles.items()}, self._group.size)
        except ValueError as error:
            return str(error)
        if profile.nodes != self._group.placement.nodes:
            return f"its ranks were on the nodes {profile.nodes}, these are on {self._group.placement.nodes}"
        if profile.device != self._device.type:
            return f"it was measured on {profile.device}, gradients are on {self._device.type}"
        return ""

    def _observe(self, runs: BucketRuns) -> None:
        """Shares the observations of one of the first steps between ranks, and makes plans from them."""
        self._share("first observations", runs)
        self._observations_left = 0 if self._observer.complete else self._observations_left - 1
        to_measure = self._observer.sparsity_known or self._group.placement.is_hierarchy
        if self._reviser is not None and self._reviser.cost is None and self._measurement is None and to_measure:
            self._measure(self._reviser.measure(self._group, self._timeout_s))
        self._plan_anew()

    def _measure(self, measurement: Iterator[None]) -> None:
        """Runs the part of a measurement of the network that belongs between this step and the next."""
        ended = self._call("measurement of the network", lambda group: next(measurement, True))
        self._measurement = None if ended else measurement

    def _plan_anew(self) -> None:
        """Makes plans by all that is known now, and tries them if nothing is left to be observed or measured."""
        plans = self._planned()
        self._require_same(plans)
        if self._observations_left == 0 and self._measurement is None and len(plans) > 1:
            self._trial = Trial(plans)
        self._switch_to(plans[0])

    def _try(self, trial: Trial[Plan], now: Moment) -> None:
        """Counts a step of a trial; at its end the ranks agree on the fastest plan."""
        if not trial.step_ended(now):
            return
        if trial.waits:
            medians_s = self._gather("times of a trial", torch.tensor(trial.medians_s, dtype=torch.float64))
            times_s = slowest([part.tolist() for part in medians_s])
            if not trial.go_on(times_s):
                self._end_trial(trial, times_s)
                return
        self._switch_to(trial.current)

    def _end_trial(self, trial: Trial[Plan], times_s: Sequence[float]) -> None:
        """Keeps the fastest plan of a trial; `times_s`: each plan's step time, equal on all ranks."""
        self._trial = None
        best = trial.fastest(times_s)
        for number, (plan, time_s) in enumerate(zip(trial.candidates, times_s, strict=True)):
            verdict = "kept" if number == best else "left"
            logger.info("tried a plan of %d buckets: %.1f ms a step, %s", len(plan.buckets), time_s * 1e3, verdict)
        self._switch_to(trial.candidates[best])

    def _look_again(self, reviser: RevisingPlanner, runs: BucketRuns) -> None:
        """Shares observations every `LOOK_STEPS` steps and lets the planner revise the plan."""
        self._steps_to_look -= 1
        if self._steps_to_look > 0:
            return
        self._steps_to_look = LOOK_STEPS
        self._share("observations", runs)
        plan = reviser.revise(self.plan, self._known_to_plan, self._known())
        self._check(plan)
        self._require_same([plan])
        if plan.digest != self.plan.digest:
            logger.info("gradients look different now; the plan is revised")
            self._known_to_plan = self._known()
            self._switch_to(plan)

    def _planned(self) -> list[Plan]:
        """Returns the planner's plans for the present profiles, the best guess first."""
        self._known_to_plan = self._known()
        return self._plans_for(self._known_to_plan)

    def _plans_for(self, profiles: Sequence[ParameterProfile]) -> list[Plan]:
        """Returns the planner's plans for these profiles, which are in the model's order; the best guess first."""
        assert self._planner is not None
        made = self._planner(profiles, self._group.size)
        plans = [made] if isinstance(made, Plan) else list(made)
        if not plans:
            raise ValueError("the planner made no plan; it must return a Plan, or a list of at least one")
        for plan in plans:
            self._check(plan)
        return plans

    def _known(self) -> list[ParameterProfile]:
        return list(self._observer.profiles.values())

    def _check(self, plan: Plan) -> None:
        specs = {name: profile.tensor for name, profile in self._observer.profiles.items()}
        plan.check(specs, self._group.size, self._device.type)
        if self._planner is not None and plan.what is not What.GRADIENT:
            raise ValueError("the planner made a plan of parameters; give such a plan itself to attach()")
        for bucket in plan.buckets if self.is_scaled else ():
            if why := why_not_scaled(bucket.scheme):
                raise ValueError(f"bucket {bucket.id!r}: {why}")

    def _switch_to(self, plan: Plan) -> None:
        """Makes `plan` the plan of the next step, unless it equals the present one."""
        if plan.digest != self.plan.digest:
            self.plan = plan

    def _share(self, what: str, runs: BucketRuns) -> None:
        for run in runs:
            run.close_prediction(self._observer.profiles)
        self._observer.share(lambda name: runs.of(name)[0].gradients, lambda mine: self._gather(what, mine))

    def _require_same(self, plans: Sequence[Plan]) -> None:
        """Raises on all ranks where ranks made different plans, as they would wait for each other for ever."""
        digests = [plan.digest for plan in plans]
        mine = torch.tensor(list(hashlib.sha256(" ".join(digests).encode()).digest()), dtype=torch.uint8)
        everyone = [part.tolist() for part in self._gather("digest of the new plans", mine)]
        other = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
        if other is not None:
            raise RuntimeError(
                f"the plans made after this step differ: rank {other} has made others than rank 0 (here: "
                f"{', '.join(digest[:12] for digest in digests)}); a planner must depend on nothing but its arguments"
            )

    def _gather(self, what: str, mine: Tensor) -> list[Tensor]:
        """Sends a small tensor to all ranks; returns the tensors of all ranks, by rank."""
        parts: list[Tensor] = self._call(what, lambda group: gather_numbers(group, mine, self._timeout_s))
        return parts
