"""A small profile, made by hand: four ranks on two nodes, a table and two dense parameters."""

from __future__ import annotations

from typing import Any

import torch

from gradsync.costs.steps import Pattern
from gradsync.plans.profile import (
    CollectiveEstimate,
    Density,
    Interval,
    KernelEstimate,
    LinkEstimate,
    LinkPoint,
    Overlap,
    ParameterTimes,
    PositiveSpread,
    Profile,
    Span,
    SpanEstimate,
    Spread,
    StepParts,
)
from gradsync.tensors.bucket import TensorSpec, model_digest
from gradsync.tensors.density import DensityProfile

SPECS = {
    "table": TensorSpec((1000, 4), torch.float32),
    "w": TensorSpec((6, 2), torch.float32),
    "b": TensorSpec((6,), torch.bfloat16),
}
ROWS = DensityProfile(1000, 30.0, {2: 1.5, 4: 2.25}, "0", 40.0, blocks={2: DensityProfile(500, 20.0)})
READY_S = {"table": 0.02, "w": 0.01, "b": 0.005}


def about(value: float) -> Interval:
    return Interval(value=value, low=0.9 * value, high=1.2 * value)


def link(stage_s: float, alpha_s: float, bandwidth: float) -> LinkEstimate:
    return LinkEstimate(stage_s=about(stage_s), alpha_s=about(alpha_s), bandwidth_bytes_per_s=about(bandwidth))


def span(kind: Span, size: int, cost: LinkEstimate) -> SpanEstimate:
    point = LinkPoint(part_bytes=1024.0, rounds=1, busiest_bytes=1024.0, seconds=about(1e-3))
    fit = CollectiveEstimate(link=cost, points=(point,))
    return SpanEstimate(span=kind, size=size, at_once_bytes=262144.0, link=cost, collectives={Pattern.ALL_GATHER: fit})


def make_profile(**changes: Any) -> Profile:
    parameters = tuple(
        ParameterTimes(
            name=name,
            shape=spec.shape,
            dtype=str(spec.dtype).removeprefix("torch."),
            sparse=name == "table",
            position=sorted(READY_S, key=READY_S.__getitem__).index(name),
            ready=PositiveSpread(median_s=READY_S[name], spread_s=1e-4),
            rows=Density.of(ROWS) if name == "table" else None,
        )
        for name, spec in SPECS.items()
    )
    fields: dict[str, Any] = {
        "torch": torch.__version__,
        "device": "cpu",
        "threads": 1,
        "model": model_digest(SPECS),
        "world": 4,
        "nodes": (0, 0, 1, 1),
        "steps": 10,
        "parts": StepParts(
            forward=PositiveSpread(median_s=0.01, spread_s=1e-3),
            backward=PositiveSpread(median_s=0.02, spread_s=2e-3),
            optimizer=Spread(median_s=0.0, spread_s=0.0),
            other=Spread(median_s=0.005, spread_s=0.0),
            beside=PositiveSpread(median_s=0.015, spread_s=1e-3),
        ),
        "overlap": Overlap(backward_by_transfer=about(1.3)),
        "links": (
            span(Span.ALL, 4, link(1e-3, 1e-4, 2e7)),
            span(Span.INSIDE, 2, link(0.0, 1e-5, 1e9)),
            span(Span.ACROSS, 2, link(2e-3, 3e-4, 1e7)),
        ),
        "kernels": {"sum_rows": KernelEstimate(call_s=about(1e-4), byte_s=about(1e-9), knee_bytes=4096.0)},
        "parameters": parameters,
    }
    return Profile(**{**fields, **changes})
