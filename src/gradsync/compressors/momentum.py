"""Deep gradient compression: momentum ahead of the sparsifier, so that nothing goes out of date. (Lin et al., 2018)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from ..kernels import accumulation_dtype
from ..tensors import allocator as memory
from ..tensors.bucket import FlatSpec
from .base import (
    Compressor,
    CompressorState,
    CompressorTraits,
    Payload,
    SparseMessage,
    Sparsifier,
    check_tensor,
    corrected_by,
    narrowed,
)
from .expressions import Decay, PositiveFloat, PositiveInt, register
from .feedback import RESIDUAL, ErrorFeedback, Feedback
from .sparsify import TopK
from .warmup import Warmup

P = TypeVar("P", bound=Payload)
MOMENTUM = "momentum"  # its key in the state


@register
@dataclass(frozen=True)
class MomentumCorrection(Feedback[P]):
    """Each rank's own momentum, and what is left of it: u = m u + g; v = v + u; sends C(v), and v keeps the rest.

    Nesterov's: u = m (u + g); v = v + u + g. It takes the place of ErrorFeedback: v is the residual. The optimiser then
    has no momentum of its own. With `masking` u is set to zero wherever something was sent, lest old gradients push on
    after their element was updated (factor masking); that needs a compressor that sends some elements only. `clip`: the
    gradient of each tensor of the bucket is first scaled to a norm of at most clip / sqrt(ranks), so that the sum over
    the ranks would have a norm of `clip` if they were independent.
    u and v are float32 (float64 for float64). A bucket of tensors that are sent dense has the same local momentum under
    MomentumCorrection(a dense compressor, masking=False), which sends what an optimiser with momentum would apply.
    Wire: as the compressor's, whose payload it is.
    """

    momentum: Decay = 0.9  # m
    nesterov: bool = False
    masking: bool = True
    clip: PositiveFloat | None = None  # the largest norm of a tensor's gradient; None: any
    ranks: PositiveInt = 1  # that clip together: schemes refuse another number

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.masking and not issubclass(self.traits.payload, SparseMessage):
            raise ValueError(
                f"MomentumCorrection.masking needs a compressor that sends some elements, got {self.compressor}: use "
                "masking=False"
            )

    @property
    def title(self) -> str:
        return f"{self.compressor.title} with momentum"

    @cached_property
    def traits(self) -> CompressorTraits:
        return replace(self.compressor.traits, made_for_ranks=None if self.clip is None else self.ranks)

    @property
    def of_sums(self) -> Compressor[P]:
        """Sums have their momentum already."""
        return ErrorFeedback(self.compressor)

    def init(self, spec: FlatSpec, stream: int = 0) -> CompressorState:
        before = super().init(spec, stream)
        if MOMENTUM in before.elements:
            raise ValueError(f"MomentumCorrection of {self.compressor.title}, which has a momentum of its own: use one")
        return replace(before, elements={**before.elements, MOMENTUM: torch.zeros_like(before.elements[RESIDUAL])})

    @torch.no_grad()
    def observe(self, x: Tensor, state: CompressorState) -> Tensor | None:
        x, residual, _ = self._advanced(x, state)
        return self.compressor.observe(narrowed(corrected_by(residual, x), x.dtype), state)

    @torch.no_grad()
    def compress(self, x: Tensor, state: CompressorState) -> tuple[P, CompressorState]:
        check_tensor(x, state)
        x, residual, velocity = self._advanced(x, state)
        payload, left, next_state = self.compressor.compress_with_feedback(x, residual, state)
        if self.masking and isinstance(payload, SparseMessage) and isinstance(payload.maker, Sparsifier):
            velocity[payload.maker.elements(payload).indices.long()] = 0
        return payload, replace(next_state, elements={**next_state.elements, RESIDUAL: left, MOMENTUM: velocity})

    def _advanced(self, x: Tensor, state: CompressorState) -> tuple[Tensor, Tensor, Tensor]:
        """The clipped gradient, what is added to it (v without the gradient itself), and the next u."""
        x = self._clipped(x, state.spec)
        before, velocity = (state.elements[name].to(x.device) for name in (RESIDUAL, MOMENTUM))
        following = torch.mul(velocity, self.momentum, out=memory.empty_like(velocity))
        if self.nesterov:
            following.add_(x, alpha=self.momentum)
        residual = corrected_by(before, following)
        return x, residual, following if self.nesterov else following.add_(x)

    def _clipped(self, x: Tensor, spec: FlatSpec) -> Tensor:
        if self.clip is None:
            return x
        dtype, most = accumulation_dtype(x.dtype), self.clip * self.ranks**-0.5
        parts = [part for part in x.split(spec.lengths) if len(part)]
        norms = [torch.linalg.vector_norm(part, dtype=dtype) for part in parts]
        return torch.cat(
            [x[:0], *(part * (most / norm).clamp_(max=1) for part, norm in zip(parts, norms, strict=True))]
        )


def dgc(
    ratio: float,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    clip: PositiveFloat | None = None,
    ranks: PositiveInt = 1,
    warmup: Sequence[float] = (),
    steps_per_ratio: int = 0,
) -> MomentumCorrection[SparseMessage]:
    """Deep gradient compression of the tensors of a bucket. (Lin et al., 2018)

    It selects by exact top-k: the kernel takes its threshold from a sample too, in the same single pass over memory,
    and what the paper corrects in up to ten rounds it cuts exactly among the few candidates. So the count is fixed.

    Args:
        ratio: kept share of each tensor, in (0, 1].
        momentum, nesterov, masking, clip, ranks: as of MomentumCorrection.
        warmup: ratios of the first steps, in the paper 0.25, 0.0625, 0.015625 and 0.004, an epoch each.
        steps_per_ratio: steps with each of these.

    Raises:
        ValueError: for settings out of their range.
    """
    starts = tuple(number * steps_per_ratio for number in range(len(warmup) + 1))
    sparsifier = Warmup(tuple(map(TopK, (*warmup, ratio))), starts) if warmup else TopK(ratio)
    return MomentumCorrection(sparsifier, momentum, nesterov, masking, clip, ranks)
