"""The engine exchanges gradients as a plan says; frontends (`frontends/`) tell the engine when gradients are ready.

A step is `begin`, a `load` for every gradient as it becomes ready, `finish`, then `unload` of the results. Schemes'
new state is adopted at the next `begin`, and dropped if the step failed or some rank saw non-finite values.
`plan_control.py` decides between steps which plan runs.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from ..comm import CallingThread, Group, GroupError, JobThread, Synchronization, gather_bytes, waiting_at
from ..comm.network_cost import network_cost
from ..costs.forecast import forecast
from ..costs.timeline import Task
from ..devices import streams
from ..plans.plan import OF, Plan, What, describe
from ..plans.profile import Profile
from ..state import NOT_STRICT, VERSION, Origin, Saved, examined, refusal, without_state
from ..tensors import allocator as memory
from ..tensors.arrivals import Arrivals
from ..tensors.bucket import PHASES, StepMarks, TensorSpec, model_digest
from ..tensors.density import ParameterProfile
from ..tensors.gradients import RowGradients, marks_of_ranks
from ..tensors.sparse import SparseRows
from .bucket_run import BucketRun, BucketRuns, BucketStatistics
from .guard import ParameterGuard, Verification
from .loss_scale import LossScale
from .observation import Observer
from .plan_control import PlanController, Planner, Resumption
from .step_listener import active
from .step_times import Step, TimedSteps
from .totals import Totals

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOADING = "loading of state"


class Engine:
    """Synchronises gradients (or parameters) over `group` by a plan, on a communication thread during backward.

    A plan has buckets, a scheme of exchange for each, and their order. `plan` is a `Plan`, or a planner: a function of
    (every parameter's shape and gradient density, world size) that returns one plan or several to try.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        group: Group,
        plan: Plan | Planner,
        *,
        timeout_s: float,
        sparse_names: frozenset[str] = frozenset(),
        verification: Verification | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.specs = {name: TensorSpec.of(p) for name, p in self.parameters.items()}
        # The ranks agreed on these shapes and strides: a memory format that changes later changes no message.
        self._templates = {name: torch.empty_like(p, device="meta") for name, p in self.parameters.items()}
        self.group = group
        self.timeout_s = timeout_s
        self.step = 0
        self.loss_scale: LossScale | None = None  # what gradients are multiplied by, where that may change
        self._scale: float | None = None  # in whose units state is
        # Set by frontends: since the last comparison an optimiser made a step that no synchronised backward preceded.
        self.stepped_alone = False
        self.late = False  # some rank took part in the last step at its optimiser's step only
        self.device = next(iter(self.parameters.values())).device if self.parameters else torch.device("cpu")
        self._streams = streams.streams_of(self.device)
        self._observer = Observer(self.specs, sparse_names)
        self._controller = PlanController(
            plan, self._observer, group, self.call, device=self.device, timeout_s=timeout_s
        )
        self.plan, self.bucket_runs = self._controller.plan, BucketRuns()
        self._running: Synchronization | None = None
        self._collected: set[str] = set()  # buckets of the step under way whose results are here
        self._collecting: streams.Moment | None = None  # when the first of them was asked for before `finish`
        self._failure: RuntimeError | None = None
        self._is_torn = False  # a load, or a change of plans, has failed midway: state is neither the old nor the new
        self._closed = False
        self._marks = StepMarks()
        self._told_marks: streams.HostCopy | None = None  # of all ranks in the last step, until they are checked
        self._ended_well = True  # the last step
        # Whether some rank then saw NaN or infinity; None: no scheme has state, for which it is asked.
        self._was_bad: streams.HostCopy | None = None
        self.arrivals = Arrivals()  # of the last finished step
        self._times = TimedSteps()
        self._final_statistics: list[BucketStatistics] = []
        self._earlier = Totals()  # of the plans that were replaced
        self._turn = threading.Lock()  # held by whoever uses the group
        self._apart = False  # the step under way exchanges when backward has ended, and no plan is made by it
        self._asides: list[Future[Any]] = []  # what the communication thread does before the exchange
        self._other_core: JobThread | None = None  # for what a plan offloads
        if verification is None or group.size == 1:
            verification = Verification(every=0)
        self._sees_steps = False  # of optimisers
        self._guard = ParameterGuard(self.parameters, verification, self.call, timeout_s=timeout_s)
        self._adopt(self._controller.plan)
        self._announce()
        self._thread = CallingThread() if group.on_calling_thread else JobThread("gradsync", self.device, owner=self)

    def follow_loss_scale(self, scaler: torch.amp.GradScaler) -> None:
        """Lets residuals, which are sums of gradients, follow the scale of this scaler."""
        self.loss_scale = LossScale(scaler, self._streams)

    # The step, in the order in which a frontend calls.

    def forward_begins(self) -> None:
        """Prepares for the step of a forward that begins; a frontend need not call it."""
        if self.loss_scale is not None and self.bucket_runs.have_state:
            self.loss_scale.look()

    def begin(self, *, late: bool = False, rounds: int = 0) -> None:
        """Starts a training step.

        `late`: this rank joins only at its optimiser's step, as its backward reached no parameter; `rounds`: its
        optimiser steps so far, which ranks compare.

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
        self._require_working()
        self._check_marks()
        self._marks = StepMarks(late, rounds % PHASES if rounds else None)
        self.bucket_runs.commit(keep=self._keeps_step)
        self._follow_scale()
        if self.replanning:
            self._change_plan(self._controller.plan)
            self._follow_scale()
        self._observer.begin()
        self._ended_well, self._was_bad = False, None
        for run in self.bucket_runs:
            run.begin()
        self._asides = []
        self._collected, self._collecting = set(), None
        listener = active()
        self._apart = listener is not None and listener.began(self)
        self._running = Synchronization(
            self.plan.order,
            self._synchronize,
            where=self._where,
            timeout_s=self.timeout_s,
            turn=self._turn,
            thread=self._thread,
            early=not self._apart,
            prepared=self.bucket_runs.prepared,
            streams=self._streams,
            offload=None if self._other_core is None else self._offload,
        )
        self._begin_to_compare()

    @property
    def in_step(self) -> bool:
        """Whether a step is under way, between `begin` and `finish`."""
        return self._running is not None

    @property
    def replanning(self) -> bool:
        """Whether the next `begin` changes the plan; gradients must leave the present buckets' memory before."""
        return self._controller.plan is not self.plan

    @property
    def settled(self) -> bool:
        """Whether trials of plans and measurements are over, so that the plan stays."""
        return self._closed or not self.parameters or (self._controller.settled and not self.replanning)

    @property
    def one_by_one(self) -> bool:
        """Whether each gradient of the step must be loaded as soon as it is ready, as measurements need."""
        return active() is not None or self._controller.looks

    @property
    def due(self) -> Sized:
        """Computations of schemes that the next `load` will run, on the thread of backward; `len` is their number."""
        return self._require_step().due

    def load(self, name: str, gradient: Tensor | None, *, used: bool = True) -> None:
        """Puts a parameter's gradient into its buckets; complete buckets are exchanged, in the plan's order.

        Args:
            name: the parameter's name.
            gradient: with the shape and dtype of the parameter, dense or sparse COO; None: zero.
            used: whether this rank used the parameter in this step; a gradient without use is from an earlier backward.

        Raises:
            RuntimeError: if the dtype changed, or the parameter became ready twice in one step.
        """
        running = self._require_step()
        if (listener := active()) is not None:
            listener.take(self, name, gradient if used else None, self.specs[name].shape)
        if used and gradient is not None:
            self._observer.arrived(name, sparse=gradient.layout is torch.sparse_coo)
            if self._controller.looks and not self._apart:
                self._observer.look(name, gradient)
        for run in self.bucket_runs.of(name):
            if run.load(name, gradient, used=used):
                running.mark_ready(run.bucket.id)
        running.do_work()

    def load_views(self, names: Sequence[str]) -> None:
        """Does what `load` does, for gradients of used parameters that live in their views of one bucket's memory.

        Not for steps whose gradients are to be loaded `one_by_one`.
        """
        running = self._require_step()
        self._observer.arrived(*names, sparse=False)
        (run,) = self.bucket_runs.of(names[0])
        if run.load_views(names):
            running.mark_ready(run.bucket.id)
        running.do_work()

    def missing(self) -> list[str]:
        """Returns the names of parameters whose gradients were not loaded in this step yet, in model order."""
        waiting: set[str] = set().union(*(run.waiting for run in self.bucket_runs))
        return [name for name in self.parameters if name in waiting] if waiting else []

    @property
    def goes_on_alone(self) -> bool:
        """Whether the communication thread can finish the step alone once all gradients are loaded."""
        return not self.bucket_runs.prepared and not self.bucket_runs.offload

    def go_on(self) -> None:
        """Lets the communication thread finish the exchange while the caller does something else before `finish`."""
        assert not self.missing()
        self._require_step().go_on()

    def collect(self, name: str) -> None:
        """Waits, after `go_on`, until the buckets of this parameter are synchronised, so that `unload` can follow.

        Raises:
            GroupError: as `finish` does.
        """
        running = self._require_step()
        for run in self.bucket_runs.of(name):
            if run.bucket.id in self._collected:
                continue
            if self._collecting is None:
                self._collecting = self._streams.moment()
            try:
                running.wait_for(run.bucket.id)
            except BaseException as error:
                self.fail(error)
                self._running = None
                raise
            self._accept(run, running)

    def finish(self) -> None:
        """Waits until every bucket is synchronised; all parameters must be loaded.

        Raises:
            GroupError: when another rank died, stopped answering or failed, naming bucket, stage and step.
        """
        running = self._require_step()
        assert not self.missing()
        backward_ended = self._streams.moment() if self._collecting is None else self._collecting
        if (listener := active()) is not None:
            listener.backward_ended(self)
        try:
            with record_function("gradsync::finish"):
                for aside in self._asides:
                    aside.result()
                running.wait()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._running = None
        for run in self.bucket_runs:
            if run.bucket.id not in self._collected:
                self._accept(run, running)
        self.arrivals = Arrivals(run.arrival for run in self.bucket_runs)
        self._ended_well = True
        if self.bucket_runs.have_state:
            self._look_for_non_finite()
        ended = self._streams.moment()
        self._times.step_ended(
            Step(running.began, backward_ended, ended, running.ready, running.spans, self.bucket_runs)
        )
        for run in self.bucket_runs:
            run.count_bytes()
        if self.bucket_runs:
            self._told_marks = self._streams.to_host(self.bucket_runs.marks())
            if self._told_marks.has_arrived:  # else the host would wait for the device: the next step looks
                self._check_marks()
        if self._guard.is_under_way:
            self._compare()
        if self._apart:
            self._controller.leave_out_step()
        else:
            self._plan_on(running.began, ended)
        self.step += 1
        if listener is not None:
            listener.step_ended(self, self.parameters)  # may end the script

    def stepped(self) -> None:
        """Records an optimiser's step, and takes digests of the parameters if ranks are about to compare parameters."""
        self._sees_steps = True
        if self.step > 0 and self._controller.settled and self.plan.what is What.GRADIENT:
            self._guard.look()

    def follow(self) -> None:
        """Lets a planner that measures jobs (`ProposingPlanner`) measure this one. Collective, between two steps."""
        self._controller.follow(self)

    def moment(self) -> streams.Moment:
        """Returns the moment at which the device has run what this thread's current stream was given so far."""
        return self._streams.moment()

    @property
    def profile(self) -> Profile | None:
        """The measurements that the plan was made from; None where the job was not measured."""
        return self._controller.profile_of(self)

    def propose(self, plans: Sequence[Plan]) -> None:
        """Runs several plans in turns on coming steps and keeps the fastest, or changes to a single one. Collective."""
        try:
            self._controller.propose(plans)
        except Exception as error:
            self.fail(f"the plans proposed before step {self.step}: {error}")
            raise
        if self.settled and not self.replanning:
            self._announce()

    def replan(self, plan: Plan) -> None:
        """Changes to another plan at once, between two steps; results of the last step must be unloaded.

        Collective. The schemes' state, such as residuals, moves into the new plan's buckets.

        Raises:
            ValueError: for a plan that is not for this model, or whose schemes cannot keep the state.
            RuntimeError: on all ranks, when they have different plans.
        """
        assert not self.in_step
        self._check_marks()
        self.bucket_runs.commit(keep=self._keeps_step)
        self.propose([plan])
        if self.replanning:
            with self.group.renewed():
                self._change_plan(self._controller.plan)

    def fail(self, why: str | BaseException) -> None:
        """Stops all synchronisation from now on and tells the other ranks why; a GroupError names the cause itself."""
        if self._failure is None:
            text = why if isinstance(why, str) else _said(why)
            ranks = why.ranks if isinstance(why, GroupError) else None
            self._failure = RuntimeError(text) if ranks is None else GroupError(text, ranks)
            self.group.announce_failure(text, ranks)

    def abandon(self, why: str) -> None:
        """Gives up the step under way, if there is one, and tells the other ranks, which may be waiting."""
        if self._running is None:
            return
        self._running.cancel()
        self._running = None
        self.fail(why)

    def used(self, name: str) -> bool:
        """Whether some rank used the parameter in the finished step."""
        return self.bucket_runs.of(name)[0].gradients.used(name)

    @property
    def profiles(self) -> dict[str, ParameterProfile]:
        """Layout and densities of each parameter's gradient as all ranks agreed, by name."""
        return self._observer.profiles

    @property
    def sparse_names(self) -> frozenset[str]:
        """The parameters whose gradients are sparse, as the ranks agreed."""
        return self._observer.sparse_names

    def unload(self, name: str, out: Tensor | None, *, sparse: bool) -> Tensor:
        """Returns the synchronised gradient of a parameter, with the parameter's shape and dtype.

        Args:
            name: the parameter's name.
            out: a dense tensor with the parameter's shape and dtype, which may be overwritten and returned where the
                gradient has no view in a bucket; None: allocate.
            sparse: whether to return a sparse COO tensor, of the rows that are not zero.
        """
        shape = self.parameters[name].shape
        for run in self.bucket_runs.of(name):
            if sparse and isinstance(run.gradients, RowGradients):  # plans cut no tables
                return run.gradients.table(name).to_torch(shape)
            out = run.gradients.unload(name, out, shape=shape)
        assert out is not None
        return SparseRows.from_dense(out).to_torch(shape) if sparse else out

    def call(self, what: str, function: Callable[[Group], Any]) -> Any:
        """Returns `function(group)`, called while no other thread uses the group.

        Raises:
            GroupError: when another rank died, stopped answering or failed, naming `what` and the step.
        """
        self._require_working()
        place = f"{what}, step {self.step}"
        try:
            with self._turn, waiting_at(lambda: place):
                return function(self.group)
        except GroupError as error:
            placed = error.at(place)
            self.fail(placed)
            raise placed from None
        except BaseException as error:  # an interruption leaves the others in the middle of it, too
            self.fail(f"{place}: {_said(error)}")
            raise

    def aside(self, job: Callable[[Group], T]) -> Future[T]:
        """Runs `job(group)` on the communication thread before the exchange of the step under way.

        Nothing else uses the group meanwhile, so all ranks must give a job with the same collectives, before any
        gradient of the step is loaded, or later where a step listener delays the exchange to the end of backward.
        `finish` waits for the job, and raises its errors.
        """
        done: Future[T] = Future()
        begun = self._streams.record()

        def run() -> None:
            try:
                with self._turn, torch.no_grad(), self._streams.on(streams.COMMUNICATION):
                    begun.wait()
                    done.set_result(job(self.group))
            except BaseException as error:  # raised again where the result is asked for
                done.set_exception(error)

        self._asides.append(done)
        self._thread.submit(run)
        return done

    def agree(self, what: str, problem: Exception | None, alike: str = "") -> None:
        """Raises on every rank if some rank has a problem, or if `alike` differs between ranks. Collective.

        It raises this rank's own problem, else that of the first rank with one. The engine can go on afterwards.
        """
        text = "" if problem is None else str(problem) or repr(problem)
        message = f"{alike}\0{text}".encode()
        told = self.call(what, lambda group: gather_bytes(group, message, self.timeout_s))
        if problem is not None:
            raise problem
        parts = [theirs.decode().partition("\0") for theirs in told]
        for rank, (_, _, theirs) in enumerate(parts):
            if theirs:
                raise RuntimeError(f"{what}: rank {rank} could not: {theirs}")
        if len({theirs for theirs, _, _ in parts}) > 1:
            by_rank = ", ".join(f"{theirs} on rank {rank}" for rank, (theirs, _, _) in enumerate(parts))
            raise ValueError(f"{what}: the ranks differ: {by_rank}")

    def verify(self, names: Iterable[str]) -> None:
        """Checks between two steps that parameters are alike on all ranks, unless comparisons are off. Collective.

        Raises:
            RuntimeError: on all ranks, where they differ by more than the tolerance.
        """
        self._guarded(lambda: self._guard.compare(names))

    @contextmanager
    def at_barrier(self, what: str) -> Iterator[None]:
        """Waits until all ranks have come here for the same purpose `what`, between two steps, then runs the block.

        Code in the block must tell the other ranks of its errors itself; interruptions, as by the keyboard, are told
        here.

        Raises:
            RuntimeError: inside a step.
            GroupError: on all ranks, where some of them make a step instead, have left, or do not come in time.
        """
        if self.in_step:
            raise RuntimeError(f"{what} was called inside a step; call it between two steps, on every rank")
        self.call(what, lambda group: group.barrier(what, self.timeout_s))
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            self.fail(f"{what}, step {self.step}: {_said(error)}")
            raise

    def tell(self, what: str, mine: Any) -> list[Any]:
        """Sends a JSON value to all ranks; returns the values of all ranks, by rank."""
        content = json.dumps(mine).encode()
        parts = self.call(what, lambda group: gather_bytes(group, content, self.timeout_s))
        return [json.loads(part) for part in parts]

    # What is kept and told.

    def state_dict(self) -> dict[str, Any]:
        """Returns step, plan and schemes' state (as residuals): tensors by parameter, range of elements and kind."""
        if self._closed:
            raise RuntimeError("gradsync was detached from this model, and its state is gone: call state_dict() before")
        if self._is_torn:
            raise RuntimeError(
                f"there is no whole state to save, as what changes it has failed midway: {self._failure}; detach() and "
                "attach again on every rank, then load a checkpoint"
            )
        if not self.in_step:
            self.bucket_runs.commit(keep=self._keeps_step)
        plan = next(iter(self._controller.on_trial), self.plan)  # a trial is not for keeping
        origin = Origin(self.group.rank, self.group.size, self._parameters_digest(), self.bucket_runs.keep_values)
        state = {
            "version": VERSION,
            **origin.entries(),
            "step": self.step,
            "plan": plan.to_json(),
            "state": {part.key: part.values for part in self.bucket_runs.state_slices()},
        }
        if self._scale is not None:
            state["loss_scale"] = self._scale
        planned = self._controller.state_of(self) if self.settled else None
        return state if planned is None else {**state, "planned": planned}

    def load_state_dict(self, state: object, *, strict: bool = True) -> None:
        """Loads what `state_dict` returned; called inside `at_barrier`, see `Attachment.load_state_dict`."""
        saved, resumption = self._examined(state, strict=strict)
        runs = self.bucket_runs
        problem: Exception | None = None
        try:
            if resumption is not None and (self.replanning or resumption.plan.digest != self.plan.digest):
                runs = self._runs_of(resumption.plan)  # beside the present ones, which stay if there is no place
            if strict:
                runs.require_place(saved.slices, f"load it under a plan as it was saved by, or drop it by {NOT_STRICT}")
                runs.require_dtypes(saved.slices)
        except Exception as error:  # told to all, then raised
            problem = error
        self.agree(LOADING, problem)
        with self.all_or_none(LOADING):
            self._take_over(saved, resumption, runs)

    @contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Runs a block that changes state on all ranks; an error inside stops all synchronisation."""
        try:
            yield
        except BaseException as error:  # an interruption, too
            self._is_torn = True
            self.fail(f"{what}, step {self.step}: {_said(error)}")
            raise

    def _examined(self, state: object, *, strict: bool) -> tuple[Saved, Resumption | None]:
        """Returns the checked state, and its plan if training can go on with it; all ranks raise if one is refused."""
        saved: Saved | None = None
        resumption: Resumption | None = None
        problem: Exception | None = None
        alike = ""
        try:
            saved = examined(state, self.specs, strict=strict)
            assert isinstance(state, Mapping)
            resumption = self._controller.resumption(state)
            alike = f"step {saved.step}{'' if resumption is None else f', {resumption}'}"
            alike += "" if saved.scale is None else f", loss scale {saved.scale:g}"
            alike += "" if strict else ", not strict"
        except Exception as error:  # told to all, then raised
            problem = error
        self.agree(LOADING, problem, alike)
        assert saved is not None
        origins = [Origin(**entries) for entries in self.tell(LOADING, saved.origin.entries())]
        if strict and (why := refusal(origins, self._parameters_digest())):
            raise ValueError(f"{LOADING}: {why}")
        group, origin = self.group, saved.origin
        if origin.per_rank and (origin.rank, origin.world) != (group.rank, group.size):
            logger.info("the state of rank %d of %d is dropped, but for its step", origin.rank, origin.world)
            saved = without_state(saved)
        return saved, resumption

    def _take_over(self, saved: Saved, resumption: Resumption | None, runs: BucketRuns) -> None:
        self.step = saved.step
        if resumption is not None:
            self._controller.resume(self, resumption)
            self._leave_plan()
            self.plan, self.bucket_runs = self._controller.plan, runs
            self._announce()
        what = "state that is the same on all ranks"
        self.bucket_runs.restore(
            saved.slices, lambda mine: self.call(what, lambda group: gather_bytes(group, mine, self.timeout_s))
        )
        self._scale = saved.scale
        if self.loss_scale is None and saved.scale is not None:  # the coming gradients have none that is known here
            self._rescale(1.0)
            self._scale = None
        self._agree_on_carried()

    def _parameters_digest(self) -> str:
        """Returns the SHA-256 of the parameters' names, shapes and dtypes, whatever the order of registration.

        Buffers and optimiser states that a plan averages are left out.
        """
        names = sorted(n for n, p in self.parameters.items() if isinstance(p, nn.Parameter) and OF not in n)
        return model_digest({name: self.specs[name] for name in names})

    def statistics(self) -> list[BucketStatistics]:
        """Returns each bucket's bytes and times so far; a closed engine returns the totals when it was closed."""
        if self._closed:
            return self._final_statistics
        self._times.read()
        return self._statistics()

    def _statistics(self) -> list[BucketStatistics]:
        return [run.statistics(self._observer.profiles) for run in self.bucket_runs]

    def totals(self) -> Totals:
        """Returns the sums of bytes, times and comparisons so far, over all plans."""
        guard = self._guard
        sums = replace(self._earlier, comparisons=guard.comparisons, differences=guard.differences)
        return sums.plus(self.statistics())

    def timeline(self) -> list[Task]:
        """Returns the tasks of the last step, each on one of five streams.

        Streams are "compute" (backward, and schemes' work on the thread of backward), "offload" (work on another core
        or the host), "kernel" (other work), "link" (operations in flight) and "wait".
        """
        self._times.read()
        return list(self._times.timeline)

    def predicted_timeline(self) -> list[Task]:
        """Returns a forecast of the last step from the plan, the ready times and the measured network.

        Empty before the first step, while densities are unknown, and where the network was not measured.
        """
        known = self.bucket_runs.expected_steps(self._observer.profiles, max(self.step - 1, 0))
        link_cost = network_cost(self.group)
        self._times.read()
        if self._times.ready_s.keys() != known.keys() or link_cost is None:
            return []
        cost = self._controller.measured_cost or link_cost
        return forecast(self.plan.order, known, self._times.ready_s, cost, self.group.placement)

    def words(self) -> list[str]:
        """Returns a description of the plan in words, one line per bucket."""
        known = {p.name: p.density.density for p in self._observer.profiles.values() if p.density}
        return describe(self.plan, self.specs, known)

    def close(self) -> None:
        """Ends the communication thread and closes the group; a second call does nothing."""
        if self._closed:
            return
        self.abandon("gradsync was detached in the middle of a step")
        self._times.read_ended()
        self._final_statistics = self._statistics()  # without what a device that hangs has not ended
        self._controller.close(self)
        self._closed = True
        self._thread.stop()
        if self._other_core is not None:
            self._other_core.stop()
        self.group.close()
        self.bucket_runs = BucketRuns()  # and so their memory goes; gradients keep what they live in
        memory.release()

    # Below here: how.

    def _accept(self, run: BucketRun, running: Synchronization) -> None:
        run.accept(running.results[run.bucket.id], self.step)
        self._collected.add(run.bucket.id)

    def _synchronize(self, bucket_id: str) -> Any:
        return self.bucket_runs[bucket_id].synchronize(
            check_finite=self.bucket_runs.have_state, marks=self._marks, step=self.step
        )

    def _offload(self, job: Callable[[], None]) -> None:
        assert self._other_core is not None

        def run() -> None:
            with self._streams.on(streams.OFFLOAD):
                job()

        self._other_core.submit(run)

    def _where(self, bucket_id: str, stage: str) -> str:
        return f"{self.bucket_runs[bucket_id].bucket.title}, stage {stage!r}, step {self.step}"

    def _begin_to_compare(self) -> None:
        """Starts the guard's comparison of parameters if one is due in this step; the same on all ranks."""
        compares = self.step > 0 and self.settled and not self._apart and self.plan.what is What.GRADIENT
        if compares and self._guard.is_due():
            try:
                self._guard.begin(self.aside, alone=self.stepped_alone, sees_steps=self._sees_steps)
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
            self._failure = self._failure or error
            raise

    def _require_step(self) -> Synchronization:
        if self._running is None:
            self._require_working()
            raise RuntimeError("gradsync was detached during this backward; detach between steps")
        return self._running

    @property
    def _keeps_step(self) -> bool:
        """Whether the last step ended well, and no rank saw NaN or infinity, so that schemes' next state is kept."""
        return self._ended_well and (self._was_bad is None or not any(self._was_bad.tolist()))

    def _look_for_non_finite(self) -> None:
        """Overwrites results by NaN if some rank saw NaN or infinity; the host does not wait for a device's answer."""
        bad = torch.stack([each for run in self.bucket_runs for each in run.non_finite()]).any()
        self._was_bad = self._streams.to_host(bad.view(1))
        if self.plan.what is not What.GRADIENT:  # nobody would skip parameters
            return
        where = None if self._was_bad.has_arrived else bad
        if where is not None or not self._keeps_step:
            for run in self.bucket_runs:
                run.fill_nan(where)

    def _check_marks(self) -> None:
        """Raises on all ranks if marks (numbers sent with gradients) show that gradients were of different steps."""
        if self._told_marks is None:
            return
        told, self._told_marks = self._told_marks.tolist(), None
        self.late, apart = marks_of_ranks(told)
        if apart:
            why = (
                "the ranks are out of step: some have made more rounds of backward and optimiser step than others "
                "before this exchange, so a backward or a whole step happened on some ranks only"
            )
            self.fail(why)
            raise RuntimeError(why)

    def _require_working(self) -> None:
        if self._closed:
            raise RuntimeError("gradsync was detached from this model; attach again on every rank")
        if self._failure is not None:
            why = f"gradient synchronisation stopped earlier: {self._failure}; detach() and attach again on every rank"
            if isinstance(self._failure, GroupError):
                raise GroupError(why, self._failure.ranks)
            raise RuntimeError(why)

    def _follow_scale(self) -> None:
        """Brings state into the units of the present loss scale; without state, the next one begins in its own."""
        if self.loss_scale is None:
            return
        if self.bucket_runs.have_state:
            self._rescale(self.loss_scale.value())
        else:
            self._scale = None

    def _rescale(self, scale: float) -> None:
        """Multiplies residuals by `scale`, the present loss scale, over the loss scale that they were computed with."""
        if self._scale is not None and scale != self._scale:
            for run in self.bucket_runs:
                run.rescale(scale / self._scale)
        self._scale = scale

    def _plan_on(self, began: streams.Moment, ended: streams.Moment) -> None:
        """Lets the controller choose the next step's plan; has the job measured again if step times have changed."""
        was_settled = self.settled
        try:
            self._controller.step_ended(self.bucket_runs, ended)
            drifted = self._controller.drifted(began, ended)
            if drifted:
                logger.info("steps take another time than they did; the job is measured again")
            if drifted or self._controller.asks_again():
                self.follow()
        except Exception as error:
            self.fail(f"the plan after step {self.step}: {error}")
            raise
        if self.settled and not was_settled:
            self._announce()

    def _change_plan(self, plan: Plan) -> None:
        """Replaces the buckets by those of `plan` and moves state into them; an error stops all synchronisation."""
        kept, state = self.bucket_runs.have_state, list(self.bucket_runs.state_slices())
        try:
            self._adopt(plan)
            if kept:
                self.bucket_runs.inherit(state)
                self._agree_on_carried()
        except BaseException as error:
            self._is_torn = True
            self.fail(f"the change of plans before step {self.step}: {_said(error)}")
            raise
        if self.settled:
            self._announce()

    def _agree_on_carried(self) -> None:
        def gather(mine: Tensor) -> list[Tensor]:
            mine = mine.to(self.device)
            found: list[Tensor] = self.call(
                "carried residuals", lambda group: group.all_gather(mine).wait(self.timeout_s)
            )
            return found

        self.bucket_runs.agree_on_carried(gather)

    def _adopt(self, plan: Plan) -> None:
        self._leave_plan()
        self.plan = plan
        self.bucket_runs = BucketRuns()  # the old buckets' memory is free before the new ones take theirs
        self.bucket_runs = self._runs_of(plan)

    def _leave_plan(self) -> None:
        """Adds the statistics of the plan in force to the sums over all plans, as its buckets are replaced."""
        self._times.read()  # of steps that keep the old buckets
        if len(self.bucket_runs):
            sums = self._earlier.plus(self._statistics())
            self._earlier = replace(sums, plan_changes=sums.plan_changes + 1)

    def _runs_of(self, plan: Plan) -> BucketRuns:
        """Allocates and returns the plan's buckets; called on all ranks at once, as schemes may make process groups."""
        runs = BucketRuns(
            BucketRun.make(bucket.bucket(self.specs), bucket.scheme, self._templates, self.device, self.group)
            for bucket in plan.buckets
        )
        if self._other_core is None and runs.offload:
            self._other_core = JobThread("gradsync offload", self.device, torch_threads=1, owner=self)
        return runs

    def _announce(self) -> None:
        for line in self.words():
            logger.info("%s", line)


def _said(error: BaseException) -> str:
    """Returns the error's text, or its class name where there is none, as for KeyboardInterrupt."""
    return str(error) or type(error).__name__
