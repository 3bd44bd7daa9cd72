"""MergeComp's simulated evaluation is fitted to unmerged compression, and meets the bars of merged compression."""

from __future__ import annotations

import pytest

from gradsync.planner.solver.problem import Resource
from gradsync_lab.papers import mergecomp
from gradsync_lab.papers.mergecomp import (
    BARS,
    FP16,
    NVLINK,
    PCIE,
    QSGD,
    SIGNS,
    SPARSE,
    cut_factor,
    highest_table,
    joint_factor,
    layerwise_factor,
    misfit,
    problem_of,
    released_factor,
)


def test_links_carry_what_is_gathered_or_reduced() -> None:
    nbytes = 2.0**30
    for kind, volume in ((FP16, 2 * 7 / 8 / 2), (QSGD, 7 / 4), (SIGNS[0], 7 / 32)):
        (transfer,) = (
            d for d in problem_of("resnet50", PCIE, 8, kind).options[0].chain if d.resource is Resource.INTRA
        )
        assert transfer.curve(nbytes) == pytest.approx(volume * nbytes / PCIE.bytes_per_s, rel=0.01)


def test_every_payload_gathered_is_decoded() -> None:
    dgc, random_k = SPARSE
    for ranks in (2, 8):
        *_, decode = problem_of("resnet50", PCIE, ranks, dgc).options[0].chain
        assert decode.curve(0.0) == pytest.approx(ranks * 34e-6)
    assert random_k.encode_us < dgc.encode_us


@pytest.mark.parametrize("model", ["resnet50", "resnet101"])
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_the_fitted_iterations_are_the_best_for_what_is_not_merged(
    model: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = misfit()
    monkeypatch.setitem(mergecomp.ITERATION_S, model, factor * mergecomp.ITERATION_S[model])
    assert misfit() > least


@pytest.mark.parametrize("model", ["resnet50", "resnet101"])
@pytest.mark.parametrize("kind", [*SPARSE, *SIGNS], ids=lambda kind: kind.name)
def test_merging_gains_what_the_paper_measured_within_a_fifth(model: str, kind: mergecomp.Kind) -> None:
    before, after = BARS[model, PCIE, kind]
    gained = released_factor(model, PCIE, 8, kind) / layerwise_factor(model, PCIE, 8, kind)
    assert gained == pytest.approx(after[-1] / before[-1], rel=0.2)


@pytest.mark.parametrize("kind", [FP16, QSGD, SPARSE[0]], ids=lambda kind: kind.name)
def test_more_freedom_gains_more(kind: mergecomp.Kind) -> None:
    layer_wise = layerwise_factor("resnet50", PCIE, 8, kind)
    cut = cut_factor("resnet50", PCIE, 8, kind)
    assert layer_wise < cut
    assert cut <= 1.001 * joint_factor("resnet50", PCIE, 8, kind)
    assert released_factor("resnet50", PCIE, 8, kind) <= 1.01 * cut


def test_over_nvlink_cuts_alone_reach_the_highest_published_factor() -> None:
    table = highest_table()
    assert table.figure("resnet101", "cuts and kinds").published == 99
    assert table.figure("resnet101", "FP32, cuts").value >= 99
    assert all(figure.value <= 100 for figure in table.figures)
    assert released_factor("resnet101", NVLINK, 8, FP16) == table.figure("resnet101", "FP16, merged").value
