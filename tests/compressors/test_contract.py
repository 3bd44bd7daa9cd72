"""The promises of every compressor. A member of the family is a row of `MEMBERS`, in family.py."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from gradsync.compressors import (
    Absolute,
    Biased,
    Compressor,
    CompressorState,
    Contraction,
    ErrorFeedback,
    Exact,
    MomentumCorrection,
    Summand,
    Threshold,
    TopK,
    Unbiased,
)
from gradsync.tensors.bucket import FlatSpec
from tests.compressors.family import (
    MEMBERS,
    SHARES,
    Member,
    compressed,
    data,
    gradient,
    no_feedback,
    spec_of,
    with_agreement,
)
from tests.kernels.native import DTYPES, assert_same_bits, special_values

pytestmark = pytest.mark.usefixtures("stale_memory")

SIZES = [0, 1, 7, 8, 31, 32, 33, 1000]
DRAWS = 100  # of a law's mean; it may miss by so many standard deviations of the mean:
SIGMAS = 4.5

members = pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@members
@dtypes
def test_shape_dtype_and_size_are_as_announced(member: Member, dtype: torch.dtype) -> None:
    compressor = member.compressor
    for spec in [*(spec_of(dtype, [size]) for size in SIZES), spec_of(dtype)]:
        x = gradient(spec.numel, dtype)
        payload, state = compressed(compressor, x, compressor.init(spec))
        back = compressor.decompress(payload)
        assert (back.shape, back.dtype) == (x.shape, x.dtype)
        assert isinstance(payload, compressor.traits.payload)
        assert compressor.nbytes(spec) == payload.nbytes
        assert compressed(compressor, x, state)[0].nbytes == compressor.nbytes(spec, 1)


@members
def test_a_step_repeats_and_changes_nothing_that_was_passed_in(member: Member) -> None:
    compressor, spec = member.compressor, spec_of(torch.float32)
    x = gradient(spec.numel, torch.float32)
    _, state = compressed(compressor, x, compressor.init(spec, stream=3))
    before, kept, generator = x.clone(), copied(state), torch.get_rng_state()
    first, again = (compressed(compressor, x, state) for _ in range(2))
    assert_same_bits(first[0].data, again[0].data)
    assert_same_state(first[1], again[1])
    assert_same_state(state, kept)
    assert_same_bits(x, before)
    assert_same_bits(compressed(compressor, x.clone().requires_grad_(), state)[0].data, first[0].data)
    assert torch.equal(torch.get_rng_state(), generator), "draws are the compressor's own"
    assert (first[1].step, first[1].stream) == (2, 3)


def copied(state: CompressorState) -> CompressorState:
    elements = {name: kept.clone() for name, kept in state.elements.items()}
    tensors = {name: tuple(part.clone() for part in kept) for name, kept in state.tensors.items()}
    return replace(state, elements=elements, tensors=tensors)


def assert_same_state(got: CompressorState, expected: CompressorState) -> None:
    assert (got.spec, got.stream, got.step, got.agreed) == (expected.spec, expected.stream, expected.step, None)
    assert got.elements.keys() == expected.elements.keys()
    assert got.tensors.keys() == expected.tensors.keys()
    for name, kept in expected.elements.items():
        assert_same_bits(got.elements[name], kept)
    for name, parts in expected.tensors.items():
        for part, kept in zip(got.tensors[name], parts, strict=True):
            assert_same_bits(part, kept)


@members
def test_the_error_is_as_the_law_says(member: Member) -> None:
    compressor = member.compressor
    for case, x in data().items():
        law = compressor.law(FlatSpec.of(x))
        in_expectation = isinstance(law, Unbiased) or (isinstance(law, Contraction) and law.in_expectation)
        draws = DRAWS if in_expectation else 1
        # Sums of errors, not single ones: an element that is rarely sent at all may be in none of the draws.
        signs = gradient(x.numel(), torch.float64, seed=1).sign()
        directions = torch.stack([x.double().sign(), x.double(), signs])
        errors, projected = [], []
        for draw in range(draws):  # of all ranks, by the step, or of each, by its stream
            payload, _ = compressed(compressor, x, replace(compressor.init(FlatSpec.of(x), draw), step=draw))
            error = compressor.decompress(payload).double() - x.double()
            errors.append(float(error.square().sum()))
            projected.append(directions @ error)
        norm = float(x.double().square().sum())
        rounding = 1e-12 * norm
        spread = SIGMAS * torch.tensor(errors).std().item() / math.sqrt(draws) if draws > 1 else 0.0
        match law:
            case Exact():
                assert errors == [0.0], case
            case Unbiased(omega):
                assert sum(errors) / draws <= omega * norm + spread + rounding, case
                sums = torch.stack(projected)
                bound = SIGMAS * sums.std(dim=0) / math.sqrt(draws) + 1e-6 * directions.abs() @ x.abs().double()
                assert (sums.mean(dim=0).abs() <= bound).all(), case
            case Contraction(delta):
                assert sum(errors) / draws <= (1 - delta) * norm + spread + rounding, case
            case Absolute(tau):
                assert math.sqrt(errors[0] / x.numel()) <= tau
            case Biased():
                pass


@members
@dtypes
def test_residual_plus_sent_equals_what_came_in(member: Member, dtype: torch.dtype) -> None:
    compressor = member.compressor
    if member.adds_momentum:
        pytest.skip("what is sent and left has momentum in it: see test_momentum.py")
    spec = spec_of(dtype)
    if refused := no_feedback(compressor, spec):
        with pytest.raises(ValueError, match=refused):
            ErrorFeedback(compressor).init(spec)
        return
    if not isinstance(compressor, ErrorFeedback):
        compressor = ErrorFeedback(compressor)
    state = compressor.init(spec)
    for step in range(4):
        x = gradient(spec.numel, dtype, seed=step)
        came_in = state.elements["residual"] + x
        payload, state = compressed(compressor, x, state)
        sent = torch.empty_like(came_in)
        compressor.sum_into(sent, [payload])  # as receivers do, who round the sum and not what is in it
        left = state.elements["residual"]
        assert left.dtype == came_in.dtype
        rounding = torch.finfo(came_in.dtype).eps * came_in.abs().max() * 2
        assert (sent + left - came_in).abs().max() <= rounding + member.tolerance * came_in.abs().max()


@members
def test_residuals_stay_bounded(member: Member) -> None:
    """Residuals of the laws that promise bounds, and of signs with their mean magnitude."""
    spec = spec_of(torch.float32, [600])
    law = member.compressor.law(spec)
    if isinstance(law, Biased) or member.adds_momentum or no_feedback(member.compressor, spec):
        pytest.skip("nothing is promised, or error feedback refused")
    feedback = isinstance(member.compressor, ErrorFeedback)
    compressor = member.compressor if feedback else ErrorFeedback(member.compressor)
    state, norms = compressor.init(spec), []
    for step in range(120):
        _, state = compressed(compressor, gradient(600, torch.float32, step), state)
        norms.append(float(state.elements["residual"].norm()))
    assert max(norms[60:]) <= 3 * max(norms[:60]) + 1e-3


@members
def test_payloads_add_up(member: Member) -> None:
    """Payloads are added as an all-gather adds them: in order, in float32, scaled once."""
    compressor, spec = member.compressor, spec_of(torch.float32)
    inputs = [gradient(spec.numel, torch.float32, seed) for seed in range(3)]
    states = with_agreement(compressor, inputs, [compressor.init(spec, stream) for stream in range(3)])
    payloads = [compressor.compress(x, state)[0] for x, state in zip(inputs, states, strict=True)]
    total = sum(compressor.decompress(payload).double() for payload in payloads)
    if member.decodes_sums:
        summed = replace(payloads[0], data=sum(payload.data for payload in payloads))
        total = compressor.decompress(summed).double()
    largest = float(total.abs().max())
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((spec.numel,), 7.0, dtype=dtype)
        compressor.sum_into(out, payloads, 1 / 3)
        torch.testing.assert_close(
            out.double(), total / 3, rtol=3 * torch.finfo(dtype).eps, atol=3e-7 * largest + member.tolerance
        )
    if issubclass(compressor.traits.payload, Summand):
        summed = replace(payloads[0], data=sum(payload.data for payload in payloads))
        numbers = summed.data.dtype  # of 16 bits, sums are rounded
        rounding = 4 * torch.finfo(numbers).eps if numbers.is_floating_point else 1e-6
        torch.testing.assert_close(
            compressor.decompress(summed).double(), total, rtol=rounding, atol=rounding * largest
        )


@members
def test_tensors_in_a_bucket_are_compressed_as_if_each_had_its_own(member: Member) -> None:
    compressor, spec = member.compressor, spec_of(torch.float32)
    if member.merges:
        pytest.skip("this one sees the bucket as one tensor, as its docstring says")
    x = torch.cat([gradient(length, torch.float32, i) * 10.0**i for i, length in enumerate(spec.lengths)])
    together = compressor.decompress(compressed(compressor, x, compressor.init(spec))[0])
    offset = 0
    for number, length in enumerate(spec.lengths):
        part = slice(offset, offset + length)
        alone = replace(spec, segments=spec.segments[number : number + 1], shapes=spec.shapes[number : number + 1])
        payload, _ = compressed(compressor, x[part].clone(), compressor.init(alone))
        torch.testing.assert_close(together[part], compressor.decompress(payload), rtol=1e-6, atol=0)
        offset += length


@members
@dtypes
def test_nan_and_infinity_do_not_become_finite_lies(member: Member, dtype: torch.dtype) -> None:
    compressor = member.compressor
    if member.drops_nonfinite:
        pytest.skip("they may be among what is not sent")
    for special in special_values(dtype)[2:5]:
        x = gradient(1000, dtype)
        x[500] = special
        sent = compressor.decompress(compressed(compressor, x)[0])
        assert not sent[500].isfinite()


@members
def test_what_is_no_floating_point_tensor_of_the_state_is_refused(member: Member) -> None:
    compressor = member.compressor
    for dtype in (torch.int32, torch.complex64):
        with pytest.raises(TypeError, match="floating-point tensors, got"):
            compressor.init(FlatSpec.of(torch.zeros(5, dtype=dtype)))
    state = compressor.init(FlatSpec.of(torch.zeros(5)))
    for other in (torch.zeros(6), torch.zeros(5, dtype=torch.float64), torch.zeros(1, 5)):
        with pytest.raises(ValueError, match="the state is of a flat torch.float32 tensor of 5 elements, got"):
            compressor.compress(other, state)


@members
@dtypes
def test_constant_tensors_of_any_size_come_back_finite(member: Member, dtype: torch.dtype) -> None:
    compressor = member.compressor
    for x in (torch.full((size,), value, dtype=dtype) for size in (0, 1, 2, 300) for value in (0.0, -0.0, 3.0, -1e-3)):
        state, case = compressor.init(FlatSpec.of(x)), f"{len(x)} elements: {x[:1].tolist()}"
        for _ in range(3):
            payload, state = compressed(compressor, x, state)
            back = compressor.decompress(payload)
            assert (back.shape, back.dtype) == (x.shape, x.dtype), case
            assert back.isfinite().all(), case
            zeros_stay = x.any() or not back.any() or isinstance(compressor.law(FlatSpec.of(x)), Biased)
            assert zeros_stay, case
            assert all(kept.isfinite().all() for kept in state.elements.values()), case


@members
@pytest.mark.parametrize("ratio", [1e-9, 1.0], ids=["least", "all"])
def test_of_each_tensor_one_element_at_least_is_kept_and_all_at_most(member: Member, ratio: float) -> None:
    settings = {f.name: ratio for f in fields(member.compressor) if f.name in SHARES}
    if not settings:
        pytest.skip("no share of elements among its settings")
    compressor, spec = replace(member.compressor, **settings), spec_of(torch.float32)
    x = gradient(spec.numel, torch.float32)
    payload, _ = compressed(compressor, x, compressor.init(spec))
    back = compressor.decompress(payload)
    assert payload.nbytes == compressor.nbytes(spec)
    assert back.isfinite().all()
    assert back.count_nonzero() <= compressor.num_kept(spec) <= spec.numel
    if isinstance(law := compressor.law(spec), Contraction) and not law.in_expectation:
        left = float((back - x).square().sum())
        assert left <= (1 - law.delta) * float(x.square().sum()) + 1e-12


@members
def test_payloads_of_others_and_of_a_wrong_length_are_refused(member: Member) -> None:
    compressor = member.compressor
    payload, _ = compressed(compressor, gradient(1000, torch.float32))
    longer = torch.cat([payload.data, payload.data[:1]])
    for bad, message in (
        (replace(payload, maker=Stranger()), "expected a payload of"),
        (replace(payload, data=payload.data[:-1]), "bytes, got"),
        (replace(payload, data=payload.data[:0]), "bytes, got"),
        (replace(payload, data=longer), "bytes, got"),
        (replace(payload, spec=FlatSpec.of(torch.zeros(3000))), "bytes, got|elements cannot be summed into 1000"),
    ):
        out = torch.full((1000,), 7.0)
        with pytest.raises(ValueError, match=message):
            compressor.decompress(bad)
        with pytest.raises(ValueError, match=message):
            compressor.sum_into(out, [payload, bad])
        assert (out == 7.0).all(), "refused before anything is applied"


@members
def test_sums_into_tensors_of_another_size_are_refused(member: Member) -> None:
    compressor = member.compressor
    payload, _ = compressed(compressor, gradient(1000, torch.float32))
    for size in (0, 1, 999, 1001):
        out = torch.full((size,), 7.0)
        with pytest.raises(ValueError, match="1000 elements"):
            compressor.sum_into(out, [payload])
        assert (out == 7.0).all()


class Stranger(Compressor):
    """A class outside of the family."""

    def law(self, spec: FlatSpec) -> Exact:
        return Exact()

    def compress(self, x: Tensor, state: CompressorState) -> None:
        raise AssertionError

    decompress = nbytes = compress


@pytest.mark.parametrize(
    "compressor",
    [
        *(member.compressor for member in MEMBERS.values()),
        MomentumCorrection(TopK(0.05), clip=1.0),
        ErrorFeedback(Threshold(0.0, most_ratio=0.1)),
        ErrorFeedback(Threshold(0.5, most_ratio=1)),
    ],
    ids=str,
)
def test_a_compressor_follows_a_loss_scale_if_it_says_so(compressor: Compressor) -> None:
    spec, factor = spec_of(torch.float32), 8.0
    states = [compressor.init(spec)] * 2
    follows = []
    for step in range(3):
        x = gradient(spec.numel, torch.float32, step)
        x += 0.01 * x.sign()  # float16 keeps fewer bits of smaller numbers
        both = [compressed(compressor, each, state) for each, state in zip((x, factor * x), states, strict=True)]
        states = [state for _, state in both]
        plain, scaled = (compressor.decompress(payload) for payload, _ in both)
        follows.append(torch.equal(scaled, factor * plain))
    assert all(follows) == compressor.traits.follows_scale


def test_error_feedback_is_of_one_compressor() -> None:
    with pytest.raises(ValueError, match="ErrorFeedback of ErrorFeedback"):
        ErrorFeedback(ErrorFeedback(TopK(0.1)))
    with pytest.raises(ValueError, match="must be a compressor .*, got 0.1"):
        ErrorFeedback(0.1)


def test_all_that_was_sent_and_the_residual_are_all_that_came_in() -> None:
    compressor = ErrorFeedback(TopK(0.05))
    gradients = [gradient(2000, torch.float64, seed) for seed in range(20)]
    state, total = compressor.init(FlatSpec.of(gradients[0])), torch.zeros(2000, dtype=torch.float64)
    for x in gradients:
        payload, state = compressor.compress(x, state)
        total += compressor.decompress(payload)
    left = state.elements["residual"]
    torch.testing.assert_close(total + left, torch.stack(gradients).sum(dim=0), rtol=0, atol=1e-13)
    assert left.abs().max() > 0.1, "something is on its way"
