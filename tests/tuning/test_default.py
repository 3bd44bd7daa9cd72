"""The planner that `attach` uses by default measures nothing beyond its group's measurements of links."""

from __future__ import annotations

from gradsync.comm import run_local
from gradsync.planner.pieces import at_once
from gradsync.tuning.default import measured_network


def test_where_the_network_was_not_measured_nothing_is_known() -> None:
    assert run_local(2, lambda group: at_once(measured_network(group, 5.0))) == [None, None]
