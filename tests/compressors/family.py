"""The compressors under test: one row a member, and the data they meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsync.compressors import (
    QSGD,
    THC,
    BlockInt,
    BlockTopK,
    Cast,
    Compressor,
    CompressorState,
    CountSketch,
    DCTTopK,
    ErrorFeedback,
    Float8,
    GaussianK,
    MomentumCorrection,
    Natural,
    OneBit,
    Payload,
    RandomK,
    ScaledSign,
    SharedBlockInt,
    SharedTernGrad,
    Sign,
    Signum,
    SketchML,
    TernGrad,
    Threshold,
    TopK,
    Unbiased,
    Warmup,
)
from gradsync.tensors.bucket import FlatSpec, Segment


@dataclass(frozen=True)
class Member:
    """`drops_nonfinite`: NaN and infinity may be among what is not sent (the engine's flag tells of them).

    `merges`: what a tensor becomes depends on the others in its bucket.
    `adds_momentum`: its residual takes up more than what came in.
    `tolerance`: of what error feedback keeps, relative to the largest element, beyond the rounding of float32.
    `decodes_sums`: a sum of payloads decodes to something else than the sum of what each decodes to.
    """

    compressor: Compressor
    drops_nonfinite: bool = False
    merges: bool = False
    adds_momentum: bool = False
    tolerance: float = 0.0
    decodes_sums: bool = False


ROUNDED_SCALE = 2**-8  # a scale is float32; what comes back in 16 bits is rounded to these

MEMBERS: dict[str, Member] = {
    "top_k": Member(TopK(0.01)),
    "top_k of all": Member(TopK(1.0)),
    "top_k in bfloat16": Member(TopK(0.05, values="bfloat16")),
    "error_feedback of top_k": Member(ErrorFeedback(TopK(0.05))),
    "random_k": Member(RandomK(0.05), drops_nonfinite=True),
    "random_k in blocks, scaled": Member(RandomK(0.25, block=32, scaled=True), drops_nonfinite=True, tolerance=1e-6),
    "random_k of each rank's own, scaled": Member(RandomK(0.25, shared=False, scaled=True), drops_nonfinite=True),
    "thc": Member(THC(summands=8)),
    "thc, clipped": Member(THC(summands=8, clip=2.5, chunk=256)),
    "dct_top_k": Member(DCTTopK()),
    "sketch_ml": Member(SketchML(0.05, buckets=16)),
    "count_sketch": Member(CountSketch(0.2, keep=0.01), drops_nonfinite=True, decodes_sums=True),
    "block_top_k": Member(BlockTopK(0.05, block=16)),
    "threshold": Member(Threshold(0.5, most_ratio=1)),
    "threshold with little room": Member(Threshold(0.5, most_ratio=0.01)),
    "gaussian_k": Member(GaussianK(0.05)),
    "momentum_correction": Member(MomentumCorrection(TopK(0.05)), adds_momentum=True),
    "warmup": Member(Warmup((TopK(0.1), TopK(0.05)), (0, 2))),
    "bfloat16": Member(Cast("bfloat16")),
    "float16": Member(Cast("float16")),
    "int8": Member(BlockInt(8)),
    "stochastic int4": Member(BlockInt(4, 100, stochastic=True)),
    "shared int8": Member(SharedBlockInt(3)),
    "stochastic shared int8": Member(SharedBlockInt(3, stochastic=True)),
    "qsgd of 8 bits": Member(QSGD(127)),
    "qsgd of 4 bits": Member(QSGD(7, norm="max")),
    "terngrad": Member(TernGrad(block=256)),
    "clipped terngrad": Member(TernGrad(clip=2.5)),
    "shared terngrad": Member(SharedTernGrad(4)),
    "natural": Member(Natural()),
    "e4m3": Member(Float8("e4m3", 256)),
    "e5m2": Member(Float8("e5m2")),
    "scaled_sign": Member(ScaledSign(), tolerance=ROUNDED_SCALE),
    "scaled_sign of blocks": Member(ScaledSign(block=100), tolerance=ROUNDED_SCALE),
    "scaled_sign by rms": Member(ScaledSign("rms"), tolerance=ROUNDED_SCALE),
    "one_bit": Member(OneBit(), tolerance=ROUNDED_SCALE),
    "one_bit of blocks": Member(OneBit(block=64), tolerance=ROUNDED_SCALE),
    "sign": Member(Sign(), drops_nonfinite=True),
    "signum": Member(Signum(0.5), drops_nonfinite=True),
    "error_feedback of scaled_sign": Member(ErrorFeedback(ScaledSign()), tolerance=ROUNDED_SCALE),
}
SHARES = ("ratio", "keep", "most_ratio")  # settings in (0, 1]
LENGTHS = (0, 1, 700, 33, 0, 2, 4097, 33, 700)  # tensors that share a bucket, some of them alike


def spec_of(dtype: torch.dtype, lengths: Sequence[int] = LENGTHS) -> FlatSpec:
    segments = tuple(Segment(f"tensor {number}", 0, length) for number, length in enumerate(lengths))
    return FlatSpec(segments, tuple((length,) for length in lengths), dtype)


def gradient(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def data(size: int = 4096) -> dict[str, Tensor]:
    """Returns the tensors of `size` elements on which every law must hold."""
    normal = gradient(size, torch.float32)
    spike = torch.zeros(size)
    spike[size // 3] = 5.0
    return {
        "zeros": torch.zeros(size),
        "normal": normal,
        "shifted": 0.3 + 0.1 * normal,
        "constant": torch.full((size,), -2.5),
        "spike": spike,
        "alternating": torch.ones(size) * torch.tensor([1.0, -1.0]).repeat(size // 2),
        "heavy tail": normal**5,
        "small": 1e-20 * normal,
        "mostly zero": normal * (gradient(size, torch.float32, 1) > 1.5),
    }


def no_feedback(compressor: Compressor, spec: FlatSpec) -> str:
    """Returns words of the error by which error feedback refuses the compressor, or ""."""
    law = compressor.law(spec)
    if not compressor.traits.feeds_back:
        return "CountSketch|count_sketch"
    return "may diverge" if isinstance(law, Unbiased) and law.omega >= 1 else ""


def compressed(
    compressor: Compressor, x: Tensor, state: CompressorState | None = None
) -> tuple[Payload, CompressorState]:
    """Compresses as one rank alone does: ranks agree on nothing."""
    state = state if state is not None else compressor.init(FlatSpec.of(x))
    return compressor.compress(x, with_agreement(compressor, [x], [state])[0])


def with_agreement(
    compressor: Compressor, inputs: Sequence[Tensor], states: Sequence[CompressorState]
) -> list[CompressorState]:
    """Returns the states of ranks that have agreed on what they need to."""
    observed = [compressor.observe(x, state) for x, state in zip(inputs, states, strict=True)]
    if observed[0] is None:
        return list(states)
    agreed = torch.stack(observed).amax(dim=0)
    return [replace(state, agreed=agreed) for state in states]
