"""Error feedback: what a compressor leaves out of one step is added to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from ..kernels import accumulation_dtype
from ..tensors.bucket import FlatSpec
from .base import Compressor, CompressorState, CompressorTraits, Payload, check_tensor, corrected_by, narrowed
from .expressions import register
from .law import Law, Unbiased

P = TypeVar("P", bound=Payload)
RESIDUAL = "residual"  # its key in the state


@dataclass(frozen=True)
class Feedback(Compressor[P]):
    """A compressor around another one, which keeps what that one leaves; its payloads are the other's."""

    compressor: Compressor[P]

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if isinstance(self.compressor, Feedback):
            inner = type(self.compressor).__name__
            raise ValueError(f"{name} of {inner}: the inner one leaves nothing to feed back; use one")
        if not self.compressor.traits.feeds_back:
            raise ValueError(
                f"{name} of {self.compressor.title}: what sums of it decode to is not what each leaves out"
            )

    @property
    def title(self) -> str:
        return f"{self.compressor.title} with feedback"

    @cached_property
    def traits(self) -> CompressorTraits:
        return self.compressor.traits

    def num_agreed(self, spec: FlatSpec) -> int:
        return self.compressor.num_agreed(spec)

    def num_kept(self, spec: FlatSpec, step: int = 0) -> int:
        return self.compressor.num_kept(spec, step)

    def number_dtype(self, spec: FlatSpec) -> torch.dtype:
        return self.compressor.number_dtype(spec)

    def law(self, spec: FlatSpec) -> Law:
        """Of what one step leaves out, which the next ones make good."""
        return self.compressor.law(spec)

    def init(self, spec: FlatSpec, stream: int = 0) -> CompressorState:
        """
        Raises:
            ValueError: for a compressor whose error on such tensors may be larger than they are: residuals would grow.
        """
        law = self.law(spec)
        if isinstance(law, Unbiased) and law.omega >= 1:
            raise ValueError(
                f"{type(self).__name__} of {self.compressor.title} may diverge, as its error is up to {law.omega:.3g} "
                "times what it compresses; it is unbiased, use it as it is"
            )
        inner = self.compressor.init(spec, stream)
        residual = torch.zeros(spec.numel, dtype=accumulation_dtype(spec.dtype))
        return replace(inner, elements={**inner.elements, RESIDUAL: residual})

    def decompress(self, payload: P) -> Tensor:
        return self.compressor.decompress(payload)

    def sum_into(self, out: Tensor, payloads: Sequence[P], scale: float = 1.0) -> None:
        self.compressor.sum_into(out, payloads, scale)

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return self.compressor.nbytes(spec, step)

    def unchanged_since(self, step: int) -> int:
        return self.compressor.unchanged_since(step)

    def remainder(self, x: Tensor, payload: P) -> Tensor:
        return self.compressor.remainder(x, payload)


@register
@dataclass(frozen=True)
class ErrorFeedback(Feedback[P]):
    """Sends C(x + residual) and keeps what is left: p = x + e; q = C(p); e' = p - q. (Seide et al., 2014)

    So sent + residual = x + the residual before, in every element, and all that was ever sent + the residual = all that
    ever came in: nothing is lost, it comes later. The residual is float32 (float64 for float64) whatever is
    compressed, so that it also takes up the rounding of a 16-bit payload. It is in units of the gradient: after a jump
    of the learning rate it is applied at the new one, and a rate of 0 loses nothing. NaN and infinity leave NaN in it:
    do not keep the state of a step that had them.
    A scheme whose owners compress the sums again has one at each end (two-way).
    Wire: as the compressor's, whose payload it is.
    """

    @torch.no_grad()
    def observe(self, x: Tensor, state: CompressorState) -> Tensor | None:
        corrected = corrected_by(state.elements[RESIDUAL].to(x.device), x)
        return self.compressor.observe(narrowed(corrected, x.dtype), state)

    @torch.no_grad()
    def compress(self, x: Tensor, state: CompressorState) -> tuple[P, CompressorState]:
        check_tensor(x, state)
        before = state.elements[RESIDUAL].to(x.device)
        payload, residual, next_state = self.compressor.compress_with_feedback(x, before, state)
        return payload, replace(next_state, elements={**next_state.elements, RESIDUAL: residual})
