"""Errors of lossy schemes and compressors on a job's gradients: the relative error that one step makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from ...comm import LocalGroup, drive
from ...compressors import Feedback
from ...plans.profile import MOST_ERROR
from ...schemes import CoarseGrained, PowerSGD, Route, Scheme, SchemeOrCompressor, ways
from ...schemes.compressed import Compressed
from ...state import at_step
from ...tensors.bucket import Bucket, Layout, Segment, TensorSpec
from ..default.compressing import LATE

DRIVEN_S = 60.0  # timeout; a group of one rank has nobody to wait for


def name_of(way: SchemeOrCompressor) -> str:
    """Returns the key under which measured errors of a compressor or lossy scheme are stored.

    It is the compressor's name, also for a scheme that only carries a compressor's payloads (encoded tensors), else the
    scheme's name.
    """
    return str(way.compressor if isinstance(way, Compressed | Route) and way.compressor is not None else way)


def sends_later(way: SchemeOrCompressor) -> bool:
    """Whether a scheme or compressor sends in later steps what it leaves out of a gradient, as error feedback does.

    Momentum correction counts, too: it keeps what it left out in its velocity.
    """
    way = way.compressor if isinstance(way, Compressed | Route) and way.compressor is not None else way
    return isinstance(way, Feedback | PowerSGD | CoarseGrained)


def delay_of(error: float) -> float:
    """Returns how many steps' worth of gradient error feedback holds back: error^2 / (1 - error^2), infinite from 1 on.

    This is the squared norm of the residual (the tensor that error feedback keeps) over a gradient's, r^2 / g^2.
    `error` is the relative error of one step, a ratio of norms. The model: a step sends the share 1 - error^2 of the
    squared norm of gradient plus residual, as it does of a gradient alone, and gradients of different steps are
    uncorrelated. Then the residual settles where r^2 = error^2 (r^2 + g^2).

    The result leaves out that a residual is flatter than a gradient, so that top-k sends less of it: for normally
    distributed numbers the residual is 2 % larger at a ratio of 0.2, half as large again at 0.01. A bound for any
    gradients, if no step's error is larger, is 4 (1 - d) / d^2 with d = 1 - error^2.

    Reference: Karimireddy et al., 2019, lemma 3.
    """
    return error**2 / (1 - error**2) if error < 1 else inf


def alone(way: SchemeOrCompressor) -> Scheme[Any]:
    """Returns a scheme that changes a gradient as `way`, a compressor or scheme, does, but runs on one rank alone.

    `relative_errors` uses it to measure the error on one rank's gradient.
    """
    if isinstance(way, Route) and way.compressor is not None:
        return ways(way.compressor)[0]
    if isinstance(way, CoarseGrained):
        return replace(way, choice="exact")  # other choices use scores of the last step, which there are not
    return way if isinstance(way, Scheme) else ways(way)[0]


@torch.no_grad()
def relative_errors(candidates: Sequence[SchemeOrCompressor], name: str, gradient: Tensor) -> dict[str, float]:
    """Returns how much each lossy candidate changes a gradient in a step: norm of the change over the gradient's norm.

    The keys are those of `name_of`. The error is that of one step after warm-up; error feedback would send it in later
    steps. Exact candidates have no entry, nor have errors above `MOST_ERROR`.

    Args:
        candidates: schemes and compressors.
        name: the parameter's name.
        gradient: this rank's gradient, of any shape; the result is empty if it is sparse, zero, not finite or not of a
            floating-point dtype.
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
        if error <= MOST_ERROR:
            found[name_of(candidate)] = error
    return found


def highest(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the highest relative error over all ranks, by name of the scheme or compressor.

    `of_ranks`: the result of `relative_errors` of each rank.
    """
    names = dict.fromkeys(name for errors in of_ranks for name in errors)
    return {name: max(errors.get(name, 0.0) for errors in of_ranks) for name in names}
