"""The real workloads' densities over 2^j ranks, their overlap and skew are those measured for the design."""

from __future__ import annotations

import pytest

from gradsync.characterization.figures import Characterization, characterize_footprints, footprints_of
from gradsync_lab.workloads import DataUnavailableError, DeepFMWorkload, Workload, load

RANKS = 8


def characterized(workload: Workload) -> Characterization:
    model = workload.model(sparse=True)
    footprints = []
    for rank in range(RANKS):
        model.zero_grad()
        workload.loss(model, next(workload.batches(rank, RANKS, seed=0))).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.is_sparse}
        footprints += footprints_of([gradients])
    return characterize_footprints([footprints])


def test_deepfm_is_as_sparse_as_measured(flights: DeepFMWorkload) -> None:
    table = characterized(flights).tensors["factors.weight"]
    assert table.rows is not None and table.rows.overlap_ratio is not None and table.filled_ratio == 1
    densities = {k: density.value for k, density in table.rows.union_density.items()}
    assert densities == pytest.approx({1: 0.0264, 2: 0.0428, 4: 0.0673, 8: 0.102}, rel=0.03)
    assert table.rows.densification_ratio[8].value == pytest.approx(3.87, rel=0.03)
    assert table.rows.overlap_ratio.mean == pytest.approx(0.38, abs=0.01)
    skews = {n: table.rows.skewness_ratio[n].value for n in (8, 16, 64, 128)}
    assert skews == pytest.approx({8: 6.94, 16: 11.65, 64: 25.74, 128: 32.2}, rel=0.03)
    assert table.elements.union_density == table.rows.union_density


def test_lstm_is_as_sparse_as_measured() -> None:
    try:
        workload = load("lstm", batch_size=64)
    except DataUnavailableError as error:
        pytest.skip(f"needs the real dictionary: {error}")
    found = characterized(workload)
    assert found.together is not None and found.together.overlap_ratio is not None
    densities = {k: density.value for k, density in found.together.union_density.items()}
    assert densities == pytest.approx({1: 0.0104, 2: 0.0184, 4: 0.0323, 8: 0.0555}, rel=0.04)
    assert found.together.overlap_ratio.mean == pytest.approx(0.23, abs=0.015)
    read, scored = (found.tensors[name].rows for name in ("words.weight", "scores.weight"))
    assert read is not None and scored is not None
    # One step; the published skews are means over twelve.
    assert {n: read.skewness_ratio[n].value for n in (8, 64, 128)} == pytest.approx(
        {8: 6.63, 64: 33.7, 128: 54.2}, rel=0.06
    )
    assert {n: scored.skewness_ratio[n].value for n in (8, 64, 128)} == pytest.approx(
        {8: 5.67, 64: 24.3, 128: 35.8}, rel=0.06
    )
