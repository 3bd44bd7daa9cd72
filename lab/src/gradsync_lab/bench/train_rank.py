"""The program of one rank in a training benchmark; `train.py` starts it."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import chain
from math import inf, lcm
from threading import TIMEOUT_MAX
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsync.frontends.attach import Attachment
from gradsync.optim.lars import LARS
from gradsync.planner import Job
from gradsync.planner.default.named import fit_optimizer
from gradsync.planner.search.predict import predict, unmeasured
from gradsync.plans.plan import What
from gradsync.schemes import Scheme, to_expression

from .. import workloads
from ..cluster.counters import interface_bytes
from ..workloads import Batch, Workload
from ..workloads.emulated import Emulated
from .card import BACKENDS, OnCard, own_card
from .memory import peak_bytes
from .methods import SWEEPS, Method, method
from .rank import DISTURBED, event, in_time, run_rank
from .replicas import rests_of
from .rivals import Rival
from .shards import put_into_shards
from .steal import Patience, Steal
from .train import AGAIN, BLOCK_AVERAGES, TrainSpec

AnyWorkload = Workload | Emulated | OnCard

PATIENCE_FOR_STEP = 2.5  # in method timeouts; ends before the harness' own collectives time out
CALIBRATION_STEPS = 3  # steps without synchronisation, which measure backward alone


@dataclass
class Contestant:
    """A benchmark method on this rank during a run: its model, optimiser and measurements."""

    name: str
    model: nn.Module
    attachment: Attachment | Rival | None
    optimizer: Optimizer
    batches: Iterator[Batch]
    patience_s: float = TIMEOUT_MAX  # for a step
    in_step: bool = True  # see `Method`
    in_shards: bool = False
    failed: str | None = None
    failed_s: float = inf  # when it failed on this rank, on the clock that the ranks of one machine share
    step_s: list[float] = field(default_factory=list)  # of the warm-up
    blocks: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    backward_s: list[list[float]] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)  # in each block

    @property
    def inner(self) -> nn.Module:
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @property
    def settled(self) -> bool:
        """Whether the method has finished trying plans and will keep its plan; the same on all ranks."""
        return self.attachment is None or self.attachment.settled

    @property
    def cycle(self) -> int:
        """Returns the number of steps after which the schedule of averaging groups repeats; 1 if there is none."""
        scheme, attachment = mixing_scheme(self), self.attachment
        if scheme is None or attachment is None:
            return 1
        schemes = [scheme] if isinstance(attachment, Rival) else [b.scheme for b in attachment.plan.buckets]
        return lcm(*(len(rests_of(each)) for each in schemes))

    def forget_block(self) -> None:
        """Deletes the times of the last block of steps; the model and the losses stay."""
        for kept in (self.blocks, self.backward_s, self.sent_bytes):
            if kept:
                kept.pop()


@contextmanager
def attempt(who: Contestant) -> Iterator[None]:
    """Runs the `with` block; if method `who` fails in it on any rank, it is marked as failed on all ranks.

    Other methods continue. Ranks in a collective of the method wait until its timeout; the harness' collectives are not
    affected. A failed method is detached: an unfinished measurement for its plan would keep other methods from theirs.
    """
    try:
        yield
    except Exception as error:  # stays in the table
        who.failed, who.failed_s = f"{type(error).__name__}: {error}", time.monotonic()
    first_s = torch.tensor([who.failed_s], dtype=torch.float64)
    dist.all_reduce(first_s, op=dist.ReduceOp.MIN)
    if who.failed is None and first_s.item() < inf:
        who.failed = "failed on another rank"
    if who.failed is not None and who.attachment is not None:
        who.attachment.detach()


def enter(workload: AnyWorkload, name: str, way: Method, spec: TrainSpec) -> Contestant:
    """Makes a fresh copy of the workload's model, wraps it by a method, and returns the contestant."""
    model = workload.model(sparse=way.sparse, seed=spec.seed)
    if way.sharding is not None:
        put_into_shards(model, way.sharding)
    batches = workload.batches(dist.get_rank(), dist.get_world_size(), spec.seed)
    optimizer = workload.optimizer(model)
    who = Contestant(
        name,
        model,
        None,
        optimizer,
        batches,
        PATIENCE_FOR_STEP * spec.method_timeout_s,
        in_step=way.in_step,
        in_shards=way.sharding is not None,
    )
    with attempt(who):
        if way.lossy is not None and (momentum := fit_optimizer(way.lossy, optimizer)):
            way = method(way.name, momentum)
        who.model, who.attachment = way.wrap(model, optimizer, timedelta(seconds=spec.method_timeout_s))
        if isinstance(optimizer, LARS) and who.attachment is not None:
            optimizer.arrived = who.attachment.arrived
    return who


def train_step(workload: AnyWorkload, who: Contestant, *, sync: bool = True) -> tuple[float, float, float]:
    """Trains one step; returns (step, backward) seconds and the loss.

    Without `sync` nothing is communicated or updated.
    """
    with in_time(f"a step of {who.name}", who.patience_s):
        return _train_step(workload, who, sync=sync)


def _train_step(workload: AnyWorkload, who: Contestant, *, sync: bool) -> tuple[float, float, float]:
    began_s = time.perf_counter()
    batch = next(who.batches)
    no_sync = who.attachment.no_sync if who.attachment else getattr(who.model, "no_sync", nullcontext)
    with nullcontext() if sync else no_sync():
        loss = workload.loss(who.model, batch)
        who.optimizer.zero_grad()
        backward_s = time.perf_counter()
        loss.backward()
        backward_s = time.perf_counter() - backward_s
    if sync:
        who.optimizer.step()
    value = float(loss.detach())  # waits for a GPU, on which the step has not ended yet
    return time.perf_counter() - began_s, backward_s, value


def run_block(workload: AnyWorkload, who: Contestant, steps: int, *, counted: bool) -> None:
    """Trains a block of `steps` steps, and before it an untimed one, as caches still hold another method's data.

    The times are added to `who.blocks`, which are compared, if `counted`; else they become `who.step_s`, the warm-up's.
    """
    if who.failed:
        return
    with attempt(who):
        who.losses.append(train_step(workload, who)[2])
    if who.failed:
        return
    dist.barrier()
    sent_before = interface_bytes()[0]
    times, backward_s = [], []
    # A barrier ends the block: a limited link counts a packet when it leaves, which is after the collective returned.
    with attempt(who):
        for _ in range(steps):
            step_s, in_backward_s, loss = train_step(workload, who)
            times.append(step_s)
            backward_s.append(in_backward_s)
            who.losses.append(loss)
    if not counted:
        who.step_s = times
    else:
        who.blocks.append(times)
        who.backward_s.append(backward_s)
        who.sent_bytes.append(interface_bytes()[0] - sent_before)


def calibrate(workload: AnyWorkload, who: Contestant) -> None:
    """Times backward without communication, to `who.alone_s`, on other batches, so that training's stay in order.

    Models in shards, which compute nothing without communication, are left out.
    """
    if who.failed or who.in_shards:
        return
    training, who.batches = who.batches, workload.batches(dist.get_rank(), dist.get_world_size(), seed=1)
    with attempt(who):
        for _ in range(CALIBRATION_STEPS):
            who.alone_s.append(train_step(workload, who, sync=False)[1])
    who.optimizer.zero_grad()
    who.batches = training


def settle(workload: AnyWorkload, who: Contestant) -> None:
    """Trains until gradsync has settled on a plan, then restores the model: all methods start from the same state."""
    if who.failed or who.settled:
        return
    saved = copy.deepcopy((who.inner.state_dict(), who.optimizer.state_dict()))
    training, who.batches = who.batches, workload.batches(dist.get_rank(), dist.get_world_size(), seed=1)
    with attempt(who):
        while not who.settled:
            train_step(workload, who)
        assert who.attachment is not None and not isinstance(who.attachment, Rival)
        nothing = {"step": 0, "state": {}}  # without the residuals that trials left
        who.attachment.load_state_dict({**who.attachment.state_dict(), **nothing})
    who.inner.load_state_dict(saved[0])
    who.optimizer.load_state_dict(saved[1])
    who.optimizer.zero_grad()
    who.batches = training


def ready(workload: AnyWorkload, name: str, way: Method, spec: TrainSpec, patience: Patience) -> Contestant:
    """Returns a method that has settled on a plan; starts again if the host stole much processor time meanwhile."""
    while True:
        since, who = Steal(), enter(workload, name, way, spec)
        if who.settled:
            return who
        settle(workload, who)
        if who.failed or who.attachment is None or not patience.is_lost(since):
            return who
        who.attachment.detach()


def affordable_steps(contestants: list[Contestant], spec: TrainSpec) -> int:
    """Returns the number of steps in a block, the same for all methods; fewer if the slowest would take too long."""
    step_s = torch.tensor([statistics.median(who.step_s) for who in contestants if who.step_s and not who.failed])
    if len(step_s) == 0:
        return spec.block_steps
    dist.all_reduce(step_s, op=dist.ReduceOp.MAX)
    return max(1, min(spec.block_steps, int(spec.most_block_s / step_s.max())))


def rounded_up(steps: int, cycle: int) -> int:
    """Returns the number of steps, rounded up to a multiple of `cycle`."""
    return steps + -steps % cycle


def compete(
    workload: AnyWorkload, ways: dict[str, Method], spec: TrainSpec, repeats: int, patience: Patience
) -> tuple[list[Contestant], list[float]]:
    """Trains all methods in turns, a block of steps each, in alternating order.

    Returns:
        The contestants, and the share of processor time that the host stole in each counted turn of all methods.
    """
    # One by one: automatic plans measure one model at a time.
    contestants = [ready(workload, name, way, spec, patience) for name, way in ways.items()]
    cycle = lcm(*(who.cycle for who in contestants if not who.failed))  # equal steps for all, of whole cycles
    for who in contestants:
        run_block(workload, who, rounded_up(spec.warmup_steps, cycle), counted=False)
        calibrate(workload, who)
        event(kind="warmup", method=who.name)
    block_steps = rounded_up(affordable_steps(contestants, spec), cycle)
    gc.collect()
    gc.freeze()  # a collection would go through the models of all methods, in the steps of one
    stolen: list[float] = []
    while len(stolen) < repeats:
        since = Steal()
        for who in contestants if len(stolen) % 2 == 0 else contestants[::-1]:
            run_block(workload, who, block_steps, counted=True)
            event(kind="block", method=who.name, repeat=len(stolen), loss=who.losses[-1] if who.losses else None)
        share = since.share
        if patience.is_lost(since):
            for who in contestants:
                who.forget_block()
            event(kind=DISTURBED, turns=len(contestants))
        else:
            stolen.append(share)
    return contestants, stolen


def agreed(figure: float) -> float:
    """Returns rank 0's figure on all ranks; collective."""
    figures = torch.tensor([figure], dtype=torch.float64)
    dist.broadcast(figures, src=0)
    return float(figures.item())


def pick(sweep: list[Contestant], spec: TrainSpec) -> tuple[str, float]:
    """Returns the fastest method's name, and its median block time in seconds on the slowest rank, inf if all failed.

    It is the same on all ranks. Collective.
    """
    rows = [
        [inf] * spec.sweep_repeats
        if who.failed
        else [BLOCK_AVERAGES[spec.block_average](block) for block in who.blocks]
        for who in sweep
    ]
    medians_s = torch.tensor(rows, dtype=torch.float64)
    dist.all_reduce(medians_s, op=dist.ReduceOp.MAX)
    overall_s = [statistics.median(row) for row in medians_s.tolist()]
    return sweep[overall_s.index(min(overall_s))].name, min(overall_s)


def result_of(workload: AnyWorkload, who: Contestant, spec: TrainSpec) -> dict[str, Any]:
    """Returns this rank's measurements of one method as plain data, which JSON can hold."""
    if who.failed:
        return {"failed": who.failed, "failed_s": who.failed_s}
    if who.attachment is not None:
        who.attachment.consensus()
    evaluate = spec.evaluate and (who.in_shards or dist.get_rank() == 0) and not who.name.endswith(f":{AGAIN}")
    backward_s = statistics.median(chain.from_iterable(who.backward_s))
    alone_s = statistics.median(who.alone_s) if who.alone_s else None
    rows, plan, timeline, predicted = [], [], [], []
    digest = who.attachment.plan.digest if isinstance(who.attachment, Attachment) else None
    if who.attachment:
        plan = who.attachment.explain()
        timeline = [asdict(task) for task in who.attachment.timeline()]
        predicted = [asdict(task) for task in who.attachment.predicted_timeline()]
        rows = [
            {
                "names": list(s.names),
                "scheme": s.scheme,
                "density": s.density,
                "sent_bytes": s.sent_bytes / s.steps,
                "predicted_bytes": None if s.predicted_bytes is None else s.predicted_bytes / s.steps,
                "communication_s": s.communication_s / s.steps,
                "exposed_s": s.exposed_s / s.steps,
            }
            for s in who.attachment.statistics()
        ]
    return {
        "failed": None,
        "blocks": who.blocks,
        "block_average": spec.block_average,
        "in_step": who.in_step,
        "mixes_by": None if (scheme := mixing_scheme(who)) is None else to_expression(scheme),
        "losses": who.losses,
        "samples_per_step": workload.batch_size,
        "sent_bytes": sum(who.sent_bytes),
        "final": workload.evaluate(who.inner) if evaluate else {},
        "backward_s": None if alone_s is None else min(alone_s, backward_s),
        "exposed_s": None if alone_s is None else max(backward_s - alone_s, 0.0),
        "plan": plan,
        "plan_digest": digest,
        "buckets": rows,
        "timeline": timeline,
        "predicted_timeline": predicted,
        "predicted_s": None,
        "memory_bytes": _step_memory_bytes(workload, who) if who.in_shards else None,
    }


def _step_memory_bytes(workload: AnyWorkload, who: Contestant) -> int:
    """Trains a last step of a model in shards and returns the peak memory of the tensors made in it, in bytes.

    Shards of parameters and the optimiser's state are there before, and do not count.
    """
    who.optimizer.zero_grad()
    state = chain.from_iterable(kept.values() for kept in who.optimizer.state.values())
    lasting = [*who.inner.parameters(), *who.inner.buffers(), *(each for each in state if isinstance(each, Tensor))]
    given = [each.to_local() if isinstance(each, DTensor) else each for each in lasting]
    return peak_bytes(lambda: train_step(workload, who), given)


def mixing_scheme(who: Contestant) -> Scheme[Any] | None:
    """Returns the scheme by which ranks average parameters; None if they do not.

    The scheme is the first bucket's, as all buckets have the same groups.
    """
    if isinstance(who.attachment, Rival):
        return who.attachment.mixes_by
    if who.attachment is None or who.attachment.plan.what is What.GRADIENT:
        return None
    return who.attachment.plan.buckets[0].scheme


def predicted_s(who: Contestant, jobs: list[Job]) -> float | None:
    """Predicts the seconds of a training step by the plan of the method `who`, from measurements of this run.

    These are in a `Job`: times of gradients, kernels and links. It is the method's own if its plan measured one, or
    else the first of `jobs` with the same gradients and all of the plan's kernels. None without a job, for plans that
    average parameters, and for failed methods and rivals.
    """
    if who.attachment is None or isinstance(who.attachment, Rival) or who.failed:
        return None
    if who.attachment.plan.what is not What.GRADIENT:
        return None
    own = who.attachment.profile
    for job in jobs if own is None else [Job.of(own)]:
        try:
            if own is not None or not unmeasured(who.attachment.plan, job):
                return job.beside_s + predict(who.attachment.plan, job).seconds
        except ValueError:  # of a model with other gradients: sparse ones, or dense
            continue
    return None


def measured_jobs(contestants: list[Contestant]) -> list[Job]:
    """Returns a `Job` (times of gradients, kernels and links) of each method whose automatic plan measured one."""
    profiles = [who.attachment.profile for who in contestants if who.attachment is not None and not who.failed]
    return [Job.of(profile) for profile in profiles if profile is not None]


def measure(text: str) -> dict[str, Any]:
    """Times the DDP variants of sweeps, then the methods; returns this rank's measurements. `text` is a `TrainSpec`."""
    spec = TrainSpec.model_validate_json(text)
    real = workloads.load(spec.workload, **spec.options)
    size, rank = dist.get_world_size(), dist.get_rank()
    workload: AnyWorkload = Emulated(real, spec.compute, rank, size) if spec.emulate_compute else real
    if spec.device == "cuda":
        workload = OnCard(real, own_card())
    sweep: dict[str, Any] = {}
    picked: dict[str, str] = {}
    methods = spec.methods
    patience = Patience(spec.patience_s, agreed)
    if spec.sweep:
        ways = {name: method(name) for name in spec.sweep}
        contestants, _ = compete(workload, ways, spec, spec.sweep_repeats, patience)
        entered = {who.name: who for who in contestants}
        picks = {name: pick([entered[m] for m in SWEEPS[name]], spec) for name in spec.methods if name in SWEEPS}
        picked = {name: best for name, (best, _) in picks.items()}
        if spec.fastest_first:
            first = min(picks, key=lambda name: picks[name][1])
            methods = (first, *(name for name in methods if name != first))
        sweep = {who.name: result_of(workload, who, spec) for who in contestants}
        del contestants, entered  # their models
    ways = {name: method(picked.get(name, name)) for name in methods}
    ways[f"{methods[0]}:{AGAIN}"] = ways[methods[0]]
    contestants, stolen = compete(workload, ways, spec, spec.repeats, patience)
    jobs = {
        kind: measured_jobs([who for who in contestants if ways[who.name].sparse is kind]) for kind in (True, False)
    }
    judged = {
        who.name: {**result_of(workload, who, spec), "predicted_s": predicted_s(who, jobs[ways[who.name].sparse])}
        for who in contestants
    }
    return {"methods": methods, "picked": picked, "sweep": sweep, "judged": judged, "stolen": stolen}


if __name__ == "__main__":
    run_rank(measure, lambda text: BACKENDS[TrainSpec.model_validate_json(text).device])
