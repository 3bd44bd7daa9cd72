"""Deep gradient compression: each rank applies momentum before it selects elements. (Lin et al., 2018)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from ..inputs.settings import Decay, PositiveFloat, PositiveInt
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
from .expressions import register
from .feedback import RESIDUAL, ErrorFeedback, Feedback
from .sparsify import TopK
from .warmup import Warmup

P = TypeVar("P", bound=Payload)
MOMENTUM = "momentum"  # the key of the momentum in `CompressorState.elements`


@register
@dataclass(frozen=True)
class MomentumCorrection(Feedback[P]):
    """Momentum on each rank, with a residual: u = m u + g; v = v + u; sends C(v), and v keeps the rest.

    g is the gradient, u the momentum, v the residual, C the inner compressor. Nesterov: u = m (u + g); v = v + u + g.
    MomentumCorrection takes the place of ErrorFeedback, and of the optimiser's momentum: set that to 0.
    With `masking` (factor masking in Lin et al., 2018) u is zeroed in elements that were sent, so that old gradients
    do not move a parameter again after its update; that needs a compressor that sends only some elements. With `clip`
    the gradient of each tensor in the bucket is first scaled to a norm of at most clip / sqrt(ranks), so that the sum
    of independent gradients of all ranks has a norm of about `clip`.
    u and v are float32 (float64 for float64). To send some tensors dense and still with this momentum, use
    MomentumCorrection(a dense compressor, masking=False): the sum over ranks is the update of an optimiser with
    momentum.
    Wire: as the inner compressor.

    Attributes:
        momentum: m, in [0, 1).
        nesterov: whether the momentum is Nesterov's.
        masking: whether u is zeroed in elements that were sent.
        clip: about the largest norm of a tensor's gradient, summed over the ranks; None: no clipping.
        ranks: how many ranks' gradients are summed; with `clip`, schemes refuse another number.
    """

    momentum: Decay = 0.9
    nesterov: bool = False
    masking: bool = True
    clip: PositiveFloat | None = None
    ranks: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.masking and not issubclass(self.traits.payload, SparseMessage):
            raise ValueError(
                f"MomentumCorrection.masking needs a compressor that sends only some elements, got {self.compressor}: "
                "use masking=False"
            )

    @property
    def title(self) -> str:
        return f"{self.compressor.title} with momentum"

    @cached_property
    def traits(self) -> CompressorTraits:
        inner = self.compressor.traits
        if self.clip is None:
            return inner
        return replace(inner, made_for_ranks=self.ranks, follows_scale=False)

    @property
    def of_sums(self) -> Compressor[P]:
        """The inner compressor with error feedback and without momentum, for sums over ranks that a rank sends on.

        The sum contains momentum already, as each rank applied it to its own gradient.
        """
        return ErrorFeedback(self.compressor)

    def init(self, spec: FlatSpec, stream: int = 0) -> CompressorState:
        before = super().init(spec, stream)
        if MOMENTUM in before.elements:
            raise ValueError(
                f"MomentumCorrection of {self.compressor.title}, which has a momentum already: use one of them"
            )
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
        """Returns the clipped gradient, the residual to add before compression, and the next momentum: (numel,)."""
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
    """Returns the compressor of deep gradient compression: top-k with momentum on each rank. (Lin et al., 2018)

    The selection is exact, so the number of elements is fixed. The paper takes the threshold from a sample and corrects
    it up to ten times; our kernel takes a threshold from a sample too, then selects exactly among the few elements
    above it, in the same pass over memory.

    Args:
        ratio: kept share of each tensor, in (0, 1].
        momentum, nesterov, masking, clip, ranks: as in MomentumCorrection.
        warmup: ratios of the first steps, in the paper 0.25, 0.0625, 0.015625 and 0.004, an epoch each.
        steps_per_ratio: steps with each of the warm-up ratios.

    Raises:
        ValueError: for a setting out of range.
    """
    starts = tuple(number * steps_per_ratio for number in range(len(warmup) + 1))
    sparsifier = Warmup(tuple(map(TopK, (*warmup, ratio))), starts) if warmup else TopK(ratio)
    return MomentumCorrection(sparsifier, momentum, nesterov, masking, clip, ranks)
