"""GradientFlow's evaluation (arXiv 1902.06855), simulated: nodes of 8 GPUs on a network of 56 Gbit/s.

Modelled from known figures: an iteration is forward, and backward overlapped with the gradient exchange as the schemes'
steps describe it. Fitted: nothing. The paper's tables are not known to us; published are the speed-up of 410.2 on 512
GPUs, 95 epochs of AlexNet in 1.5 minutes, and the 2.5 of older systems on 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from typing import Any

import torch

from gradsync.costs.cluster import Link, Placement
from gradsync.costs.cost_model import CostModel
from gradsync.costs.steps import Compute, transfers
from gradsync.costs.transport import DEFAULT_TRANSPORT
from gradsync.planner.solver.joint import search
from gradsync.planner.solver.machine import step_s
from gradsync.planner.solver.problem import Curve, Demand, Option, Part, Problem, Resource, layerwise
from gradsync.schemes import AllReduce, CoarseGrained, HalfPrecision, Hierarchical, ReduceScatter, Scheme
from gradsync.tensors.bucket import TensorSpec

from ..rivals.merge import lazy, lazy_bytes
from .models import paper_model
from .tables import Rows, Table

GPUS = (8, 16, 32, 64, 128, 256, 512)
GPUS_PER_NODE = 8
HOP_S = 5e-6  # latency of a message between nodes: assumed
LINK_BYTES_PER_S = 7e9  # 56 Gbit/s
INSIDE = Link(50e9, 2e-6)  # NVLink, as ByteComp's planner has it; the latency is assumed
MEMORY_BYTES_PER_S = 790e9  # copy rate of a V100 (peak 900e9): assumed

IMAGES, EPOCHS, BATCH = 1_281_167, 95, 65_536
SPEED_UP, MINUTES, OLDER_SPEED_UP = 410.2, 1.5, 2.5  # published, on 512, 512 and 64 GPUs
RATIO = 0.1
CHOOSING = frozenset({"take_chunks", "put_chunks"})  # kernels that choose, pack and unpack chunks
TIMED_BYTES = (1 << 28, 1 << 30)  # bucket sizes whose times are joined by a line: so large that all-reduce is a ring


@dataclass(frozen=True)
class GradientFlowJob:
    """The computation of one GPU in an iteration; forward takes half as long as backward."""

    model: str
    backward_s: float
    images: int  # per GPU

    @property
    def compute_s(self) -> float:
        return 1.5 * self.backward_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        found = paper_model(self.model)
        return tuple(gap_s * self.backward_s / found.backward_s for gap_s in found.gaps_s)


# 95 epochs in 90 s at a speed-up of 410.2 make 38.8 ms of 128 images; of ResNet-50, 750 images a second are assumed.
ALEXNET = GradientFlowJob("alexnet", 0.0259, 128)
RESNET50 = GradientFlowJob("resnet50", 64 / 750 / 1.5, 64)
JOBS = (ALEXNET, RESNET50)

HALF = HalfPrecision(values="float16")
CHUNKS = CoarseGrained(HALF, ratio=RATIO)
TECHNIQUES = ("32 bits, per tensor", "+ 16 bits", "+ lazy", "+ by nodes", "+ chunks", "ours")


@dataclass(frozen=True)
class Attribution:
    """The parts of an iteration's time, in seconds."""

    forward_s: float
    backward_s: float
    bytes_s: float  # exposed transfers without latency
    latency_s: float  # additional exposed time with latencies
    kernels_s: float  # additional time with sums, scaling and rounding
    choosing_s: float  # additional time with choosing, packing and unpacking chunks

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.bytes_s + self.latency_s + self.kernels_s + self.choosing_s


def scheme_of(technique: str, gpus: int) -> Scheme[Any]:
    """Returns the scheme of one of `TECHNIQUES` but "ours": all-reduce, also in 16 bits, by nodes or in chunks.

    Where nodes sum first ("+ by nodes", "+ chunks"), values have 32 bits inside nodes, as links are fast there.
    """
    inside = min(gpus, GPUS_PER_NODE)
    match technique:
        case "32 bits, per tensor":
            return AllReduce()
        case "+ 16 bits" | "+ lazy":
            return HALF
        case "+ by nodes":
            return Hierarchical(ReduceScatter(), HALF, ranks_per_node=inside)
        case "+ chunks":
            return Hierarchical(ReduceScatter(), CHUNKS, ranks_per_node=inside)
    raise ValueError(f"unknown technique {technique!r}")


class Counted(IntEnum):
    """The costs besides bytes that a simulated step includes; each level includes those before it."""

    NOTHING = 0
    LATENCY = 1
    KERNELS = 2  # except those in CHOOSING
    CHOOSING = 3


@cache
def problem_of(job: GradientFlowJob, gpus: int, *techniques: str, counted: Counted = Counted.CHOOSING) -> Problem:
    """Returns the model's planning problem with exchanges (`TECHNIQUES`) as options; costs not `counted` are zero."""
    chains = {n: tuple(_chain(scheme_of(n, gpus), gpus, counted)) for n in techniques}
    options = tuple(Option(name, chain) for name, chain in chains.items())
    return Problem(job.gaps_s, paper_model(job.model).nbytes, options)


def _chain(scheme: Scheme[Any], gpus: int, counted: Counted) -> Iterator[Demand]:
    placement = Placement.regular(-(-gpus // GPUS_PER_NODE), min(gpus, GPUS_PER_NODE))
    cost = CostModel(HOP_S, LINK_BYTES_PER_S, MEMORY_BYTES_PER_S, intra=INSIDE)
    small, large = (scheme.steps((_bucket(nbytes),), (), placement) for nbytes in TIMED_BYTES)
    for one, other in zip(small, large, strict=True):
        first_s, second_s = cost.seconds(one, placement), cost.seconds(other, placement)
        byte_s = (second_s - first_s) / (TIMED_BYTES[1] - TIMED_BYTES[0])
        call_s = max(first_s - TIMED_BYTES[0] * byte_s, 0.0)
        if isinstance(one, Compute):
            if counted >= (Counted.CHOOSING if one.kernel in CHOOSING else Counted.KERNELS):
                yield Demand(Resource.COMPUTE, Curve.linear(0.0, byte_s))
            continue
        nodes = placement.nodes
        stays = all(nodes[source] == nodes[to] for source, to, _ in one.carried_by(DEFAULT_TRANSPORT).messages())
        where = Resource.INTRA if stays else Resource.INTER
        yield Demand(where, Curve.linear(call_s if counted >= Counted.LATENCY else 0.0, byte_s))


def _bucket(nbytes: int) -> TensorSpec:
    return TensorSpec((nbytes // 4,), torch.float32)


@cache
def parts_of(job: GradientFlowJob, gpus: int, technique: str) -> tuple[Part, ...]:
    """Returns the buckets into which a technique of `TECHNIQUES` (per tensor, lazy, our search) merges gradients."""
    problem = problem_of(job, gpus, *_options_of(technique))
    if technique == "ours":
        return search(problem).parts
    return layerwise(problem, 0) if technique in TECHNIQUES[:2] else lazy(problem)


def _options_of(technique: str) -> tuple[str, ...]:
    return (TECHNIQUES[1], *TECHNIQUES[3:5]) if technique == "ours" else (technique,)


def synced_s(job: GradientFlowJob, gpus: int, technique: str, counted: Counted = Counted.CHOOSING) -> float:
    """Returns the seconds from the begin of backward to the last synchronised gradient."""
    problem = problem_of(job, gpus, *_options_of(technique), counted=counted)
    return step_s(problem, parts_of(job, gpus, technique))


def iteration_s(job: GradientFlowJob, gpus: int, technique: str) -> float:
    return job.compute_s - job.backward_s + synced_s(job, gpus, technique)


def speed_up(job: GradientFlowJob, gpus: int, technique: str) -> float:
    """Returns the throughput of `gpus` GPUs over that of one."""
    return gpus * job.compute_s / iteration_s(job, gpus, technique)


def attributed(job: GradientFlowJob, gpus: int, technique: str) -> Attribution:
    """Returns an iteration's seconds of forward and backward, and what bytes, latency, kernels and choosing chunks add.

    The kinds of cost are added one by one, with the same buckets. `technique` is one of `TECHNIQUES`, such as "+ lazy".
    """
    bare_s, waiting_s, rounded_s, all_s = (synced_s(job, gpus, technique, counted) for counted in Counted)
    return Attribution(
        forward_s=job.compute_s - job.backward_s,
        backward_s=job.backward_s,
        bytes_s=bare_s - job.backward_s,
        latency_s=waiting_s - bare_s,
        kernels_s=rounded_s - waiting_s,
        choosing_s=all_s - rounded_s,
    )


def epochs_minutes(job: GradientFlowJob, gpus: int, technique: str) -> float:
    """Returns the minutes of 95 epochs of ImageNet, in batches of `job.images` per GPU."""
    return EPOCHS * IMAGES / (gpus * job.images) * iteration_s(job, gpus, technique) / 60


def gradientflow_tables() -> list[Table]:
    """Returns tables of speed-ups by technique (16 bits, lazy, ...), an iteration's time by cause, and bucket sizes."""
    return [
        *(speed_ups_table(job) for job in JOBS),
        attribution_table(),
        epochs_table(),
        threshold_table(),
        sizes_table(),
    ]


def speed_ups_table(job: GradientFlowJob) -> Table:
    rows = Rows(f"speed-up {job.model}", "ratio")
    for technique in TECHNIQUES:
        values: list[tuple[str, float, float | None]] = []
        for gpus in GPUS:
            published = None
            if job is ALEXNET and (technique, gpus) == (TECHNIQUES[0], 64):
                published = OLDER_SPEED_UP
            if job is ALEXNET and (technique, gpus) == ("+ chunks", 512):
                published = SPEED_UP
            values.append((f"{gpus}", speed_up(job, gpus, technique), published))
        rows.add(technique, values)
        rows.add(technique, [("ms on 512", 1e3 * iteration_s(job, 512, technique), None)], unit="ms")
    older_s, ring_s = 64 / OLDER_SPEED_UP * ALEXNET.compute_s, iteration_s(ALEXNET, 64, TECHNIQUES[0])
    assumed = "derived from 410.2" if job is ALEXNET else "750 images a second: assumed"
    return rows.done(
        f"{job.model}: speed-up on so many GPUs, by technique, each on top of those before (published in brackets)",
        f"Computation: {1e3 * job.compute_s:.1f} ms of {job.images} images ({assumed}), two thirds of it backward.",
        f"Links of 7 GB/s a node and {1e6 * HOP_S:.0f} us a hop; inside nodes of 8 "
        f"{INSIDE.bandwidth_bytes_per_s / 1e9:.0f} GB/s and {1e6 * INSIDE.latency_s:.0f} us (assumed).",
        "by nodes: reduce-scatter inside, a ring for each of a node's GPUs across, all-gather inside. chunks: 10 %, "
        "the choice one step late. ours: the search's buckets, each in 16 bits by one ring or by nodes, or in chunks.",
        "Modelled, not fitted; neither stragglers nor input are. Every all-reduce is a ring, however small.",
        f"2.5 on 64, of a model not named, is not met: AlexNet would take {1e3 * older_s:.0f} ms an iteration, with 32 "
        f"bits per tensor it takes {1e3 * ring_s:.0f}.",
        "As AlexNet's computation follows from 410.2, to be above that is to lose less than the published iteration.",
        decimals=1,
    )


def attribution_table() -> Table:
    rows = Rows("milliseconds on 512", "ms")
    for job in JOBS:
        for technique in TECHNIQUES:
            found = attributed(job, 512, technique)
            values: list[tuple[str, float, float | None]] = [
                ("forward", 1e3 * found.forward_s, None),
                ("backward", 1e3 * found.backward_s, None),
                ("bytes behind it", 1e3 * found.bytes_s, None),
                ("latency", 1e3 * found.latency_s, None),
                ("kernels", 1e3 * found.kernels_s, None),
                ("choosing", 1e3 * found.choosing_s, None),
            ]
            published = job.compute_s * 512 / SPEED_UP if (job, technique) == (ALEXNET, "+ chunks") else None
            rows.add(
                f"{job.model} {technique}",
                [*values, ("in all", 1e3 * found.seconds, None if published is None else 1e3 * published)],
            )
    left_s = ALEXNET.compute_s * (512 / SPEED_UP - 1)
    ours = attributed(ALEXNET, 512, "+ chunks")
    modelled_s = ours.seconds - ALEXNET.compute_s
    return rows.done(
        "Milliseconds of an iteration on 512 GPUs (published in brackets)",
        "bytes: time of an iteration beyond computation, with bytes only; latency, kernels (sums, scaling, rounding), "
        "choosing (and packing): additional time with each.",
        f"Kernels interrupt backward and go through memory at {MEMORY_BYTES_PER_S / 1e9:.0f} GB/s (assumed).",
        f"Of {1e3 * left_s:.1f} ms that the published iteration takes beyond computation, {1e3 * modelled_s:.1f} are "
        f"modelled here with chunks; the other {1e3 * (left_s - modelled_s):.1f} (stragglers, input, copies, their own "
        "way to choose) are not.",
        decimals=2,
    )


def epochs_table() -> Table:
    rows = Rows("95 epochs", "min")
    for technique in TECHNIQUES:
        published = MINUTES if technique == "+ chunks" else None
        rows.add(technique, [("alexnet", epochs_minutes(ALEXNET, 512, technique), published)])
    return rows.done(
        "Minutes for 95 epochs of ImageNet, AlexNet on 512 GPUs in batches of 65,536 (published in brackets)",
        f"{IMAGES:,} images an epoch. Time that is not modelled, see above, is not included.",
        decimals=2,
    )


THRESHOLDS = {  # MB of 16-bit values, worked out by other code
    (ALEXNET, "+ lazy", "one ring"): 47.0,
    (ALEXNET, "+ by nodes", "by nodes"): 16.0,
    (RESNET50, "+ by nodes", "by nodes"): 11.0,
}


def threshold_table() -> Table:
    """Tabulates the bucket size that lazy all-reduce takes by its rule, and its step time over the best size's."""
    rows = Rows("threshold", "MB")
    for (job, technique, way), stated in THRESHOLDS.items():
        problem = problem_of(job, 512, technique)
        best_s = min(step_s(problem, lazy(problem, nbytes=nbytes)) for nbytes in _thresholds(problem))
        chosen = lazy(problem, nbytes=lazy_bytes(problem))
        row = f"{job.model}, {way}"
        rows.add(row, [("root of bytes x latency / rate", lazy_bytes(problem) / 2 / 1e6, None)])
        rows.add(row, [("by links between nodes alone", lazy_bytes(_between_nodes(problem)) / 2 / 1e6, stated)])
        rows.add(row, [("step over the best threshold's", step_s(problem, chosen) / best_s, None)], unit="ratio")
        rows.add(row, [("and parted at the end", step_s(problem, lazy(problem)) / best_s, None)], unit="ratio")
    return rows.done(
        "Threshold: bytes in 16 bits from which on gradients are sent, 512 GPUs (in brackets: by other code)",
        "Figures in brackets count links between nodes alone; the steps count all transfers. Where backward hides most "
        "of the exchange, more and smaller buckets are better than by this rule of bytes and latencies.",
    )


def _between_nodes(problem: Problem) -> Problem:
    kept = (replace(o, chain=tuple(d for d in o.chain if d.resource is Resource.INTER)) for o in problem.options)
    return replace(problem, options=tuple(kept))


def _thresholds(problem: Problem) -> Iterator[float]:
    size = sum(problem.nbytes)
    yield from (size / 2**power for power in range(12))


QUANTITIES = (
    *("million parameters", "tensors", "MB, 32 bits", "MB, 16 bits", "ms, 32 bits", "ms, 16 bits"),
    *("chunks of 32 Ki", "ms, 10 % of them in 16 bits", "ms, 15 %"),
)
SIZES = {  # worked out by other code, in the order of QUANTITIES
    ALEXNET: (61.0, 26, 244.0, 122.0, 69.8, 34.9, 1865, 3.5, 5.2),
    RESNET50: (25.56, 161, 102.0, 51.0, 29.2, 14.6, 780, 1.5, 2.2),
}


def sizes_table() -> Table:
    """Tabulates the bytes of gradients, and the time to move them around a ring without latency."""
    rows = Rows("sizes", "number")
    for job, stated in SIZES.items():
        model = paper_model(job.model)
        elements = sum(gradient.elements for gradient in model.gradients)
        bucket = TensorSpec((elements,), torch.float32)
        found = (
            elements / 1e6,
            len(model.gradients),
            *(_sent_bytes(scheme, bucket) / 2e6 for scheme in (AllReduce(), HALF)),
            *(_moved_ms(scheme, bucket) for scheme in (AllReduce(), HALF)),
            CHUNKS.num_chunks(elements),
            *(_moved_ms(replace(CHUNKS, ratio=ratio), bucket) for ratio in (RATIO, 0.15)),
        )
        for name, value, figure in zip(QUANTITIES, found, stated, strict=True):
            rows.add(name, [(job.model, float(value), figure)])
    return rows.done(
        "Time to move gradients once around a ring at 7 GB/s, without latency (in brackets: worked out by other code)",
        "The ring is so long that a rank sends everything twice.",
        decimals=1,
    )


def _sent_bytes(scheme: Scheme[Any], bucket: TensorSpec) -> float:
    """Returns the bytes that a rank sends in a ring of very many ranks."""
    (transfer,) = transfers(scheme.steps((bucket,), (), Placement.one_per_node(2)))
    return 2 * transfer.part_bytes[0]


def _moved_ms(scheme: Scheme[Any], bucket: TensorSpec) -> float:
    return 1e3 * _sent_bytes(scheme, bucket) / LINK_BYTES_PER_S
