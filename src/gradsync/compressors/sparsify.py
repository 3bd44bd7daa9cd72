"""Sparsifiers: some elements travel, with what tells which. Their sum has more elements: no all-reduce takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..bucket import FlatSpec
from ..expressions import register
from ..positions import Positions, smallest
from ..sparse import SparseVector, index_dtype
from .base import SparseMessage, Sparsifier, State, check_payload, check_tensor, fields, fields_nbytes
from .law import Contraction, Law


@register
@dataclass(frozen=True)
class TopK(Sparsifier):
    """Keeps the `ratio` largest elements of each tensor by magnitude, as they are. (Aji & Heafield, 2017)

    Exactly k = max(1, round(ratio * numel)) of a tensor; of equal ones the first. NaN is larger than infinity, so both
    are sent. Biased, a contraction by k/numel: wrap it in ErrorFeedback.
    Wire: k values, and their positions in the format that is the smallest for k of so many.
    """

    ratio: float  # kept share, in (0, 1]

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"TopK.ratio must be in (0, 1], got {self.ratio}")

    def kept(self, numel: int) -> int:
        """Elements that are sent of so many."""
        return min(max(1, round(self.ratio * numel)), numel)

    def law(self, spec: FlatSpec) -> Law:
        return Contraction(min((self.kept(n) / n for n in spec.lengths if n), default=1.0))

    @torch.no_grad()
    def compress(self, x: Tensor, state: State) -> tuple[SparseMessage, State]:
        check_tensor(x, state)
        spec, count = state.spec, self.num_kept(state.spec)
        indices = x.new_empty(count, dtype=index_dtype(spec.numel))
        payload = SparseMessage(self, spec, state.step, x.new_zeros(self.nbytes(spec), dtype=torch.uint8))
        values, positions = self._parts(payload)
        taken = offset = 0
        for length in spec.lengths:
            part = slice(taken, taken + self.kept(length))
            kernels.top_k(x[offset : offset + length], indices[part], values[part])
            indices[part] += offset
            taken, offset = part.stop, offset + length
        positions.encode(indices)
        return payload, state.next()

    def elements(self, payload: SparseMessage) -> SparseVector:
        check_payload(self, payload)
        values, positions = self._parts(payload)
        return SparseVector(positions.decode(), values, payload.spec.numel)

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        count = self.num_kept(spec)
        positions = smallest(count, spec.numel).nbytes(count, spec.numel)
        return fields_nbytes((torch.uint8, int(positions)), (spec.dtype, count))

    def num_kept(self, spec: FlatSpec, step: int = 0) -> int:
        return sum(map(self.kept, spec.lengths))

    def _parts(self, payload: SparseMessage) -> tuple[Tensor, Positions]:
        """Values and positions, as views of the message."""
        spec, count = payload.spec, self.num_kept(payload.spec)
        form = smallest(count, spec.numel)
        layout = (torch.uint8, int(form.nbytes(count, spec.numel))), (spec.dtype, count)
        packed, values = fields(payload.data, *layout)
        return values, Positions(packed, count, spec.numel, form)
