"""`plan="auto"`: measures the first steps of a job, searches a plan for it, tries the best ones, and looks again later.

The first steps run by the default plan, some of them set apart to be measured (`measurement.py`). Rank 0 plans by what
all ranks saw; the plans that the search found best take turns on real steps, beside one that needs no search, and the
fastest stays. When steps come to take clearly more or less time, the job is measured and planned for again. One model
is measured at a time: another one's turn comes when that is done.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal

import torch
from torch import Tensor

from ..comm import LocalGroup, gather_bytes
from ..compressors import RESIDUAL
from ..engine.engine import Engine
from ..engine.plan_control import Follows, Planner
from ..engine.step_listener import active
from ..planner import AveragingPlanner, default_plan
from ..planner.candidates import Search, candidate_plans
from ..planner.errors import alone
from ..planner.job import Job
from ..planner.ways import Constraints
from ..plans.plan import Plan
from ..plans.profile import Profile
from ..schemes import SchemeOrCompressor
from ..tensors.bucket import Bucket, Layout, Segment, TensorSpec
from ..tensors.density import ParameterProfile
from .kernels import CANDIDATES
from .measurement import Measurement

logger = logging.getLogger(__name__)

STEPS, WARMUP_STEPS = 10, 3
ORDER = (Follows.NO, Follows.LATER, Follows.NOW)


class AutoMeasurement(Measurement):
    """A measurement for a plan: it ends by itself, so others wait for it."""


class AutoPlanner:
    """A planner for `attach`, what `plan="auto"` means: exact unless `constraints` allow gradients to lose something.

    `steps` are measured undisturbed and as many beside an exchange, after `warmup` as usual; links and kernels take up
    to ten seconds of one of these steps. Of several attached models one is measured after the other, each by its own
    steps. Nothing is measured, and the default plan stays, in a group of one rank, on other devices than the CPU, while
    some rank runs `measure` or a recorder, and if `torch.use_deterministic_algorithms` is on: timing decides. Where no
    plan can be made of what was measured, the present one stays, and a warning says why.

    `search` makes the plans that are tried, of a `Job` and the constraints, on rank 0; it may take as long as ranks
    wait for each other. `must_plan`: where nothing can be measured or no plan be made, all ranks raise.

    `averaging`: when the plan has settled, parameters are averaged in groups by that planner's plan for a block of
    steps, and from then on, if that is clearly faster; `attach` needs the optimiser for it. A checkpoint goes on with
    averaged gradients, and chooses again. Lost ranks are survived from that choice on only, if the planner says so.

    Raises:
        ValueError: when made, for settings out of their range, and compressors with momentum, which a plan that does
            not compress has no place for: allowed as the only way, `always` taken; when asked for a plan, for an
            `exact` that no parameter matches.
        RuntimeError: with `must_plan`, from `attach` or a backward.

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
        self.constraints = constraints or Constraints()
        self.steps, self.warmup = steps, warmup
        self.search, self.must_plan, self.averaging = search, must_plan, averaging
        if not (self.constraints.always and len(self.constraints.lossy) == 1):
            for lossy in self.constraints.lossy:
                _require_only_residuals(lossy)
        self._measurement()  # raises for wrong settings
        self._measuring: weakref.WeakKeyDictionary[Engine, ExitStack] = weakref.WeakKeyDictionary()
        self._profiles: weakref.WeakKeyDictionary[Engine, Profile] = weakref.WeakKeyDictionary()

    def __call__(self, profiles: Sequence[ParameterProfile], world_size: int) -> Plan:
        """Until the job was measured."""
        self.constraints.require_names([profile.name for profile in profiles])
        return default_plan(profiles, world_size)

    @property
    def settings(self) -> str:
        """The constraints and the search, in words."""
        name = getattr(self.search, "__qualname__", "<")
        # What is made anew in each process, as a lambda, is the same as nothing: its address says so.
        return f"{self.constraints!r} by {repr(self.search) if '<' in name else name}"

    def follow(self, engine: Engine) -> Follows:
        """Measures the coming steps and proposes plans after them, if no rank measures another model meanwhile."""
        follows, why = _answer(engine)
        if follows is Follows.NO and self.must_plan:
            raise RuntimeError(f"the job cannot be measured: {why}")
        if follows is Follows.NO:
            logger.info("the present plan stays: %s", why)
        elif follows is Follows.NOW:
            stack = ExitStack()
            stack.enter_context(self._measurement(engine).active())
            self._measuring[engine] = stack
        return follows

    def resume(self, engine: Engine, profile: Profile) -> None:
        """Measures nothing for now: the engine goes on with a plan that was made by this profile."""
        self.close(engine)
        self._profiles[engine] = profile

    def _measurement(self, engine: Engine | None = None) -> Measurement:
        candidates = tuple(dict.fromkeys((*CANDIDATES, *self.constraints.lossy)))
        return AutoMeasurement(self.steps, self.warmup, engine=engine, candidates=candidates, then=self._propose)

    def close(self, engine: Engine) -> None:
        """Measures nothing more of this engine."""
        stack = self._measuring.pop(engine, None)
        if stack is not None:
            stack.close()

    def profile_of(self, engine: Engine) -> Profile | None:
        """What its plans were made by; None before the job was measured."""
        return self._profiles.get(engine)

    def _propose(self, engine: Engine, profile: Profile) -> None:
        self.close(engine)
        plans: list[str] = []
        why_none = ""
        if engine.group.rank == 0:  # on another processor the same sums may round differently
            try:
                plans = [plan.to_json() for plan in self.search(Job.of(profile), self.constraints)]
            except Exception as error:
                why_none = f"{type(error).__name__}: {error}"
                if not self.must_plan:
                    logger.warning("no plan was found; the present one stays", exc_info=True)
        mine = json.dumps([why_none, plans]).encode()
        texts = engine.call("the plans", lambda group: gather_bytes(group, mine, engine.timeout_s))
        why_none, plans = json.loads(texts[0])
        if self.must_plan and not plans:
            raise RuntimeError(f"no plan was found: {why_none or 'the search returned none'}")
        found = [Plan.from_json(text) for text in plans]
        # A plan that was proposed before stays unless another one is clearly faster.
        present = [engine.plan] if engine in self._profiles or not found else []
        self._profiles[engine] = profile
        engine.propose(list({plan.digest: plan for plan in (*present, *found)}.values()))


def planner_of(plan: Plan | Planner | Literal["auto"]) -> Plan | Planner:
    """Returns the plan or the planner that `attach` takes, for "auto" the planner that it means."""
    return AutoPlanner() if isinstance(plan, str) and plan == "auto" else plan


def _answer(engine: Engine) -> tuple[Follows, str]:
    """Whether the job is measured, and why not, as the ranks agree."""
    if engine.group.size == 1:
        return Follows.NO, "one rank has nothing to exchange"
    mine, why = Follows.NOW, ""
    if engine.device.type != "cpu":
        mine, why = Follows.NO, f"jobs on {engine.device.type} cannot be measured yet"
    elif torch.are_deterministic_algorithms_enabled():
        mine, why = Follows.NO, "torch.use_deterministic_algorithms is on, and timing would decide"
    elif isinstance(active(), AutoMeasurement):
        mine = Follows.LATER
    elif active() is not None:
        mine, why = Follows.NO, "gradients are being measured or recorded already"
    said = f"{mine.name} {why}".encode()
    texts = engine.call("whether to measure", lambda group: gather_bytes(group, said, engine.timeout_s))
    answers = [(Follows[name], reason) for name, _, reason in (text.decode().partition(" ") for text in texts)]
    # One rank that cannot be measured is enough; so is one that is at another model still.
    return min(answers, key=lambda answer: ORDER.index(answer[0]))


def _require_only_residuals(lossy: SchemeOrCompressor) -> None:
    """
    Raises:
        ValueError: for what keeps more of each element than what is left to be sent.
    """
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
