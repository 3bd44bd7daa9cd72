"""Plans that average parameters in groups which change (after DS-Sync), for a model, its optimiser and the links."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam

from ..comm.shuffle import GroupSchedule, thinned, together
from ..compressors import Cast, Compressor
from ..costs.cluster import Cluster, Placement
from ..optim.momentum import momentum_of
from ..plans.plan import Plan, What, state_name
from ..schemes import AllReduce, CompressedAllGather, HalfPrecision, Hierarchical, ReduceScatter, Scheme, Shuffled
from ..tensors.bucket import TensorSpec, matches, trainable_parameters
from .grouping import Grouping, groupings, judge, step_s
from .regroup import CLEARLY, ROOM, is_better, spread_for

ABOUT = 1.02  # times as long is about as long
BUCKET_BYTES = 4 << 20  # what a module's forward waits for at most beside its own; one tensor may be larger
STATES: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("momentum_buffer",),
    **dict.fromkeys((Adam, AdamW, NAdam, RAdam), ("exp_avg", "exp_avg_sq")),
}


@dataclass(frozen=True)
class AveragingPlanner:
    """For `attach(model, optimizer, AveragingPlanner())`: who averages with whom follows from the links of the nodes.

    Of the schedules that keep what is asked for, the one with the shortest expected step; of those that are about as
    quick, the one that keeps nodes closest together. Ranks of a node are averaged in every round, and each has a part
    of that between nodes.

    Args:
        cluster: None: rates between all nodes are measured when attached, for the time of a few MiB each.
        schedule: of nodes, or of ranks, if it is not to be chosen.
        largest: nodes of a group at most, but for all of them; None: the square root of all, or all that do not sit
            out.
        budget: groups that may cross a rack's uplink in the same round; None: any number.
        most_spread: how far nodes may be apart for good, in variances of a step's noise, see `GroupSchedule.spread`.
            All nodes that average after each fourth step are 1.5 apart at most, pairs of a hypercube 1.
        most_left: share of any disagreement that a cycle may leave.
        most_local_steps: steps of which only the last may be followed by an average, on all nodes; 1: each one is. How
            many follows from the links, and from `most_spread`.
        momentum_every: rounds with averages, of which one averages the optimiser's momenta too, in 16 bits; 0: each
            rank's stay its own. Ranks are 5 to 12 times as far apart with momenta of their own (momentum 0.9).
        compressor: what differences to the values of the last consensus travel by; None: values travel as they are.
            What it leaves out a rank keeps for itself, so it needs no error feedback.
        early: parameters are stepped inside backward, and their exchange begins there. Not for gradients that are
            clipped.
        compute_s: what a step takes beside the exchange; it decides between schedules where nodes are slow, and how
            many local steps pay. With 0, nodes make as many as `most_spread` lets them. `AutoPlanner` measures it.
        remap: where rates were measured, they are again at a consensus point if rounds have come to take clearly more
            or less time, and other groups are taken if they are expected to be clearly better.
        most_apart: how far ranks may be apart behind a round, as a share of the norm of their parameters: the root mean
            square distance to their mean. At consensus points groups become larger, up to all together, where more is
            expected of what averages have changed since the last one, and smaller where there is room; None: they stay.
            It takes a pass over the parameters in each round. Distances shrink with the learning rate, and the norm
            hardly does, so ranks are held together most in the first phase of training, which is where it matters
            (Kong et al., 2021, "Consensus Control for Decentralized Deep Learning").
        survives: where a rank dies or stops answering, the others do not raise. They finish the step in their groups,
            keep their own values of what did not arrive, and agree on who is left; then they make their models one, and
            go on by a plan for these: `cluster` and `schedule` were for others, so links are measured. Optimisers keep
            what they have, rounds are counted anew, and samples of the lost rank are nobody's. Its silence is waited
            for: 15 s, or half of the timeout. A rank that is alive but does not come before the timeout is left behind,
            and raises. Costs a thread that tells the store of torch.distributed once a second that the rank is alive;
            where that store ends with its host, all raise. Not with NCCL, which ends such jobs itself. Nodes with
            different numbers of ranks are averaged all together.
    """

    cluster: Cluster | None = None
    schedule: GroupSchedule | None = None
    largest: int | None = None
    budget: int | None = 1
    most_spread: float = 1.5
    most_left: float = 0.5
    most_local_steps: int = 4
    momentum_every: int = 0
    compressor: Compressor[Any] | None = None
    early: bool = False
    compute_s: float = 0.0
    remap: bool = True
    most_apart: float | None = None
    survives: bool = False

    def __post_init__(self) -> None:
        if self.momentum_every < 0 or type(self.momentum_every) is not int:
            raise ValueError(f"momentum_every must be a whole number from 0 on, got {self.momentum_every!r}")
        if type(self.most_local_steps) is not int or self.most_local_steps < 1:
            raise ValueError(f"most_local_steps must be a whole number from 1 on, got {self.most_local_steps!r}")
        if self.compressor is not None and not isinstance(self.compressor, Compressor):
            raise ValueError(f"compressor must be a compressor or None, got {self.compressor!r}")
        if self.most_apart is not None and not self.most_apart > 0:
            raise ValueError(f"most_apart must be a share above 0, or None, got {self.most_apart!r}")
        if self.most_apart is not None and self.schedule is not None:
            raise ValueError("most_apart lets groups change, and a schedule was given: give one of the two")

    def measures(self, placement: Placement) -> bool:
        """Whether it needs to know the links."""
        given = self.cluster is not None or self.schedule is not None or self._must_sum(placement)
        return not given and placement.num_nodes > 1

    def remaps(self, placement: Placement) -> bool:
        """Whether groups are chosen anew when links have changed."""
        return self.remap and self.measures(placement)

    def regroups(self, placement: Placement) -> bool:
        """Whether groups may change at consensus points."""
        return self.remaps(placement) or (self.most_apart is not None and placement.num_nodes > 1)

    def plan(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        placement: Placement,
        cluster: Cluster | None = None,
        exclude: Sequence[str] = (),
    ) -> Plan:
        """The plan, by this cluster if none was given.

        Raises:
            ValueError: for a cluster or schedule of other nodes, nodes with different numbers of ranks, and momenta of
                an optimiser that is not known.
        """
        parameters = _parameters(model, exclude)
        specs = {name: TensorSpec.of(p) for name, p in parameters.items()}
        schedule = self._schedule(placement, self.cluster or cluster, _total_bytes(parameters))
        by_node = schedule.size != placement.size
        ordered = list(reversed(specs)) if self.early else list(specs)
        scheme = _of_ranks(Shuffled.by(schedule, self._exchange(schedule)), placement, by_node)
        buckets = [(names, scheme) for names in filled(ordered, specs)]
        buffers = {n: TensorSpec.of(b) for n, b in model.named_buffers() if _is_averaged(n, b, exclude)}
        exact = _of_ranks(Shuffled.by(schedule), placement, by_node)
        buckets += [(names, exact) for names in filled(list(buffers), buffers)]
        beside = dict(buffers)
        if self.momentum_every:
            names = [n for n in ordered if id(parameters[n]) in _with_momentum(optimizer)]
            states = {state_name(n, key): specs[n] for n in names for key in _states_of(optimizer)}
            seldom = thinned(schedule, self.momentum_every)
            rounded = _of_ranks(Shuffled.by(seldom, HalfPrecision()), placement, by_node)
            buckets += [(names, rounded) for names in filled(list(states), states)]
            beside |= states
        what = What.EARLY_PARAMETER if self.early else What.PARAMETER
        return Plan.make(specs | dict(sorted(beside.items())), placement.size, buckets, what=what)

    def of_others(self) -> AveragingPlanner:
        """The same settings for other ranks than `cluster` and `schedule` were given for."""
        return replace(self, cluster=None, schedule=None)

    def grouping(self, cluster: Cluster, nbytes: float) -> Grouping:
        """The schedule of nodes that is taken on these links, and what is expected of it.

        Of those that are about as quick as the quickest it is the one that keeps nodes closest together.
        """
        found = groupings(
            cluster,
            nbytes,
            self.compute_s,
            largest=self.largest,
            budget=self.budget,
            most_spread=self.most_spread,
            most_left=self.most_left,
            most_local_steps=self.most_local_steps,
        )
        quick = (each for each in found if each.step_s <= ABOUT * found[0].step_s)
        return min(quick, key=lambda grouping: round(grouping.spread, 9))  # as processors round differently

    def regrouped(
        self,
        present: GroupSchedule,
        model: nn.Module,
        optimizer: Optimizer,
        placement: Placement,
        cluster: Cluster,
        exclude: Sequence[str] = (),
        *,
        removed: float | None = None,
    ) -> Plan | None:
        """A plan by other groups of nodes than these, if they are expected to be clearly better on this cluster.

        Args:
            removed: what rounds took away of the ranks' distances, see `regroup.spread_for`; None: that is not known.
        """
        nbytes = _total_bytes(_parameters(model, exclude))
        judged = judge("present", present, cluster, nbytes, self.compute_s)
        most_spread, too_far = self.most_spread, False
        if self.most_apart is not None and removed is not None:
            nodes = placement.num_nodes
            allowed = spread_for(self.most_apart, removed, nodes, placement.size // nodes)
            too_far = CLEARLY * judged.spread > allowed
            most_spread = min(most_spread, allowed if too_far else ROOM * allowed)
        found = replace(self, most_spread=most_spread).grouping(cluster, nbytes)
        if found.schedule == present or not (too_far or is_better(found, judged, self.budget)):
            return None
        settled = replace(self, schedule=found.schedule, most_apart=None)
        return settled.plan(model, optimizer, placement, None, exclude)

    def expected_s(
        self, schedule: GroupSchedule, model: nn.Module, cluster: Cluster, exclude: Sequence[str] = ()
    ) -> float:
        """What a round of a schedule of nodes takes on these links, with what a step takes beside the exchange."""
        nbytes = _total_bytes(_parameters(model, exclude))
        return step_s(schedule, cluster, nbytes, self.compute_s)

    def cycle(self, schedule: GroupSchedule) -> int:
        """Rounds until what travels with whom begins again, by a plan of this schedule."""
        return len(schedule.rounds) * max(self.momentum_every, 1)

    def _schedule(self, placement: Placement, cluster: Cluster | None, nbytes: float) -> GroupSchedule:
        nodes, schedule = placement.num_nodes, self.schedule
        if schedule is None:
            if nodes == 1 or self._must_sum(placement):
                return together(placement.size)
            assert cluster is not None, "either is given, or the links were measured"
            schedule = self.grouping(cluster, nbytes).schedule
        if schedule.size not in (nodes, placement.size):
            raise ValueError(
                f"the schedule is for {schedule.size}, the job has {placement.size} ranks on {nodes} nodes: expected "
                "one of as many ranks, or nodes"
            )
        return schedule

    def _must_sum(self, placement: Placement) -> bool:
        """Whether no groups of nodes can be made any more: nodes have different numbers of ranks left."""
        return self.survives and self.cluster is None and placement.ranks_per_node is None

    def _exchange(self, schedule: GroupSchedule) -> Scheme[Any]:
        """Of a group. Payloads of 16 bits may be summed on their way, which pays from three members on."""
        if self.compressor is None:
            return AllReduce()
        if isinstance(self.compressor, Cast) and max(map(len, schedule.distinct), default=1) > 2:
            return HalfPrecision(values=self.compressor.dtype)
        return CompressedAllGather(self.compressor)


def schedule_of(plan: Plan) -> GroupSchedule:
    """Of nodes, or of ranks: the one by which a plan of this planner averages parameters."""
    scheme = plan.buckets[0].scheme
    between = scheme.inter if isinstance(scheme, Hierarchical) else scheme
    assert isinstance(between, Shuffled)
    return between.schedule


def filled(names: Sequence[str], specs: Mapping[str, TensorSpec]) -> list[list[str]]:
    """Buckets of one type each, in this order."""
    buckets: list[list[str]] = []
    for dtype in dict.fromkeys(specs[name].dtype for name in names):
        filled_bytes = math.inf
        for name in (name for name in names if specs[name].dtype is dtype):
            if filled_bytes + specs[name].nbytes > BUCKET_BYTES:
                buckets.append([])
                filled_bytes = 0
            buckets[-1].append(name)
            filled_bytes += specs[name].nbytes
    return buckets


def _is_averaged(name: str, buffer: Tensor, exclude: Sequence[str]) -> bool:
    return buffer.is_floating_point() and buffer.numel() > 0 and not matches(name, exclude)


def _parameters(model: nn.Module, exclude: Sequence[str]) -> dict[str, nn.Parameter]:
    return {n: p for n, p in trainable_parameters(model).items() if not matches(n, exclude)}


def _total_bytes(parameters: Mapping[str, Tensor]) -> float:
    return float(sum(TensorSpec.of(p).nbytes for p in parameters.values()))


def _of_ranks(between: Scheme[Any], placement: Placement, by_node: bool) -> Scheme[Any]:
    """`between` nodes, once the ranks of each have summed up."""
    if not by_node:
        return between
    per_node = placement.ranks_per_node
    if per_node is None:
        raise ValueError("groups of nodes need as many ranks on each node, and here they differ")
    return Hierarchical(ReduceScatter(), between, per_node)


def _states_of(optimizer: Optimizer) -> tuple[str, ...]:
    found = next((keys for kind, keys in STATES.items() if type(optimizer) is kind), None)
    if found is None:
        known = ", ".join(kind.__name__ for kind in STATES)
        raise ValueError(
            f"momentum_every averages the momenta of {known}; what {type(optimizer).__name__} keeps is not known: use 0"
        )
    return found


def _with_momentum(optimizer: Optimizer) -> set[int]:
    """Parameters that have momenta."""
    return {id(p) for group in optimizer.param_groups if momentum_of(group) for p in group["params"]}
