"""Error feedback: what a compressor leaves out of a gradient is added to the next gradient."""

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
RESIDUAL = "residual"
"""The key of the residual in `CompressorState.elements`."""


@dataclass(frozen=True)
class Feedback(Compressor[P]):
    """A compressor that wraps another one, sends its payloads, and keeps what they leave out as a residual.

    Attributes:
        compressor: the inner compressor, whose payloads are sent.
    """

    compressor: Compressor[P]

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if isinstance(self.compressor, Feedback):
            inner = type(self.compressor).__name__
            raise ValueError(f"{name} of {inner}: {inner} has a residual already; use one of them")
        if not self.compressor.traits.feeds_back:
            title = self.compressor.title
            raise ValueError(
                f"{name} of {title}: a sum of its payloads does not decode to the sum of its decoded payloads, so no "
                f"rank knows what it left out; use {title} without feedback"
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
        """Returns the error bound of the inner compressor, for one step; later steps make up for the error."""
        return self.compressor.law(spec)

    def init(self, spec: FlatSpec, stream: int = 0) -> CompressorState:
        """Returns the state before the first step, with a residual (what was left out) of zeros.

        The residual is (numel,) float32, or float64 for float64.

        Raises:
            ValueError: if the error may be larger than the tensor, so that residuals would grow.
        """
        law = self.law(spec)
        if isinstance(law, Unbiased) and law.omega >= 1:
            raise ValueError(
                f"{type(self).__name__} of {self.compressor.title} may diverge, as its squared error is up to "
                f"{law.omega:.3g} times the squared norm of the tensor; it is unbiased, use it without error feedback"
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

    x is the gradient, e the residual, C the inner compressor. In every element, sent + new residual = x + old residual,
    so the sum of everything sent + the residual = the sum of all gradients: nothing is lost, it is sent later.
    The residual is float32 (float64 for float64) whatever the dtype of x, so that it also holds the rounding error of a
    16-bit payload. It is in units of the gradient: after a change of the learning rate it is applied at the new rate,
    and a rate of 0 loses nothing. NaN and infinity leave NaN in the residual: do not keep the state of such a step.
    In a scheme whose ranks each sum one part of the gradients and send the sums back compressed, both compressions have
    error feedback, each with a residual of its own.
    Wire: as the inner compressor.
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
