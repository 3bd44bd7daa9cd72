"""Changes the groups of ranks that average parameters, at consensus points, where all ranks' models are equal.

Between consensus points each rank records how long its exchanges take, and how much averages change its values. At a
consensus point all ranks exchange these figures. If they show that links have changed, rates are measured again; rank 0
decides on the new groups (`planner.averaging.regroup`). Rounds are still counted by steps, so a checkpoint needs only
the plan.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm import Group, gather_bytes
from ..costs.cluster import Cluster
from ..engine.engine import Engine
from ..planner import AveragingPlanner
from ..planner.averaging.plan import schedule_of
from ..planner.averaging.regroup import LEAST_ROUNDS, Rounds, links_changed, share_removed
from ..plans.plan import Plan
from ..tuning.rates import measured_cluster
from .averaging import Averaging
from .torch_hooks import OptimizerStep, after_optimizer_steps

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedGroups:
    """A checkpoint's plan, which says which ranks average parameters together, and the time of its exchanges.

    `young_s`: seconds of one exchange on this rank when the plan was new; None: not known.
    """

    plan: Plan
    young_s: float | None  # seconds of this rank's rounds when the plan was new

    def __post_init__(self) -> None:
        if self.young_s is not None and not (isinstance(self.young_s, float) and self.young_s > 0):
            raise ValueError(f"the state's young_s must be a number of seconds above 0, or None, got {self.young_s!r}")


class Regrouping:
    """Times the exchanges that average parameters, and changes which ranks average together if that is better.

    Other groups of ranks are better if they are clearly faster, or keep the ranks' models closer to each other.
    """

    def __init__(
        self,
        planner: AveragingPlanner,
        engine: Engine,
        averaging: Averaging,
        model: nn.Module,
        optimizer: Optimizer,
        cluster: Cluster,
        exclude: Sequence[str] = (),
    ) -> None:
        self._planner = planner
        self._engine = engine
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._cluster = cluster
        self._exclude = tuple(exclude)
        self._begin()
        self._handle = after_optimizer_steps(self, Regrouping._after_optimizer_step, optimizer)
        if planner.most_apart is not None:
            averaging.watch = self._watch

    def remove(self) -> None:
        """Stops the timing of exchanges, by removing a hook from the optimiser; groups of ranks stay as they are."""
        self._handle.remove()

    def consider(self) -> None:
        """Changes which ranks average together, if that is clearly better. Collective, while models are equal."""
        engine, placement = self._engine, self._engine.group.placement
        figures = [self._rounds.young_s or 0.0, self._rounds.now_s or 0.0, self._removed, self._removed_rounds]
        mine = torch.tensor(figures, dtype=torch.float64, device=engine.device)
        parts = engine.peers.call("what rounds did", lambda group: group.all_gather(mine).wait(engine.timeout_s))
        young_s, now_s, removed, rounds = zip(*(part.tolist() for part in parts), strict=True)
        changed = self._planner.remaps(placement) and all(young_s) and all(now_s) and links_changed(young_s, now_s)
        if changed:
            logger.info("times of rounds have changed; rates between nodes are measured again")
            self._cluster = engine.peers.call(
                "rates between nodes", lambda group: measured_cluster(group, engine.timeout_s)
            )
        mean = sum(removed) / sum(rounds) if min(rounds) >= LEAST_ROUNDS else None
        self._count_removed_anew()
        if not changed and mean is None:
            return
        text = engine.peers.call("groups chosen anew", lambda group: self._better_plan(group, mean))
        if text:
            engine.replan(Plan.from_json(text))
            self._begin()
        elif changed:
            self._rounds.keep_plan()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps beside the plan: planner's settings, ranks' node numbers, `young_s`.

        `young_s`: seconds that one averaging exchange took when the plan was new; None: not known yet.
        """
        return {**self._same_job, "young_s": self._rounds.young_s}

    def saved(self, state: Mapping[str, Any]) -> SavedGroups | None:
        """Returns a checkpoint's plan of groups; None if it was made by another planner or for other nodes.

        Collective. `state` has this object's `state_dict` as "groups", and the plan as "plan".

        Raises:
            ValueError, RuntimeError: on all ranks, for a plan that does not fit, or other plans on other ranks.
        """
        found: SavedGroups | None = None
        problem: Exception | None = None
        try:
            groups = state.get("groups", {})
            if not isinstance(groups, Mapping):
                raise ValueError(f"the state's groups must be a dict, got {type(groups).__name__}")
            if self._same_job.items() <= groups.items():
                found = SavedGroups(Plan.from_json(state["plan"]), groups["young_s"])
                found.plan.check(self._engine.specs, self._engine.group.size)
        except Exception as error:  # told to all, then raised
            problem = error
        self._engine.peers.agree(
            "loading of groups", problem, "" if found is None else f"plan {found.plan.digest[:12]}"
        )
        return found

    def go_on(self, saved: SavedGroups | None) -> None:
        """Changes to the plan `saved` of a loaded checkpoint, or keeps the present one if it is None. Collective.

        Exchanges are timed anew from then on.
        """
        if saved is not None and saved.plan.digest != self._engine.plan.digest:
            self._engine.replan(saved.plan)
        self._begin(None if saved is None else saved.young_s)

    @property
    def _same_job(self) -> dict[str, Any]:
        """The planner's settings and each rank's node number; a checkpoint's plan is used only if both are equal."""
        return {"settings": repr(self._planner), "nodes": list(self._engine.group.placement.nodes)}

    def _begin(self, young_s: float | None = None) -> None:
        """Begins to time rounds of averaging; `young_s`: seconds of a round when groups were new; None: not known."""
        self._schedule = schedule_of(self._engine.plan)
        self._cycle = self._planner.cycle(self._schedule)
        self._rounds = Rounds(self._cycle, young_s)
        self._seen = self._engine.step, self._communication_s()
        self._count_removed_anew()

    def _count_removed_anew(self) -> None:
        """Zeroes the sum of rounds' `share_removed`; counting skips the next cycle (rounds until the plan repeats)."""
        self._removed_from = self._engine.step + self._cycle
        self._removed, self._removed_rounds = 0.0, 0  # sums over whole cycles
        self._under_way: list[float] = []  # rounds of the unfinished cycle
        self._squares = torch.zeros(2, dtype=torch.float64, device=self._engine.device)

    def _communication_s(self) -> float:
        """Returns all buckets' seconds of communication since the engine got its present plan (buckets and groups)."""
        running = self._engine.running_plan
        running.times.read_ended()
        return sum(run.communication_s for run in running.runs)

    def _watch(self, own: Tensor, average: Tensor) -> None:
        """Adds a parameter's squared distance to its average, and the average's squared norm, to this round's sums."""
        norms = torch.stack([torch.linalg.vector_norm(own - average), torch.linalg.vector_norm(average)])
        self._squares += norms.double().square()

    def _after_optimizer_step(self, step: OptimizerStep) -> None:
        """Records the communication time of each round that has ended since the last optimiser step."""
        before, before_s = self._seen
        self._seen = rounds, total_s = self._engine.step, self._communication_s()
        for _ in range(before, rounds):
            self._rounds.add((total_s - before_s) / (rounds - before))
        if self._planner.most_apart is not None and rounds > before:
            self._count_removed(rounds - 1)

    def _count_removed(self, round: int) -> None:
        """Adds up how much averaging rounds cut this rank's squared distance to all ranks' mean (`share_removed`)."""
        if round >= self._removed_from:
            rank = self._engine.group.rank
            relaxation = next(share for group, share in self._schedule.round(round).parts if rank in group)
            distance, norm = self._squares.tolist()  # a host read of two numbers per round
            self._under_way.append(share_removed(distance, norm, relaxation) if norm else 0.0)
        if len(self._under_way) == self._cycle:
            self._removed += sum(self._under_way)
            self._removed_rounds += self._cycle
            self._under_way.clear()
        self._squares.zero_()

    def _better_plan(self, group: Group, removed: float | None) -> str:
        """Returns rank 0's plan with clearly faster or more accurate groups of ranks, as JSON, or "" if there is none.

        `removed`: how much a round of averaging cut a rank's squared distance to all ranks' mean, averaged over rounds
        and ranks (`share_removed`); None: not known. Only rank 0 decides, as other processors may round differently.
        """
        model, optimizer = self._model(), self._optimizer()
        found: Plan | None = None
        if group.rank == 0 and model is not None and optimizer is not None:
            found = self._planner.regrouped(
                self._schedule, model, optimizer, group.placement, self._cluster, self._exclude, removed=removed
            )
        mine = b" " if found is None else found.to_json().encode()
        return gather_bytes(group, mine, self._engine.timeout_s)[0].decode().strip()
