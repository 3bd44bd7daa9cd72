"""The engine: runs a plan, step by step. Front-ends (`hooks.py`, `ddp.py`) tell it when gradients are ready.

A step is `begin`, a `load` for every gradient as it becomes ready, `finish`, then `unload` of the results. State of
schemes is committed at the next `begin`: a step that failed, or in which some rank saw non-finite values, leaves none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .bucket import Bucket, Layout, TensorSpec
from .cluster import Placement
from .comm import Exchange, Group, GroupError, IssueThread, Ledger, RecordingGroup, split
from .density import DensityProfile, ParameterProfile
from .gradients import FlatGradients, Gradients, RowGradients, gradients_of
from .plan import Plan, What, describe
from .schemes import Scheme, State
from .steps import transfers
from .timeline import Task, covered_s

logger = logging.getLogger(__name__)

Planner = Callable[[Sequence[ParameterProfile], int], Plan]

NEVER_READY = 1 << 40  # position of a parameter that rank 0 did not use in the observed step
UNKNOWN = -1


@dataclass(frozen=True)
class BucketStatistics:
    """Totals of one bucket since attach, or since the plan changed."""

    id: str
    names: tuple[str, ...]
    scheme: str
    density: float | None  # of its tables, mean over the ranks; None for dense buckets, and before it was measured
    steps: int
    sent_bytes: float  # payload bytes this rank handed to the transport
    predicted_bytes: float | None  # the same from `Scheme.steps`; None while the density is not known
    communication_s: float  # time in which the bucket had an operation in flight
    exposed_s: float  # the part of it after the end of backward


@dataclass
class Lane:
    """One bucket at run time."""

    bucket: Bucket
    scheme: Scheme[Any]
    gradients: Gradients
    group: RecordingGroup
    state: State
    next_state: State | None = None
    waiting: set[str] = field(default_factory=set)
    steps: int = 0
    sent_bytes: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0


class Engine:
    """Runs a plan for `parameters` over `group`, on one communication thread of its own.

    `plan` is a `Plan`, or a function that makes one: it is asked at once with what is known of the model, and again
    after the first step with what that step showed, reduced over the ranks: readiness order, layouts, densities.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        group: Group,
        plan: Plan | Planner,
        *,
        timeout_s: float,
        sparse_names: frozenset[str] = frozenset(),
    ) -> None:
        self.parameters = dict(parameters)
        self.specs = {name: TensorSpec.of(p) for name, p in self.parameters.items()}
        self.group = group
        self.step = 0
        self.profiles = {
            name: ParameterProfile(name, spec, sparse=name in sparse_names) for name, spec in self.specs.items()
        }
        self._planner = None if isinstance(plan, Plan) else plan
        self.timeout_s = timeout_s
        self._device = next(iter(self.parameters.values())).device if self.parameters else torch.device("cpu")
        self._exchange: Exchange | None = None
        self._next_plan: Plan | None = None
        self._failure: str | None = None
        self._arrivals: dict[str, bool] = {}  # parameters in the order they became ready -> sparse layout
        self._timeline: list[Task] = []
        self._steps_good = True
        self._observed = False
        self._closed = False
        self.plan = plan if isinstance(plan, Plan) else plan(list(self.profiles.values()), group.size)
        self._thread = IssueThread("gradsync", self._device)
        self._lanes: dict[str, Lane] = {}
        self._lanes_of: dict[str, list[Lane]] = {}
        self._adopt(self.plan, {})

    # The step, in the order in which a front-end calls.

    def begin(self) -> None:
        """Starts a step.

        Raises:
            RuntimeError: when an earlier step failed or was left unfinished on this rank.
        """
        self.abandon("the previous backward did not finish on this rank (an error in it?)")
        self._require_working()
        self._commit()
        if self._next_plan is not None:
            self._adopt(self._next_plan, self._export_state())
            self._next_plan = None
        self._arrivals.clear()
        self._steps_good = False  # until it has ended well
        for lane in self._lanes.values():
            lane.gradients.begin()
            lane.waiting = set(lane.bucket.names)
        self._exchange = Exchange(
            self.plan.order,
            self._synchronize,
            where=self._where,
            timeout_s=self.timeout_s,
            device=self._device,
        )
        self._thread.submit(self._exchange.run)

    @property
    def in_step(self) -> bool:
        """Between `begin` and `finish`."""
        return self._exchange is not None

    @property
    def replanning(self) -> bool:
        """Whether the next `begin` changes the plan: who holds views into the buckets' memory lets go of them."""
        return self._next_plan is not None

    def lanes(self) -> list[Lane]:
        """The buckets at run time, in plan order."""
        return list(self._lanes.values())

    def load(self, name: str, gradient: Tensor | None, *, used: bool = True) -> None:
        """A parameter's gradient is ready (None or not `used`: this rank did not use it in this step).

        Raises:
            RuntimeError: when the parameter became ready twice in one step.
        """
        exchange = self._require_step()
        if used and gradient is not None:
            self._arrivals[name] = gradient.layout is torch.sparse_coo
        for lane in self._lanes_of[name]:
            if name not in lane.waiting:
                raise RuntimeError(
                    f"the gradient of {name!r} became ready twice in one backward; re-entrant activation checkpointing "
                    "does that: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            lane.gradients.load(name, gradient, used=used)
            lane.waiting.discard(name)
            if not lane.waiting:
                exchange.mark_ready(lane.bucket.id)

    def missing(self) -> list[str]:
        """Parameters that were not loaded in this step yet, in model order."""
        if not any(lane.waiting for lane in self._lanes.values()):
            return []
        return [name for name in self.parameters if any(name in lane.waiting for lane in self._lanes_of[name])]

    def finish(self) -> None:
        """Waits until every bucket is synchronised; all parameters are loaded.

        Raises:
            GroupError: when another rank died, stopped answering or failed, naming bucket, stage and step.
        """
        exchange = self._require_step()
        assert not self.missing()
        backward_ended_s = time.perf_counter() - exchange.began_s
        try:
            exchange.wait()
        except BaseException as error:
            self._fail(str(error))
            raise
        finally:
            self._exchange = None
        for lane in self._lanes.values():
            lane.gradients.accept(exchange.results[lane.bucket.id])
            lane.steps += 1
        self._steps_good = not (self._has_state() and any(lane.gradients.troubled for lane in self.lanes()))
        self._record(exchange, backward_ended_s)
        if self._planner is not None and not self._observed:
            try:
                self._observe()
            except Exception as error:
                self._fail(f"the plan after step {self.step}: {error}")
                raise
        self.step += 1

    def abandon(self, why: str) -> None:
        """Gives the step under way up, if there is one, and tells the other ranks, who may wait for this one."""
        if self._exchange is None:
            return
        self._exchange.cancel()
        self._exchange = None
        self._fail(why)

    def used(self, name: str) -> bool:
        """Whether some rank used the parameter in the finished step."""
        return self._lanes_of[name][0].gradients.used(name)

    def layout_is_sparse(self, name: str) -> bool:
        """The layout in which the gradient is given back: as it came, else as the ranks agreed."""
        return self._arrivals.get(name, self.profiles[name].sparse)

    def unload(self, name: str, out: Tensor | None, *, sparse: bool) -> Tensor:
        """The synchronised gradient, in the layout asked for; `out` is reused for parameters that the plan cut."""
        for lane in self._lanes_of[name]:
            out = lane.gradients.unload(name, out, sparse=sparse, shape=self.parameters[name].shape)
        assert out is not None
        return out

    def call(self, what: str, function: Callable[[Group], Any]) -> Any:
        """Runs `function(group)` on the communication thread, the only one that may use the group.

        Raises:
            GroupError: when another rank died, stopped answering or failed, naming `what` and the step.
        """
        self._require_working()
        try:
            return self._thread.call(lambda: function(self.group))
        except GroupError as error:
            self._fail(f"{what}, step {self.step}: {error}")
            raise GroupError(f"{what}, step {self.step}: {error}") from None

    # What is kept and told.

    def state_dict(self) -> dict[str, Any]:
        """The plan and all scheme state by (parameter, slice, compress point); of tensors, numbers and text only."""
        if not self.in_step:
            self._commit()
        return {"version": 1, "step": self.step, "plan": self.plan.to_json(), "state": self._export_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave, under this engine's own plan.

        Raises:
            ValueError: for another version, or state of parameters that this model does not have.
        """
        if state.get("version") != 1:
            raise ValueError(f"expected a gradsync state of version 1, got version {state.get('version')!r}")
        if unknown := sorted({key.rpartition("[")[0] for key in state["state"]} - set(self.parameters)):
            raise ValueError(f"the state holds {unknown[0]!r}, which is no parameter to synchronise here")
        self.step = int(state["step"])
        for lane in self._lanes.values():
            lane.next_state = None
            lane.state = lane.scheme.init(lane.bucket, lane.group)
        self._import_state(state["state"])

    def statistics(self) -> list[BucketStatistics]:
        return [self._statistics_of(lane) for lane in self._lanes.values()]

    def timeline(self) -> list[Task]:
        """The last step: "compute" (backward), "link" (operations in flight), "kernel" (schemes' own work), "wait"."""
        return list(self._timeline)

    def words(self) -> list[str]:
        """The plan in words."""
        known = {p.name: p.density.density for p in self.profiles.values() if p.density is not None}
        return describe(self.plan, self.specs, known)

    def close(self) -> None:
        """Ends the communication thread and its communicator; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.abandon("gradsync was detached in the middle of a step")
        self._thread.stop()
        self.group.close()

    # Below here: how.

    async def _synchronize_lane(self, lane: Lane) -> Any:
        x = lane.gradients.take(check_finite=self._has_state())
        result, lane.next_state = await lane.scheme.synchronize(x, lane.state, lane.group, 1.0 / self.group.size)
        if isinstance(lane.gradients, FlatGradients) and not lane.bucket.flags_ride:
            await lane.group.all_reduce(lane.gradients.flags)
        return result

    def _synchronize(self, bucket_id: str) -> Any:
        return self._synchronize_lane(self._lanes[bucket_id])

    def _where(self, bucket_id: str, stage: str) -> str:
        names = self._lanes[bucket_id].bucket.names
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"bucket {bucket_id!r} ({names[0]}{others}), stage {stage!r}, step {self.step}"

    def _fail(self, why: str) -> None:
        """From now on nothing is synchronised any more; the other ranks are told."""
        if self._failure is None:
            self._failure = why
            self.group.announce_failure(why)

    def _require_step(self) -> Exchange:
        if self._exchange is None:
            self._require_working()
            raise RuntimeError("gradsync was detached during this backward; detach between steps")
        return self._exchange

    def _require_working(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"gradient synchronisation stopped earlier: {self._failure}; detach() and attach again on every rank"
            )

    def _has_state(self) -> bool:
        return any(lane.state for lane in self._lanes.values())

    def _commit(self) -> None:
        for lane in self._lanes.values():
            if lane.next_state is not None and self._steps_good:
                lane.state = lane.next_state
            lane.next_state = None

    def _adopt(self, plan: Plan, state: Mapping[str, Tensor]) -> None:
        plan.check(self.specs, self.group.size)
        if any(bucket.what is not What.GRADIENT for bucket in plan.buckets):
            raise ValueError("this version synchronises gradients only; the plan has buckets of parameters")
        self.plan = plan
        self._lanes, self._lanes_of = {}, {}  # the old buckets' memory is free before the new ones take theirs
        self._lanes = {b.id: self._make_lane(b.bucket(self.specs), b.make_scheme()) for b in plan.buckets}
        self._lanes_of = {name: [] for name in self.parameters}
        for lane in self._lanes.values():
            for name in dict.fromkeys(lane.bucket.names):
                self._lanes_of[name].append(lane)
        self._import_state(state)
        for line in self.words():
            logger.info("%s", line)

    def _make_lane(self, bucket: Bucket, scheme: Scheme[Any]) -> Lane:
        group = RecordingGroup(self.group, Ledger())
        return Lane(bucket, scheme, gradients_of(bucket, self.parameters), group, scheme.init(bucket, group))

    def _export_state(self) -> dict[str, Tensor]:
        exported = {}
        for lane in self._lanes.values():
            for point, flat in lane.state.items():
                parts = split(flat, [segment.numel for segment in lane.bucket.segments])
                for segment, part in zip(lane.bucket.segments, parts, strict=True):
                    exported[f"{segment.name}[{segment.start}:{segment.stop}]/{point}"] = part.clone()
        return exported

    def _import_state(self, exported: Mapping[str, Tensor]) -> None:
        """Lays the slices into the lanes' states, wherever the present plan cuts; what no lane keeps is dropped."""
        slices = [(*_parse_state_key(key), part) for key, part in exported.items()]
        for lane in self._lanes.values():
            offset = 0
            for segment in lane.bucket.segments:
                for name, start, point, part in slices:
                    low, high = max(start, segment.start), min(start + part.numel(), segment.stop)
                    if name == segment.name and low < high and point in lane.state:
                        target = lane.state[point][offset + low - segment.start : offset + high - segment.start]
                        target.copy_(part[low - start : high - start])
                offset += segment.numel

    def _record(self, exchange: Exchange, backward_ended_s: float) -> None:
        ended_s = time.perf_counter() - exchange.began_s
        self._timeline = [Task("backward", "compute", 0.0, backward_ended_s), *exchange.tasks]
        self._timeline.append(Task("wait", "wait", backward_ended_s, ended_s))
        for lane in self._lanes.values():
            flights = [t for t in exchange.tasks if t.stream == "link" and t.name.startswith(f"{lane.bucket.id}:")]
            lane.sent_bytes += lane.group.ledger.take_sent_bytes()
            lane.communication_s += covered_s(flights, 0.0, ended_s)
            lane.exposed_s += covered_s(flights, backward_ended_s, ended_s)

    def _statistics_of(self, lane: Lane) -> BucketStatistics:
        return BucketStatistics(
            id=lane.bucket.id,
            names=tuple(lane.bucket.names),
            scheme=lane.scheme.name,
            density=self._density_of(lane),
            steps=lane.steps,
            sent_bytes=lane.sent_bytes,
            predicted_bytes=self._predicted_bytes(lane),
            communication_s=lane.communication_s,
            exposed_s=lane.exposed_s,
        )

    def _density_of(self, lane: Lane) -> float | None:
        known = [d for name in lane.bucket.names if (d := self.profiles[name].density) is not None]
        rows = sum(d.num_rows for d in known)
        return sum(d.rows for d in known) / rows if rows else None

    def _predicted_bytes(self, lane: Lane) -> float | None:
        densities: list[DensityProfile] = []
        if lane.bucket.layout is Layout.ROWS:
            for name in lane.bucket.names:
                density = self.profiles[name].density
                if density is None:
                    return None
                densities.append(density)
        placement = Placement.one_per_node(self.group.size)
        steps = lane.scheme.steps(lane.bucket.specs, tuple(densities), placement)
        return lane.steps * sum(t.sent_bytes(self.group.rank) for t in transfers(steps))

    def _observe(self) -> None:
        """Reduces what a first step showed over the ranks, and makes the plan that all of them now make."""
        assert self._planner is not None
        mine = torch.tensor([self._observation(name) for name in self.parameters], dtype=torch.int64)
        if self.parameters:
            buffer = mine.flatten().to(self._device)
            everyone = self.call("first observations", lambda group: group.all_gather(buffer).wait(self.timeout_s))
            table = torch.stack([row.view(len(self.parameters), 4).cpu() for row in everyone])
            for index, name in enumerate(self.parameters):
                self.profiles[name] = self._profile(name, table[:, index])
        # A table that no module announced travelled dense: what its rows are, the next step shows.
        self._observed = all(p.density is not None for p in self.profiles.values() if p.sparse)
        plan = self._planner(list(self.profiles.values()), self.group.size)
        self._require_same(plan.digest)
        if plan.digest != self.plan.digest:
            self._next_plan = plan
        else:
            for line in self.words():
                logger.info("%s", line)

    def _require_same(self, digest: str) -> None:
        """A planner that is not deterministic would make the ranks wait for each other: raises on all of them."""
        mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8, device=self._device)
        everyone = self.call("digest of the new plan", lambda group: group.all_gather(mine).wait(self.timeout_s))
        digests = [bytes(part.tolist()).hex() for part in everyone]
        other = next((rank for rank, theirs in enumerate(digests) if theirs != digests[0]), None)
        if other is not None:
            raise RuntimeError(
                f"the plans made after the first step differ: rank 0 has {digests[0][:12]}, rank {other} has "
                f"{digests[other][:12]}; a planner must depend on nothing but its arguments"
            )

    def _observation(self, name: str) -> tuple[int, int, int, int]:
        """(place in ready order, sparse layout, rows of mine, rows of the sum) of one parameter; -1: not known."""
        gradients = self._lanes_of[name][0].gradients
        seen = name in self._arrivals
        position = list(self._arrivals).index(name) if seen else NEVER_READY
        rows, union = UNKNOWN, UNKNOWN
        if isinstance(gradients, RowGradients):
            rows, union = gradients.rows(name), gradients.union_rows(name)
        return position, int(self._arrivals[name]) if seen else UNKNOWN, rows, union

    def _profile(self, name: str, rows_of_ranks: Tensor) -> ParameterProfile:
        spec = self.specs[name]
        layouts = set(rows_of_ranks[:, 1].tolist()) - {UNKNOWN}
        sparse = 1 in layouts if layouts else self.profiles[name].sparse
        density = None
        if sparse and int(rows_of_ranks[0, 2]) != UNKNOWN:
            rows = float(rows_of_ranks[:, 2].double().mean())
            union = float(rows_of_ranks[0, 3])
            ratios = {self.group.size: union / rows} if rows > 0 and self.group.size > 1 else {}
            density = DensityProfile(spec.num_rows, rows, ratios)
        return ParameterProfile(name, spec, sparse, density, int(rows_of_ranks[0, 0]))


def _parse_state_key(key: str) -> tuple[str, int, str]:
    """(parameter, start, compress point) of a key `name[start:stop]/point`."""
    head, _, point = key.rpartition("/")
    name, _, span = head.rpartition("[")
    return name, int(span.partition(":")[0]), point
