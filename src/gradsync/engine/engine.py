"""The engine exchanges gradients as a plan says; frontends (`frontends/`) tell the engine when gradients are ready.

A step is `begin`, a `load` for every gradient as it becomes ready, `finish`, then `unload` of the results. Schemes'
new state is adopted at the next `begin`, and dropped if the step failed or some rank saw non-finite values.
`plan_control.py` decides between steps which plan runs, `running_plan.py` has the buckets of that plan,
`engine_state.py` saves and loads schemes' state, and `peers.py` talks to the other ranks about all but gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..comm import Group, Synchronization, inert_in_children
from ..devices import streams
from ..devices.trace import in_trace
from ..plans.plan import Plan, What
from ..plans.profile import Profile
from ..tensors import allocator as memory
from ..tensors.arrivals import Arrivals
from ..tensors.bucket import ROUND_BITS, StepMarks, TensorSpec
from ..tensors.density import ParameterProfile
from ..tensors.gradients import RowGradients, marks_of_ranks
from ..tensors.sparse import SparseRows
from .bucket_run import BucketRun, BucketRuns
from .engine_state import LOADING, EngineState
from .guard import ParameterGuard, Verification
from .loss_scale import LossScale
from .observation import Observer
from .peers import Peers, said
from .plan_control import PlanController, Planner
from .running_plan import RunningPlan
from .step_listener import RecordingDone, StepListener, active
from .step_times import Step
from .totals import Totals

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Engine:
    """Synchronises gradients (or parameters) over `group` by a plan, on a communication thread during backward.

    A plan has buckets, a scheme of exchange for each, and their order. `plan` is a `Plan`, or a planner: a function of
    (every parameter's shape and gradient density, world size) that returns one plan or several to try. `guarded` are
    the tensors, by name, that ranks compare as `verification` says; None: `parameters`.

    Attributes:
        running_plan: the plan in force, its buckets and statistics.
        state: what schemes keep from step to step, such as residuals of compression, for checkpoints.
        peers: runs collectives that are no part of the gradients' exchange.
    """

    # Of the step under way:
    _listener: StepListener | None = None
    _looks = False  # its gradients are sampled for zeros, to choose a plan
    _apart = False  # it exchanges when backward has ended, and no plan is made by it
    _checks_finite = False  # state of schemes, or a judge, depends on whether its gradients are finite
    _resting: frozenset[str] = frozenset()  # see `rests`

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        group: Group,
        plan: Plan | Planner,
        *,
        timeout_s: float,
        sparse_names: frozenset[str] = frozenset(),
        verification: Verification | None = None,
        guarded: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.specs = {name: TensorSpec.of(p) for name, p in self.parameters.items()}
        self.group = group
        self.timeout_s = timeout_s
        self.step = 0
        self.arrivals = Arrivals()  # of the last finished step
        # Set by frontends: since the last comparison an optimiser made a step that no synchronised backward preceded.
        self.stepped_alone = False
        # Whether some rank took part in the last step at its optimiser's step only; None: the answer is under way.
        self.late: bool | None = False
        self._not_late = ""  # why it must not have; "": it may have
        self.device = next(iter(self.parameters.values())).device if self.parameters else torch.device("cpu")
        self._streams = streams.streams_of(self.device)
        self.peers = Peers(group, self.device, self._streams, timeout_s=timeout_s, step=lambda: self.step)
        self._observer = Observer(self.specs, sparse_names)
        self._controller = PlanController(
            plan, self._observer, group, self.peers.call, device=self.device, timeout_s=timeout_s
        )
        if verification is None or group.size == 1:
            verification = Verification(every=0)
        self._guard = ParameterGuard(
            self.parameters if guarded is None else guarded, verification, self.peers.call, timeout_s=timeout_s
        )
        self._sees_steps = False  # of optimisers
        self.running_plan = RunningPlan(
            self._controller,
            self._observer,
            self.peers,
            self.parameters,
            self.specs,
            device=self.device,
            streams=self._streams,
        )
        self.state = EngineState(self.running_plan, self._controller, self.peers, self.parameters, self.specs)
        self._exchange: Synchronization | None = None  # of the step under way
        self._collected: set[str] = set()  # buckets of the step under way whose results are here
        self._collecting: streams.Moment | None = None  # when the first of them was asked for before `finish`
        self._marks = StepMarks()
        self._told_marks: streams.HostCopy | None = None  # of all ranks in the last step, until they are checked
        self._ended_well = True  # the last step
        # Whether some rank then saw NaN or infinity; None: no scheme has state, for which it is asked.
        self._was_bad: streams.HostCopy | None = None
        # Set by a frontend that calls `judge` after each step, as ranks outside the group have a say.
        self.awaits_judgement = False
        self.saw_non_finite = torch.zeros(1, dtype=torch.bool, device=self.device)  # some rank, in the last such step
        self.peers.start()
        inert_in_children(self)

    def forked(self) -> None:
        """Forgets the step under way, as this process was forked from the rank's, which goes on with it."""
        self._exchange = None

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.running_plan.plan

    @property
    def bucket_runs(self) -> BucketRuns:
        """The buckets of the plan in force, with their memory, state and statistics."""
        return self.running_plan.runs

    def follow_loss_scale(self, scaler: torch.amp.GradScaler) -> None:
        """Lets residuals follow the loss scale of this scaler: whenever it changes, they change by the same factor.

        Residuals are gradients that compression has left to be sent, so they are in units of the loss scale. From now
        on plans whose results do not follow it are refused, unless the scaler is disabled.

        Raises:
            ValueError: if the present plan is such a one.
        """
        self.state.loss_scale = LossScale(scaler, self._streams)
        if scaler.is_enabled():
            self._controller.follow_loss_scale()

    @property
    def is_scaled(self) -> bool:
        """Whether gradients are multiplied by a loss scale, which the results of all schemes must follow."""
        return self._controller.is_scaled

    # The step, in the order in which a frontend calls.

    def forward_begins(self) -> None:
        """Begins to copy the loss scale to the host if residuals follow it; `begin` then need not wait for the device.

        A frontend may call it when a forward begins.
        """
        self.state.look_at_scale()

    def begin(self, *, late: bool = False, rounds: int = 0) -> None:
        """Starts a training step: the buckets wait for the gradients of all parameters.

        Args:
            late: whether this rank joins only at its optimiser's step, as its backward reached no parameter.
            rounds: how many optimiser steps this rank has made so far, which the ranks compare; 0: not known.

        Raises:
            RuntimeError: when an earlier step failed, was left unfinished on this rank, or mixed two steps' gradients,
                and inside the capture of a CUDA graph.
        """
        if streams.is_capturing(self.device):
            raise RuntimeError(
                "backward runs inside the capture of a CUDA graph, which cannot hold gradsync's exchange: call "
                "torch.cuda.make_graphed_callables(model, ...) before attach(), as for DDP, or train without a graph"
            )
        self.abandon("the previous backward did not finish on this rank (an error in it?)")
        self.peers.require_working()
        self._check_marks()
        self._marks = StepMarks(late, rounds % 2**ROUND_BITS if rounds else None)
        running = self.running_plan
        running.runs.commit(keep=self._keeps_step)
        self.state.follow_scale()
        if running.is_outdated:
            self._change_plan()
            self.state.follow_scale()
        self._observer.begin()
        self._ended_well, self._was_bad = False, None
        self._checks_finite = self._looks_for_non_finite
        self.peers.begin_step()
        self._collected, self._collecting = set(), None
        self._listener = active()
        self._apart = self._listener is not None and self._listener.began(self)
        self._looks = self._controller.looks and not self._apart
        may_rest = self._listener is None and running.plan.what is not What.GRADIENT
        self._resting = running.runs.resting(self.step) if may_rest else frozenset()
        for run in running.runs:
            run.begin(self._resting)
        self._exchange = Synchronization(
            running.plan.order,
            self._synchronize,
            where=self._where,
            timeout_s=self.timeout_s,
            turn=self.peers.turn,
            thread=self.peers.thread,
            early=not self._apart,
            prepared=running.runs.prepared,
            streams=self._streams,
            offload=running.offload if running.offloads else None,
        )
        for run in running.runs:
            if not run.waiting:
                self._exchange.mark_ready(run.bucket.id)
        self._begin_to_compare()

    def rests(self, name: str) -> bool:
        """Whether this rank exchanges nothing of a parameter in the step under way: it is neither loaded nor unloaded.

        So it is where parameters are averaged in groups, and this rank is alone in its group. The engine then ends the
        step when the frontend calls `finish`, as always.
        """
        return name in self._resting

    @property
    def in_step(self) -> bool:
        """Whether a step is under way, between `begin` and `finish`."""
        return self._exchange is not None

    @property
    def settled(self) -> bool:
        """Whether trials of plans and measurements are over, so that the plan stays; true once the engine is closed."""
        return self.peers.is_closed or not self.parameters or self.running_plan.settled

    @property
    def is_choosing(self) -> bool:
        """Whether gradients are observed, the network is measured, or plans are on trial, to choose the plan."""
        return self._controller.is_choosing

    @property
    def may_keep_state(self) -> bool:
        """Whether schemes keep state from step to step, such as residuals, or may do so by a plan to be proposed."""
        return self.running_plan.runs.have_state or self._controller.may_propose

    @property
    def one_by_one(self) -> bool:
        """Whether each gradient of the step must be loaded as soon as it is ready, so that it can be measured.

        Otherwise `load_views` may load several at once.
        """
        return self._listener is not None or self._looks

    @property
    def due(self) -> Sized:
        """The computations of schemes that the next `load` will run on the calling thread; `len` is their number."""
        return self._require_step().due

    def load(self, name: str, gradient: Tensor | None, *, used: bool = True) -> None:
        """Puts a parameter's gradient into its buckets; complete buckets are exchanged, in the plan's order.

        Args:
            name: the parameter's name.
            gradient: with the shape and dtype of the parameter, dense or sparse COO; None: zero.
            used: whether this rank used the parameter in this step; False for a gradient that an earlier backward left.

        Raises:
            RuntimeError: if the dtype changed, or the parameter became ready twice in one step.
        """
        exchange = self._exchange or self._require_step()
        if self._listener is not None:
            self._listener.take(self, name, gradient if used else None, self.specs[name].shape)
        if used and gradient is not None:
            self._observer.arrived(name, sparse=gradient.layout is torch.sparse_coo)
            if self._looks:
                self._observer.look(name, gradient)
        for run in self.running_plan.runs.of(name):
            if run.load(name, gradient, used=used):
                exchange.mark_ready(run.bucket.id)
        exchange.do_work()

    def load_views(self, names: Sequence[str]) -> None:
        """Loads the gradients of several used parameters at once, which live in their views of one bucket's memory.

        A step whose gradients are to be loaded `one_by_one` must call `load` instead.
        """
        exchange = self._require_step()
        self._observer.arrived(*names, sparse=False)
        (run,) = self.running_plan.runs.of(names[0])
        if run.load_views(names):
            exchange.mark_ready(run.bucket.id)
        exchange.do_work()

    def missing(self) -> list[str]:
        """Returns the names of parameters whose gradients were not loaded in this step yet, in model order."""
        waiting = [run.waiting for run in self.running_plan.runs if run.waiting]
        return [name for name in self.parameters if any(name in names for names in waiting)] if waiting else []

    @property
    def goes_on_alone(self) -> bool:
        """Whether the communication thread can finish the step alone once all gradients are loaded.

        It cannot where schemes compute something on the caller's thread or offload computations.
        """
        return not self.running_plan.runs.prepared and not self.running_plan.runs.offload

    def go_on(self) -> None:
        """Lets the communication thread finish the exchange while the caller does something else before `finish`.

        All gradients must have been loaded.
        """
        assert not self.missing()
        self._require_step().go_on()

    def collect(self, name: str) -> None:
        """Waits, after `go_on`, until the buckets of this parameter are synchronised, so that `unload` can follow.

        Raises:
            GroupError: when another rank died, stopped answering or failed.
        """
        exchange = self._require_step()
        for run in self.running_plan.runs.of(name):
            if run.bucket.id in self._collected:
                continue
            if self._collecting is None:
                self._collecting = self._streams.moment()
            try:
                exchange.wait_for(run.bucket.id)
            except BaseException as error:
                self.peers.fail(error)
                self._exchange = None
                raise
            self._accept(run, exchange)

    def finish(self) -> None:
        """Waits until every bucket is synchronised, and ends the training step; all gradients must have been loaded.

        `unload` then returns the results.

        Raises:
            GroupError: when another rank died, stopped answering or failed, naming bucket, stage and step.
        """
        exchange = self._require_step()
        assert not self.missing()
        backward_ended = self._streams.moment() if self._collecting is None else self._collecting
        if self._listener is not active():  # its block has ended since the step began, or another one's has begun
            self._listener = None
        if self._listener is not None:
            self._listener.backward_ended(self)
        try:
            with in_trace("gradsync::finish"):
                self.peers.end_asides()
                exchange.wait()
        except BaseException as error:
            self.peers.fail(error)
            raise
        finally:
            self._exchange = None
        with self._telling_interruptions("what follows a step"):
            self._conclude(exchange, backward_ended)

    def judge(self, bad: Tensor) -> None:
        """Drops schemes' next state of the finished step, and overwrites lossy results by NaN, where `bad` is true.

        The host does not wait for a device's answer. `bad`: whether some rank saw NaN or infinity, (1,) bool, the same
        on all ranks.
        """
        self._was_bad = self._streams.to_host(bad)
        if self.running_plan.plan.what is not What.GRADIENT:  # nobody would skip parameters
            return
        where = None if self._was_bad.has_arrived else bad.view(())
        if where is not None or not self._keeps_step:
            for run in self.running_plan.runs:
                run.fill_nan(where)

    def forbid_late(self, why: str) -> None:
        """Stops all synchronisation if some rank was late in the last step.

        A rank is late if it took part only at its optimiser's step, as its backward reached no parameter. Where the
        device's answer is still under way, the next step looks, so that the host need not wait.

        Raises:
            RuntimeError: with the text `why`, from here or from the next `begin`.
        """
        if self._told_marks is None or self._told_marks.has_arrived:
            self._check_marks()
            if self.late:
                self.peers.stop(why)
        else:
            self._not_late = (
                f"{why} (an accelerator's answer came after the step, which was made: the ranks' parameters differ)"
            )

    def stepped(self) -> None:
        """Records that an optimiser stepped; stores digests of the parameters if ranks are about to compare them."""
        self._sees_steps = True
        if self.step > 0 and self._controller.settled and self.running_plan.plan.what is What.GRADIENT:
            self._guard.look()

    def follow(self) -> None:
        """Asks a planner that measures jobs (`ProposingPlanner`) to measure this one. Collective, between two steps."""
        self._controller.follow(self)

    def moment(self) -> streams.Moment:
        """Returns a mark of the time when the device will have run what this thread's current stream was given so far.

        The difference of two such moments is the device's time between them, and reading it waits for the device.
        """
        return self._streams.moment()

    @property
    def profile(self) -> Profile | None:
        """The measurements of the job that the plan was made from; None where the job was not measured."""
        return self._controller.profile_of(self)

    def propose(self, plans: Sequence[Plan]) -> None:
        """Tries several plans alternately on coming steps and keeps the fastest, or changes to a single one.

        Collective. `plans`: the best guess first.
        """
        try:
            self._controller.propose(plans)
        except Exception as error:
            self.peers.fail(f"the plans proposed before step {self.step}: {error}")
            raise
        if self.settled and not self.running_plan.is_outdated:
            self.running_plan.announce()

    def followers(self, plans: Sequence[Plan]) -> list[Plan]:
        """Returns those of the plans, in their order, under which what schemes keep now has a place; for `propose`.

        Plans are left out, too, that cannot take turns with those before them. Collective.
        """
        return self.running_plan.followers(plans)

    def sent_all(self) -> bool:
        """Whether no rank has residuals left to be sent, now that a step has ended; the same on all ranks.

        Residuals are what compression left out of gradients.
        """
        self.running_plan.runs.commit(keep=self._keeps_step)
        return not self.running_plan.runs.kept_names

    def replan(self, plan: Plan) -> None:
        """Changes to another plan at once, between two steps; the caller must have unloaded the last step's results.

        Collective. What schemes keep, such as residuals of compression, moves into the new plan's buckets.

        Raises:
            ValueError: for a plan that is not for this model, or whose schemes cannot keep the state.
            RuntimeError: on all ranks, when they have different plans.
        """
        assert not self.in_step
        self._check_marks()
        self.running_plan.runs.commit(keep=self._keeps_step)
        self.propose([plan])
        if self.running_plan.is_outdated:
            with self.group.renewed():
                self._change_plan()

    def abandon(self, why: str) -> None:
        """Gives up the step under way, if there is one, and tells the other ranks why, which may be waiting.

        All synchronisation has stopped then: later steps raise.
        """
        if self._exchange is None:
            return
        self._exchange.cancel()
        self._exchange = None
        self.peers.fail(why)

    def used(self, name: str) -> bool:
        """Whether some rank used the parameter in the finished step, so that it has a synchronised gradient."""
        return self.running_plan.runs.of(name)[0].gradients.used(name)

    @property
    def profiles(self) -> dict[str, ParameterProfile]:
        """The layout (dense or sparse) and densities of each parameter's gradient, as all ranks agreed, by name."""
        return self._observer.profiles

    @property
    def sparse_names(self) -> frozenset[str]:
        """The names of the parameters whose gradients are sparse tensors, as the ranks agreed."""
        return self._observer.sparse_names

    def unload(self, name: str, out: Tensor | None, *, sparse: bool) -> Tensor:
        """Returns the synchronised gradient of a parameter, with the parameter's shape and dtype, after `finish`.

        Args:
            name: the parameter's name.
            out: a dense tensor with the parameter's shape and dtype, which may be overwritten and returned where the
                gradient has no view in a bucket; None: allocate.
            sparse: whether to return a sparse COO tensor, of the rows that are not zero.
        """
        shape = self.parameters[name].shape
        for run in self.running_plan.runs.of(name):
            if sparse and isinstance(run.gradients, RowGradients):  # plans cut no tables
                return run.gradients.table(name).to_torch(shape)
            out = run.gradients.unload(name, out, shape=shape)
        assert out is not None
        return SparseRows.from_dense(out).to_torch(shape) if sparse else out

    def release(self) -> None:
        """Leaves the buckets' memory to the gradients in it, once all results of a step were unloaded.

        The next step's buckets take new memory, each with the first gradient that it gets.
        """
        for run in self.running_plan.runs:
            run.gradients.release()

    def verify(self, names: Iterable[str]) -> None:
        """Checks, between two steps, that the parameters `names` are the same on all ranks. Collective.

        Differences within the tolerance are a warning. Nothing is compared where the user turned comparisons off.

        Raises:
            RuntimeError: on all ranks, where parameters differ by more than the tolerance.
        """
        self._guarded(lambda: self._guard.compare(names))

    @contextmanager
    def at_barrier(self, what: str) -> Iterator[None]:
        """Waits, between two steps, until all ranks have come here for the purpose `what`, then runs the `with` block.

        Code in the block must tell the other ranks of its errors itself; they are told here only of interruptions, as
        by the keyboard.

        Raises:
            RuntimeError: inside a step.
            GroupError: on all ranks, where some of them make a step instead, have left, or do not come in time.
        """
        if self.in_step:
            raise RuntimeError(f"{what} was called inside a step; call it between two steps, on every rank")
        self.peers.call(what, lambda group: group.barrier(what, self.timeout_s))
        with self._telling_interruptions(what):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint needs of this rank: the step's number, the plan, and the schemes' state.

        The state, such as residuals of compression, consists of tensors by parameter, range of elements and kind.

        Raises:
            RuntimeError: if the engine was closed, or a change of the state has failed midway.
        """
        self.state.require_whole()
        if not self.in_step:
            self.running_plan.runs.commit(keep=self._keeps_step)
        entries = self.state.entries(self.step)
        planned = self._controller.state_of(self) if self.settled else None
        return entries if planned is None else {**entries, "planned": planned}

    def load_state_dict(self, state: object, *, strict: bool = True, ready: Callable[[], None] | None = None) -> None:
        """Loads what `state_dict` returned; called on all ranks inside `at_barrier`.

        Args:
            state: what `state_dict` returned.
            strict: whether to refuse state that the plan's schemes cannot keep, of another dtype, or of another rank or
                model.
            ready: called when all ranks have accepted their state, before anything changes; may raise.

        Raises:
            TypeError, ValueError, RuntimeError: on all ranks, before anything has changed, if the state of one is
                refused.
        """
        saved, resumption = self.state.examine(state, strict=strict)
        runs = self.state.place_for(saved, resumption, strict=strict)
        if ready is not None:
            ready()
        self.step = saved.step
        with self.state.all_or_none(f"{LOADING}, step {self.step}"):
            if resumption is not None:
                self._controller.resume(self, resumption)
                self.running_plan.replace(runs)
            self.state.take_over(saved)

    def totals(self) -> Totals:
        """Returns this rank's sums of bytes and times so far, over all plans, and counts of parameters' comparisons."""
        guard = self._guard
        sums = self.running_plan.totals()
        return replace(sums, comparisons=guard.comparisons, differences=guard.differences)

    def close(self) -> None:
        """Ends the communication thread and closes the group; a second call does nothing."""
        if self.peers.is_closed:
            return
        self.abandon("gradsync was detached in the middle of a step")
        self._controller.close(self)
        self.peers.close()
        self.running_plan.close()
        memory.release()

    # Below here: how.

    @contextmanager
    def _telling_interruptions(self, what: str) -> Iterator[None]:
        """Tells the other ranks, which may wait for this one, of an interruption in the block, as by the keyboard.

        All synchronisation has stopped then. Other errors are told where they are raised. `what` names the block.
        """
        try:
            yield
        except (Exception, RecordingDone):  # all ranks end a recording in the same step
            raise
        except BaseException as error:
            self.peers.fail(f"{what}, step {self.step}: {said(error)}")
            raise

    def _conclude(self, exchange: Synchronization, backward_ended: streams.Moment) -> None:
        """Ends a step whose exchange has ended: accepts results, and lets the ranks decide about coming steps."""
        for run in self.running_plan.runs:
            if run.bucket.id not in self._collected:
                self._accept(run, exchange)
        partial = self.running_plan.runs.have_state  # only schemes with state leave elements out
        self.arrivals = Arrivals(run.arrival for run in self.running_plan.runs) if partial else Arrivals()
        self._ended_well = True
        if self._checks_finite:
            self._look_for_non_finite()
        ended = self._streams.moment()
        step = Step(exchange.began, backward_ended, ended, exchange.ready, exchange.spans)
        self.running_plan.times.step_ended(step, self.running_plan.runs)
        for run in self.running_plan.runs:
            run.count_bytes()
        if self.running_plan.runs:
            self._told_marks, self.late = self._streams.to_host(self.running_plan.runs.marks()), None
            if self._told_marks.has_arrived:  # else the host would wait for the device: the next step looks
                self._check_marks()
        if self._guard.is_under_way:
            self._compare()
        if self._apart:
            self._controller.leave_out_step()
        else:
            self._plan_on(exchange.began, ended)
        self.step += 1
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.step_ended(self, self.parameters)  # may end the script

    def _accept(self, run: BucketRun, exchange: Synchronization) -> None:
        run.accept(exchange.results[run.bucket.id], self.step)
        self._collected.add(run.bucket.id)

    def _synchronize(self, bucket_id: str) -> Any:
        return self.running_plan.runs[bucket_id].synchronize(
            check_finite=self._checks_finite, marks=self._marks, step=self.step
        )

    def _where(self, bucket_id: str, stage: str) -> str:
        return f"{self.running_plan.runs[bucket_id].bucket.title}, stage {stage!r}, step {self.step}"

    def _begin_to_compare(self) -> None:
        """Starts the guard's comparison of parameters if one is due in this step; the same on all ranks."""
        compares = self.step > 0 and self.settled and not self._apart and self.running_plan.plan.what is What.GRADIENT
        if compares and self._guard.is_due():
            try:
                self._guard.begin(self.peers.aside, alone=self.stepped_alone, sees_steps=self._sees_steps)
            except Exception as error:
                self.abandon(f"comparison of parameters, step {self.step}: {error}")
                raise

    def _compare(self) -> None:
        self.stepped_alone = False
        self._guarded(lambda: self._guard.end(self.step))

    def _guarded(self, compare: Callable[[], T]) -> T:
        """Returns `compare()`; its RuntimeError, which all ranks raise alike, also stops all synchronisation."""
        try:
            return compare()
        except RuntimeError as error:
            self.peers.failed_alike(error)
            raise

    def _require_step(self) -> Synchronization:
        if self._exchange is None:
            self.peers.require_working()
            raise RuntimeError("gradsync was detached during this backward; detach between steps")
        return self._exchange

    @property
    def _keeps_step(self) -> bool:
        """Whether the last step ended well, and no rank saw NaN or infinity, so that schemes' next state is kept."""
        return self._ended_well and (self._was_bad is None or not any(self._was_bad.tolist()))

    @property
    def _looks_for_non_finite(self) -> bool:
        runs = self.running_plan.runs
        if self.running_plan.plan.what is not What.GRADIENT:  # numbers of rounds are those of steps in any case
            return runs.keep_values
        return runs.have_state or (self.awaits_judgement and len(runs) > 0)

    def _look_for_non_finite(self) -> None:
        """Looks whether some rank saw NaN or infinity, and lets the step count so, unless that is judged elsewhere."""
        found = [each for run in self.running_plan.runs for each in run.non_finite()]
        bad = torch.stack(found).any().view(1) if found else torch.zeros(1, dtype=torch.bool, device=self.device)
        if self.awaits_judgement:
            self.saw_non_finite, self._was_bad = bad, self._streams.to_host(bad)
        else:
            self.judge(bad)

    def _check_marks(self) -> None:
        """Raises if the marks that ranks sent with gradients say that they are out of step, or late where none may be.

        All ranks raise alike for steps that differ.
        """
        if self._told_marks is None:
            return
        told, self._told_marks = self._told_marks.tolist(), None
        self.late, apart = marks_of_ranks(told)
        not_late, self._not_late = self._not_late, ""
        if apart:
            self.peers.stop(
                "the ranks are out of step: some have made more rounds of backward and optimiser step than others "
                "before this exchange, so a backward or a whole step happened on some ranks only"
            )
        if self.late and not_late:
            self.peers.stop(not_late)

    def _change_plan(self) -> None:
        """Replaces the buckets by those of the next plan and moves state into them; errors stop all synchronisation."""
        with self.state.all_or_none(f"the change of plans before step {self.step}"):
            self.running_plan.change()
        if self.settled:
            self.running_plan.announce()

    def _plan_on(self, began: streams.Moment, ended: streams.Moment) -> None:
        """Lets the controller choose the next step's plan; has the job measured again if step times have changed."""
        was_settled = self.settled
        try:
            self._controller.step_ended(self.running_plan.runs, ended)
            drifted = self._controller.drifted(began, ended)
            if drifted:
                logger.info("steps take another time than they did; the job is measured again")
            if drifted or self._controller.asks_again():
                self.follow()
        except Exception as error:
            self.peers.fail(f"the plan after step {self.step}: {error}")
            raise
        if self.settled and not was_settled:
            self.running_plan.announce()
