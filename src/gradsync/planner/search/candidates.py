"""Finds the plans for a measured job that are worth a trial: plans of the search, and plans to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...plans.plan import Plan
from ...schemes import HalfPrecision
from ..default.plan import default_plans
from ..pieces import InPieces, Pieces
from ..solver.joint import Certificate, certify, search
from ..solver.problem import Solution
from .job import Job
from .options import Formulation, Way, formulate
from .polish import coarse, merged, polished
from .predict import predict
from .reasons import WORTH_IT
from .simplify import simplified
from .turns import with_best_turns
from .ways import Constraints, exact_ways, ways_of

MOST_TRIED = 5
UNSURE = 0.05  # relative error of predicted steps
FAR_LONGER = 1.5  # a plan predicted to take so many times as long is hardly worth a trial
SMALLEST_PIECE_BYTES, MOST_PIECES = 1 << 18, 64  # large gradients are cut into such pieces, about so many per job

Search = Callable[[Job, Constraints], Sequence[Plan]]
"""A search, which returns at least one plan to be tried on the job: `AutoPlanner(search=...)` takes one."""


@dataclass(frozen=True)
class Searched:
    """The result of a search for a plan: the schemes allowed, the problem in numbers, its solution, and the plan.

    Attributes:
        ways: schemes, each with the gradients that may take it.
        formulation: the problem that the search solved.
        found: the solution, before it was simplified and improved to `plan`.
        plan: the plan.
        hiding: whether the search halved latencies, as one transfer's latency is hidden by another transfer.
    """

    ways: tuple[Way, ...]
    formulation: Formulation
    found: Solution
    plan: Plan
    hiding: bool = False

    def certificate(self) -> Certificate:
        """Returns the seconds of the solution that the search found, and a lower bound of the seconds of any solution.

        Both are seconds of a training step's backward and exchange in the solver's model (`solver/problem.py`).
        """
        return certify(self.formulation.problem, self.found)


@InPieces
def searched(job: Job, constraints: Constraints | None = None) -> Pieces[Searched]:
    """Returns the best plan found for a job with the schemes that the constraints allow, and the data of the search.

    The plan is the simplest of the solutions with about equal time. Then buckets get another scheme, or are merged,
    where that shortens the step by `predict`, which simulates more than the search. If the constraints have no errors
    of lossy schemes and compressors on the gradients, the job's measured ones are used.

    Raises:
        ValueError: for constraints that leave no scheme for a gradient, an `exact` that no parameter matches, limits on
            routes that leave a compressor none, or a compressor whose numbers cannot be summed over so many ranks.
    """
    constraints = constraints or Constraints()
    constraints = constraints if constraints.errors else replace(constraints, errors=job.errors)
    ways = yield from ways_of.pieces(job, constraints)
    yield
    return (yield from _searched(job, ways))


def _searched(job: Job, ways: Sequence[Way]) -> Pieces[Searched]:
    """Returns the best of up to three searches for a plan: as is, with halved latencies, and with large gradients cut.

    A later search's plan replaces that of an earlier one only if its predicted step is clearly shorter. At the end
    neighbouring buckets are merged where this shortens the predicted step, as the search does not contain all latencies
    and threads that they share.
    """
    best = yield from _solved(job, ways, formulate(job, ways))
    other = yield from _solved(job, ways, formulate(job.with_hidden_latencies(), ways), hiding=True)
    best = _better(best, other, job)
    formulation = best.formulation
    cut = formulation.in_pieces(max(SMALLEST_PIECE_BYTES, sum(formulation.problem.nbytes) / MOST_PIECES))
    if cut.problem.size != formulation.problem.size:
        best = _better(best, (yield from _solved(job, ways, cut, best.hiding)), job)
    return replace(best, plan=(yield from merged.pieces(best.plan, job, ways)))


def _better(usual: Searched, other: Searched, job: Job) -> Searched:
    seconds = [predict(each.plan, job).seconds for each in (usual, other)]
    return other if seconds[1] < (1 - WORTH_IT) * seconds[0] else usual


def _solved(job: Job, ways: Sequence[Way], formulation: Formulation, hiding: bool = False) -> Pieces[Searched]:
    yield
    found = search(formulation.problem)
    yield
    ranks = [
        0 if scheme.traits.exact else 1 if isinstance(scheme, HalfPrecision) else 2 for scheme in formulation.schemes
    ]
    simple = simplified(formulation.problem, found, ranks)
    plan = yield from with_best_turns.pieces(formulation.plan(simple.parts), job)
    plan = yield from polished.pieces(plan, job, ways)
    plan = yield from with_best_turns.pieces(plan, job)
    yield
    return Searched(tuple(ways), formulation, found, plan, hiding)


@InPieces
def candidate_plans(job: Job, constraints: Constraints | None = None) -> Pieces[list[Plan]]:
    """Returns plans worth a trial on real steps: the job's present plan, then that with the shortest predicted step.

    Candidates are the best two among the search's plan and its plans with only one of the lossy schemes or compressors
    allowed; the best plan in fewer buckets, as predictions are least certain about costs of calls and gains of overlap;
    and unless plans must be lossy, the best exact plan. A job without a present plan, which is the best of those made
    without a search, gets the best of these too. Plans with a far longer predicted step are left out, unless only one
    plan would remain, as predictions may be wrong.
    """
    if job.world_size == 1:
        return default_plans(job.profiles, 1)
    constraints = constraints or Constraints()
    alone = [replace(constraints, lossy=(lossy,), always=True) for lossy in constraints.lossy]
    found = []
    for each in (constraints, *alone):
        found.append((yield from searched.pieces(job, each)))
    usual: list[Plan] = []
    if not constraints.always:
        if constraints.lossy:  # else the first search has found the best exact plan
            found.append((yield from _searched(job, exact_ways(job))))
            yield
        usual = [] if job.present else default_plans(job.profiles, job.world_size, job.network)
    by_search = [each.plan for each in found]
    seconds = {}
    for plan in (*by_search, *usual):
        yield
        seconds[plan.digest] = predict(plan, job).seconds

    def best(plans: Sequence[Plan], count: int) -> list[Plan]:
        return sorted({p.digest: p for p in plans}.values(), key=lambda plan: seconds[plan.digest])[:count]

    quickest = min(found, key=lambda each: seconds[each.plan.digest])
    step_s = job.beside_s + seconds[quickest.plan.digest]
    fewer = yield from coarse.pieces(quickest.plan, job, quickest.ways, (1 + UNSURE) * step_s - job.beside_s)
    seconds[fewer.digest] = predict(fewer, job).seconds
    last = [] if constraints.always else by_search[-1:]
    all_of_them = {p.digest: p for p in (*best(by_search, 2), fewer, *last, *best(usual, MOST_TRIED))}
    tried = best(list(all_of_them.values())[:MOST_TRIED], MOST_TRIED)
    far = [plan for plan in tried if job.beside_s + seconds[plan.digest] > FAR_LONGER * step_s]
    present = [] if job.present is None else [job.present]
    worth_it = [*present, *tried[: max(len(tried) - len(far), 2 - len(present))]]
    return list({plan.digest: plan for plan in worth_it}.values())
