"""`bench plan` compares searches with ByteComp's on the papers' models, and with the best of all plans on small
problems.
"""

from __future__ import annotations

from typing import Any

import pytest

from gradsync_lab.bench.plan import PlanSpec, run_planning
from gradsync_lab.report.planning import planning_rows


def test_records_say_how_long_planning_took_and_how_good_plans_are() -> None:
    events: list[Any] = []
    spec = PlanSpec(models=("lstm",), drawn=(20,), small=20, repeats=2)
    records = run_planning(spec, events.append)
    assert len(events) == spec.turns and len(records) == 5
    *timed, small = records
    for record in timed:
        assert record.planning is not None and record.metric == "plan_s" and record.ratio is not None
        assert record.planning.bound_s <= record.planning.step_s * (1 + 1e-9)
        if record.params["model"] == "lstm":
            assert record.planning.step_s <= record.planning.baseline_step_s * (1 + 1e-9)
    assert small.metric == "gap" and small.params["worst_gap"] <= 0.03 and small.params["mean_gap"] <= 0.01
    rows = planning_rows(records)
    assert [row[0] for row in rows] == ["lstm A", "lstm B", "lstm C", "drawn", "20 drawn"]


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown model 'vgg19'; there are"):
        PlanSpec(models=("vgg19",))
    with pytest.raises(ValueError, match="at least 1"):
        PlanSpec(repeats=0)
