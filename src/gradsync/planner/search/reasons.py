"""Explains a plan: the best alternatives for each bucket, and how plain DDP would do.

All figures are predicted by `predict`: seconds from the begin of backward to the last synchronised gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...costs.steps import FINISH, Step
from ...plans.plan import BucketPlan, Plan
from ...schemes import HalfPrecision, Scheme
from ...tensors.bucket import Layout
from ..default.plan import BUCKET_BYTES, default_plan
from ..default.revise import reordered
from .job import Job
from .options import Way
from .predict import predict, predict_steps, steps_of
from .simplify import AS_LONG

WORTH_IT = 0.02  # share of DDP's step that another plan must save; steps vary by as much
SAME = AS_LONG - 1  # relative difference of two steps that counts as none
ALTERNATIVES = 3
DDP_BYTES = {"ddp": BUCKET_BYTES, "ddp_1mb": 1 << 20, "ddp_one_bucket": 1 << 62}
BF16 = HalfPrecision(values="bfloat16")


@dataclass(frozen=True)
class Alternative:
    """Another scheme for one bucket, and the step that is predicted with it.

    Attributes:
        scheme: the other scheme.
        step_s: the predicted seconds of the step with it, if the other buckets stay as they are.
    """

    scheme: Scheme[Any]
    step_s: float


@dataclass(frozen=True)
class BucketReasons:
    """The reasons why one bucket of a plan has its scheme.

    Attributes:
        id: the bucket's id in the plan.
        names: its parameters, in order.
        nbytes: its bytes when dense.
        scheme: the chosen scheme.
        alternatives: the best other schemes, best first.
        why_exact: why no scheme that loses data was chosen, in words; None if the chosen one loses data.
    """

    id: str
    names: tuple[str, ...]
    nbytes: int
    scheme: Scheme[Any]
    alternatives: tuple[Alternative, ...]
    why_exact: str | None


@dataclass(frozen=True)
class Explanation:
    """The reasons for a plan, bucket by bucket, with its predicted seconds and those of plain DDP (`rivals`).

    Attributes:
        step_s: predicted seconds from the begin of backward until all gradients are synchronised.
        backward_s: predicted seconds of backward, slowed down by the exchange.
        beside_s: seconds of the rest of a step: forward, optimiser, data.
        rivals: `step_s` of plans as DDP's, by name.
        buckets: the reasons for each bucket's scheme.
    """

    step_s: float
    backward_s: float
    beside_s: float
    rivals: Mapping[str, float]
    buckets: tuple[BucketReasons, ...]

    @property
    def verdict(self) -> str:
        """One sentence that compares the plan with plain DDP."""
        name, ddp_s = min(((n, s) for n, s in self.rivals.items() if n in DDP_BYTES), key=lambda rival: rival[1])
        saved = (ddp_s - self.step_s) / (self.beside_s + ddp_s)
        if saved <= WORTH_IT:
            return f"plain DDP ({name}) is within {WORTH_IT:.0%} of the step: keep it"
        return f"a step takes {saved:.0%} less than with DDP ({name})"


def explain(plan: Plan, job: Job, ways: Sequence[Way]) -> Explanation:
    """Returns the reasons for a plan: the predicted step with other schemes for each bucket, and with plain DDP.

    `ways`: the other schemes, each with the gradients that may take it.

    Raises:
        ValueError: for a plan that does not fit the job.
    """
    expected = predict(plan, job)
    steps = {bucket.id: steps_of(bucket, bucket.scheme, job) for bucket in plan.buckets}
    reasons = []
    for place, bucket in enumerate(plan.buckets):
        scheme = bucket.scheme
        others = sorted(alternatives(plan, place, job, ways, steps), key=lambda other: other.step_s)
        lossy = next((other for other in others if not other.scheme.traits.exact), None)
        known = {p.name: p.tensor for p in job.profiles}
        reasons.append(
            BucketReasons(
                id=bucket.id,
                names=tuple(bucket.names),
                nbytes=sum((stop - start) * known[name].itemsize for name, start, stop in bucket.segments),
                scheme=scheme,
                alternatives=tuple(others[:ALTERNATIVES]),
                why_exact=_why_exact(expected.seconds, lossy) if scheme.traits.exact else None,
            )
        )
    return Explanation(expected.seconds, expected.backward_s, job.beside_s, rivals(job), tuple(reasons))


def rivals(job: Job) -> dict[str, float]:
    """Returns the predicted seconds of a step with plans such as DDP would have, by name such as "ddp" or "ddp_bf16".

    They have several bucket sizes, each in the gradients' dtype and in bfloat16; sparse gradients count as dense.
    """
    profiles = [replace(p, sparse=False, density=None, elements=None) for p in job.profiles]
    dense = replace(job, profiles=tuple(profiles))
    found = {}
    for name, nbytes in DDP_BYTES.items():
        plan = default_plan(profiles, job.world_size, bucket_bytes=nbytes)
        found[name] = predict(plan, dense).seconds
        half = with_scheme(plan, range(len(plan.buckets)), BF16)
        found[name.replace("ddp", "ddp_bf16")] = predict(half, dense).seconds
    return found


def as_data(explanation: Explanation) -> dict[str, Any]:
    """Returns the explanation as data for JSON: the fields by their names, schemes by their titles, and the verdict."""
    buckets = [
        {
            "id": bucket.id,
            "names": list(bucket.names),
            "nbytes": bucket.nbytes,
            "scheme": bucket.scheme.title,
            "alternatives": [{"scheme": other.scheme.title, "step_s": other.step_s} for other in bucket.alternatives],
            "why_exact": bucket.why_exact,
        }
        for bucket in explanation.buckets
    ]
    return {
        "step_s": explanation.step_s,
        "backward_s": explanation.backward_s,
        "beside_s": explanation.beside_s,
        "rivals": dict(explanation.rivals),
        "buckets": buckets,
        "verdict": explanation.verdict,
    }


def describe(explanation: Explanation) -> Iterator[str]:
    """Yields the explanation as lines of text, a paragraph per bucket."""
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
    """Yields other schemes for the bucket at index `place`, each with the predicted seconds of the training step.

    Args:
        ways: the schemes to choose from, each with the gradients that may take it.
        steps: the computations and transfers of the plan's schemes, by the id of the bucket.
    """
    bucket = plan.buckets[place]
    present = bucket.scheme
    for way in ways:
        if way.scheme.planned_for(()) != present.planned_for(()) and may_take(bucket, present, way, job):
            changed = {**steps, bucket.id: steps_of(bucket, way.scheme, job)}
            yield Alternative(way.scheme, predict_steps(with_scheme(plan, [place], way.scheme), job, changed).seconds)


def may_take(bucket: BucketPlan, present: Scheme[Any], way: Way, job: Job) -> bool:
    """Whether the scheme of `way` may replace `present` in this bucket, as it may take all the bucket's gradients."""
    if way.members is not None:
        return set(bucket.names) == set(way.members)
    sparse = {p.name for p in job.profiles if p.sparse}
    taken = way.among is None or way.among.issuperset(bucket.names)
    return present.traits.layout is Layout.FLAT and taken and sparse.isdisjoint(bucket.names)


def with_scheme(plan: Plan, places: Sequence[int], scheme: Scheme[Any]) -> Plan:
    """Returns the plan with this scheme for the buckets at the indices `places`."""
    return with_buckets(
        plan,
        [
            bucket.model_copy(update={"scheme": scheme}) if place in places else bucket
            for place, bucket in enumerate(plan.buckets)
        ],
    )


def with_buckets(plan: Plan, buckets: Sequence[BucketPlan]) -> Plan:
    """Returns the plan with these buckets instead of its own; a bucket takes the turns that the plan has for its id.

    A turn is (bucket id, stage): the moment to issue one collective of one bucket. If the new bucket's scheme has more
    stages, they follow its last turn.
    """
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
        return "no lossy scheme is allowed for it"
    longer_s = lossy.step_s - step_s
    if abs(longer_s) < SAME * step_s:
        return "its exchange is hidden behind backward and other exchanges: a lossy scheme would gain nothing"
    more_or_less = "longer" if longer_s > 0 else "shorter"
    return f"with the best lossy scheme, {lossy.scheme.title}, a step takes {abs(longer_s) * 1e3:.2f} ms {more_or_less}"
