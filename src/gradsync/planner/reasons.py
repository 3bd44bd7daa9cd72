"""Why a plan is as it is: for every bucket the best alternatives, and for the job what plain DDP would take.

All figures are predicted steps, from backward's begin to the last synchronised gradient, see `predict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..costs.steps import FINISH, Step
from ..plans.plan import BucketPlan, Plan
from ..schemes import HalfPrecision, Scheme
from ..tensors.bucket import Layout
from .default import BUCKET_BYTES, default_plan
from .job import Job
from .options import Way
from .predict import played, predict, steps_of
from .revise import reordered
from .simplify import AS_LONG

WORTH_IT = 0.02  # share of DDP's step that another plan must save: less is within the spread of steps
SAME = AS_LONG - 1  # share of a step that is no difference
ALTERNATIVES = 3
DDP_BYTES = {"ddp": BUCKET_BYTES, "ddp_1mb": 1 << 20, "ddp_one_bucket": 1 << 62}
BF16 = HalfPrecision(values="bfloat16")


@dataclass(frozen=True)
class Alternative:
    """Another scheme for a bucket, and the predicted step if it took that, everything else as it is."""

    scheme: Scheme[Any]
    step_s: float


@dataclass(frozen=True)
class BucketReasons:
    """One bucket: what was chosen, what else there is, and why it loses nothing, if it does not."""

    id: str
    names: tuple[str, ...]
    nbytes: int
    scheme: Scheme[Any]
    alternatives: tuple[Alternative, ...]  # the best ones
    why_exact: str | None


@dataclass(frozen=True)
class Explanation:
    """A plan's reasons. `rivals`: predicted steps of plans that need no search, by name."""

    step_s: float
    backward_s: float  # with what the exchange stretches it by
    beside_s: float  # what a step takes beside
    rivals: Mapping[str, float]
    buckets: tuple[BucketReasons, ...]

    @property
    def verdict(self) -> str:
        """One sentence for the job."""
        name, ddp_s = min(((n, s) for n, s in self.rivals.items() if n in DDP_BYTES), key=lambda rival: rival[1])
        saved = (ddp_s - self.step_s) / (self.beside_s + ddp_s)
        if saved <= WORTH_IT:
            return f"plain DDP ({name}) is within {WORTH_IT:.0%} of the step: keep it"
        return f"a step takes {saved:.0%} less than with DDP ({name})"


def explain(plan: Plan, job: Job, ways: Sequence[Way]) -> Explanation:
    """The plan's reasons, beside these ways.

    Raises:
        ValueError: for a plan that does not fit the job.
    """
    expected = predict(plan, job)
    steps = {bucket.id: steps_of(bucket, bucket.scheme, job) for bucket in plan.buckets}
    reasons = []
    for place, bucket in enumerate(plan.buckets):
        scheme = bucket.scheme
        others = sorted(alternatives(plan, place, job, ways, steps), key=lambda other: other.step_s)
        lossy = next((other for other in others if not other.scheme.exact), None)
        known = {p.name: p.tensor for p in job.profiles}
        reasons.append(
            BucketReasons(
                id=bucket.id,
                names=tuple(bucket.names),
                nbytes=sum((stop - start) * known[name].itemsize for name, start, stop in bucket.segments),
                scheme=scheme,
                alternatives=tuple(others[:ALTERNATIVES]),
                why_exact=_why_exact(expected.seconds, lossy) if scheme.exact else None,
            )
        )
    return Explanation(expected.seconds, expected.backward_s, job.beside_s, rivals(job), tuple(reasons))


def rivals(job: Job) -> dict[str, float]:
    """Predicted steps of DDP with several bucket sizes, in 32 bits and in 16: tables travel dense there."""
    profiles = [replace(p, sparse=False, density=None, elements=None) for p in job.profiles]
    dense = replace(job, profiles=tuple(profiles))
    found = {}
    for name, nbytes in DDP_BYTES.items():
        plan = default_plan(profiles, job.world_size, bucket_bytes=nbytes)
        found[name] = predict(plan, dense).seconds
        half = with_scheme(plan, range(len(plan.buckets)), BF16)
        found[name.replace("ddp", "ddp_bf16")] = predict(half, dense).seconds
    return found


def describe(explanation: Explanation) -> Iterator[str]:
    """The explanation in words, a paragraph a bucket."""
    for bucket in explanation.buckets:
        first, *others = bucket.names
        names = first if not others else f"{first} ... {others[-1]} ({len(bucket.names)} tensors)"
        yield f"{names}, {bucket.nbytes / 1e6:.2f} MB -> {bucket.scheme.title}"
        for other in bucket.alternatives:
            yield f"    {other.scheme.title}: {(other.step_s - explanation.step_s) * 1e3:+.2f} ms a step"
        if bucket.why_exact:
            yield f"    exact: {bucket.why_exact}"
    step_ms, backward_ms = explanation.step_s * 1e3, explanation.backward_s * 1e3
    yield f"predicted: {step_ms:.1f} ms from backward's begin, {backward_ms:.1f} of them backward"
    yield "without a search: " + ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in explanation.rivals.items())
    yield explanation.verdict


def alternatives(
    plan: Plan, place: int, job: Job, ways: Sequence[Way], steps: Mapping[str, Sequence[Step]]
) -> Iterator[Alternative]:
    """Other schemes among the ways for the bucket in this place; `steps` of each bucket."""
    bucket = plan.buckets[place]
    present = bucket.scheme
    for way in ways:
        if way.scheme.unplanned != present.unplanned and may_take(bucket, present, way, job):
            changed = {**steps, bucket.id: steps_of(bucket, way.scheme, job)}
            yield Alternative(way.scheme, played(with_scheme(plan, [place], way.scheme), job, changed).seconds)


def may_take(bucket: BucketPlan, present: Scheme[Any], way: Way, job: Job) -> bool:
    """Whether the way is one of this bucket, which has the present scheme."""
    if way.members is not None:
        return set(bucket.names) == set(way.members)
    sparse = {p.name for p in job.profiles if p.sparse}
    taken = way.among is None or way.among.issuperset(bucket.names)
    return present.layout is Layout.FLAT and taken and sparse.isdisjoint(bucket.names)


def with_scheme(plan: Plan, places: Sequence[int], scheme: Scheme[Any]) -> Plan:
    """The plan with this scheme for some of its buckets."""
    return with_buckets(
        plan,
        [
            bucket.model_copy(update={"scheme": scheme}) if place in places else bucket
            for place, bucket in enumerate(plan.buckets)
        ],
    )


def with_buckets(plan: Plan, buckets: Sequence[BucketPlan]) -> Plan:
    """The plan with these buckets, each in the turns that the plan has for its id."""
    ids = {bucket.id for bucket in buckets}
    turns = [turn for turn in plan.order if turn[0] in ids]
    finishing = {bucket for bucket, stage in turns if stage == FINISH}
    stages = {
        bucket.id: (*bucket.scheme.stages(plan.world), *([FINISH] if bucket.id in finishing else []))
        for bucket in buckets
    }
    return plan.model_copy(update={"buckets": tuple(buckets), "order": tuple(reordered(turns, stages))})


def _why_exact(step_s: float, lossy: Alternative | None) -> str:
    if lossy is None:
        return "no lossy way is allowed for it"
    longer_s = lossy.step_s - step_s
    if abs(longer_s) < SAME * step_s:
        return "its exchange is hidden behind backward and other exchanges: a lossy way would gain nothing"
    more_or_less = "longer" if longer_s > 0 else "shorter"
    return f"by the best lossy way, {lossy.scheme.title}, the step would be {abs(longer_s) * 1e3:.2f} ms {more_or_less}"
