"""Ranks as threads of this process: the engine over a `LocalGroup`."""

from __future__ import annotations

from gradsync.comm import LocalGroup, run_local
from gradsync.costs.cluster import Placement

from .case import Case
from .judge import problems
from .models import FuzzModel
from .ranks import EngineSubject, traced
from .trace import Trace

LIMIT_S = 3600.0  # of a case: workers have a shorter one, and show where threads are


def judged(case: Case) -> list[str]:
    """Runs a case on ranks as threads; returns its problems.

    Raises:
        GroupError: where ranks hang.
    """

    def rank_main(group: LocalGroup) -> Trace:
        model = models[group.rank]
        return traced(case, model, lambda: EngineSubject(case, model, group), group.rank)

    models = [FuzzModel(case) for _ in range(case.size)]  # before there are threads, which share a random state
    placement = Placement.regular(case.size // case.ranks_per_node, case.ranks_per_node)
    return problems(case, run_local(case.size, rank_main, placement=placement, timeout_s=LIMIT_S))
