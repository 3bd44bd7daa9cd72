"""PowerSGD: a projection of the ranks' sum, nothing lost, the same bits on all ranks, factors by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradsync.costs.cluster import Placement
from gradsync.costs.steps import transfers
from gradsync.schemes import Hierarchical, PowerSGD, ReduceScatter, from_expression, to_expression
from gradsync.tensors.bucket import TensorSpec
from tests.schemes.stateful import SHAPES, Ranks, bucket, gradient, tensors_of

pytestmark = pytest.mark.usefixtures("stale_memory")

MATRICES = [0, 2, 4]
KINDS = [
    pytest.param(PowerSGD(2), id="tensors"),
    pytest.param(PowerSGD(1, matrices="bucket"), id="bucket"),
    pytest.param(PowerSGD(2, start_step=9), id="dense steps"),
]


def matrix(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1)


def test_what_has_the_rank_arrives_as_it_is() -> None:
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    shared = draw(24, 2), draw(24, 2), draw(16, 2)
    inputs = [gradient(rank) for rank in range(3)]
    for x in inputs:
        for place, left in zip(MATRICES, shared, strict=True):
            part = tensors_of(x)[place]
            part.copy_((left @ draw(2, part.numel() // len(left))).view(part.shape))
    ranks = Ranks(PowerSGD(2), 3)
    mean = torch.stack(inputs).mean(dim=0)
    result = ranks.step(inputs)
    torch.testing.assert_close(result[: bucket().numel], mean[: bucket().numel], rtol=0, atol=7e-14)
    assert ranks.residuals().abs().max() < 1e-12
    assert (result[bucket().numel :] > 0).tolist() == [True, True, *[False] * (bucket().num_flags - 2)]


def test_several_ranks_do_what_one_does_with_their_mean() -> None:
    many, one = Ranks(PowerSGD(2), 3), Ranks(PowerSGD(2), 1)
    for step in range(4):
        inputs = [gradient(10 * step + rank) for rank in range(3)]
        got, expected = many.step(inputs), one.step([torch.stack(inputs).mean(dim=0)])
        torch.testing.assert_close(got[: bucket().numel], expected[: bucket().numel], rtol=0, atol=2e-14)
    torch.testing.assert_close(many.residuals() / 3, one.residuals(), rtol=0, atol=2e-14)


@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_lost_and_no_residual_is_larger_than_what_it_is_of(scheme: PowerSGD, dtype: torch.dtype) -> None:
    ranks = Ranks(scheme, 3, like := bucket(dtype))
    brought, given = torch.zeros(like.numel).double(), torch.zeros(like.numel).double()
    for step in range(4):
        before = [ranks.kept(rank).elements["residual"].double() for rank in range(3)]
        inputs = [gradient(10 * step + rank, like) for rank in range(3)]
        result = ranks.step(inputs, scale=0.25)
        assert result.dtype is dtype
        given += 4 * result[: like.numel].double()
        brought += sum(x[: like.numel].double() for x in inputs)
        for rank in range(3):
            kept = ranks.kept(rank).elements["residual"]
            assert kept.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
            corrected = before[rank] + inputs[rank][: like.numel]
            for left, whole in zip(tensors_of(kept, like), tensors_of(corrected, like), strict=True):
                assert scheme.matrices == "bucket" or left.norm() <= whole.norm() * (1 + 1e-6)
            assert kept.double().norm() <= corrected.norm() * (1 + 1e-6)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-4, torch.bfloat16: 0.25}[dtype]  # the result's own rounding
    torch.testing.assert_close(given + ranks.residuals(), brought, rtol=0, atol=tolerance)


@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_and_turns_are_as_predicted(scheme: PowerSGD, size: int, dtype: torch.dtype) -> None:
    ranks = Ranks(scheme, size, like := bucket(dtype))
    for step in range(2):
        ranks.step([gradient(rank, like) for rank in range(size)])
        expected = transfers(scheme.steps(like.specs, (), Placement.one_per_node(size), step))
        assert [t.stage for t in expected] == list(scheme.stages(size))
        assert ranks.outcome.awaits == [2] * size
        for rank, ledger in enumerate(ranks.outcome.ledgers):
            got = [(entry.pattern, entry.sent_bytes) for entry in ledger.entries]
            assert got == [(t.pattern, pytest.approx(t.sent_bytes(rank))) for t in expected]


def test_factors_and_what_is_not_compressed_are_all_that_travels() -> None:
    expected = transfers(PowerSGD(2).steps(bucket(torch.float32).specs, (), Placement.one_per_node(2)))
    dense = 2 * 40 + 1 + 3 * 4 + bucket().num_flags
    assert [t.part_bytes[0] for t in expected] == [
        4 * (2 * (24 + 24 + 16) + dense),
        4 * 2 * (40 + 40 + 72),
    ]


def test_what_is_not_compressed_arrives_as_its_mean() -> None:
    inputs = [gradient(rank) for rank in range(3)]
    result = Ranks(PowerSGD(1), 3).step(inputs)
    mean = tensors_of(torch.stack(inputs).mean(dim=0))
    for place, tensor in enumerate(tensors_of(result)):
        if place not in MATRICES:
            torch.testing.assert_close(tensor, mean[place], rtol=0, atol=1e-15)


def test_steps_approach_the_best_approximation_of_a_matrix_that_stays() -> None:
    """Each step begins with the factors of the last one: power iteration, whose limit SVD gives."""
    like = bucket(shapes=((30, 50),))
    generator = torch.Generator().manual_seed(5)
    u, v = (torch.linalg.qr(torch.randn(n, 30, generator=generator, dtype=torch.float64))[0] for n in (30, 50))
    constant = torch.zeros(like.numel + like.num_flags, dtype=torch.float64)
    constant[: like.numel] = ((u * 0.6 ** torch.arange(30)) @ v.T).flatten()
    best = ((u[:, :2] * 0.6 ** torch.arange(2)) @ v[:, :2].T).flatten()
    ranks, errors = Ranks(PowerSGD(2), 1, like), []
    for _ in range(20):
        (own,) = ranks.states[0]["sent"]
        fresh = {"residual": torch.zeros(like.numel, dtype=torch.float64)}  # the same matrix in every step
        ranks.states = [{"sent": (replace(own, elements=fresh),)}]
        errors.append(float((ranks.step([constant])[: like.numel] - best).norm()))
    assert errors[0] > 0.1 and errors[-1] < 1e-6


def test_a_gradient_that_was_zero_is_not_given_up() -> None:
    """Nor one in a single row, of which the second column of Q sees nothing."""
    ranks = Ranks(PowerSGD(2), 2)
    zero = torch.zeros_like(gradient(0))
    assert not ranks.step([zero, zero]).any()
    assert not ranks.residuals().any()
    row = zero.clone()
    tensors_of(row)[0][7] = 1.0
    result = ranks.step([row, row])
    torch.testing.assert_close(result, row, rtol=0, atol=1e-14)
    after = ranks.step([gradient(1), gradient(1)])
    for place in MATRICES:
        singular = torch.linalg.svdvals(matrix(tensors_of(after)[place]))
        assert singular[1] > 1.0, "all of the rank is used"
        assert singular[2] < 1e-12


def test_what_is_not_finite_ends_as_nan_on_all_ranks() -> None:
    inputs = [gradient(rank) for rank in range(2)]
    inputs[1][3] = torch.inf
    inputs[0][bucket().numel - 20] = torch.nan
    result = Ranks(PowerSGD(2), 2).step(inputs)
    first, last = tensors_of(result)[0], tensors_of(result)[4]
    assert first.isnan().any() and last.isnan().any()
    assert tensors_of(result)[2].isfinite().all()


def test_the_first_factors_follow_from_seed_and_name() -> None:
    first = Ranks(PowerSGD(2), 2)
    factors = first.kept().tensors["q"]
    assert [len(q) for q in factors] == [80, 0, 80, 0, 144, 0, 0, 0]
    assert not torch.equal(factors[0], factors[2])
    for q, same, other in zip(
        factors, first.kept(1).tensors["q"], Ranks(PowerSGD(2, seed=1), 1).kept().tensors["q"], strict=True
    ):
        assert torch.equal(q, same)
        assert not len(q) or not torch.equal(q, other)
    alone = replace(bucket(), segments=bucket().segments[2:3], tensors=bucket().tensors[2:3])
    assert torch.equal(Ranks(PowerSGD(2), 1, alone).kept().tensors["q"][0], factors[2])


def test_tensors_alike_are_compressed_in_one_go_however_they_lie() -> None:
    shapes = [(8, 8), (20, 16), (8, 8), (8, 8), (20, 16), (3,), (8, 8), (20, 16)]
    parts = PowerSGD(1, min_compression=1.0).parts_of(bucket(shapes=shapes).flat_spec)
    assert [(run.rows, run.places) for run in parts.runs] == [(8, (0, 2)), (8, (3, 6)), (20, (1, 4)), (20, (7,))]
    assert sum(parts.lengths) == bucket(shapes=shapes).numel


def test_a_step_can_be_taken_back() -> None:
    ranks = Ranks(PowerSGD(2), 2)
    inputs = [gradient(rank) for rank in range(2)]
    ranks.step(inputs)
    states = ranks.states
    first = ranks.step(inputs)
    ranks.states = states
    assert torch.equal(ranks.step(inputs), first)


@pytest.mark.parametrize("shapes", [SHAPES, ((3,), (2, 2))], ids=["usual", "parts without matrices"])
def test_nothing_is_lost_between_nodes_either(shapes: tuple[tuple[int, ...], ...]) -> None:
    """Ranks of a node sum first; between nodes each keeps the residual of its part of the node's sums."""
    like = bucket(torch.float32, shapes)
    scheme = Hierarchical(ReduceScatter(), PowerSGD(2), ranks_per_node=2)
    ranks = Ranks(scheme, 4, like, Placement.regular(2, 2))
    brought, given = torch.zeros(like.numel).double(), torch.zeros(like.numel).double()
    for step in range(3):
        inputs = [gradient(10 * step + rank, like) for rank in range(4)]
        given += 4 * ranks.step(inputs)[: like.numel].double()
        brought += sum(x[: like.numel].double() for x in inputs)
        for rank, ledger in enumerate(ranks.outcome.ledgers):
            expected = transfers(scheme.steps(like.specs, (), Placement.regular(2, 2), step))
            assert ledger.sent_bytes == pytest.approx(sum(t.sent_bytes(rank) for t in expected))
    kept = [ranks.kept(rank).elements["residual"].double() for rank in range(4)]
    left = torch.cat([kept[0] + kept[2], kept[1] + kept[3]])[: like.numel]
    torch.testing.assert_close(given + left, brought, rtol=0, atol=1e-4)
    assert ranks.outcome.awaits == [len(scheme.stages(4))] * 4


def test_plans_name_it_and_illegal_settings_are_refused() -> None:
    scheme = PowerSGD(4, min_compression=3.0, matrices="bucket", start_step=2, seed=9)
    assert from_expression(to_expression(scheme)) == scheme
    for settings, message in (
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"rank": True}, "rank must be a whole number"),
        ({"min_compression": 0.5}, r"min_compression must be in \[1, inf\), got 0.5"),
        ({"min_compression": float("nan")}, r"min_compression must be in \[1, inf\), got nan"),
        ({"matrices": "rows"}, "matrices must be 'tensors' or 'bucket', got 'rows'"),
        ({"start_step": -1}, "start_step must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            from_expression({"powersgd": settings})
    with pytest.raises(ValueError, match="is for floating-point gradients"):
        scheme.check((TensorSpec((4,), torch.int64),))
