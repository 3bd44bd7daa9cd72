"""Error feedback: what a compressor leaves out of one step is added to the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..bucket import TensorSpec
from ..kernels import accumulation_dtype
from .base import Compressor, State

P = TypeVar("P")
RESIDUAL = "residual"  # its key in the state


@dataclass(frozen=True)
class ErrorFeedback(Compressor[P]):
    """Sends C(x + residual) and keeps what is left: p = x + e; q = C(p); e' = p - q. (Seide et al., 2014, one way)

    So sent + residual = x + the residual before, in every element, and all that was ever sent + the residual = all that
    ever came in: nothing is lost, it comes later. The residual is float32 (float64 for float64) whatever is
    compressed, so that it also takes up the rounding of a 16-bit payload. It is in units of the gradient: after a jump
    of the learning rate it is applied at the new one. NaN and infinity leave NaN in it: do not keep the state of a
    step that had them.
    Wire: as the compressor's.
    """

    compressor: Compressor[P]

    def __post_init__(self) -> None:
        if isinstance(self.compressor, ErrorFeedback):
            raise ValueError("ErrorFeedback of ErrorFeedback: the inner one leaves nothing to feed back; use one")

    def init(self, spec: TensorSpec) -> State:
        return {**self.compressor.init(spec), RESIDUAL: torch.zeros(spec.numel, dtype=accumulation_dtype(spec.dtype))}

    @torch.no_grad()
    def compress(self, x: Tensor, state: State) -> tuple[P, State]:
        corrected = state[RESIDUAL].to(x.device) + x
        payload, next_state = self.compressor.compress(corrected.to(x.dtype), state)
        return payload, {**next_state, RESIDUAL: self.compressor.remainder(corrected, payload)}

    def decompress(self, payload: P) -> Tensor:
        return self.compressor.decompress(payload)

    def nbytes(self, spec: TensorSpec) -> int:
        return self.compressor.nbytes(spec)

    def remainder(self, x: Tensor, payload: P) -> Tensor:
        return self.compressor.remainder(x, payload)
