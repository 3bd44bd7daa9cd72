"""Ranks that keep state from step to step, as threads, and the bucket that they synchronise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync.comm import LocalGroup
from gradsync.compressors import CompressorState
from gradsync.costs.cluster import Placement
from gradsync.schemes import Scheme
from gradsync.tensors.bucket import Bucket, Layout, Segment, TensorSpec
from tests.schemes.family import Outcome, run_scheme

# Two layers alike, evenly spaced, a convolution, a scalar, an empty tensor and a matrix too small to be compressed.
SHAPES = ((24, 40), (40,), (24, 40), (40,), (16, 8, 3, 3), (), (0, 5), (3, 4))


def bucket(dtype: torch.dtype = torch.float64, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Bucket:
    specs = tuple(TensorSpec(shape, dtype) for shape in shapes)
    segments = tuple(Segment(f"tensor {number}", 0, spec.numel) for number, spec in enumerate(specs))
    return Bucket("0", segments, specs, Layout.FLAT)


def gradient(seed: int, like: Bucket | None = None) -> Tensor:
    """Returns a gradient with flags behind it, the second of which is not set for every seed."""
    like = like or bucket()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(like.numel + like.num_flags, generator=generator, dtype=torch.float64)
    x[like.numel :] = 0.0
    x[like.numel : like.numel + 2] = torch.tensor([1.0, float(seed % 2)])
    return x.to(like.dtype)


def tensors_of(x: Tensor, like: Bucket | None = None) -> list[Tensor]:
    like = like or bucket()
    parts = x[: like.numel].double().split([segment.numel for segment in like.segments])
    return [part.view(spec.shape) for part, spec in zip(parts, like.tensors, strict=True)]


class Ranks:
    """Ranks that take steps together, each with its state."""

    def __init__(
        self, scheme: Scheme[Any], size: int, like: Bucket | None = None, placement: Placement | None = None
    ) -> None:
        self.scheme, self.size, self.placement = scheme, size, placement
        self.states = [scheme.init(like or bucket(), group) for group in LocalGroup.world(size, placement)]

    def step(self, inputs: Sequence[Tensor], scale: float | None = None) -> Tensor:
        """Takes a step and returns the results of all ranks."""
        self.outcome: Outcome = run_scheme(self.scheme, inputs, scale or 1 / self.size, self.states, self.placement)
        self.states = self.outcome.states
        first = self.outcome.results[0]
        for result in self.outcome.results:
            assert torch.equal(result.nan_to_num(7.0), first.nan_to_num(7.0)), "the same bits on all ranks"
        return first

    def kept(self, rank: int = 0) -> CompressorState:
        state: CompressorState = self.states[rank]["sent"][0]
        return state

    def residuals(self) -> Tensor:
        return sum((self.kept(rank).elements["residual"].double() for rank in range(self.size)), torch.zeros(()))
