"""Narrower floating-point numbers, which an all-reduce can sum as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .. import kernels
from ..tensors import allocator as memory
from ..tensors.bucket import FlatSpec
from .base import Compressor, CompressorState, CompressorTraits, Summand, check_payload, check_tensor, corrected_by
from .expressions import register
from .law import Biased, Contraction, Exact, Law

HalfType = Literal["bfloat16", "float16"]
DTYPES: dict[HalfType, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@register
@dataclass(frozen=True)
class Cast(Compressor[Summand]):
    """Rounds each element to the nearest number of 16 bits; 16-bit tensors are sent as they are.

    bfloat16 keeps 8 significant bits in the range of float32: an error of 2^-8 of an element at most.
    float16 keeps 11 (2^-11) of numbers from 6.1e-5 to 65504; smaller numbers lose bits, then become zero. Finite
    numbers beyond the range become the largest one of their sign; infinity and NaN stay. The all-reduce rounds its sums
    and may overflow.
    Wire: 2 bytes an element.

    Attributes:
        dtype: "bfloat16" or "float16".
    """

    dtype: HalfType = "bfloat16"

    traits = CompressorTraits(Summand)

    @property
    def title(self) -> str:
        return self.dtype

    def law(self, spec: FlatSpec) -> Law:
        if not self._rounds(spec):
            return Exact()
        if self.dtype == "float16":
            return Biased("magnitudes below 6e-8 become 0, magnitudes above 65504 become 65504")
        return Contraction(1 - 2.0**-16)

    @torch.no_grad()
    def compress(self, x: Tensor, state: CompressorState) -> tuple[Summand, CompressorState]:
        check_tensor(x, state)
        return self._payload(x, state), state.next()

    @torch.no_grad()
    def compress_with_feedback(
        self, x: Tensor, residual: Tensor, state: CompressorState
    ) -> tuple[Summand, Tensor, CompressorState]:
        check_tensor(x, state)
        corrected = corrected_by(residual, x)
        payload = self._payload(corrected, state)
        return payload, corrected.sub_(payload.data), state.next()

    def decompress(self, payload: Summand) -> Tensor:
        out = memory.empty_like(payload.data, payload.spec.dtype)
        self.sum_into(out, [payload])
        return out

    @torch.no_grad()
    def sum_into(self, out: Tensor, payloads: Sequence[Summand], scale: float = 1.0) -> None:
        for payload in payloads:
            check_payload(self, payload, out)
        kernels.sum_parts([payload.data for payload in payloads], out, scale=scale)

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return spec.numel * self.number_dtype(spec).itemsize

    def number_dtype(self, spec: FlatSpec) -> torch.dtype:
        return DTYPES[self.dtype] if self._rounds(spec) else spec.dtype

    def _payload(self, x: Tensor, state: CompressorState) -> Summand:
        data = memory.empty_like(x, self.number_dtype(state.spec))
        if data.itemsize < x.itemsize:
            kernels.narrow(x, data)
        else:
            data.copy_(x)
        return Summand(self, state.spec, state.step, data)

    def _rounds(self, spec: FlatSpec) -> bool:
        return spec.itemsize > DTYPES[self.dtype].itemsize
