"""The planner of `plan="auto"`: it measures a job's steps, searches plans, and tries the best on real steps.

The first steps run as without it: the default planner tries its plans, and the fastest stays. Then some steps are
measured (`measurement.py`). Rank 0 searches plans by all ranks' figures, in pieces between further steps; the best
plans and the present one take turns on real steps, and the fastest stays. When steps begin to take clearly more or less
time, the planner measures and searches again. One model is measured and planned for at a time, and other models wait.
"""

from __future__ import annotations

import functools
import json
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from ..comm import LocalGroup
from ..comm.links import highest_over
from ..compressors import RESIDUAL
from ..engine.engine import Engine
from ..engine.loss_scale import why_not_scaled
from ..engine.plan_control import Follows, Planner
from ..engine.step_listener import active
from ..inputs.settings import argument
from ..planner import AveragingPlanner, default_plan
from ..planner.pieces import InPieces, Pieces
from ..planner.search.candidates import Search, candidate_plans
from ..planner.search.errors import alone
from ..planner.search.job import Job
from ..planner.search.ways import Constraints
from ..plans.plan import Plan
from ..plans.profile import Profile
from ..schemes import SchemeOrCompressor
from ..tensors.bucket import Bucket, Layout, Segment, TensorSpec
from ..tensors.density import ParameterProfile
from .default import default_planner
from .earlier import EarlierTimes
from .measurement import Measurement
from .pieces import after_steps

logger = logging.getLogger(__name__)

SEARCH = "the search for plans"
STEPS, WARMUP_STEPS = 10, 3
ORDER = (Follows.NO, Follows.LATER, Follows.NOW)


class AutoMeasurement(Measurement):
    """A measurement of one model's step times and costs that `AutoPlanner` makes; other models wait until it has ended.

    Models that were attached while the user measured or recorded, as by `measure`, are not measured at all.
    """


class AutoPlanner:
    """The planner for `plan="auto"`. Its plans are exact unless `constraints` allow lossy compressors or schemes.

    It measures each attached model during that model's own steps, one model after the other, once the default planner
    has chosen among its plans. Links and kernels take up to ten seconds, fifteen where gradients are on an accelerator,
    less in jobs of short steps, spread over steps that take a fifth longer. Kernels that an earlier job on this machine
    has measured take none. Rank 0's search of plans, a tenth of a second to some seconds, is spread over steps
    likewise. If it finds no plan, the present plan stays, and a warning says why.

    Plans stay those of the default planner in a group of one rank, and where some rank already runs `gradsync.measure`
    or a `Recorder` of gradients when the model is attached; if one begins later, the search begins when it has ended.
    Under `torch.use_deterministic_algorithms` the default plan stays, since timing decides on others.

    Args:
        constraints: the lossy compressors and schemes that plans may use; None: none, plans are exact.
        steps: training steps measured undisturbed; as many more are measured during a transfer or compression.
        warmup: training steps before these, not measured.
        search: returns plans to try for a `Job` and the constraints; it runs on rank 0. The job's `present` is the plan
            that runs, unless it is exact and plans must be lossy. One that is `InPieces` (`planner/pieces.py`), as
            `candidate_plans` is, runs between steps; any other in one, within the timeout.
        must_plan: whether all ranks raise where nothing can be measured or the search finds no plan.
        averaging: a planner that averages parameters instead of gradients. It is tried for a block of steps after the
            plan has settled, and stays if it is clearly faster. `attach` then needs the optimiser. A run resumed from a
            checkpoint averages gradients and chooses again. Loss of ranks is survived, if that planner allows, only
            once averaging was chosen.

    Raises:
        ValueError: from the constructor, for settings out of their range; also for a compressor with momentum, which
            plans without compression cannot keep, unless it is the only one and `constraints.always` is set. From a
            call, for a name in `constraints.exact` that no parameter matches.
        RuntimeError: with `must_plan`, from `attach` or from backward.

    Example:
        >>> lossy = (ErrorFeedback(BlockInt(8)), HalfPrecision())       # doctest: +SKIP
        >>> planner = AutoPlanner(Constraints(lossy, most_error=0.01))  # doctest: +SKIP
        >>> handle = gradsync.attach(model, plan=planner)               # doctest: +SKIP
    """

    def __init__(
        self,
        constraints: Constraints | None = None,
        *,
        steps: int = STEPS,
        warmup: int = WARMUP_STEPS,
        search: Search = candidate_plans,
        must_plan: bool = False,
        averaging: AveragingPlanner | None = None,
    ) -> None:
        argument("constraints", constraints, Constraints | None)
        argument("search", search, Callable[..., list[Plan]])
        argument("must_plan", must_plan, bool)
        argument("averaging", averaging, AveragingPlanner | None)
        self.constraints = constraints or Constraints()
        self.steps, self.warmup = steps, warmup
        self.search, self.must_plan, self.averaging = search, must_plan, averaging
        if not (self.constraints.always and len(self.constraints.lossy) == 1):
            for lossy in self.constraints.lossy:
                _require_only_residuals(lossy)
        self._measuring: weakref.WeakKeyDictionary[Engine, ExitStack] = weakref.WeakKeyDictionary()
        self._profiles: weakref.WeakKeyDictionary[Engine, Profile] = weakref.WeakKeyDictionary()
        self._measurement()  # raises for wrong settings

    def __call__(self, profiles: Sequence[ParameterProfile], world_size: int) -> Plan:
        """Returns the default plan, which the first step uses."""
        self.constraints.require_names([profile.name for profile in profiles])
        return default_plan(profiles, world_size)

    def first_planner(self) -> Planner:
        """Returns the planner that attach() takes without a plan; one that tries nothing if its plans cannot stay."""
        return default_plan if self.constraints.always else default_planner()

    @property
    def settings(self) -> str:
        """The constraints and the search function as text, by which ranks and checkpoints compare planners."""
        name = getattr(self.search, "__qualname__", "<")
        # An object that each process makes anew, such as a lambda, shows its address: it equals no other rank's.
        return f"{self.constraints!r} by {repr(self.search) if '<' in name else name}"

    def follow(self, engine: Engine) -> Follows:
        """Begins to measure the engine's next steps, after which it proposes plans, if all ranks can. Collective.

        Returns `Follows.NOW` if it has begun, `LATER` while some rank measures another model, and `NO` if this job
        cannot be measured.

        Raises:
            RuntimeError: with `must_plan`, where the job cannot be measured.
            ValueError: under a loss scale, where the constraints allow a scheme or compressor that does not follow it.
        """
        for lossy in self.constraints.lossy if engine.is_scaled else ():
            if why := why_not_scaled(lossy):
                raise ValueError(f"Constraints.lossy: {why}")
        follows, why = _answer(engine)
        if follows is Follows.NO and self.must_plan:
            raise RuntimeError(f"the job cannot be measured: {why}")
        if follows is Follows.NO:
            logger.info("the present plan stays: %s", why)
        elif why:
            logger.debug("plans are searched later: %s", why)
        elif follows is Follows.NOW:
            stack = ExitStack()
            stack.enter_context(self._measurement(engine).active())
            self._measuring[engine] = stack
        return follows

    def resume(self, engine: Engine, profile: Profile) -> None:
        """Accepts that the engine continues with a checkpoint's plan: stores its profile, and stops measuring.

        `profile`: the measurements that the plan was made from; `profile_of` returns them from now on.
        """
        self.close(engine)
        self._profiles[engine] = profile

    def _measurement(self, engine: Engine | None = None) -> Measurement:
        drifted = engine in self._profiles  # the processor may be slower than it was
        return AutoMeasurement(
            self.steps,
            self.warmup,
            engine=engine,
            candidates=tuple(dict.fromkeys(self.constraints.lossy)),
            then=self._propose,
            at_once=False,
            earlier=functools.partial(EarlierTimes.of, anew=drifted),
        )

    def close(self, engine: Engine) -> None:
        """Ends the measurement of this engine, if one is under way."""
        stack = self._measuring.pop(engine, None)
        if stack is not None:
            stack.close()

    def profile_of(self, engine: Engine) -> Profile | None:
        """Returns the measurements (profile) that the engine's plans were made from; None before it was measured."""
        return self._profiles.get(engine)

    def _propose(self, engine: Engine, profile: Profile) -> Iterator[None]:
        """Searches plans on rank 0 between steps, then ends the measurement and has the engine try them.

        All ranks call `next` at once, when a step has ended. Collective.
        """
        group, highest = engine.group, highest_over(engine.group, engine.timeout_s)
        mine: list[str] = []
        slices = after_steps(self._search(engine, profile, mine), list)  # no other rank's time counts
        while True:
            if group.rank == 0:  # on another processor the same sums may round differently
                next(slices, None)
            (ended,) = engine.peers.call(SEARCH, lambda group: highest([float(len(mine))]))
            if ended:
                break
            yield
        self.close(engine)
        text = "".join(mine).encode() or b" "
        texts = engine.peers.gather("the plans", text)
        why_none, plans = json.loads(texts[0])
        if self.must_plan and not plans:
            raise RuntimeError(f"no plan was found: {why_none or 'the search returned none'}")
        found = [Plan.from_json(text).measured_on(profile.device) for text in plans]
        if engine in self._profiles or not found:  # a proposed plan stays unless another is clearly faster
            found.insert(0, engine.plan)
        self._profiles[engine] = profile
        found = list({plan.digest: plan for plan in found}.values())
        tried = engine.followers(found)
        if len(tried) < len(found):
            logger.info("%d plans are not tried: they have no place for residuals of tables", len(found) - len(tried))
        engine.propose(tried or [engine.plan])

    def _search(self, engine: Engine, profile: Profile, found: list[str]) -> Pieces[None]:
        """Searches plans in pieces, and appends the result to `found` as JSON: why there are none, and the plans."""
        may_stay = engine in self._profiles or not self.constraints.always
        plans: list[str] = []
        why_none = ""
        try:
            job = replace(Job.of(profile), present=engine.plan if may_stay else None)
            if isinstance(self.search, InPieces):
                made = yield from self.search.pieces(job, self.constraints)
            else:
                made = self.search(job, self.constraints)
            plans = [plan.to_json() for plan in made]
        except Exception as error:
            why_none = f"{type(error).__name__}: {error}"
            if not self.must_plan:
                logger.warning("no plan was found; the present one stays", exc_info=True)
        found.append(json.dumps([why_none, plans]))


def _answer(engine: Engine) -> tuple[Follows, str]:
    """Returns whether all ranks can measure the job now, later or not, and the reason if not. Collective."""
    if engine.group.size == 1:
        return Follows.NO, "one rank has nothing to exchange"
    mine, why = Follows.NOW, ""
    if torch.are_deterministic_algorithms_enabled():
        mine, why = Follows.NO, "torch.use_deterministic_algorithms is on, and timing would decide"
    elif active() is not None and not isinstance(active(), AutoMeasurement):
        mine = Follows.NO if engine.step == 0 else Follows.LATER
        why = "gradients are being measured or recorded already"
    elif active() is not None or engine.is_choosing:
        mine = Follows.LATER
    said = f"{mine.name} {why}".encode()
    texts = engine.peers.gather("whether to measure", said)
    answers = [(Follows[name], reason) for name, _, reason in (text.decode().partition(" ") for text in texts)]
    # One rank that cannot be measured decides for all; so does one that must wait.
    return min(answers, key=lambda answer: ORDER.index(answer[0]))


def _require_only_residuals(lossy: SchemeOrCompressor) -> None:
    """Raises ValueError if a compressor or scheme keeps other numbers for elements than an error-feedback residual."""
    scheme = alone(lossy)
    spec = TensorSpec((2, 2), torch.float32)
    bucket = Bucket("", (Segment("any", 0, 4),), (spec,), Layout.FLAT, flags_ride=False)
    kept = scheme.init(bucket, LocalGroup.world(1)[0])
    names = {n for parts in kept.values() if not isinstance(parts, Tensor) for part in parts for n in part.elements}
    if any(isinstance(parts, Tensor) for parts in kept.values()) or names - {RESIDUAL}:
        raise ValueError(
            f"{lossy} keeps {', '.join(sorted(names - {RESIDUAL})) or 'state of its own'}, for which plans that do not "
            "compress have no place: automatic plans cannot try it; give it to CompressingPlanner"
        )
