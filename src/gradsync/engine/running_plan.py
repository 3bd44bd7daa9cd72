"""The plan that an engine runs, with its buckets: how the next plan replaces it, and what it has exchanged so far."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..comm import JobThread, gather_numbers
from ..comm.network_cost import network_cost
from ..costs.forecast import forecast
from ..costs.timeline import Task
from ..devices.streams import OFFLOAD, Streams
from ..plans.plan import Plan, What, describe
from ..state import keeps_values
from ..tensors.bucket import Layout, TensorSpec
from .bucket_run import BucketRun, BucketRuns, BucketStatistics
from .observation import Observer
from .peers import Peers
from .plan_control import PlanController
from .step_times import TimedSteps
from .totals import Totals

logger = logging.getLogger(__name__)


class RunningPlan:
    """The plan in force with its buckets at run time; between steps the controller's next plan takes its place.

    Args:
        controller: chooses plans.
        observer: knows the densities of gradients.
        peers: runs collectives between the ranks.
        parameters: the parameters by name.
        specs: their shapes and dtypes.
        device: where gradients are.
        streams: those of the device.

    Attributes:
        plan: the plan in force.
        runs: its buckets, with their memory, state and statistics.
        times: the times of the steps so far.
    """

    def __init__(
        self,
        controller: PlanController,
        observer: Observer,
        peers: Peers,
        parameters: Mapping[str, Tensor],
        specs: Mapping[str, TensorSpec],
        *,
        device: torch.device,
        streams: Streams,
    ) -> None:
        self._controller, self._observer, self._peers = controller, observer, peers
        self._specs = specs
        # The ranks agreed on these shapes and strides: a memory format that changes later changes no message.
        self._templates = {name: torch.empty_like(p, device="meta") for name, p in parameters.items()}
        self._device, self._streams = device, streams
        self._other_core: JobThread | None = None  # for what a plan offloads
        self._earlier = Totals()  # of the plans that were replaced
        self._final: list[BucketStatistics] | None = None  # when the engine was closed
        self.times = TimedSteps()
        self.plan, self.runs = controller.plan, BucketRuns()
        self._adopt(controller.plan)
        self.announce()

    @property
    def is_outdated(self) -> bool:
        """Whether the next step begins with another plan: by then gradients must have left these buckets' memory."""
        return self._controller.plan is not self.plan

    @property
    def settled(self) -> bool:
        """Whether trials of plans and measurements are over, so that the plan stays."""
        return self._controller.settled and not self.is_outdated

    @property
    def offloads(self) -> bool:
        """Whether there is a thread for offloaded computations, because the plan or a former one has needed it."""
        return self._other_core is not None

    def offload(self, job: Callable[[], None]) -> None:
        """Runs `job` on the thread for offloaded computations, with the device's stream for them."""
        assert self._other_core is not None

        def run() -> None:
            with self._streams.on(OFFLOAD):
                job()

        self._other_core.submit(run)

    # How one plan follows another.

    def change(self) -> None:
        """Replaces the buckets by those of the controller's plan, and moves schemes' state into them. Collective.

        Raises:
            ValueError: for state that the plan's schemes cannot keep; the old state is then lost.
        """
        kept, state = self.runs.have_state, list(self.runs.state_slices())
        self._adopt(self._controller.plan)
        if kept:
            self.runs.inherit(state)
            self.agree_on_carried()

    def followers(self, plans: Sequence[Plan]) -> list[Plan]:
        """Returns those of the plans, in their order, that can follow the present plan and take turns with each other.

        The others are left out: they send rows of a table for which another plan keeps state, such as a residual, and
        there is no place for it then. Collective: schemes may make process groups.
        """
        all_rows = frozenset[str]().union(*map(_tables, plans))
        kept, rows = self.runs.kept_names, frozenset[str]()
        found = []
        for plan in plans:
            keeps, tables = self._kept_of(plan, all_rows), _tables(plan)
            if not (tables & kept or keeps & rows):
                kept, rows = kept | keeps, rows | tables
                found.append(plan)
        return found

    def _kept_of(self, plan: Plan, names: frozenset[str]) -> frozenset[str]:
        """Returns the parameters, of `names`, for which a plan's schemes keep state that differs between ranks."""
        lossy = [b for b in plan.buckets if b.scheme.traits.lossy and names.intersection(b.names)]
        kept = (b for b in lossy if keeps_values(b.scheme.init(b.bucket(self._specs), self._peers.group)))
        return names.intersection(name for b in kept for name in b.names)

    def replace(self, runs: BucketRuns) -> None:
        """Makes the controller's plan the one in force, with its buckets `runs`: new ones of `runs_of`, or the present.

        Schemes' state is not moved: that of a checkpoint is loaded next.
        """
        if runs is self.runs:  # whose statistics go on
            return
        self._leave()
        self.plan, self.runs = self._controller.plan, runs
        self.announce()

    def runs_of(self, plan: Plan) -> BucketRuns:
        """Allocates and returns the buckets of a plan, with new state. Collective: schemes may make process groups."""
        templates, device, group = self._templates, self._device, self._peers.group
        of_gradients = plan.what is What.GRADIENT
        runs = BucketRuns(
            BucketRun.make(b.bucket(self._specs), b.scheme, templates, device, group, of_gradients=of_gradients)
            for b in plan.buckets
        )
        if self._other_core is None and runs.offload:
            self._other_core = JobThread("gradsync offload", self._device, torch_threads=1, owner=self)
        return runs

    def agree_on_carried(self) -> None:
        """Tells all ranks in which buckets some rank has a residual that a former plan left to be sent. Collective."""
        timeout_s = self._peers.timeout_s

        def gather(mine: Tensor) -> list[Tensor]:
            found: list[Tensor] = self._peers.call(
                "carried residuals", lambda group: gather_numbers(group, mine, timeout_s)
            )
            return found

        self.runs.agree_on_carried(gather)

    def _adopt(self, plan: Plan) -> None:
        self._leave()
        self.plan = plan
        self.runs = BucketRuns()  # the old buckets' memory is free before the new ones take theirs
        self.runs = self.runs_of(plan)

    def _leave(self) -> None:
        """Adds the statistics of the plan in force to the sums over all plans, as its buckets are replaced."""
        self.times.read()  # of steps that keep the old buckets
        if len(self.runs):
            sums = self._earlier.plus(self._statistics())
            self._earlier = replace(sums, plan_changes=sums.plan_changes + 1)

    def close(self) -> None:
        """Gives up the buckets' memory, except where gradients still live in it; statistics stay as they are now."""
        self.times.read_ended()
        self._final = self._statistics()  # without what a device that hangs has not ended
        if self._other_core is not None:
            self._other_core.stop()
        self.runs = BucketRuns()

    # What is told of it.

    def statistics(self) -> list[BucketStatistics]:
        """Returns each bucket's bytes and times since the plan came into force, or until the engine was closed."""
        if self._final is not None:
            return self._final
        self.times.read()
        return self._statistics()

    def _statistics(self) -> list[BucketStatistics]:
        return [run.statistics(self._observer.profiles) for run in self.runs]

    def totals(self) -> Totals:
        """Returns the sums of bytes and times since `attach`, over all plans, without comparisons of parameters."""
        return self._earlier.plus(self.statistics())

    def timeline(self) -> list[Task]:
        """Returns the tasks of the last step, each on one of five streams, with begin and end in seconds.

        Streams are "compute" (backward, and schemes' work on the thread of backward), "offload" (work on another core
        or the host), "kernel" (other work), "link" (operations in flight) and "wait".
        """
        self.times.read()
        return self.times.timeline

    def predicted_timeline(self, step: int) -> list[Task]:
        """Returns a forecast of the tasks of training step `step`, in seconds since its first gradient was ready.

        It follows from the plan, the times when buckets were ready in the last step, and the measured network. Empty
        before the first step, while densities are unknown, and where the network was not measured.
        """
        known = self.runs.expected_steps(self._observer.profiles, step)
        group = self._peers.group
        link_cost = network_cost(group)
        self.times.read()
        ready_s = self.times.ready_s
        if ready_s.keys() != known.keys() or link_cost is None:
            return []
        cost = self._controller.measured_cost or link_cost
        return forecast(self.plan.order, known, ready_s, cost, group.placement)

    def words(self) -> list[str]:
        """Returns a description of the plan in words, one line per bucket."""
        known = {p.name: p.density.density for p in self._observer.profiles.values() if p.density}
        return describe(self.plan, self._specs, known)

    def announce(self) -> None:
        """Logs the description of the plan that `words` returns."""
        for line in self.words():
            logger.info("%s", line)


def _tables(plan: Plan) -> frozenset[str]:
    """Returns the parameters of which the plan sends rows, without a place for residuals."""
    rows = (bucket for bucket in plan.buckets if bucket.scheme.traits.layout is Layout.ROWS)
    return frozenset(name for bucket in rows for name in bucket.names)
