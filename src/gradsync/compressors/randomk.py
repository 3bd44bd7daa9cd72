"""Random sparsifiers: the elements that are sent are drawn at random, whatever the gradient is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..devices import host
from ..inputs.settings import PositiveInt, Ratio
from ..tensors import allocator as memory
from ..tensors.bucket import FlatSpec
from ..tensors.sparse import SparseVector, index_dtype
from .base import (
    CompressorState,
    CompressorTraits,
    Payload,
    SparseMessage,
    Sparsifier,
    Summand,
    by_spec,
    check_payload,
    check_tensor,
    corrected_by,
    fields,
    fields_nbytes,
    narrowed,
)
from .expressions import register
from .law import Contraction, Law, Unbiased


@register
@dataclass(frozen=True)
class RandomK(Sparsifier):
    """Keeps the same share of each tensor, in random elements that change at every step. (Stich et al., 2018)

    A tensor is cut into runs of `block` neighbours (a shorter tensor is one run), and k = max(1, round(ratio * runs))
    different runs are drawn, so that each element has the same probability; longer runs read memory in fewer pieces.
    `scaled`: kept values are multiplied by elements / kept: unbiased, with E |error|^2 <= omega |x|^2, omega = elements
    / kept - 1; no error feedback needed. Otherwise values are sent as they are: in the mean over the draws |error|^2 is
    (1 - kept / elements) |x|^2; wrap it in ErrorFeedback then.
    `shared`: all ranks draw the same elements, by the tensor's name and the step, so that an all-reduce can sum their
    values. Otherwise ranks draw independently, so that the mean over n ranks of scaled payloads has omega / n.
    NaN and infinity are not preferred: they may not be sent.
    Wire: the kept values; if not shared, also the 8 bytes of the rank's stream number, which repeats the draws.

    Attributes:
        ratio: the share of a tensor's elements that is sent, in (0, 1].
        block: the number of neighbours in a run.
        shared: whether all ranks draw the same elements.
        scaled: whether kept values are multiplied by elements / kept.
        seed: the seed of the draws.
    """

    ratio: Ratio
    block: PositiveInt = 1
    shared: bool = True
    scaled: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()

    @cached_property
    def traits(self) -> CompressorTraits:
        return CompressorTraits(Summand if self.shared else SparseMessage, waits_for_device=not self.shared)

    def runs(self, numel: int) -> tuple[int, int]:
        """Returns how many runs of neighbours are kept of a tensor with `numel` elements, and the length of a run."""
        run = max(1, min(self.block, numel))
        return min(max(1, round(self.ratio * (numel // run))), numel // run), run

    def kept(self, numel: int) -> int:
        """Returns how many elements of a tensor with `numel` elements are sent."""
        count, run = self.runs(numel)
        return count * run

    def num_kept(self, spec: FlatSpec, step: int = 0) -> int:
        return self._num_kept(spec)

    @by_spec
    def _num_kept(self, spec: FlatSpec) -> int:
        return sum(map(self.kept, spec.lengths))

    @by_spec
    def _counts(self, spec: FlatSpec) -> tuple[int, ...]:
        return tuple(self.runs(length)[0] for length in spec.lengths)

    def law(self, spec: FlatSpec) -> Law:
        delta = min((self.kept(n) / n for n in spec.lengths if n), default=1.0)
        return Unbiased(1 / delta - 1) if self.scaled else Contraction(delta, in_expectation=True)

    @torch.no_grad()
    def compress(self, x: Tensor, state: CompressorState) -> tuple[Any, CompressorState]:
        check_tensor(x, state)
        return self._payload(x[self._drawn(state, x.device).long()], state), state.next()

    @torch.no_grad()
    def compress_with_feedback(
        self, x: Tensor, residual: Tensor, state: CompressorState
    ) -> tuple[Any, Tensor, CompressorState]:
        check_tensor(x, state)
        left, indices = corrected_by(residual, x), self._drawn(state, x.device)
        values = narrowed(left[indices.long()], x.dtype)
        sent = SparseVector(indices, self._decoded(values, state.spec), x.numel())
        return self._payload(values, state), sent.subtract_from(left), state.next()

    def elements(self, payload: Any) -> SparseVector:
        check_payload(self, payload)
        values, stream = self._values(payload), 0
        if not self.shared:
            stream = int(fields(payload.data, (torch.int64, 1))[0])
        state = CompressorState(payload.spec, stream, payload.step)
        return SparseVector(self._drawn(state, values.device), self._decoded(values, payload.spec), payload.spec.numel)

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        values = spec.dtype, self.num_kept(spec)
        return fields_nbytes(values) if self.shared else fields_nbytes((torch.int64, 1), values)

    def _drawn(self, state: CompressorState, device: torch.device) -> Tensor:
        """Returns the drawn indices into the flat tensor, ascending, (kept,) int32 or int64."""
        spec = state.spec
        indices = memory.empty(self.num_kept(spec), index_dtype(spec.numel), device)
        kernels.random_k(state.sections(self.seed, shared=self.shared), self._counts(spec), indices, block=self.block)
        # Sorted by way of a bitmap: a `SparseVector` has ascending indices, and memory is read in order.
        words = memory.empty(-(-spec.numel // 64), torch.int64, device)
        kernels.encode_bitmap(indices, spec.numel, words)
        kernels.decode_bitmap(words, indices)
        return indices

    def _payload(self, values: Tensor, state: CompressorState) -> Payload:
        if self.shared:
            return Summand(self, state.spec, state.step, values)
        message = memory.zeros(self.nbytes(state.spec), torch.uint8, values.device)
        payload = SparseMessage(self, state.spec, state.step, message)
        fields(message, (torch.int64, 1))[0].fill_(state.stream)
        self._values(payload).copy_(values)
        return payload

    def _values(self, payload: Payload) -> Tensor:
        if self.shared:
            return payload.data
        return fields(payload.data, (torch.int64, 1), (payload.spec.dtype, self.num_kept(payload.spec)))[1]

    def _decoded(self, values: Tensor, spec: FlatSpec) -> Tensor:
        if not self.scaled:
            return values
        kept = host.numbers([self.kept(n) for n in spec.lengths], values.device)
        factors = host.numbers([n / max(1, self.kept(n)) for n in spec.lengths], values.device, torch.float64)
        wide = values.to(kernels.accumulation_dtype(values.dtype))
        each = factors.to(wide.dtype).repeat_interleave(kept, output_size=len(values))  # else the host reads the size
        return (wide * each).to(values.dtype)
