"""The cost of examining gradients is measured together with the step that made them."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from gradsync_lab.bench.characterization import LookSpec, run_looks
from gradsync_lab.report.record import Spread


def test_the_time_of_a_look_is_spread_over_the_steps_between_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))  # each call a second after the one before
    events: list[dict[str, Any]] = []
    options = {"data": "zipf", "batch_size": 64}
    record = run_looks(LookSpec(("deepfm",), options, sample=1024, every=4, repeats=5), events.append)[0]
    assert events == [{"workload": "deepfm"}]
    assert record.params == {"workload": "deepfm", "sample": 1024, "every": 4}
    assert record.subject_s == record.ratio == Spread(median=0.25, p5=0.25, p95=0.25)
    assert record.baseline_s == record.aa == Spread(median=1, p5=1, p95=1)
