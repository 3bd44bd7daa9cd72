"""Signs as bits with scales, and back, in blocks and sections that begin at any bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, get_args

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gradsync import kernels
from gradsync.kernels import Sections, SignScale, accumulation_dtype, reference, sign_scales_shape
from gradsync.kernels.reference.blocks import ordered_sum
from tests.kernels.native import DTYPES, assert_same_bits, cpu, native, special_values
from tests.kernels.on_device import every

SCALES = get_args(SignScale)
LENGTHS = (0, 1, 7, 0, 1024, 2051, 33, 40_000)  # sections begin inside of bytes


def numbers(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Returns numbers of all magnitudes, and zeros of both signs."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    x[::5], x[1::10] = 0.0, -0.0
    return x.to(dtype)


def packed(
    kernels: Any,
    x: Tensor,
    lengths: Sequence[int],
    block: int,
    scale: SignScale,
    residual: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns words, scales and the residual; nothing is written behind them."""
    sections, nbytes = Sections(tuple(lengths)), -(-len(x) // 8)
    words = torch.full((nbytes + 8,), 77, dtype=torch.uint8)
    scales = torch.full(sign_scales_shape(sections, block=block, scale=scale), 77.0)
    left = None if residual is None else torch.full((len(x) + 8,), 77.0, dtype=residual.dtype)
    kernels.pack_signs(
        x, sections, words[:nbytes], scales, block=block, scale=scale, residual=residual,
        next_residual=None if left is None else left[: len(x)], **options,
    )  # fmt: skip
    assert (words[nbytes:] == 77).all() and (left is None or (left[len(x) :] == 77).all())
    return words[:nbytes], scales, None if left is None else left[: len(x)]


def unpacked(
    kernels: Any, parts: Sequence[tuple[Tensor, Tensor]], lengths: Sequence[int], dtype: torch.dtype, block: int,
    scale: SignScale, factor: float = 1.0, **options: Any,
) -> Tensor:  # fmt: skip
    size = sum(lengths)
    out = torch.full((size + 8,), 77.0, dtype=dtype)
    kernels.unpack_signs(
        parts, Sections(tuple(lengths)), out[:size], block=block, scale=scale, factor=factor, **options
    )
    assert (out[size:] == 77).all()
    return out[:size]


@pytest.mark.parametrize("scale", SCALES)
def test_the_definition_is_what_it_says(scale: SignScale) -> None:
    x, lengths, block = numbers(100, torch.float32), (40, 60), 32
    words, scales, _ = packed(reference, x, lengths, block, scale)
    bits = [int(words[i // 8]) >> i % 8 & 1 for i in range(104)]
    assert bits == [int(v < 0) for v in x.tolist()] + [0] * 4
    expected, got = [], unpacked(reference, [(words, scales)], lengths, torch.float64, block, scale)
    for begin, end in ((0, 32), (32, 40), (40, 72), (72, 100)):
        part = x[begin:end].tolist()
        below, others = [v for v in part if v < 0], [v for v in part if not v < 0]
        mean = math.fsum(map(abs, part)) / len(part)
        rms = math.sqrt(math.fsum(v * v for v in part) / len(part))
        two = math.fsum(others) / max(len(others), 1), math.fsum(below) / max(len(below), 1)
        positive, negative = {"mean": (mean, -mean), "rms": (rms, -rms), "two": two, "one": (1, -1)}[scale]
        expected += [negative if v < 0 else positive for v in part]
    assert got.tolist() == pytest.approx(expected, rel=1e-7)


def test_sums_in_their_order_are_as_exact_as_any() -> None:
    for width in (1, 31, 1024, 1025, 40_000):
        addends = numbers(3 * width, torch.float64).view(3, width)
        exact = [math.fsum(row) for row in addends.tolist()]
        assert ordered_sum(addends).tolist() == pytest.approx(exact, rel=1e-13, abs=1e-12)


@native
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_signs_have_the_bits_of_the_definition(dtype: torch.dtype, scale: SignScale, module: ModuleType) -> None:
    size = sum(LENGTHS)
    for threads, block in zip((1, 3, 1, 3, 3), (0, 5, 32, 1000, 33_000), strict=True):
        options = {"threads": threads, "module": module}
        parts = []
        for seed in range(3):
            x = numbers(size, dtype, seed)
            residual = numbers(size, accumulation_dtype(dtype), seed + 9) if seed else None
            got = packed(cpu, x, LENGTHS, block, scale, residual, **options)
            for mine, theirs in zip(got, packed(reference, x, LENGTHS, block, scale, residual), strict=True):
                assert mine is theirs or assert_same_bits(mine, theirs) is None
            parts.append(got[:2])
        total = unpacked(cpu, parts, LENGTHS, dtype, block, scale, 1 / 3, **options)
        assert_same_bits(total, unpacked(reference, parts, LENGTHS, dtype, block, scale, 1 / 3))


@native
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 3, 8, 31, 32, 33, 200, 1025]), max_size=6),
    block=st.sampled_from([0, 1, 7, 64, 1024]),
    scale=st.sampled_from(SCALES),
    threads=st.integers(1, 4),
    feedback=st.booleans(),
    ranks=st.integers(1, 9),
)
def test_sections_may_begin_at_any_bit(
    module: ModuleType, lengths: list[int], block: int, scale: SignScale, threads: int, feedback: bool, ranks: int
) -> None:
    x = numbers(sum(lengths), torch.float32)
    residual = numbers(len(x), torch.float32, 1) if feedback else None
    got = packed(cpu, x, lengths, block, scale, residual, threads=threads, module=module)
    expected = packed(reference, x, lengths, block, scale, residual)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine is theirs or assert_same_bits(mine, theirs) is None
    parts = [(got[0].roll(rank), got[1] / (rank + 1)) for rank in range(ranks)]
    back = unpacked(cpu, parts, lengths, torch.float32, block, scale, 0.3, threads=threads, module=module)
    assert_same_bits(back, unpacked(reference, parts, lengths, torch.float32, block, scale, 0.3))


@native
def test_large_outputs_past_the_caches_are_the_same(module: ModuleType) -> None:
    size = (32 << 20) // 2 + 77
    words = torch.randint(256, (-(-size // 8),), generator=torch.Generator().manual_seed(0)).byte()
    scales = torch.rand(2, generator=torch.Generator().manual_seed(1))
    for dtype, lengths in ((torch.bfloat16, (3, size - 3)), (torch.float32, (size // 2 + 1, 0, 8))):
        part = (words[: -(-sum(lengths) // 8)], scales[: sum(map(bool, lengths))])
        got = unpacked(cpu, [part], lengths, dtype, 0, "mean", module=module)
        assert_same_bits(got, unpacked(reference, [part], lengths, dtype, 0, "mean"))


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_are_told_by_the_scale_of_their_block(kernels: Any, dtype: torch.dtype) -> None:
    for special in special_values(dtype)[2:5]:
        x = torch.ones(70, dtype=dtype)
        x[40] = special
        for scale in ("mean", "rms", "two"):
            words, scales, _ = packed(kernels, x, (70,), 32, scale)
            back = unpacked(kernels, [(words, scales)], (70,), dtype, 32, scale)
            assert not back[40].isfinite() and (back[:32] == 1).all() and (back[64:] == 1).all()


@every
def test_what_does_not_fit_is_refused(kernels: Any) -> None:
    x, words, one = torch.ones(9), torch.zeros(2).byte(), torch.zeros(1)
    whole = Sections((9,))
    options: dict[str, Any] = {"block": 0, "scale": "mean"}
    with pytest.raises(TypeError, match="x must be float"):
        kernels.pack_signs(x.int(), whole, words, one, **options)
    with pytest.raises(TypeError, match="words must be uint8"):
        kernels.pack_signs(x, whole, one, one, **options)
    with pytest.raises(TypeError, match="scales must be"):
        kernels.pack_signs(x, whole, words, one.double(), **options)
    for sections, bits, scales, changed in (
        (Sections((8,)), words, one, {}),
        (whole, words[:1], one, {}),
        (whole, words, torch.zeros(2), {}),
        (whole, words, one, {"scale": "two"}),
        (whole, words, one, {"scale": "one"}),
        (whole, words, one, {"scale": "three"}),
        (whole, words, one, {"block": -1}),
        (whole, words, one, {"residual": x}),
        (whole, words, one, {"next_residual": x.clone()}),
        (whole, words, one, {"residual": x[1:], "next_residual": x.clone()}),
    ):
        with pytest.raises(ValueError):
            kernels.pack_signs(x, sections, bits, scales, **{**options, **changed})
        if "residual" not in changed and "next_residual" not in changed:
            with pytest.raises(ValueError):
                kernels.unpack_signs([(bits, scales)], sections, x, **{**options, **changed})
    with pytest.raises(TypeError, match="residual must be"):
        kernels.pack_signs(x, whole, words, one, residual=x.half(), next_residual=x.clone(), **options)
    with pytest.raises(ValueError):
        kernels.unpack_signs([], whole, x, **options)
    assert not words.any() and not one.any()


def test_every_implementation_can_be_chosen() -> None:
    x, words, scales, out = torch.tensor([1.0, -3.0, 2.0]), torch.zeros(1).byte(), torch.zeros(1), torch.zeros(3)
    for implementation in ("reference", "native", "auto"):
        with kernels.use(implementation):
            kernels.pack_signs(x, Sections((3,)), words.zero_(), scales.zero_(), block=0, scale="mean")
            kernels.unpack_signs([(words, scales)], Sections((3,)), out.zero_(), block=0, scale="mean")
            assert (words.tolist(), scales.tolist(), out.tolist()) == ([2], [2.0], [2.0, -2.0, 2.0])
