"""Measures a training job while it trains, for planners: `measure` calls a function that makes a training step.

A few steps are not measured. In the measured steps gradients are exchanged only when backward has ended, so that
nothing disturbs the times at which gradients become ready. In every other measured step the communication thread sends
zeros or compresses noise during backward: the time that backward then takes longer is the cost of overlap. The
results of training do not change, and all ranks get the same profile.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..comm import Group, gather_numbers
from ..comm.links import barrier, highest_over
from ..devices import streams
from ..devices.inventory import name_of
from ..devices.streams import Moment, NoStreams, Streams
from ..engine.engine import Engine
from ..engine.observation import Observer
from ..engine.plan_control import MAX_OBSERVATIONS
from ..engine.step_listener import RecordingDone, StepListener, recording
from ..inputs.settings import Steps, argument
from ..planner.pieces import Pieces
from ..planner.pieces import at_once as all_at_once
from ..planner.search.errors import highest, relative_errors
from ..plans.profile import (
    HostEstimate,
    Interval,
    KernelEstimate,
    Overlap,
    ParameterTimes,
    PositiveSpread,
    Profile,
    SpanEstimate,
    Spread,
    StepParts,
)
from ..schemes import SchemeOrCompressor
from ..tensors.bucket import model_digest
from .earlier import EarlierTimes
from .fitting import fit_slowdown
from .kernels import CANDIDATES, flat_schemes, measured_host, measured_kernels
from .links import BUDGET_S, measured_links
from .overlap import Aside, Disturbance, Slowdowns, computation, transfer_beside_kernels, transfers
from .pieces import SHARE_OF_A_STEP, after_steps
from .stopwatch import StepMoments, Stopwatch

COSTS = "measurement of costs"
LINKS_STEPS = 100  # steps among which the costs of links are measured, at most, where not all at once
COVER = 1.2  # length of a disturbance over that of the backward beside it

Array = NDArray[np.float64]


class Kind(Enum):
    """The use of a training step during a measurement."""

    WARM_UP = "warm-up"  # a step as without a measurement
    LOOK = "look"  # densities of gradients, errors of compressors
    QUIET = "quiet"  # ready times and parts
    TRANSFER = "transfer"  # a transfer beside backward
    KERNEL = "kernel"  # a computation on the communication thread beside backward


class Measurement(StepListener):
    """Measures one model's step times and gradients, and links and kernels, for a `Profile` that planners use.

    It makes `warmup` usual steps and one that measures the gradients' densities and errors of compression. Then come `2
    * steps` timed ones: in every second one a transfer or compression runs during backward. The last step sets
    `profile`. Links and kernels are measured after the warm-up.

    Args:
        steps: undisturbed steps to be timed; as many more are disturbed.
        warmup: steps before these that are not measured, two or more.
        model: the model to measure; None: that of `engine` or, without one, the first that exchanges gradients.
        engine: the engine of the model; None: found in the first step.
        candidates: compressors and schemes of flat buckets whose kernels are measured, beside those of default plans.
        links_budget_s: seconds that exchanges for the costs of links may take. Between short steps they take less, to
            be over in `LINKS_STEPS` of them.
        ends_script: whether the last step raises `RecordingDone` to end the script.
        then: called as `then(engine, profile)` after the last step, on all ranks at once. It returns an iterator, whose
            `next` is called at once and after each further step until it ends; the measurement goes on until then.
        at_once: whether one step waits for all of links and kernels; else they are measured in pieces between further
            usual steps.
        earlier: returns the kernel times of earlier jobs that count as this one's, or None to measure all.
        problem: an error of this rank alone, which ends the measurement on all ranks in the first step; None: none.

    Attributes:
        profile: the result; None until the last step has ended.
        refusal: why the first step ended the script without a measurement: the settings of ranks differ, or one had a
            problem. None for what does not end a script: it raises the error in the step.

    Raises:
        ValueError: for settings out of their range.
    """

    def __init__(
        self,
        steps: int = 10,
        warmup: int = 5,
        *,
        model: nn.Module | None = None,
        engine: Engine | None = None,
        candidates: Sequence[SchemeOrCompressor] = CANDIDATES,
        links_budget_s: float = BUDGET_S,
        ends_script: bool = False,
        then: Callable[[Engine, Profile], Iterator[None]] | None = None,
        at_once: bool = True,
        earlier: Callable[[Group], EarlierTimes | None] = lambda group: None,
        problem: Exception | None = None,
    ) -> None:
        argument("steps", steps, Steps)
        argument("warmup", warmup, Steps)
        argument("model", model, nn.Module | None)
        if warmup < MAX_OBSERVATIONS:
            raise ValueError(f"warmup must be at least {MAX_OBSERVATIONS}, in which plans settle, got {warmup}")
        flat_schemes(argument("candidates", candidates, tuple[Any, ...]))
        self.profile: Profile | None = None
        self.refusal: Exception | None = None
        self.steps_taken = 0
        self._steps, self._warmup, self._candidates = steps, warmup, tuple(candidates)
        self._links_budget_s, self._ends_script = links_budget_s, ends_script
        self._at_once, self._earlier, self._problem = at_once, earlier, problem
        self._between: Iterator[None] | None = None  # what goes on between usual steps: measuring costs, or `then`
        self._parameters = None if model is None else {id(p) for p in model.parameters()}
        busy = [Kind.TRANSFER, Kind.KERNEL]
        timed = [kind for number in range(steps) for kind in (Kind.QUIET, busy[number % 2])]
        self._kinds = [*[Kind.WARM_UP] * warmup, Kind.LOOK, *timed]
        self._engine = engine
        self._then = then
        self._observer: Observer | None = None
        self._clock: Streams = NoStreams() if engine is None else streams.streams_of(engine.device)
        self._watch = Stopwatch()
        self._steps_seen: list[StepMoments] = []  # all; the clock of the first one may change within it
        self._asides: list[Aside] = []  # of all steps
        self._disturbances: dict[Kind, Disturbance] = {}
        self._exchange: Slowdowns = (None, None)
        self._links: tuple[SpanEstimate, ...] = ()
        self._kernels: dict[str, KernelEstimate] = {}
        self._host: HostEstimate | None = None
        self._errors: dict[str, dict[str, float]] = {}  # by parameter, by compressor

    @property
    def steps_needed(self) -> int:
        """The number of training steps that are measured or warm up, without those between which costs are measured."""
        return len(self._kinds)

    # The engine calls these.

    def forward_began(self, engine: Any) -> None:
        if self._is_mine(engine):
            self._watch.forward_began(self._now())

    def began(self, engine: Any) -> bool:
        if not self._is_mine(engine):
            return False
        if self._engine is None:
            self._engine, self._clock = engine, streams.streams_of(engine.device)
        self._watch.began(self._now())
        if self._between is not None:
            return False
        kind = self._kind
        if kind is Kind.LOOK:
            sparse = [name for name, profile in engine.profiles.items() if profile.sparse]
            self._observer = Observer(engine.specs, sparse)
        self._asides.append(aside := Aside())
        if kind in self._disturbances:
            self._start(engine, self._disturbances[kind], aside)
        return kind is not Kind.WARM_UP

    def take(self, engine: Any, name: str, gradient: Tensor | None, shape: tuple[int, ...]) -> None:
        if not self._watches(engine) or self._between is not None:
            return
        self._watch.ready(name, self._now())
        if self._kind is Kind.LOOK and gradient is not None and self._observer is not None:
            self._observer.arrived(name, sparse=gradient.layout is torch.sparse_coo)
            self._observer.look(name, gradient)
            self._errors[name] = relative_errors(self._candidates, name, gradient)

    def backward_ended(self, engine: Any) -> None:
        if self._watches(engine):
            self._watch.backward_ended(self._now())

    def step_ended(self, engine: Any, names: Iterable[str]) -> None:
        if not self._watches(engine):
            return
        if self._between is not None:
            self._go_on(self._between)
            self._watch.resume(self._now())
            return
        self._steps_seen.append(self._watch.step_ended(self._now()))
        kind = self._kind
        self.steps_taken += 1
        if self.steps_taken == 1:
            self._require_alike(engine)
        if kind is Kind.LOOK and self._observer is not None:
            self._observer.share(
                lambda name: engine.bucket_runs.of(name)[0].gradients,
                lambda mine: engine.peers.call(
                    "a look at the gradients", lambda group: gather_numbers(group, mine, engine.timeout_s)
                ),
            )
            self._share_errors(engine)
        if kind is Kind.WARM_UP and self._kind is not Kind.WARM_UP:
            self._measure_costs(engine)
        if self.steps_taken == self.steps_needed:
            self.profile = self._agreed_profile(engine)
            if self._then is not None:
                self._go_on(self._then(engine, self.profile))
            if self._ends_script:
                raise RecordingDone
        self._watch.resume(self._now())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Measures the training steps that are made inside the `with` block.

        Raises:
            RuntimeError: inside another measurement or recording.
        """
        watch = self._watch
        with ExitStack() as stack:
            stack.enter_context(recording(self))
            stack.enter_context(_backwards(watch, self._now))
            for register, note in (
                (register_optimizer_step_pre_hook, watch.optimizer_began),
                (register_optimizer_step_post_hook, watch.optimizer_ended),
            ):
                stack.callback(register(functools.partial(_note, note, self._now)).remove)
            watch.resume(self._now())
            yield

    def _now(self) -> Moment:
        return self._clock.moment()

    @property
    def _kind(self) -> Kind:
        """The `Kind` of the present step, such as WARM_UP or QUIET (undisturbed); between steps, that of the next."""
        return self._kinds[min(self.steps_taken, len(self._kinds) - 1)]

    @property
    def _ended(self) -> bool:
        return self.profile is not None and self._between is None

    def _is_mine(self, engine: Any) -> bool:
        if self._ended:
            return False
        if self._engine is not None:
            return engine is self._engine
        return self._parameters is None or any(id(p) in self._parameters for p in engine.parameters.values())

    def _watches(self, engine: Any) -> bool:
        return engine is self._engine and not self._ended

    def _require_alike(self, engine: Engine) -> None:
        """Raises an error on all ranks if one has a problem, or settings or kinds of devices differ.

        With different settings ranks would wait forever.
        """
        settings = f"steps={self._steps}, warmup={self._warmup}, candidates={self._candidates}"
        settings += f", links_budget_s={self._links_budget_s}, device={engine.device.type}"
        try:
            engine.peers.agree("the settings of a measurement", self._problem, settings)
        except (ValueError, RuntimeError) as error:
            if not self._ends_script or engine.peers.failure is not None:
                raise
            self.refusal = error
            raise RecordingDone from None

    def _start(self, engine: Engine, disturbance: Disturbance, aside: Aside) -> None:
        aside.alone_s = disturbance.alone_s

        def job(group: Group) -> None:
            if disturbance.together:
                barrier(group, engine.timeout_s)
            aside.began = self._now()
            disturbance.do()
            aside.ended = self._now()

        engine.peers.aside(job)

    def _measure_costs(self, engine: Engine) -> None:
        """Begins to measure links, kernels, and the transfers and compressions that later run during backward.

        Each piece runs between two steps, so that it is timed without a backward. Collective.
        """
        pieces = self._pieces_of_costs(engine.group, engine.timeout_s)
        if self._at_once:
            engine.peers.call(COSTS, lambda group: all_at_once(pieces))
        else:
            self._go_on(_called(engine, after_steps(pieces, highest_over(engine.group, engine.timeout_s))))

    def _go_on(self, between: Iterator[None]) -> None:
        """Runs what belongs after this step. Collective."""
        self._between = None if next(between, True) else between

    def _pieces_of_costs(self, group: Group, timeout_s: float) -> Pieces[None]:
        highest = highest_over(group, timeout_s)
        device, placement, earlier = group.payload_device, group.placement, self._earlier(group)
        candidates = self._candidates
        (step_s,) = highest([statistics.median(step.times().total_s for step in self._steps_seen[1:])])
        most_s = float("inf") if self._at_once else LINKS_STEPS * SHARE_OF_A_STEP * step_s
        self._links = yield from measured_links(group, timeout_s, min(self._links_budget_s, most_s))
        self._kernels = yield from measured_kernels(candidates, placement, highest, device, earlier=earlier)
        self._host = yield from measured_host(candidates, highest, device, earlier=earlier)
        self._exchange = yield from transfer_beside_kernels(group, timeout_s)
        (backward_s,) = highest([statistics.median(step.times().backward_s for step in self._steps_seen[1:])])
        if group.size > 1:
            self._disturbances[Kind.TRANSFER] = yield from transfers(group, COVER * backward_s, timeout_s)
        self._disturbances[Kind.KERNEL] = yield from computation(group, COVER * backward_s, timeout_s)

    def _share_errors(self, engine: Engine) -> None:
        """Replaces each compressor's error on each parameter by the maximum over all ranks. Collective."""
        of_ranks = engine.peers.tell("errors of compressors", self._errors)
        self._errors = {name: highest([errors.get(name, {}) for errors in of_ranks]) for name in engine.parameters}

    def _agreed_profile(self, engine: Engine) -> Profile:
        """Gathers all ranks' figures, and returns the profile that rank 0 makes of them, on all ranks. Collective."""
        mine = torch.from_numpy(self._figures(list(engine.parameters)))
        parts = engine.peers.call(
            "figures of a measurement", lambda group: gather_numbers(group, mine.flatten(), engine.timeout_s)
        )
        text, problem = " ", None
        if engine.group.rank == 0:
            try:
                figures = np.stack([part.cpu().view(mine.shape).numpy() for part in parts])
                text = self._profile(engine, figures).to_json()
            except Exception as error:  # told to all, then raised
                problem = error
        engine.peers.agree("the profile", problem)
        texts = engine.peers.gather("the profile", text.encode())
        return Profile.from_json(texts[0].decode())

    def _figures(self, names: Sequence[str]) -> Array:
        """Returns this rank's seconds in the steps after the warm-up, (steps, 7 + len(names)) float64.

        Columns: forward, backward, optimiser, rest; of the transfer or compression that runs beside backward: its time
        alone, its time in this step, and the part of that during backward; each parameter's ready time, in order.
        """
        rows = []
        for step, aside, kind in zip(self._steps_seen, self._asides, self._kinds, strict=True):
            if kind is not Kind.WARM_UP:
                times = step.times()
                rows.append(
                    [
                        *(times.forward_s, times.backward_s, times.optimizer_s, times.other_s),
                        *(aside.alone_s, aside.took_s, aside.shared_s(step)),
                        *(times.ready_s[name] for name in names),
                    ]
                )
        return np.array(rows, dtype=np.float64)

    def _profile(self, engine: Engine, figures: Array) -> Profile:
        """Makes the profile from `figures`, (ranks, steps, columns) float64: those of `_figures` on each rank."""
        assert self._observer is not None
        kinds = [kind for kind in self._kinds if kind is not Kind.WARM_UP]
        by_kind = {kind: figures[:, [k is kind for k in kinds]] for kind in Kind}
        quiet = by_kind[Kind.QUIET]
        beside = quiet[:, :, [0, 2, 3]].sum(axis=2, keepdims=True)  # seconds of a rank before its backward
        before = beside.max(axis=0)
        waited_for = (quiet[:, :, [1, *range(7, quiet.shape[2])]] + beside).max(axis=0) - before
        forward, optimizer, other, all_beside, backward, *ready = map(
            _spread, np.hstack([quiet[:, :, [0, 2, 3]].max(axis=0), before, waited_for]).T
        )
        looked = list(self._observer.profiles.values())
        order = sorted(range(len(looked)), key=lambda number: (ready[number]["median_s"], looked[number].position))
        positions = {number: position for position, number in enumerate(order)}
        return Profile(
            torch=torch.__version__,
            device=engine.device.type,
            card=name_of(engine.device),
            threads=torch.get_num_threads(),
            model=model_digest(engine.specs),
            world=engine.group.size,
            nodes=engine.group.placement.nodes,
            steps=self._steps,
            parts=StepParts(
                forward=PositiveSpread(**forward),
                backward=PositiveSpread(**backward),
                optimizer=Spread(**optimizer),
                other=Spread(**other),
                beside=PositiveSpread(**all_beside),
            ),
            overlap=_overlap(quiet, by_kind[Kind.TRANSFER], by_kind[Kind.KERNEL], self._exchange),
            links=self._links,
            kernels=self._kernels,
            host=self._host,
            parameters=tuple(
                ParameterTimes.of(
                    p, positions[number], ready=PositiveSpread(**ready[number]), errors=self._errors[p.name]
                )
                for number, p in enumerate(looked)
            ),
        )


def measure(
    step_fn: Callable[[], object],
    *,
    model: nn.Module | None = None,
    steps: int = 10,
    warmup: int = 5,
    candidates: Sequence[SchemeOrCompressor] = CANDIDATES,
) -> Profile:
    """Measures when a job's gradients are ready, and the costs of its links, kernels and overlap, for planners.

    Runs `step_fn` `warmup + 1 + 2 * steps` times. These are real training steps, with the same results as without a
    measurement. All ranks call this function at once, between two steps. Links and kernels take some seconds more.

    Args:
        step_fn: one training step of a model that `gradsync.attach` or `ddp_hook` is on: forward, backward, optimiser.
        model: the model to measure; None: the one whose gradients are exchanged first.
        steps: steps that time ready gradients and the parts of a step; as many more measure overlap.
        warmup: steps before these that are not measured, two or more.
        candidates: compressors and schemes of flat buckets whose kernels are measured, beside those of default plans.

    Returns:
        The profile, the same on every rank; times in seconds. `profile.save(path)` keeps it.

    Raises:
        ValueError: for settings out of their range, or that differ between the ranks.
        RuntimeError: where `step_fn` synchronises no gradients, while another measurement is under way, and when
            another rank failed.

    Example:
        >>> handle = gradsync.attach(model)                # doctest: +SKIP
        >>> profile = gradsync.measure(step, steps=10)     # doctest: +SKIP
        >>> profile.save("profile.json")                   # doctest: +SKIP
    """
    argument("step_fn", step_fn, Callable[[], object])
    measurement = Measurement(steps, warmup, model=model, candidates=candidates)
    with measurement.active():
        while measurement.profile is None:
            before = measurement.steps_taken
            step_fn()
            if measurement.steps_taken == before:
                raise RuntimeError(
                    "step_fn has synchronised no gradients: it must run a backward, outside of no_sync(), of a model "
                    "that gradsync.attach(model) or gradsync.ddp_hook is on"
                )
    return measurement.profile


def _called(engine: Engine, slices: Iterator[None]) -> Iterator[None]:
    """Runs a slice of a measurement of costs at each `next`, while nothing else uses the group. Collective."""
    while not engine.peers.call(COSTS, lambda group: next(slices, True)):
        yield


@contextmanager
def _backwards(watch: Stopwatch, now: Callable[[], Moment]) -> Iterator[None]:
    """Wraps `torch.autograd.backward`, which has no hook, to tell `watch` when calls, unless nested, begin and end."""
    usual = torch.autograd.backward

    @functools.wraps(usual)
    def backward(*args: Any, **kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # inside of another one
            return usual(*args, **kwargs)
        watch.backward_began(now())
        try:
            return usual(*args, **kwargs)
        finally:
            watch.backward_returned(now())

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = usual


def _note(note: Callable[[Moment], None], now: Callable[[], Moment], *args: object) -> None:
    """Calls `note` with the present moment; ignores the arguments that optimiser hooks are given."""
    note(now())


def _spread(seconds: Array) -> dict[str, float]:
    """Returns `median_s`, the median of `seconds`, and `spread_s`, 1.4826 times their median absolute deviation."""
    median_s = float(np.median(seconds))
    return {"median_s": median_s, "spread_s": 1.4826 * float(np.median(np.abs(seconds - median_s)))}


def _overlap(quiet: Array, transfer: Array, kernel: Array, exchange: Slowdowns) -> Overlap:
    """Returns the factors by which backward, transfers and kernels slow each other down, fitted to measured steps.

    Args:
        quiet: seconds in undisturbed steps, (ranks, steps, columns) float64, with the columns of `_figures`.
        transfer: the same in steps with a transfer during backward.
        kernel: the same in steps with a compression during backward.
        exchange: slowdown of a transfer by kernels, and of kernels by a transfer; None for those not measured.
    """

    def factors(busy: Array) -> tuple[Interval | None, Interval | None]:
        if not busy.shape[1]:
            return None, None
        backward_s, alone_s, together_s, shared_s = (busy[:, :, figure] for figure in (1, 4, 5, 6))
        return (
            fit_slowdown(quiet[:, :, 1], backward_s, shared_s),
            fit_slowdown(alone_s, together_s, shared_s),
        )

    by_transfer, of_transfer = factors(transfer)
    by_kernel, of_kernel = factors(kernel)
    return Overlap(
        backward_by_transfer=by_transfer,
        transfer_by_backward=of_transfer,
        backward_by_kernel=by_kernel,
        kernel_by_backward=of_kernel,
        transfer_by_kernel=exchange[0],
        kernel_by_transfer=exchange[1],
    )
