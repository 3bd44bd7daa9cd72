"""Sparsifiers: values and positions of the largest elements or blocks are sent, which an all-reduce cannot sum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from .. import kernels
from ..devices import host, streams
from ..inputs.settings import PositiveInt, Ratio
from ..kernels import Sections
from ..tensors import allocator as memory
from ..tensors.bucket import FlatSpec
from ..tensors.index_formats import Positions, smallest
from ..tensors.sparse import SparseVector, index_dtype
from .base import (
    SPARSE_TRAITS,
    CompressorState,
    CompressorTraits,
    Field,
    SparseMessage,
    Sparsifier,
    by_spec,
    check_payload,
    check_tensor,
    fields,
    fields_nbytes,
)
from .expressions import register
from .law import Biased, Contraction, Law

WireValues = Literal["same", "bfloat16", "float16"]  # the dtype of sent values; "same": as the tensor
BFLOAT16_ROUNDING = 2.0**-8  # the largest error of rounding, relative to the value


def share_of(ratio: float, numel: int) -> int:
    """Returns how many of `numel` elements the share `ratio` is: rounded, at least 1, at most `numel`."""
    return min(max(1, round(ratio * numel)), numel)


def least_share(kept: tuple[int, ...], of: tuple[int, ...]) -> float:
    """Returns the smallest share of a tensor that is sent: the least kept[i] / of[i]; 1 if all are empty.

    Args:
        kept: the number of elements (or blocks) that are sent, of each tensor.
        of: the number that each tensor has.
    """
    return min((count / numel for count, numel in zip(kept, of, strict=True) if numel), default=1.0)


@register
@dataclass(frozen=True)
class TopK(Sparsifier):
    """Keeps the `ratio` largest elements of each tensor by magnitude. (Aji & Heafield, 2017)

    Exactly k = max(1, round(ratio * numel)) of a tensor; of equal elements the first ones. NaN is larger than infinity,
    so both are sent. Biased, with |error|^2 <= (1 - k / numel) |x|^2 if values are sent as they are: wrap it in
    ErrorFeedback. If they are rounded to 16 bits, the residual (what is sent later) also holds the rounding error, even
    of magnitudes beyond 65504 or too small for float16.
    Wire: k values, and their positions in the smallest format for k of numel (`tensors.index_formats`).

    Attributes:
        ratio: the share of a tensor's elements that is sent, in (0, 1].
        values: the dtype of sent values: "same" as the tensor, "bfloat16" or "float16".
    """

    ratio: Ratio
    values: WireValues = "same"

    def kept(self, numel: int) -> int:
        """Returns how many elements of a tensor with `numel` elements are sent."""
        return share_of(self.ratio, numel)

    def law(self, spec: FlatSpec) -> Law:
        share = least_share(self._counts(spec), spec.lengths)
        wire = self._wire_dtype(spec)
        if wire is torch.float16 and spec.dtype is not torch.float16:
            return Biased("float16 has a small range: larger magnitudes are sent as 65504, smaller ones as 0")
        return Contraction(share if wire is spec.dtype else share * (1 - BFLOAT16_ROUNDING**2))

    def compress(self, x: Tensor, state: CompressorState) -> tuple[SparseMessage, CompressorState]:
        return self._message(x, state), state.next()

    def compress_with_feedback(
        self, x: Tensor, residual: Tensor, state: CompressorState
    ) -> tuple[SparseMessage, Tensor, CompressorState]:
        left = memory.empty_like(residual)
        return self._message(x, state, residual, left), left, state.next()

    def elements(self, payload: SparseMessage) -> SparseVector:
        check_payload(self, payload)
        values, positions = self._parts(payload)
        return SparseVector(positions.decode(), values.to(payload.spec.dtype), payload.spec.numel)

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return fields_nbytes(*self._layout(spec))

    @torch.no_grad()
    def _message(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None, left: Tensor | None = None
    ) -> SparseMessage:
        check_tensor(x, state)
        spec, counts = state.spec, self._counts(state.spec)
        payload = SparseMessage(self, spec, state.step, memory.zeros(self.nbytes(spec), torch.uint8, x.device))
        values, positions = self._parts(payload)
        indices = positions.room()
        kernels.top_k(x, indices, values, sections=spec.sections, counts=counts, residual=residual, next_residual=left)
        positions.encode(indices)
        return payload

    def num_kept(self, spec: FlatSpec, step: int = 0) -> int:
        return self._layout(spec)[1][1]

    @by_spec
    def _counts(self, spec: FlatSpec) -> tuple[int, ...]:
        return tuple(map(self.kept, spec.lengths))

    def _wire_dtype(self, spec: FlatSpec) -> torch.dtype:
        return {"same": spec.dtype, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.values]

    @by_spec
    def _layout(self, spec: FlatSpec) -> tuple[Field, Field]:
        return packed_layout(sum(self._counts(spec)), spec.numel, self._wire_dtype(spec))

    def _parts(self, payload: SparseMessage) -> tuple[Tensor, Positions]:
        """Returns values, (k,), and positions as views of the message."""
        spec = payload.spec
        packed, values = fields(payload.data, *self._layout(spec))
        return values, packed_positions(packed, len(values), spec.numel)


def packed_layout(count: int, length: int, dtype: torch.dtype) -> tuple[Field, Field]:
    """Returns (dtype, number of elements) of a message's two fields: packed positions (uint8), and values.

    The message has `count` elements of a tensor with `length` elements; positions are packed in their smallest format.
    """
    return (torch.uint8, int(smallest(count, length).nbytes(count, length))), (dtype, count)


def packed_positions(packed: Tensor, most: int, length: int, count: int | None = None) -> Positions:
    """Returns the positions of sent elements in `packed`, (nbytes,) uint8, as a view.

    Args:
        packed: a field with room for `most` positions; they are at its beginning.
        most: decides on the format: the smallest for this many positions.
        length: positions are in [0, length).
        count: how many positions there are; None: `most`.
    """
    form, count = smallest(most, length), most if count is None else count
    return Positions(packed[: int(form.nbytes(count, length))], count, length, form)


@register
@dataclass(frozen=True)
class BlockTopK(Sparsifier):
    """Keeps whole blocks of consecutive elements: the `ratio` largest of each tensor by their Euclidean norm.

    Exactly max(1, round(ratio * blocks)) of the blocks of a tensor, the last of which may be shorter; of equal blocks
    the first, and blocks with NaN before blocks with infinity. There are few positions, and memory is read in runs.
    Biased, with |error|^2 <= (1 - share of blocks) |x|^2: wrap it in ErrorFeedback.
    Wire: the values of this number of whole blocks, and the positions of the blocks.

    Attributes:
        ratio: the share of a tensor's blocks that is sent, in (0, 1].
        block: the number of elements in a block.
    """

    ratio: Ratio
    block: PositiveInt = 256

    @property
    def traits(self) -> CompressorTraits:
        return replace(SPARSE_TRAITS, waits_for_device=True)  # the last block of a tensor may be shorter

    def law(self, spec: FlatSpec) -> Law:
        return Contraction(least_share(self._kept(spec), self._blocks(spec)))

    @torch.no_grad()
    def compress(self, x: Tensor, state: CompressorState) -> tuple[SparseMessage, CompressorState]:
        check_tensor(x, state)
        spec = state.spec
        payload = SparseMessage(self, spec, state.step, memory.zeros(self.nbytes(spec), torch.uint8, x.device))
        values, positions = self._parts(payload)
        norms, blocks = x.new_empty(sum(self._blocks(spec)), dtype=torch.float64), positions.room()
        kernels.squared_norms(x, spec.sections, norms, block=self.block)
        sections = Sections(self._blocks(spec))
        kernels.top_k(norms, blocks, norms.new_empty(len(blocks)), sections=sections, counts=self._kept(spec))
        positions.encode(blocks)
        indices = self._elements_of(blocks, spec)
        values[: len(indices)] = x[indices]
        return payload, state.next()

    def elements(self, payload: SparseMessage) -> SparseVector:
        check_payload(self, payload)
        values, positions = self._parts(payload)
        blocks = positions.decode()
        if len(blocks):
            first, last = blocks.aminmax()
            expected = f"a payload of {self} names blocks in [0, {positions.length})"
            within = (first >= 0) & (last < positions.length)
            streams.require(within, expected, lambda: f"{int(first)} to {int(last)}")
        indices = self._elements_of(blocks, payload.spec)
        return SparseVector(indices, values[: len(indices)], payload.spec.numel)

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return fields_nbytes(*self._layout(spec))

    def num_kept(self, spec: FlatSpec, step: int = 0) -> int:
        """Returns how many elements are sent at most: all sent blocks of a tensor may be whole."""
        return self._layout(spec)[1][1]

    @by_spec
    def _blocks(self, spec: FlatSpec) -> tuple[int, ...]:
        return tuple(-(-length // self.block) for length in spec.lengths)

    @by_spec
    def _kept(self, spec: FlatSpec) -> tuple[int, ...]:
        return tuple(share_of(self.ratio, blocks) for blocks in self._blocks(spec))

    @by_spec
    def _layout(self, spec: FlatSpec) -> tuple[Field, Field]:
        positions, _ = packed_layout(sum(self._kept(spec)), sum(self._blocks(spec)), spec.dtype)
        rooms = (min(kept * self.block, n) for kept, n in zip(self._kept(spec), spec.lengths, strict=True))
        return positions, (spec.dtype, sum(rooms))

    def _parts(self, payload: SparseMessage) -> tuple[Tensor, Positions]:
        """Returns values, 1-D, and the positions of blocks as views of the message."""
        spec = payload.spec
        packed, values = fields(payload.data, *self._layout(spec))
        return values, packed_positions(packed, sum(self._kept(spec)), sum(self._blocks(spec)))

    def _elements_of(self, blocks: Tensor, spec: FlatSpec) -> Tensor:
        """Returns the indices of all elements of these blocks, 1-D int32 or int64; `blocks`, (kept,), ascend."""
        number, device = blocks.long(), blocks.device
        first_block = host.numbers([0, *accumulate(self._blocks(spec))][:-1], device)
        first_element = host.numbers([0, *accumulate(spec.lengths)][:-1], device)
        section = torch.searchsorted(first_block, number, right=True) - 1
        skipped = (number - first_block[section]) * self.block  # elements of the tensor
        lengths = (host.numbers(spec.lengths, device)[section] - skipped).clamp_(max=self.block)
        shift = first_element[section] + skipped - (lengths.cumsum(0) - lengths)
        shifts = shift.repeat_interleave(lengths)
        return (shifts + torch.arange(len(shifts), device=device)).to(index_dtype(spec.numel))
