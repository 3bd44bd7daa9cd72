"""`shrunk`: a smaller case that fails in the same way, found greedily and the same in each run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from gradsync.comm import LocalGroup
from gradsync.compressors.expressions import registered, to_expression
from gradsync.costs.cluster import Placement
from gradsync.schemes import Scheme, from_expression
from gradsync.tensors.bucket import Layout, TensorSpec, trainable_parameters

from .case import BucketCase, Case, Part
from .models import FuzzModel

MOST_TRIES = 80
SMALLEST: dict[Layout, dict[str, Any]] = {Layout.FLAT: {"all_reduce": {}}, Layout.ROWS: {"agsparse": {}}}
USUAL = {name: field.default for name, field in Case.model_fields.items()}
SETTINGS = (
    "micro",
    "zero",
    "clip",
    "order",
    "ready",
    "magnitude",
    "optimizer",
    "spoilt",
    "written",
    "reload_at",
    "ddp",
)


def shrunk(case: Case, judged: Callable[[Case], list[str]], problem: str, *, tries: int = MOST_TRIES) -> Case:
    """Returns the smallest case found that has a problem of the same kind as `problem`, after at most `tries` runs."""
    kind, smaller = kind_of(problem), True
    while smaller:
        smaller = False
        for candidate in _candidates(case):
            if tries == 0:
                return case
            if not is_possible(candidate):
                continue
            tries -= 1
            if any(kind_of(found) == kind for found in judged(candidate)):
                case, smaller = candidate, True
                break
    return case


def kind_of(problem: str) -> str:
    """Returns the words of a problem that stay the same when a case gets smaller: no numbers, no names."""
    first = problem.partition("\n")[0].partition("(")[0]
    return " ".join(re.findall(r"(?<![\w.'])[A-Za-z]{3,}(?![\w.'])", first)[:6])


def is_possible(case: Case) -> bool:
    """Whether the case is one that `attach` promises to take."""
    first = case.parts[0]
    if first.used != "always" or first.frozen != "none" or first.frozen_from is not None:
        return False
    if case.size % case.ranks_per_node:
        return False
    spots = [spot for spot in (case.spoilt, case.written) if spot is not None]
    if any(spot.rank >= case.size or spot.step >= case.steps for spot in spots):
        return False
    if case.reload_at is not None and case.reload_at >= case.steps:
        return False
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(FuzzModel(case)).items()}
    try:
        plan = case.plan(specs)
        if plan is not None:
            plan.check(specs, case.size)
            placement = Placement.regular(case.size // case.ranks_per_node, case.ranks_per_node)
            for bucket in plan.buckets:
                bucket.scheme.init(bucket.bucket(specs), LocalGroup.world(case.size, placement)[0])
                if bucket.scheme.traits.layout is Layout.FLAT:
                    bucket.scheme.steps(bucket.bucket(specs).specs, (), placement)
    except (ValueError, KeyError):
        return False
    return True


def _candidates(case: Case) -> Iterator[Case]:
    """Yields cases that are a little smaller, those with the largest parts left out first."""
    for size in range(1, case.size):
        yield case.model_copy(update={"size": size, "ranks_per_node": 1})
    for part in case.parts:
        if len(case.parts) > 1:
            yield _without(case, part)
    for steps in range(1, case.steps):
        yield case.model_copy(update={"steps": steps})
    for name in (*SETTINGS, "ranks_per_node"):
        if getattr(case, name) != USUAL[name]:
            yield case.model_copy(update={name: USUAL[name]})
    if case.frontend in ("ddp_hook", "class"):
        yield case.model_copy(update={"frontend": "attach"})
    for number, bucket in enumerate(case.buckets or ()):
        yield from (_with_bucket(case, number, smaller) for smaller in _simpler_buckets(bucket))
    yield from _whole(case)
    for part in case.parts:
        yield from (_with_part(case, part, smaller) for smaller in _simpler_parts(part))


def _without(case: Case, part: Part) -> Case:
    kept = [
        bucket.model_copy(update={"segments": segments})
        for bucket in case.buckets or ()
        if (segments := tuple(each for each in bucket.segments if not each[0].startswith(f"parts.{part.key}.")))
    ]
    parts = tuple(each for each in case.parts if each is not part)
    return case.model_copy(update={"parts": parts, "buckets": None if case.buckets is None else tuple(kept)})


def _with_bucket(case: Case, number: int, bucket: BucketCase) -> Case:
    buckets = list(case.buckets or ())
    buckets[number] = bucket
    return case.model_copy(update={"buckets": tuple(buckets)})


def _simpler_buckets(bucket: BucketCase) -> Iterator[BucketCase]:
    least = to_expression(from_expression(SMALLEST[bucket.made.traits.layout]))
    if bucket.scheme != least:
        yield bucket.model_copy(update={"scheme": least})
    yield from (bucket.model_copy(update={"scheme": scheme}) for scheme in _simpler(bucket.scheme))


def _simpler(expression: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields expressions in which one setting has its default, or a scheme is one of those inside it."""
    ((name, settings),) = expression.items()
    for key, value in settings.items():
        inner = value if isinstance(value, dict) else None
        if inner is not None and next(iter(inner)) in registered(Scheme):
            yield inner
        without = {name: {other: each for other, each in settings.items() if other != key}}
        try:
            usual = to_expression(from_expression(without))
        except ValueError:  # the setting has no default
            usual = expression
        if usual != expression:
            yield usual
        if inner is not None:
            yield from ({name: {**settings, key: smaller}} for smaller in _simpler(inner))


def _whole(case: Case) -> Iterator[Case]:
    """Yields cases in which one bucket gets the whole of a parameter that is cut."""
    for number, bucket in enumerate(case.buckets or ()):
        for name in {name: None for name, _, _ in bucket.segments}:
            stops = [stop for each in case.buckets or () for other, _, stop in each.segments if other == name]
            if len(stops) > 1:
                buckets = []
                for place, each in enumerate(case.buckets or ()):
                    others = tuple(part for part in each.segments if part[0] != name)
                    segments = (*others, (name, 0, max(stops))) if place == number else others
                    if segments:
                        buckets.append(each.model_copy(update={"segments": segments}))
                yield case.model_copy(update={"buckets": tuple(buckets)})


def _with_part(case: Case, part: Part, smaller: Part) -> Case:
    """Returns the case with a simpler part; buckets lose what is gone, and whole parameters stay whole."""
    parts = tuple(smaller if each is part else each for each in case.parts)
    changed = case.model_copy(update={"parts": parts})
    if case.buckets is None:
        return changed
    before, after = ({n: p.numel() for n, p in trainable_parameters(FuzzModel(c)).items()} for c in (case, changed))
    buckets = []
    for bucket in case.buckets:
        segments = tuple(
            (name, start, after[name] if stop == before[name] else stop)
            for name, start, stop in bucket.segments
            if name in after
        )
        if segments:
            buckets.append(bucket.model_copy(update={"segments": segments}))
    return changed.model_copy(update={"buckets": tuple(buckets)})


def _simpler_parts(part: Part) -> Iterator[Part]:
    for name in ("depth", "width", "rows"):
        for less in (1, 2, 4):
            if less < getattr(part, name):
                yield part.model_copy(update={name: less})
    for name, field in Part.model_fields.items():
        if not field.is_required() and name not in ("depth", "width", "rows") and getattr(part, name) != field.default:
            yield part.model_copy(update={name: field.default})
