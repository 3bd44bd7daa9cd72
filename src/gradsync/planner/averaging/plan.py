"""Plans that average parameters in changing groups of ranks (after DS-Sync), made for a model and a network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam

from ...comm.shuffle import GroupSchedule, of_nodes, of_ranks, thinned, together
from ...compressors import Cast, Compressor
from ...costs.cluster import Cluster, Placement
from ...costs.steps import FINISH
from ...inputs.settings import (
    FewInt,
    FewOrZeroInt,
    NonNegativeFinite,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SeveralInt,
    check,
)
from ...optim.momentum import momentum_of
from ...plans.plan import BucketPlan, Plan, What, default_order, state_name
from ...schemes import AllReduce, CompressedAllGather, HalfPrecision, Hierarchical, ReduceScatter, Scheme, Shuffled
from ...tensors.bucket import TensorSpec, matches, trainable_parameters
from .grouping import Grouping, groupings, judge, step_s
from .regroup import CLEARLY, ROOM, is_better, spread_for

ABOUT = 1.02  # steps up to so many times the shortest count as equal
BUCKET_BYTES = 4 << 20  # a module's forward waits for whole buckets, so these are small; one tensor may be larger
STATES: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("momentum_buffer",),
    **dict.fromkeys((Adam, AdamW, NAdam, RAdam), ("exp_avg", "exp_avg_sq")),
}


@dataclass(frozen=True)
class AveragingPlanner:
    """A planner for `attach(model, optimizer, AveragingPlanner())`, to average parameters in groups of nodes.

    A schedule says which nodes average in which round. The planner takes the one with the shortest expected step by the
    rates of links, within the limits below; among schedules that are about as quick, the one that keeps ranks closest
    together. In a round with averages the ranks of a node are averaged, too, and each rank exchanges a part of that
    average between nodes; in a local step, on all nodes, every rank is alone.

    Attributes:
        cluster: links of the nodes; None: rates between all nodes are measured when attached, with a few MiB each.
        schedule: the schedule, of nodes or of ranks, to be used; None: the planner chooses one.
        largest: most nodes of a group, except a group of all; None: the square root of all, a whole rack, or all but
            slow nodes, which then average in few rounds.
        budget: most groups that may cross a rack's uplink in the same round; None: any number.
        most_spread: how far apart ranks may stay: their mean squared distance to their mean, in variances of the noise
            of a rank's step. It is up to 1.5 if all average after each fourth step, up to 1 in pairs with changing
            partners (as in a hypercube) after each step; pairs of nodes with several ranks stay closer.
        most_left: largest share of the squared distances to the mean that a cycle of rounds may leave.
        most_local_steps: most steps per average, on all nodes; 1 averages after each step. The number within this limit
            follows from the links and `most_spread`.
        momentum_every: average the optimiser's momenta, too, in one of so many rounds with averages, in 16 bits; 0:
            each rank keeps its own. Ranks are 5 to 12 times as far apart with momenta of their own (momentum 0.9).
        compressor: compresses differences to the parameters of the last consensus point (where all ranks had the same
            ones); None: parameters are sent as they are. A rank keeps what is left out: no error feedback is needed.
        early: parameters are stepped inside backward, where their exchange begins. Not for clipped gradients.
        compute_s: seconds of a step without the exchange; it decides between schedules where nodes are slow, and how
            many local steps pay. With 0, nodes make as many as `most_spread` lets them. `AutoPlanner` measures it.
        remap: where rates were measured, measure them again at a consensus point if rounds have come to take clearly
            more or less time, and change groups if others are expected to be clearly better.
        most_apart: how far ranks may be apart after a round, as a share of the norm of their parameters: the root mean
            square distance to their mean. At each consensus point groups become larger, up to all together, if the
            distances that averages removed since the last such point predict a larger share, and smaller if a clearly
            smaller one; None: groups stay. It takes a pass over the parameters in each round. Distances shrink with the
            learning rate and the norm hardly does, so ranks are held together most in the first phase of training,
            where it matters (Kong et al., 2021, "Consensus Control for Decentralized Deep Learning").
        survives: where a rank dies or stops answering, the others go on without an error. They finish the step in their
            groups, keep their own values of what did not arrive, and agree on who is left; then they make their models
            one, and go on by a new plan: `cluster` and `schedule` no longer fit, so links are measured. Optimisers keep
            their state, rounds are counted anew, and samples of the lost rank are dropped. Silence is detected after 15
            s, or half of the timeout. A rank that is alive but late beyond the timeout is left behind, and raises. It
            costs a thread that tells the store of torch.distributed once a second that the rank is alive; if that store
            ends with its host, all raise. Not with NCCL, which ends such jobs itself. Nodes with different numbers of
            ranks are averaged all together.
    """

    cluster: Cluster | None = None
    schedule: GroupSchedule | None = None
    largest: SeveralInt | None = None
    budget: PositiveInt | None = 1
    most_spread: NonNegativeFloat = 1.5
    most_left: NonNegativeFloat = 0.5
    most_local_steps: FewInt = 4
    momentum_every: FewOrZeroInt = 0
    compressor: Compressor[Any] | None = None
    early: bool = False
    compute_s: NonNegativeFinite = 0.0
    remap: bool = True
    most_apart: PositiveFloat | None = None
    survives: bool = False

    def __post_init__(self) -> None:
        check(self)
        if self.most_apart is not None and self.schedule is not None:
            raise ValueError("most_apart lets groups change, and a schedule was given: give one of the two")

    def measures(self, placement: Placement) -> bool:
        """Whether the rates of links between nodes must be measured before a plan is made.

        True with several nodes if neither `cluster` nor `schedule` was given; False if lost ranks left nodes with
        different numbers of ranks, which are averaged all together.
        """
        given = self.cluster is not None or self.schedule is not None or self._averages_all_together(placement)
        return not given and placement.num_nodes > 1

    def remaps(self, placement: Placement) -> bool:
        """Whether groups of averaging are chosen anew during training when the rates of links have changed.

        `placement`: the node of each rank.
        """
        return self.remap and self.measures(placement)

    def regroups(self, placement: Placement) -> bool:
        """Whether groups of averaging may change during training, at steps where all ranks have the same parameters.

        `placement`: the node of each rank.
        """
        return self.remaps(placement) or (self.most_apart is not None and placement.num_nodes > 1)

    def plan(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        placement: Placement,
        cluster: Cluster | None = None,
        exclude: Sequence[str] = (),
    ) -> Plan:
        """Returns the plan by which the ranks average a model's parameters, and its floating-point buffers.

        Args:
            model, optimizer: the model to average, and its optimiser, whose momenta are averaged with `momentum_every`.
            placement: the node of each rank.
            cluster: the links between nodes, used if the planner was given no `cluster` of its own.
            exclude: names or shell patterns of parameters and buffers that are not averaged.

        Raises:
            ValueError: for a cluster or schedule of other nodes, nodes with different numbers of ranks, or momenta of
                an optimiser that is not known.
        """
        parameters = _parameters(model, exclude)
        specs = {name: TensorSpec.of(p) for name, p in parameters.items()}
        schedule = self._schedule(placement, self.cluster or cluster, _total_bytes(parameters))
        ordered = list(reversed(specs)) if self.early else list(specs)
        scheme = _shuffled(schedule, self._exchange(schedule), placement)
        buckets = [(names, scheme) for names in filled(ordered, specs)]
        buffers = {n: TensorSpec.of(b) for n, b in model.named_buffers() if _is_averaged(n, b, exclude)}
        exact = _shuffled(schedule, AllReduce(), placement)
        buckets += [(names, exact) for names in filled(list(buffers), buffers)]
        beside, before_momenta = dict(buffers), len(buckets)
        if self.momentum_every:
            names = [n for n in ordered if id(parameters[n]) in _with_momentum(optimizer)]
            states = {state_name(n, key): specs[n] for n in names for key in _states_of(optimizer)}
            seldom = thinned(schedule, self.momentum_every)
            rounded = _shuffled(seldom, HalfPrecision(), placement)
            buckets += [(names, rounded) for names in filled(list(states), states)]
            beside |= states
        what = What.EARLY_PARAMETER if self.early else What.PARAMETER
        plan = Plan.make(specs | dict(sorted(beside.items())), placement.size, buckets, what=what)
        # Forwards wait for parameters and buffers, and only the optimiser's next step for momenta.
        order = (*_turns(plan.buckets[:before_momenta], scheme), *_turns(plan.buckets[before_momenta:], scheme))
        return plan.model_copy(update={"order": order})

    def for_other_ranks(self) -> AveragingPlanner:
        """Returns a planner for the ranks that survive a loss: the same settings, but no `cluster` or `schedule`."""
        return replace(self, cluster=None, schedule=None)

    def grouping(self, cluster: Cluster, nbytes: float) -> Grouping:
        """Returns the schedule of averaging to use on these links, with its step time and how far it lets ranks differ.

        A schedule says which nodes average in which round. Of those about as quick as the quickest, the one that keeps
        ranks' parameters closest together is chosen.

        Args:
            cluster: the nodes, the ranks on each of them, and their links.
            nbytes: bytes that each node averages in a step.
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
        """Returns a plan with better groups of nodes than `present`; None if none are expected to be clearly better.

        Args:
            present: the schedule in use, which says which ranks average in which round, made of groups of nodes.
            model, optimizer: the model that is averaged, and its optimiser.
            placement: the node of each rank.
            cluster: the links between nodes, as measured now.
            exclude: names or shell patterns of parameters and buffers that are not averaged.
            removed: how much of the ranks' squared distances a round removed, see `regroup.share_removed`; None: not
                known.
        """
        nbytes, cluster = _total_bytes(_parameters(model, exclude)), _with_ranks_of(placement, cluster)
        nodes = of_nodes(present, placement)
        assert nodes is not None, "only groups that the planner chose are changed, which are of nodes"
        judged = judge("present", nodes, cluster, nbytes, self.compute_s)
        most_spread, too_far = self.most_spread, False
        if self.most_apart is not None and removed is not None:
            allowed = spread_for(self.most_apart, removed, placement.size)
            too_far = CLEARLY * judged.spread > allowed
            most_spread = min(most_spread, allowed if too_far else ROOM * allowed)
        found = replace(self, most_spread=most_spread).grouping(cluster, nbytes)
        if found.schedule == nodes or not (too_far or is_better(found, judged, self.budget)):
            return None
        settled = replace(self, schedule=found.schedule, most_apart=None)
        return settled.plan(model, optimizer, placement, None, exclude)

    def expected_s(
        self,
        schedule: GroupSchedule,
        model: nn.Module,
        placement: Placement,
        cluster: Cluster,
        exclude: Sequence[str] = (),
    ) -> float:
        """Returns the expected seconds of a training step on these links, computation included.

        Args:
            schedule: says which ranks average in which round.
            model: the model whose parameters are averaged.
            placement: the node of each rank.
            cluster: the nodes and their links.
            exclude: names or shell patterns of parameters that are not averaged.

        Returns:
            The seconds; 0 for a schedule whose groups divide the ranks of a node, of which nothing is expected.
        """
        nodes, nbytes = of_nodes(schedule, placement), _total_bytes(_parameters(model, exclude))
        return 0.0 if nodes is None else step_s(nodes, cluster, nbytes, self.compute_s)

    def cycle(self, schedule: GroupSchedule) -> int:
        """Returns the number of rounds of averaging after which a plan with this schedule repeats itself.

        It is the schedule's number of rounds or, with `momentum_every`, that many times as large.
        """
        return len(schedule.rounds) * max(self.momentum_every, 1)

    def _schedule(self, placement: Placement, cluster: Cluster | None, nbytes: float) -> GroupSchedule:
        nodes, schedule = placement.num_nodes, self.schedule
        if schedule is None:
            if nodes == 1 or self._averages_all_together(placement):
                return together(placement.size)
            assert cluster is not None, "a cluster is given, or its links were measured"
            schedule = self.grouping(_with_ranks_of(placement, cluster), nbytes).schedule
        if schedule.size not in (nodes, placement.size):
            raise ValueError(
                f"the schedule is for {schedule.size}, the job has {placement.size} ranks on {nodes} nodes: expected "
                "one of as many ranks, or nodes"
            )
        return schedule

    def _averages_all_together(self, placement: Placement) -> bool:
        """Whether all ranks must average together, as lost ranks left the nodes with different numbers of ranks."""
        return self.survives and self.cluster is None and placement.ranks_per_node is None

    def _exchange(self, schedule: GroupSchedule) -> Scheme[Any]:
        """Returns the scheme that averages in a group: it gathers compressed values, or all-reduces without compressor.

        A `Cast` (compressor to 16 bits) is replaced by an all-reduce of 16-bit values where groups exceed two.
        """
        if self.compressor is None:
            return AllReduce()
        if isinstance(self.compressor, Cast) and max(map(len, schedule.distinct), default=1) > 2:
            return HalfPrecision(values=self.compressor.dtype)
        return CompressedAllGather(self.compressor)


def schedule_of(plan: Plan) -> GroupSchedule:
    """Returns the schedule of a plan of `AveragingPlanner`: which ranks average in which round."""
    scheme = plan.buckets[0].scheme
    assert isinstance(scheme, Shuffled)
    return scheme.schedule


def filled(names: Sequence[str], specs: Mapping[str, TensorSpec]) -> list[list[str]]:
    """Splits the names, in order, into buckets of one dtype and up to `BUCKET_BYTES` each; larger tensors are alone."""
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


def _with_ranks_of(placement: Placement, cluster: Cluster) -> Cluster:
    """Returns the cluster with as many ranks on each node as the job has."""
    return replace(cluster, ranks_per_node=placement.ranks_per_node or 1)


def _total_bytes(parameters: Mapping[str, Tensor]) -> float:
    return float(sum(TensorSpec.of(p).nbytes for p in parameters.values()))


def _shuffled(schedule: GroupSchedule, scheme: Scheme[Any], placement: Placement) -> Shuffled:
    """Returns the scheme that averages by the schedule, of ranks or of nodes, and within its groups by `scheme`.

    In groups of nodes with several ranks, the ranks of a node sum first, and each exchanges a part of the sum by
    `scheme` between nodes.
    """
    if schedule.size == placement.size:
        return Shuffled.by(schedule, scheme)
    per_node = placement.ranks_per_node
    if per_node is None:
        raise ValueError("groups of nodes need as many ranks on each node, and here they differ")
    return Shuffled.by(of_ranks(schedule, placement), Hierarchical(ReduceScatter(), scheme, per_node))


def _turns(buckets: Sequence[BucketPlan], scheme: Shuffled) -> list[tuple[str, str]]:
    """Returns the order of some buckets' stages, and of their ends, as pairs (bucket id, stage).

    A bucket's values are there when it ends, so modules that begin a forward need not wait for all buckets. Between
    nodes with several ranks, a bucket is handed out in its node and ends before the thread waits for the next bucket's
    exchange between nodes. `scheme` averages all buckets, or one like it.
    """
    turns, ends = default_order(buckets, scheme.schedule.size), {bucket.id: (bucket.id, FINISH) for bucket in buckets}
    if not isinstance(scheme.scheme, Hierarchical):
        return [*turns, *ends.values()]
    last = {bucket.id: bucket.scheme.stages(scheme.schedule.size)[-1] for bucket in buckets}
    found = []
    for bucket, stage in turns:
        found += [(bucket, stage), ends[bucket]] if stage == last[bucket] else [(bucket, stage)]
    return found


def _states_of(optimizer: Optimizer) -> tuple[str, ...]:
    found = next((keys for kind, keys in STATES.items() if type(optimizer) is kind), None)
    if found is None:
        known = ", ".join(kind.__name__ for kind in STATES)
        raise ValueError(
            f"momentum_every averages the momenta of {known}; what {type(optimizer).__name__} keeps is not known: use 0"
        )
    return found


def _with_momentum(optimizer: Optimizer) -> set[int]:
    """Returns the `id` of each parameter to which the optimiser applies momentum."""
    return {id(p) for group in optimizer.param_groups if momentum_of(group) for p in group["params"]}
