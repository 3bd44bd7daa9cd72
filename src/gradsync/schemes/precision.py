"""A wrapper that makes any scheme send 16-bit values, for buckets of wider floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..comm import Group
from ..compressors.cast import DTYPES, HalfType
from ..compressors.expressions import register
from ..costs.cluster import Placement
from ..costs.steps import Compute, Step
from ..tensors import allocator as memory
from ..tensors.bucket import Bucket, Layout, TensorSpec
from ..tensors.density import DensityProfile
from ..tensors.sparse import SparseRows
from .base import Scheme, State, Traits
from .dense import AllReduce


@register
@dataclass(frozen=True)
class HalfPrecision(Scheme[Any]):
    """A scheme that scales gradients, rounds them to 16 bits, sums them by `inner`, and widens the sum. Not exact.

    If `inner` keeps residuals, which are in units of gradients, it scales the sum instead.

    Sparse schemes add 16-bit values in float32 and round once more, where a rank that summed a part (its owner) sends
    it to all; so every rank, the owner too, has the same rounded bits. (An all-reduce adds as its transport does.)
    Repeated rows are merged before rounding. Finite values beyond the range become the largest finite value; a sum
    beyond the range becomes infinity. Infinity and NaN stay; values below the range become zero. The rounding error is
    lost; errors up and down are about equally likely. Buckets of 16-bit floats pass unchanged.
    Wire: that of `inner` for values of 2 bytes; positions are the same. Partial sums, as in recursive doubling and
    between the nodes of a hierarchy, are float32: in a hierarchy, wrap its scheme across nodes (`inter`).

    Attributes:
        inner: the scheme that sums.
        values: "bfloat16", or "float16": 3 bits more, in a range up to 65504.
    """

    inner: Scheme[Any] = AllReduce()
    values: HalfType = "bfloat16"

    def __post_init__(self) -> None:
        super().__post_init__()

    @property
    def dtype(self) -> torch.dtype:
        """The 16-bit dtype in which values travel."""
        return DTYPES[self.values]

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether values of `dtype` are wider than 16 bits, and so are rounded."""
        return dtype.itemsize > self.dtype.itemsize

    @property
    def title(self) -> str:
        return f"{self.inner.title} {self.values}"

    @cached_property
    def traits(self) -> Traits:
        return replace(self.inner.traits, lossy=True)  # rounding keeps flags non-zero, and infinity

    def planned_for(self, profiles: Sequence[DensityProfile]) -> Scheme[Any]:
        return HalfPrecision(self.inner.planned_for(profiles), self.values)

    def has_room_for(self, profiles: Sequence[DensityProfile]) -> bool:
        return self.inner.has_room_for(profiles)

    def stages(self, size: int) -> tuple[str, ...]:
        return self.inner.stages(size)

    def check(self, specs: tuple[TensorSpec, ...]) -> None:
        self.inner.check(self._narrow(specs))

    def init(self, bucket: Bucket, group: Group) -> State:
        return self.inner.init(replace(bucket, tensors=self._narrow(bucket.tensors)), group)

    async def synchronize(self, x: Any, state: State, group: Group, scale: float) -> tuple[Any, State]:
        if isinstance(x, Tensor):
            if not self.rounds(x.dtype):
                return await self.inner.synchronize(x, state, group, scale)
            # With state the inner scheme scales, as residuals are in units of gradients, under whichever plan.
            first, then = (1.0, scale) if state else (scale, 1.0)
            total, next_state = await self.inner.synchronize(self._narrowed(x, first), state, group, then)
            return x.copy_(total), next_state
        if not self.rounds(x[0].values.dtype):
            return await self.inner.synchronize(x, state, group, scale)
        scaled_tables = tuple(self._rounded(table, scale) for table in x)
        tables, next_state = await self.inner.synchronize(scaled_tables, state, group, 1.0)
        widened = [replace(t, values=t.values.to(of.values.dtype)) for t, of in zip(tables, x, strict=True)]
        return tuple(widened), next_state

    async def mix(self, x: Any, numel: int, state: State, group: Group, scale: float) -> tuple[Any, State]:
        """Returns what `synchronize` does; a rank keeps the rounding error of its values, but not that of sums.

        `x` and the result are flat tensors, (`numel` + flags,).
        """
        if not self.rounds(x.dtype):
            return await self.synchronize(x, state, group, scale)
        sent = self._narrowed(x[:numel], scale).to(x.dtype)
        rest = x[:numel].mul(scale * group.size).sub_(sent, alpha=group.size)
        x, next_state = await self.synchronize(x, state, group, scale)
        x[:numel].add_(rest)
        return x, next_state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        inner = self.inner.steps(self._narrow(specs), profiles, placement, step)
        if not self.rounds(specs[0].dtype):
            return inner
        brought, summed = ([float(spec.numel) for spec in specs] for _ in range(2))
        if self.traits.layout is Layout.ROWS:
            brought, summed = (
                [p.union_rows(ranks) * spec.dim for p, spec in zip(profiles, specs, strict=True)]
                for ranks in (1, placement.size)
            )
        nbytes = specs[0].itemsize + self.dtype.itemsize  # of an element, read and written
        return Compute("round_values", nbytes * sum(brought)), *inner, Compute("widen_values", nbytes * sum(summed))

    def unchanged_since(self, step: int) -> int:
        return self.inner.unchanged_since(step)

    def _narrow(self, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(self._narrow_one(spec) if self.rounds(spec.dtype) else spec for spec in specs)

    def _narrow_one(self, spec: TensorSpec) -> TensorSpec:
        narrow = self.dtype
        return replace(spec, dtype=narrow, flat=None if spec.flat is None else spec.flat.with_dtype(narrow))

    def _rounded(self, table: SparseRows, scale: float) -> SparseRows:
        indices, values = kernels.sum_rows([(table.indices, table.values)], table.num_rows, scale=scale)
        return replace(table, indices=indices, values=self._narrowed(values.flatten(), 1.0).view(values.shape))

    def _narrowed(self, x: Tensor, scale: float) -> Tensor:
        narrowed = memory.empty_like(x, self.dtype)
        kernels.narrow(x, narrowed, scale=scale)
        return narrowed
