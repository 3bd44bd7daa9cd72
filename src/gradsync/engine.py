"""The engine: runs a plan, step by step. Front-ends (`hooks.py`, `ddp.py`) tell it when gradients are ready.

A step is `begin`, a `load` for every gradient as it becomes ready, `finish`, then `unload` of the results. State of
schemes is committed at the next `begin`: a step that failed, or in which some rank saw non-finite values, leaves none.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .bucket import PHASES, Layout, StepMarks, TensorSpec
from .comm import Exchange, Group, GroupError, JobThread
from .costs import CostModel
from .density import ParameterProfile
from .forecast import forecast, network_cost
from .gradients import marks_of_ranks
from .lane import BucketStatistics, Lane, StateSlice
from .observation import Observer
from .plan import Plan, What, describe
from .recording import active
from .timeline import Task
from .trial import Trial, fastest

logger = logging.getLogger(__name__)

Planner = Callable[[Sequence[ParameterProfile], int], Plan | Sequence[Plan]]


@runtime_checkable
class RevisingPlanner(Protocol):
    """A planner that knows the network it plans for, and is asked again while training runs.

    It is asked again if it has measured the network; it is told to where the first steps show sparse gradients,
    and where nodes have several ranks.
    """

    cost: CostModel | None  # once measured

    def __call__(self, profiles: Sequence[ParameterProfile], world_size: int) -> Plan | Sequence[Plan]: ...

    def measure(self, group: Group, timeout_s: float) -> None:
        """Called on all ranks at once, before the first plan that depends on what gradients look like."""

    def revise(self, plan: Plan, before: Sequence[ParameterProfile], now: Sequence[ParameterProfile]) -> Plan:
        """The plan to go on with, the same on all ranks; `before` is what was known when the plan was made."""


# A table that no module announced travels dense at first, and so do dense gradients with many zeros: their rows show in
# the second step.
MAX_OBSERVATIONS = 2
LOOK_AGAIN_STEPS = 499  # a prime: what alternates from step to step is not always met in the same state


class Engine:
    """Runs a plan for `parameters` over `group`, with a communication thread of its own for what is ready early.

    `plan` is a `Plan`, or a function that makes one: it is asked at once with what is known of the model, and again
    after the first step, at times the second, with what it showed on all ranks: readiness order, layouts, densities.
    If it then returns several plans, the best guess first, each runs for some steps and the fastest stays.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        group: Group,
        plan: Plan | Planner,
        *,
        timeout_s: float,
        sparse_names: frozenset[str] = frozenset(),
    ) -> None:
        self.parameters = dict(parameters)
        self.specs = {name: TensorSpec.of(p) for name, p in self.parameters.items()}
        self.group = group
        self.step = 0
        self._planner = None if isinstance(plan, Plan) else plan
        self._reviser = plan if isinstance(plan, RevisingPlanner) else None
        self._steps_to_look = LOOK_AGAIN_STEPS
        self.timeout_s = timeout_s
        self._device = next(iter(self.parameters.values())).device if self.parameters else torch.device("cpu")
        self._exchange: Exchange | None = None
        self._next_plan: Plan | None = None
        self._failure: str | None = None
        self._marks = StepMarks()
        self._marks_checked = True
        self.late = False  # some rank took part in the last step at its optimiser's step only
        self._final_statistics: list[BucketStatistics] = []
        self._observer = Observer(self.specs, sparse_names)
        self._timeline: list[Task] = []
        self._ready_s: dict[str, float] = {}  # when each bucket was ready in the last step
        self._steps_good = True
        self._observations_left = 0 if isinstance(plan, Plan) else MAX_OBSERVATIONS
        self._trial: Trial[Plan] | None = None
        self._closed = False
        self.plan = plan if isinstance(plan, Plan) else self._planned()[0]
        self._check(self.plan)
        self._turn = threading.Lock()  # held by whoever uses the group
        self._thread = JobThread("gradsync", self._device)
        self._lanes: dict[str, Lane] = {}
        self._lanes_of: dict[str, list[Lane]] = {}
        self._adopt(self.plan, [])
        self._announce()

    # The step, in the order in which a front-end calls.

    def begin(self, *, late: bool = False, rounds: int = 0) -> None:
        """Starts a step. `late`: this rank brings nothing but joins the others; `rounds` its optimiser has made so far.

        Raises:
            RuntimeError: when an earlier step failed or was left unfinished on this rank.
        """
        self.abandon("the previous backward did not finish on this rank (an error in it?)")
        self._require_working()
        self._check_marks()
        self._marks = StepMarks(late, rounds % PHASES if rounds else None)
        self._commit()
        if self._next_plan is not None:
            self._change_plan(self._next_plan)
        self._observer.begin()
        self._steps_good = False  # until it has ended well
        for lane in self._lanes.values():
            lane.begin()
        self._exchange = Exchange(
            self.plan.order,
            self._synchronize,
            where=self._where,
            timeout_s=self.timeout_s,
            turn=self._turn,
            thread=self._thread,
            device=self._device,
        )

    @property
    def in_step(self) -> bool:
        """Between `begin` and `finish`."""
        return self._exchange is not None

    @property
    def replanning(self) -> bool:
        """Whether the next `begin` changes the plan: who holds views into the buckets' memory lets go of them."""
        return self._next_plan is not None

    @property
    def settled(self) -> bool:
        """Whether the plan in force stays."""
        open_questions = self._next_plan is not None or self._trial is not None or self._observations_left
        return self._closed or not self.parameters or not open_questions

    def lanes(self) -> list[Lane]:
        """The buckets at run time, in plan order."""
        return list(self._lanes.values())

    def load(self, name: str, gradient: Tensor | None, *, used: bool = True) -> None:
        """A parameter's gradient is ready (None or not `used`: this rank did not use it in this step).

        Raises:
            RuntimeError: when the parameter became ready twice in one step.
        """
        exchange = self._require_step()
        if (recorder := active()) is not None:
            recorder.take(self, name, gradient if used else None, self.specs[name].shape)
        if used and gradient is not None:
            self._observer.arrived(name, sparse=gradient.layout is torch.sparse_coo)
            if self._looking:
                self._observer.look(name, gradient)
        for lane in self._lanes_of[name]:
            if gradient is not None and gradient.dtype is not lane.bucket.dtype:
                raise RuntimeError(
                    f"the gradient of {name!r} is {gradient.dtype}, it was {lane.bucket.dtype} when gradsync was "
                    "attached; change a model's element type before attach()"
                )
            if name not in lane.waiting:
                raise RuntimeError(
                    f"the gradient of {name!r} became ready twice in one backward; re-entrant activation checkpointing "
                    "does that: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            lane.gradients.load(name, gradient, used=used)
            lane.waiting.discard(name)
            if not lane.waiting:
                exchange.mark_ready(lane.bucket.id)

    def missing(self) -> list[str]:
        """Parameters that were not loaded in this step yet, in model order."""
        if not any(lane.waiting for lane in self._lanes.values()):
            return []
        return [name for name in self.parameters if any(name in lane.waiting for lane in self._lanes_of[name])]

    def finish(self) -> None:
        """Waits until every bucket is synchronised; all parameters are loaded.

        Raises:
            GroupError: when another rank died, stopped answering or failed, naming bucket, stage and step.
        """
        exchange = self._require_step()
        assert not self.missing()
        backward_ended_s = time.perf_counter() - exchange.began_s
        try:
            exchange.wait()
        except BaseException as error:
            self.fail(str(error))
            raise
        finally:
            self._exchange = None
        for lane in self._lanes.values():
            lane.accept(exchange.results[lane.bucket.id])
        self._steps_good = not (self._has_state() and any(lane.gradients.troubled for lane in self.lanes()))
        self._record(exchange, backward_ended_s)
        self._marks_checked = False
        if self._device.type == "cpu":
            self._check_marks()  # elsewhere the host would wait for the device: there the next step looks
        try:
            if self._observations_left:
                self._observe()
            elif self._trial is not None:
                self._try(self._trial)
            elif self._reviser is not None and self._reviser.cost is not None:
                self._look_again(self._reviser)
        except Exception as error:
            self.fail(f"the plan after step {self.step}: {error}")
            raise
        self.step += 1
        if (recorder := active()) is not None:
            recorder.step_ended(self, self.parameters)  # may end the script

    def fail(self, why: str) -> None:
        """From now on nothing is synchronised any more; the other ranks are told."""
        if self._failure is None:
            self._failure = why
            self.group.announce_failure(why)

    def abandon(self, why: str) -> None:
        """Gives the step under way up, if there is one, and tells the other ranks, who may wait for this one."""
        if self._exchange is None:
            return
        self._exchange.cancel()
        self._exchange = None
        self.fail(why)

    def used(self, name: str) -> bool:
        """Whether some rank used the parameter in the finished step."""
        return self._lanes_of[name][0].gradients.used(name)

    def layout_is_sparse(self, name: str) -> bool:
        """The layout in which the gradient is given back: as it came, else as the ranks agreed."""
        return self._observer.layout_is_sparse(name)

    def unload(self, name: str, out: Tensor | None, *, sparse: bool) -> Tensor:
        """The synchronised gradient, in the layout asked for; `out` is reused for parameters that the plan cut."""
        for lane in self._lanes_of[name]:
            out = lane.gradients.unload(name, out, sparse=sparse, shape=self.parameters[name].shape)
        assert out is not None
        return out

    def call(self, what: str, function: Callable[[Group], Any]) -> Any:
        """`function(group)`, while nobody else uses the group.

        Raises:
            GroupError: when another rank died, stopped answering or failed, naming `what` and the step.
        """
        self._require_working()
        try:
            with self._turn:
                return function(self.group)
        except GroupError as error:
            self.fail(f"{what}, step {self.step}: {error}")
            raise GroupError(f"{what}, step {self.step}: {error}") from None
        except Exception as error:
            self.fail(f"{what}, step {self.step}: {error}")
            raise

    # What is kept and told.

    def state_dict(self) -> dict[str, Any]:
        """The plan and all scheme state by (parameter, slice, compress point); of tensors, numbers and text only."""
        if not self.in_step:
            self._commit()
        plan = self._trial.candidates[0] if self._trial is not None else self.plan  # a trial is not for keeping
        return {
            "version": 1,
            "step": self.step,
            "plan": plan.to_json(),
            "state": {s.key: s.values for s in self._state_slices()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave, under this engine's own plan.

        Raises:
            ValueError: for another version, or state of parameters that this model does not have.
        """
        if state.get("version") != 1:
            raise ValueError(f"expected a gradsync state of version 1, got version {state.get('version')!r}")
        if missing := sorted({"step", "state"} - set(state)):
            raise ValueError(f"the state has no {missing[0]!r}: it is not what state_dict() gave")
        slices = [StateSlice.from_key(key, values) for key, values in state["state"].items()]
        for part in slices:
            if part.name not in self.parameters:
                raise ValueError(f"the state holds {part.name!r}, which is no parameter to synchronise here")
            if part.start + part.values.numel() > self.specs[part.name].numel:
                raise ValueError(
                    f"the state of {part.name!r} reaches to element {part.start + part.values.numel()}, the parameter "
                    f"has {self.specs[part.name].numel}"
                )
        self.step = int(state["step"])
        for lane in self._lanes.values():
            lane.reset_state()
            lane.take_over(slices)

    def statistics(self) -> list[BucketStatistics]:
        """Totals by bucket; of a closed engine those at its end."""
        if self._closed:
            return self._final_statistics
        return [lane.statistics(self._observer.profiles) for lane in self._lanes.values()]

    def timeline(self) -> list[Task]:
        """The last step: "compute" (backward), "link" (operations in flight), "kernel" (schemes' own work), "wait"."""
        return list(self._timeline)

    def predicted_timeline(self) -> list[Task]:
        """The last step as forecast from the plan, when gradients were ready, and what the network was measured to be.

        Empty before a step, while densities are not known, and where the network was not measured.
        """
        steps = {lane.bucket.id: lane.expected_steps(self._observer.profiles) for lane in self.lanes()}
        known = {bucket: expected for bucket, expected in steps.items() if expected is not None}
        cost = network_cost(self.group)
        if self._ready_s.keys() != known.keys() or cost is None:
            return []
        if self._reviser is not None and self._reviser.cost is not None:
            cost = self._reviser.cost
        return forecast(self.plan.order, known, self._ready_s, cost, self.group.placement)

    def words(self) -> list[str]:
        """The plan in words."""
        known = {p.name: p.density.density for p in self._observer.profiles.values() if p.density}
        return describe(self.plan, self.specs, known)

    def close(self) -> None:
        """Ends the communication thread and its communicator; a second call does nothing."""
        if self._closed:
            return
        self.abandon("gradsync was detached in the middle of a step")
        self._final_statistics = self.statistics()
        self._closed = True
        self._thread.stop()
        self.group.close()
        self._lanes, self._lanes_of = {}, {}  # and their memory; gradients keep what they live in

    # Below here: how.

    def _synchronize(self, bucket_id: str) -> Any:
        return self._lanes[bucket_id].synchronize(check_finite=self._has_state(), marks=self._marks)

    def _where(self, bucket_id: str, stage: str) -> str:
        names = self._lanes[bucket_id].bucket.names
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"bucket {bucket_id!r} ({names[0]}{others}), stage {stage!r}, step {self.step}"

    def _require_step(self) -> Exchange:
        if self._exchange is None:
            self._require_working()
            raise RuntimeError("gradsync was detached during this backward; detach between steps")
        return self._exchange

    def _check_marks(self) -> None:
        """Raises when the finished step averaged gradients of different steps."""
        if self._marks_checked or not self._lanes:
            return
        self._marks_checked = True
        self.late, apart = marks_of_ranks(next(lane for lane in self.lanes() if self._carries_marks(lane)).gradients)
        if apart:
            why = (
                "the ranks are out of step: some have made more rounds of backward and optimiser step than others "
                "before this exchange, so a backward or a whole step happened on some ranks only"
            )
            self.fail(why)
            raise RuntimeError(why)

    def _carries_marks(self, lane: Lane) -> bool:
        return lane.bucket.layout is Layout.FLAT or lane.flags_apart

    def _require_working(self) -> None:
        if self._closed:
            raise RuntimeError("gradsync was detached from this model; attach again on every rank")
        if self._failure is not None:
            raise RuntimeError(
                f"gradient synchronisation stopped earlier: {self._failure}; detach() and attach again on every rank"
            )

    def _has_state(self) -> bool:
        return any(lane.state for lane in self._lanes.values())

    def _commit(self) -> None:
        for lane in self._lanes.values():
            lane.commit(keep=self._steps_good)

    def _state_slices(self) -> list[StateSlice]:
        return [part for lane in self._lanes.values() for part in lane.state_slices()]

    def _check(self, plan: Plan) -> None:
        plan.check(self.specs, self.group.size)
        if any(bucket.what is not What.GRADIENT for bucket in plan.buckets):
            raise ValueError("this version synchronises gradients only; the plan has buckets of parameters")

    def _change_plan(self, plan: Plan) -> None:
        """The plan of the coming steps; what schemes kept goes over to it, or the engine fails."""
        self._next_plan = None
        state = self._state_slices()
        try:
            self._adopt(plan, state)
            places = {
                (segment.name, point)
                for lane in self.lanes()
                for segment in lane.bucket.segments
                for point in lane.state
            }
            if lost := [part.key for part in state if (part.name, part.point) not in places]:
                raise ValueError(
                    f"the new plan has no place for the state {lost[0]!r}: plans that follow each other, or are tried "
                    "in turns, must have schemes with the same state for the same parameters"
                )
        except Exception as error:
            self.fail(f"the change of plans before step {self.step}: {error}")
            raise
        if self.settled:
            self._announce()

    def _adopt(self, plan: Plan, state: Sequence[StateSlice]) -> None:
        self.plan = plan
        self._lanes, self._lanes_of = {}, {}  # the old buckets' memory is free before the new ones take theirs
        for b in plan.buckets:
            self._lanes[b.id] = Lane.make(b.bucket(self.specs), b.make_scheme(), self.parameters, self.group)
            self._lanes[b.id].take_over(state)
        if self._lanes and not any(self._carries_marks(lane) for lane in self._lanes.values()):
            next(iter(self._lanes.values())).flags_apart = True  # only tables: nothing the marks could ride in
        self._lanes_of = {name: [] for name in self.parameters}
        for lane in self._lanes.values():
            for name in dict.fromkeys(lane.bucket.names):
                self._lanes_of[name].append(lane)

    def _record(self, exchange: Exchange, backward_ended_s: float) -> None:
        ended_s = time.perf_counter() - exchange.began_s
        self._timeline = [Task("backward", "compute", 0.0, backward_ended_s), *exchange.tasks]
        self._timeline.append(Task("wait", "wait", backward_ended_s, ended_s))
        self._ready_s = dict(exchange.ready_s)
        for lane in self._lanes.values():
            lane.record(exchange.tasks, backward_ended_s, ended_s)

    def _announce(self) -> None:
        for line in self.words():
            logger.info("%s", line)

    def _planned(self) -> list[Plan]:
        """What the planner makes of what is known now: the plans worth trying, the best guess first."""
        assert self._planner is not None
        self._known_to_plan = list(self._observer.profiles.values())
        made = self._planner(self._known_to_plan, self.group.size)
        plans = [made] if isinstance(made, Plan) else list(made)
        if not plans:
            raise ValueError("the planner made no plan; it must return a Plan, or a list of at least one")
        for plan in plans:
            self._check(plan)
        return plans

    def _observe(self) -> None:
        """Reduces what a first step showed over the ranks, and makes the plans that all of them now make."""
        self._share("first observations")
        self._observations_left = 0 if self._observer.complete else self._observations_left - 1
        to_measure = self._observer.sparsity_known or self.group.placement.is_hierarchy
        if (reviser := self._reviser) is not None and reviser.cost is None and to_measure:
            self.call("measurement of the network", lambda group: reviser.measure(group, self.timeout_s))
        plans = self._planned()
        self._require_same([plan.digest for plan in plans])
        if self._observations_left == 0 and len(plans) > 1:
            self._trial = Trial(plans)
        self._switch_to(plans[0])

    @property
    def _looking(self) -> bool:
        """Whether this step shows what gradients look like."""
        return self._observations_left > 0 or self._steps_to_look == 1

    def _look_again(self, reviser: RevisingPlanner) -> None:
        """From time to time: reduces what the step showed over the ranks, who go on by the plan that fits it."""
        self._steps_to_look -= 1
        if self._steps_to_look > 0:
            return
        self._steps_to_look = LOOK_AGAIN_STEPS
        self._share("observations")
        plan = reviser.revise(self.plan, self._known_to_plan, list(self._observer.profiles.values()))
        self._check(plan)
        self._require_same([plan.digest])
        if plan.digest != self.plan.digest:
            logger.info("gradients look different now; the plan is revised")
            self._known_to_plan = list(self._observer.profiles.values())
            self._switch_to(plan)

    def _share(self, what: str) -> None:
        for lane in self._lanes.values():
            lane.close_prediction(self._observer.profiles)
        self._observer.share(lambda name: self._lanes_of[name][0].gradients, self._gather(what))

    def _try(self, trial: Trial[Plan]) -> None:
        """Counts a step of a trial; at its end the ranks agree on the fastest plan."""
        if not trial.step_ended(time.perf_counter()):
            return
        if not trial.done:
            self._switch_to(trial.current)
            return
        self._trial = None
        medians_s = self._gather("times of a trial")(torch.tensor(trial.medians_s, dtype=torch.float64))
        best, times_s = fastest([part.tolist() for part in medians_s])
        for number, (plan, time_s) in enumerate(zip(trial.candidates, times_s, strict=True)):
            verdict = "kept" if number == best else "left"
            logger.info("tried a plan of %d buckets: %.1f ms a step, %s", len(plan.buckets), time_s * 1e3, verdict)
        self._switch_to(trial.candidates[best])

    def _switch_to(self, plan: Plan) -> None:
        """`plan` is in force from the next step on."""
        self._next_plan = plan if plan.digest != self.plan.digest else None
        if self.settled:
            self._announce()

    def _require_same(self, digests: Sequence[str]) -> None:
        """A planner that is not deterministic would make the ranks wait for each other: raises on all of them."""
        mine = torch.tensor(list(hashlib.sha256(" ".join(digests).encode()).digest()), dtype=torch.uint8)
        everyone = [part.tolist() for part in self._gather("digest of the new plans")(mine)]
        other = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
        if other is not None:
            raise RuntimeError(
                f"the plans made after this step differ: rank {other} has made others than rank 0 (here: "
                f"{', '.join(digest[:12] for digest in digests)}); a planner must depend on nothing but its arguments"
            )

    def _gather(self, what: str) -> Callable[[Tensor], list[Tensor]]:
        """Hands a small tensor to all ranks; returns everybody's, by rank."""

        def gather(mine: Tensor) -> list[Tensor]:
            buffer = mine.to(self._device)
            parts: list[Tensor] = self.call(what, lambda group: group.all_gather(buffer).wait(self.timeout_s))
            return parts

        return gather
