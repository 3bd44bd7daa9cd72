"""What lossy ways make of a gradient of the job: the error that they would send in one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from ..comm import LocalGroup, drive
from ..compressors import Feedback
from ..schemes import CoarseGrained, PowerSGD, Route, Scheme, SchemeOrCompressor, ways
from ..schemes.compressed import Compressed
from ..state import at_step
from ..tensors.bucket import Bucket, Layout, Segment, TensorSpec
from .compressing import LATE

DRIVEN_S = 60.0  # a group of one rank waits for nobody


def name_of(way: SchemeOrCompressor) -> str:
    """By which its errors are known: whoever carries a compressor's payloads, they are the compressor's."""
    return str(way.compressor if isinstance(way, Compressed | Route) and way.compressor is not None else way)


def sends_later(way: SchemeOrCompressor) -> bool:
    """Whether what a step leaves out of a gradient goes with later ones: error feedback.

    Momentum correction, too: the velocity that it keeps is its residual.
    """
    way = way.compressor if isinstance(way, Compressed | Route) and way.compressor is not None else way
    return isinstance(way, Feedback | PowerSGD | CoarseGrained)


def delay_of(error: float) -> float:
    """Steps' gradients that error feedback holds back, by a step's relative error: infinite from 1 on.

    As if a step sent the share 1 - error^2 of the squared norm of gradient and residual that it sends of a gradient
    alone, and gradients had nothing to do with each other: then squares add up, and the residual's settles where
    r^2 = error^2 (r^2 + g^2), at error^2 / (1 - error^2) of the gradient's. A residual is flatter than a gradient, so
    top-k sends less of it: of normal numbers, 2 % more than this are held back at a ratio of 0.2, half as much again
    at 0.01. Of any gradients, where no step's error is larger, it is with d = 1 - error^2 at most 4 (1 - d) / d^2
    (Karimireddy et al., 2019, lemma 3).
    """
    return error**2 / (1 - error**2) if error < 1 else inf


def alone(way: SchemeOrCompressor) -> Scheme[Any]:
    """What loses as much, and keeps the same, in a group of one rank."""
    if isinstance(way, Route) and way.compressor is not None:
        return ways(way.compressor)[0]
    if isinstance(way, CoarseGrained):
        return replace(way, choice="exact")  # by the last step's scores there is nothing to choose by
    return way if isinstance(way, Scheme) else ways(way)[0]


@torch.no_grad()
def relative_errors(candidates: Sequence[SchemeOrCompressor], name: str, gradient: Tensor) -> dict[str, float]:
    """By `name_of` each lossy candidate: the norm of what it changes in this rank's gradient over the gradient's norm.

    What one step loses, after all warm-up; with error feedback it is sent later. Nothing of exact candidates, and of
    gradients that are zero, not finite, or no dense floating-point ones.
    """
    norm = float(gradient.norm()) if gradient.layout is torch.strided and gradient.is_floating_point() else 0.0
    if not norm or not isfinite(norm):
        return {}
    found: dict[str, float] = {}
    for candidate in candidates:
        scheme = alone(candidate)
        if scheme.traits.exact or scheme.traits.layout is not Layout.FLAT or name_of(candidate) in found:
            continue
        (group,) = LocalGroup.world(1)
        bucket = Bucket("", (Segment(name, 0, gradient.numel()),), (TensorSpec.of(gradient),), Layout.FLAT, False)
        flat = gradient.detach().reshape(-1).clone()
        state = at_step(scheme.init(bucket, group), LATE)  # after all warm-up
        sent, _ = drive(scheme.synchronize(flat, state, group, 1.0), timeout_s=DRIVEN_S)
        error = float((gradient.reshape(-1) - sent).norm()) / norm
        if isfinite(error):
            found[name_of(candidate)] = error
    return found


def highest(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each way the highest error that some rank saw."""
    names = dict.fromkeys(name for errors in of_ranks for name in errors)
    return {name: max(errors.get(name, 0.0) for errors in of_ranks) for name in names}
