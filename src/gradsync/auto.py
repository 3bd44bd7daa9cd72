"""`plan="auto"`: measures the first steps of a job, searches a plan for it, tries the best ones, and looks again later.

The first steps run by the default plan, some of them set apart to be measured (`measurement.py`). Rank 0 plans by what
all ranks saw; the plans that the search found best take turns on real steps, beside one that needs no search, and the
fastest stays. When steps come to take clearly more or less time, the job is measured and planned for again.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal

import torch

from .comm import gather_bytes
from .density import ParameterProfile
from .engine import Engine
from .measurement import Measurement
from .plan import Plan
from .planner import default_plan
from .planner.candidates import candidate_plans
from .planner.job import Job
from .planner.rehearsed import CANDIDATES
from .planner.ways import Constraints
from .planning import Planner
from .profile import Profile
from .recording import active

logger = logging.getLogger(__name__)

STEPS, WARMUP_STEPS = 10, 3


class AutoPlanner:
    """A planner for `attach`, what `plan="auto"` means: exact unless `constraints` allow gradients to lose something.

    `steps` are measured undisturbed and as many beside an exchange, after `warmup` as usual. Nothing is measured, and
    the default plan stays, in a group of one rank, on other devices than the CPU, inside `gradsync.measure`, and if
    `torch.use_deterministic_algorithms` is on: timing decides.

    Example:
        >>> lossy = (ErrorFeedback(BlockInt(8)), HalfPrecision())       # doctest: +SKIP
        >>> planner = AutoPlanner(Constraints(lossy, most_error=0.01))  # doctest: +SKIP
        >>> handle = gradsync.attach(model, plan=planner)               # doctest: +SKIP
    """

    def __init__(
        self, constraints: Constraints | None = None, *, steps: int = STEPS, warmup: int = WARMUP_STEPS
    ) -> None:
        self.constraints = constraints or Constraints()
        self.steps, self.warmup = steps, warmup
        self._measuring: weakref.WeakKeyDictionary[Engine, ExitStack] = weakref.WeakKeyDictionary()
        self._profiles: weakref.WeakKeyDictionary[Engine, Profile] = weakref.WeakKeyDictionary()

    def __call__(self, profiles: Sequence[ParameterProfile], world_size: int) -> Plan:
        """Until the job was measured."""
        return default_plan(profiles, world_size)

    def follow(self, engine: Engine) -> bool:
        """Measures the coming steps and proposes plans after them; whether it does."""
        why_not = _why_not(engine)
        if why_not:
            logger.info("%s: the default plan stays", why_not)
            return False
        measurement = Measurement(
            self.steps,
            self.warmup,
            engine=engine,
            candidates=tuple(dict.fromkeys((*CANDIDATES, *self.constraints.lossy))),
            then=self._propose,
        )
        stack = ExitStack()
        stack.enter_context(measurement.active())
        self._measuring[engine] = stack
        return True

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
        mine, problem = b" ", None
        if engine.group.rank == 0:  # on another processor the same sums may round differently
            try:
                plans = candidate_plans(Job.of(profile), self.constraints)
                mine = json.dumps([plan.to_json() for plan in plans]).encode()
            except Exception as error:  # told to all, then raised
                problem = error
        engine.agree("the search for a plan", problem)
        texts = engine.call("the plans", lambda group: gather_bytes(group, mine, engine.timeout_s))
        found = [Plan.from_json(text) for text in json.loads(texts[0])]
        present = [engine.plan] if engine in self._profiles else []  # which stays unless another one is clearly faster
        self._profiles[engine] = profile
        engine.propose(list({plan.digest: plan for plan in (*present, *found)}.values()))


def planner_of(plan: Plan | Planner | Literal["auto"] | None) -> Plan | Planner | None:
    """What `attach` takes as `plan`, "auto" as the planner that it means."""
    return AutoPlanner() if isinstance(plan, str) and plan == "auto" else plan


def _why_not(engine: Engine) -> str | None:
    """Why the job is not measured; the same on all ranks."""
    if engine.group.size == 1:
        return "one rank has nothing to exchange"
    if engine.device.type != "cpu":
        return f"jobs on {engine.device.type} cannot be measured yet"
    if torch.are_deterministic_algorithms_enabled():
        return "torch.use_deterministic_algorithms is on, and timing would decide"
    return "the job is being measured or recorded already" if active() is not None else None
