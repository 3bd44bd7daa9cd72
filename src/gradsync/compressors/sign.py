"""Compressors that send the sign of each element in one bit, and a scale in place of the magnitudes.

0 and -0 count as positive. This matters for tensors that are mostly zeros: zeros are decoded as the scale. Error
feedback undoes that in the next step, but a majority vote without it moves weights that have no gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from .. import kernels
from ..inputs.settings import Decay, NonNegativeInt
from ..kernels import SignScale, accumulation_dtype
from ..tensors import allocator as memory
from ..tensors.bucket import FlatSpec
from .base import (
    Compressor,
    CompressorState,
    CompressorTraits,
    Message,
    by_spec,
    check_payload,
    check_tensor,
    fields,
    fields_nbytes,
)
from .expressions import register
from .law import Biased, Contraction, Law

MOMENTUM = "momentum"  # the key of the momentum in `CompressorState.elements`


class Signs(Compressor[Message]):
    """Base class of compressors that send one sign bit an element. A message has float32 scales, then the bits."""

    @property
    @abstractmethod
    def kept(self) -> tuple[SignScale, int]:
        """The kind of scale that blocks have, and the elements of a block (0: a block is a whole tensor)."""

    @torch.no_grad()
    def compress(self, x: Tensor, state: CompressorState) -> tuple[Message, CompressorState]:
        check_tensor(x, state)
        return self._packed(x, state), state.next()

    @torch.no_grad()
    def compress_with_feedback(
        self, x: Tensor, residual: Tensor, state: CompressorState
    ) -> tuple[Message, Tensor, CompressorState]:
        check_tensor(x, state)
        left = memory.empty_like(residual)
        return self._packed(x, state, residual, left), left, state.next()

    def decompress(self, payload: Message) -> Tensor:
        out = memory.empty(payload.spec.numel, payload.spec.dtype, payload.data.device)
        self.sum_into(out, [payload])
        return out

    def sum_into(self, out: Tensor, payloads: Sequence[Message], scale: float = 1.0) -> None:
        for payload in payloads:
            check_payload(self, payload, out)
        parts = [self._parts(payload) for payload in payloads]
        kind, block = self.kept
        kernels.unpack_signs(parts, payloads[0].spec.sections, out, block=block, scale=kind, factor=scale)

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return fields_nbytes(*self._layout(spec))

    def _packed(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None, left: Tensor | None = None
    ) -> Message:
        """Returns the message of x + residual; overwrites `left` by what the message leaves out.

        `x` may have a wider dtype than the state's tensor.
        """
        data = memory.zeros(self.nbytes(state.spec), torch.uint8, x.device)
        payload = Message(self, state.spec, state.step, data)
        words, scales = self._parts(payload)
        kind, block = self.kept
        kernels.pack_signs(
            x, state.spec.sections, words, scales, block=block, scale=kind, residual=residual, next_residual=left
        )
        return payload

    @by_spec
    def _layout(self, spec: FlatSpec) -> tuple[tuple[torch.dtype, int], tuple[torch.dtype, int]]:
        kind, block = self.kept
        shape = kernels.sign_scales_shape(spec.sections, block=block, scale=kind)
        return (torch.float32, torch.Size(shape).numel()), (torch.uint8, -(-spec.numel // 8))

    def _parts(self, payload: Message) -> tuple[Tensor, Tensor]:
        """Returns the bits, (ceil(numel / 8),) uint8, and the scales, float32, as views of the message."""
        scales, words = fields(payload.data, *self._layout(payload.spec))
        return words, scales.view(-1, 2) if self.kept[0] == "two" else scales

    def _least(self, spec: FlatSpec) -> Contraction:
        """Returns the law of a contraction by 1 / d, with d the number of elements in the longest block."""
        block = self.kept[1]
        longest = max(spec.lengths, default=0)
        return Contraction(1 / max(1, min(block, longest) if block else longest))


@register
@dataclass(frozen=True)
class ScaledSign(Signs):
    """Sends signs, and one magnitude for each tensor, or for each `block` of elements.

    "mean": the mean magnitude. (EFSignSGD: Karimireddy et al., 2019) With d elements, |C(x) - x|^2 is
    (1 - |x|_1^2 / (d |x|^2)) |x|^2, where zeros count like other elements, as they are decoded as the scale: a
    contraction by at least 1 / d, by 2 / pi for normal data, exact for a constant. Needs ErrorFeedback.
    "rms": the root mean square. (1-bit Adam: Tang et al., 2021) It keeps |x| but is no contraction: the squared error
    is 2 - 2 |x|_1 / (sqrt(d) |x|) times |x|^2, for one spike among 64 zeros 1.75 times. Residuals may grow there: use
    "rms" for tensors of even magnitudes, such as momenta.
    Wire: 1 bit an element and 4 bytes a block.

    Attributes:
        scale: the magnitude: "mean" or "rms".
        block: the number of elements that share a magnitude; 0: a whole tensor.
    """

    scale: Literal["mean", "rms"] = "mean"
    block: NonNegativeInt = 0

    @property
    def kept(self) -> tuple[SignScale, int]:
        return self.scale, self.block

    def law(self, spec: FlatSpec) -> Law:
        if self.scale == "mean":
            return self._least(spec)
        return Biased("with the root mean square as the scale, a tensor with one spike has an error larger than itself")


@register
@dataclass(frozen=True)
class OneBit(Signs):
    """Sends signs, the mean of the negative elements, and the mean of the other elements. (Seide et al., 2014)

    Each tensor, or each `block` of elements, has its two means. No other two levels have a smaller squared error, so
    the error is never larger than that of ScaledSign: |error|^2 <= (1 - 1 / d) |x|^2 for blocks of d elements. In the
    paper a block is a column. Needs ErrorFeedback.
    Wire: 1 bit an element and 8 bytes a block.

    Attributes:
        block: the number of elements that share two means; 0: a whole tensor.
    """

    block: NonNegativeInt = 0

    @property
    def kept(self) -> tuple[SignScale, int]:
        return "two", self.block

    def law(self, spec: FlatSpec) -> Law:
        return self._least(spec)


@register
@dataclass(frozen=True)
class Sign(Signs):
    """Sends signs only, decoded as +1 or -1, for `schemes.MajorityVote`. (SignSGD: Bernstein et al., 2018)

    Zero and NaN become +1, infinity +1 or -1 by its sign: receivers cannot see that there was NaN or infinity.
    Wire: 1 bit an element.
    """

    traits = CompressorTraits(follows_scale=False)

    @property
    def kept(self) -> tuple[SignScale, int]:
        return "one", 0

    def law(self, spec: FlatSpec) -> Law:
        return Biased("signs have no magnitude: for some gradients, steps along the signs diverge")


@register
@dataclass(frozen=True)
class Signum(Sign):
    """Sends the signs of a rank's momentum, decoded as +1 or -1. (SIGNUM: Bernstein et al., 2018)

    m = momentum * m + (1 - momentum) * gradient, in float32 (float64 for float64), starts from 0; with `momentum` 0
    this is Sign. NaN and infinity stay in m: do not keep the state of a step that had them. Otherwise as Sign.
    Wire: 1 bit an element.

    Attributes:
        momentum: the weight of earlier gradients, in [0, 1).
    """

    momentum: Decay = 0.9

    @property
    def of_sums(self) -> Sign:
        """`Sign`, for sums over ranks that a rank sends on: they contain momentum already."""
        return Sign()

    def init(self, spec: FlatSpec, stream: int = 0) -> CompressorState:
        zeros = torch.zeros(spec.numel, dtype=accumulation_dtype(spec.dtype))
        return replace(super().init(spec, stream), elements={MOMENTUM: zeros})

    @torch.no_grad()
    def compress(self, x: Tensor, state: CompressorState) -> tuple[Message, CompressorState]:
        check_tensor(x, state)
        before = state.elements[MOMENTUM].to(x.device)
        momentum = torch.mul(before, self.momentum, out=memory.empty_like(before)).add_(x, alpha=1 - self.momentum)
        return self._packed(momentum, state), state.next(elements={**state.elements, MOMENTUM: momentum})

    def compress_with_feedback(
        self, x: Tensor, residual: Tensor, state: CompressorState
    ) -> tuple[Message, Tensor, CompressorState]:
        """Compresses with error feedback: adds `residual` to the gradient `x`, both (numel,), before momentum.

        Returns the payload, the next residual and the next state. The next residual is x + residual less the decoded
        payload, not the momentum less it.
        """
        return Compressor.compress_with_feedback(self, x, residual, state)
