"""Compressors in another basis: that the basis is orthonormal, what integers sum to, and what is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradsync.compressors import THC, DCTTopK, Summand
from gradsync.compressors.transform import cosines
from gradsync.tensors.bucket import FlatSpec, Segment
from tests.compressors.family import gradient, spec_of, with_agreement

CPU = torch.device("cpu")


def payloads_of(compressor: THC, inputs: Sequence[Tensor], step: int = 0) -> list[Summand]:
    states = [replace(compressor.init(FlatSpec.of(x), rank), step=step) for rank, x in enumerate(inputs)]
    states = with_agreement(compressor, inputs, states)
    return [compressor.compress(x, state)[0] for x, state in zip(inputs, states, strict=True)]


@pytest.mark.parametrize(("summands", "bits", "levels"), [(8, 4, 7), (16, 8, 7), (4, 8, 31), (127, 8, 1), (1, 8, 127)])
def test_integers_sum_to_the_sum_of_what_each_decodes_to_and_fit_8_bits(summands: int, bits: int, levels: int) -> None:
    compressor = THC(summands=summands, bits=bits)
    assert compressor.levels == levels
    assert compressor.traits.most_summands >= summands
    ranks = compressor.traits.most_summands
    payloads = payloads_of(compressor, [gradient(1000, torch.float64, rank % 3) for rank in range(ranks)])
    most = max(int(payload.data.abs().max()) for payload in payloads)
    assert payloads[0].data.dtype is torch.int8
    assert most <= levels and ranks * levels <= 127
    summed = replace(payloads[0], data=torch.stack([p.data for p in payloads]).sum(0, dtype=torch.int8))
    expected = torch.stack([compressor.decompress(payload) for payload in payloads]).sum(0)
    torch.testing.assert_close(compressor.decompress(summed), expected, rtol=1e-12, atol=1e-12)


def test_within_the_range_the_rounding_is_unbiased_and_smaller_than_a_level() -> None:
    compressor, x, draws = THC(summands=4, bits=8), gradient(512, torch.float64), 400
    spec = FlatSpec.of(x)
    mean = torch.zeros(512, dtype=torch.float64)
    for rank in range(draws):  # with the signs of one step, so that only the rounding differs
        state = with_agreement(compressor, [x], [compressor.init(spec, rank)])[0]
        payload, _ = compressor.compress(x, state)
        error = compressor.decompress(payload) - x
        unit = float(state.agreed[0]) / compressor.levels
        assert float(error.norm()) <= unit * math.sqrt(512)
        mean += error / draws
    assert float(mean.abs().max()) < 5 * unit / 2 / math.sqrt(draws)


def test_what_is_beyond_the_clip_is_cut_off_and_nothing_else() -> None:
    x = gradient(4096, torch.float64)
    clipped, whole = THC(bits=8, summands=1, clip=1.5), THC(bits=8, summands=1)
    ranges = [with_agreement(c, [x], [c.init(FlatSpec.of(x))])[0].agreed for c in (clipped, whole)]
    assert float(ranges[0]) == pytest.approx(1.5 * float(x.norm()) / 64, rel=1e-6)
    assert float(ranges[1]) > 2 * float(ranges[0])
    payload = payloads_of(clipped, [x])[0]
    share = float((payload.data.abs() == clipped.levels).double().mean())
    assert share == pytest.approx(math.erfc(1.5 / math.sqrt(2)), abs=0.02)


def test_nothing_and_what_is_nearly_nothing_become_nothing() -> None:
    for compressor in (THC(), THC(clip=2.0)):
        for value in (0.0, 1e-44):
            payload = payloads_of(compressor, [torch.full((100,), value)])[0]
            assert not compressor.decompress(payload).any()


def test_settings_of_thc_that_make_no_sense_are_refused() -> None:
    for settings, message in (
        ({"summands": 128}, "summands must be in"),
        ({"bits": 1}, "bits must be in"),
        ({"clip": 0.0}, "clip must be greater than 0"),
        ({"chunk": 100}, "chunk must be a power of two"),
    ):
        with pytest.raises(ValueError, match=message):
            THC(**settings)
    state = THC().init(spec_of(torch.float32))
    with pytest.raises(ValueError, match="needs the T that the ranks agreed on"):
        THC().compress(torch.zeros(state.spec.numel), state)


def test_the_cosine_transform_is_orthonormal_for_every_side() -> None:
    for n in range(1, 65):
        matrix = cosines(n, torch.float32, CPU)
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(n), rtol=0, atol=1e-6)
    ramp = cosines(8, torch.float64, CPU) @ torch.full((8,), 2.0, dtype=torch.float64)
    assert ramp.abs()[1:].max() < 1e-14
    assert float(ramp[0]) == pytest.approx(2 * math.sqrt(8))


SHAPES = [(), (1,), (64,), (65,), (701,), (0, 3), (5, 7), (64, 128), (70, 96), (131, 3), (16, 3, 3, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_coefficients_give_back_every_shape(shape: tuple[int, ...]) -> None:
    compressor, x = DCTTopK(chunk=16, k=256), gradient(math.prod(shape), torch.float32).view(shape)
    payload, _ = compressor.compress(x.flatten(), compressor.init(FlatSpec.of(x)))
    torch.testing.assert_close(compressor.decompress(payload), x.flatten(), rtol=0, atol=2e-6)


def test_sides_are_cut_into_equal_pieces_with_little_padding() -> None:
    tilings = [DCTTopK().tiling(shape) for shape in ((768, 3072), (50257, 96), (64, 3, 7, 7), (1000,), (30,))]
    assert [(t.height, t.width, t.tiles) for t in tilings] == [
        (64, 64, 12 * 48), (64, 48, 786 * 2), (64, 49, 3), (16, 64, 1), (1, 30, 1),
    ]  # fmt: skip


def test_of_each_rectangle_the_largest_coefficients_are_sent() -> None:
    x = gradient(64 * 128, torch.float64).view(64, 128)
    compressor = DCTTopK(chunk=64, k=40)
    payload, _ = compressor.compress(x.flatten(), compressor.init(FlatSpec.of(x)))
    error = (compressor.decompress(payload) - x.flatten()).square().sum()
    left, tail = cosines(64, torch.float64, CPU), 0.0
    for tile in x.split(64, dim=1):
        tail += float((left @ tile @ left.T).flatten().square().sort(descending=True).values[40:].sum())
    assert float(error) == pytest.approx(tail, rel=1e-12)
    assert payload.nbytes == 80 * (2 + 8)


def test_a_wave_is_one_coefficient() -> None:
    x = torch.outer(torch.ones(64), ((torch.arange(64) + 0.5) * 5 * math.pi / 64).cos())
    compressor = DCTTopK(chunk=64, k=1)
    payload, _ = compressor.compress(x.flatten(), compressor.init(FlatSpec.of(x)))
    torch.testing.assert_close(compressor.decompress(payload), x.flatten(), rtol=0, atol=1e-5)


def test_places_of_damaged_payloads_are_refused_and_large_ones_are_no_infinity() -> None:
    compressor, x = DCTTopK(chunk=16, k=4), torch.ones(10, 10)
    payload, _ = compressor.compress(x.flatten(), compressor.init(FlatSpec.of(x)))
    payload.data[:2] = 255
    with pytest.raises(ValueError, match="has places in its rectangles of 100 elements, got 65535"):
        compressor.decompress(payload)
    huge = torch.full((64, 64), 60000.0, dtype=torch.float16)
    payload, _ = DCTTopK().compress(huge.flatten(), DCTTopK().init(FlatSpec.of(huge)))
    assert DCTTopK().decompress(payload).isfinite().all()


def test_matrices_of_equal_shapes_are_transformed_each_for_itself() -> None:
    shapes = [(20, 33), (7,), (16, 3, 3, 3), (20, 33), (7,), (33, 20)]
    parts = [gradient(math.prod(shape), torch.float64, seed) for seed, shape in enumerate(shapes)]
    segments = tuple(Segment(f"tensor {i}", 0, len(part)) for i, part in enumerate(parts))
    compressor, spec = DCTTopK(chunk=16, k=20), FlatSpec(segments, tuple(shapes), torch.float64)
    together, _ = compressor.compress(torch.cat(parts), compressor.init(spec))
    alone = []
    for shape, part in zip(shapes, parts, strict=True):
        payload, _ = compressor.compress(part, compressor.init(FlatSpec.of(part.view(shape))))
        alone.append(compressor.decompress(payload))
    torch.testing.assert_close(compressor.decompress(together), torch.cat(alone), rtol=0, atol=1e-12)
