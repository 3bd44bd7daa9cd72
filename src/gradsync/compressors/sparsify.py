"""Sparsifiers: the payload is a SparseVector, which no all_reduce can sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..bucket import TensorSpec
from ..sparse import SparseVector, index_dtype
from .base import Compressor, State


@dataclass(frozen=True)
class TopK(Compressor[SparseVector]):
    """Keeps the `ratio` largest elements by magnitude, as they are. (Aji & Heafield, 2017)

    Exactly k = max(1, round(ratio * numel)); of equal ones the first. NaN is larger than infinity, so both are sent.
    Biased, a contraction by k/numel: wrap it in ErrorFeedback.
    Wire: k * (value + index) bytes.
    """

    ratio: float  # kept share, in (0, 1]

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"TopK.ratio must be in (0, 1], got {self.ratio}")

    def kept(self, numel: int) -> int:
        """Elements that are sent of so many."""
        return min(max(1, round(self.ratio * numel)), numel)

    @torch.no_grad()
    def compress(self, x: Tensor, state: State) -> tuple[SparseVector, State]:
        k = self.kept(x.numel())
        indices, values = x.new_empty(k, dtype=index_dtype(x.numel())), x.new_empty(k)
        kernels.top_k(x, indices, values)
        return SparseVector(indices, values, x.numel()), state

    def decompress(self, payload: SparseVector) -> Tensor:
        return payload.to_dense()

    def nbytes(self, spec: TensorSpec) -> int:
        return self.kept(spec.numel) * (index_dtype(spec.numel).itemsize + spec.itemsize)

    def remainder(self, x: Tensor, payload: SparseVector) -> Tensor:
        return payload.subtract_from(x)
