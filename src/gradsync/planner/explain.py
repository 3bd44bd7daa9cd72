"""Why a plan is as it is: for every bucket the best alternatives, and for the job what plain DDP would take.

All figures are of the machine of `problem`, under the costs that the plan was made by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..schemes import AllReduce, HalfPrecision, Scheme
from .default import BUCKET_BYTES
from .job import Job
from .machine import step_s
from .merge import fixed_size
from .options import Formulation, Way, formulate
from .problem import Part, Solution

WORTH_IT = 0.02  # share of DDP's step that another plan must save: less is within the spread of steps
ALTERNATIVES = 3


@dataclass(frozen=True)
class Alternative:
    """Another way for a bucket, and the step's time if it took that, everything else as it is."""

    way: str
    step_s: float


@dataclass(frozen=True)
class BucketReasons:
    """One bucket: what was chosen, what else there is, and why it loses nothing if it does not."""

    names: tuple[str, ...]
    nbytes: float
    way: str
    lossy: bool
    alternatives: tuple[Alternative, ...]  # the best ones
    why_exact: str | None


@dataclass(frozen=True)
class Explanation:
    """A plan's reasons. `rivals`: steps of plans that need no search, by name; `bound_s`: no plan's step is shorter."""

    step_s: float
    backward_s: float
    bound_s: float | None
    rivals: Mapping[str, float]
    buckets: tuple[BucketReasons, ...]

    @property
    def verdict(self) -> str:
        """One sentence for the job."""
        name, ddp_s = min(
            ((name, seconds) for name, seconds in self.rivals.items() if name.startswith("ddp")), key=lambda r: r[1]
        )
        saved = 1 - self.step_s / ddp_s
        if saved <= WORTH_IT:
            return f"plain DDP is within {WORTH_IT:.0%} ({name}: {ddp_s * 1e3:.1f} ms): keep it"
        exact_s = self.rivals.get("well_cut", ddp_s)
        if 1 - self.step_s / exact_s <= WORTH_IT:
            return f"{saved:.0%} less than DDP, by where buckets are cut and by exact schemes alone"
        return f"{saved:.0%} less than DDP ({name}: {ddp_s * 1e3:.1f} ms)"


def explain(job: Job, formulation: Formulation, solution: Solution, bound_s: float | None = None) -> Explanation:
    """The reasons of a solution."""
    problem = formulation.problem
    reasons = []
    for place, part in enumerate(solution.parts):
        scheme = formulation.schemes[part.option]
        others = sorted(_alternatives(formulation, solution.parts, place), key=lambda found: found[1].step_s)
        best = tuple(alternative for _, alternative in others[:ALTERNATIVES])
        lossy = next((alternative for other, alternative in others if not other.exact), None)
        reasons.append(
            BucketReasons(
                names=tuple(name for item in formulation.items[part.start : part.stop] for name, _, _ in item),
                nbytes=sum(problem.nbytes[part.start : part.stop]),
                way=problem.options[part.option].name,
                lossy=not scheme.exact,
                alternatives=best,
                why_exact=_why_exact(formulation, solution, place, lossy) if scheme.exact else None,
            )
        )
    return Explanation(solution.seconds, sum(problem.gaps_s) + problem.rest_s, bound_s, rivals(job), tuple(reasons))


def rivals(job: Job) -> dict[str, float]:
    """Steps of plans that need no search: DDP with its own buckets and others, by all-reduce, 32 bits and 16."""
    plain = replace(job, profiles=tuple(replace(p, sparse=False, density=None, elements=None) for p in job.profiles))
    found = {}
    ways: list[tuple[str, Scheme[Any]]] = [("ddp", AllReduce()), ("ddp_bf16", HalfPrecision(values="bfloat16"))]
    for name, scheme in ways:
        stated = formulate(plain, [Way(scheme)])
        for suffix, nbytes in (("", BUCKET_BYTES), ("_1mb", 1 << 20), ("_one_bucket", 1 << 62)):
            found[name + suffix] = step_s(stated.problem, fixed_size(stated.problem, nbytes))
    return found


def _alternatives(
    formulation: Formulation, parts: Sequence[Part], place: int
) -> Iterator[tuple[Scheme[Any], Alternative]]:
    problem, part = formulation.problem, parts[place]
    allowed = set(range(len(problem.options)))
    if problem.allowed is not None:
        allowed = set.intersection(*(set(problem.allowed[item]) for item in range(part.start, part.stop)))
    for option in sorted(allowed - {part.option}):
        changed = [*parts[:place], replace(part, option=option), *parts[place + 1 :]]
        yield formulation.schemes[option], Alternative(problem.options[option].name, step_s(problem, changed))


def _why_exact(formulation: Formulation, solution: Solution, place: int, lossy: Alternative | None) -> str:
    if lossy is None:
        return "no lossy way is allowed for it"
    if lossy.step_s > solution.seconds:
        later = lossy.step_s - solution.seconds
        return f"the step would take {later * 1e3:.2f} ms longer by {lossy.way}, the best of the lossy ways"
    return "its exchange is hidden behind backward and other exchanges: nothing would be gained"
