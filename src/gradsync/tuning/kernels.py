"""Measures kernel costs on this job's processors: all ranks time schemes without a network, and costs are fitted.

`measure` times candidate schemes at several sizes; the default planner times only the schemes of its plans. All ranks
measure at the same time, so that ranks on shared cores slow each other down as they do when they exchange gradients.
Planners take the times of an earlier job on this machine where there are some (`earlier.py`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from ..comm.links import Highest
from ..compressors import BlockInt, Cast, Compressor, ErrorFeedback, ScaledSign, Summand, TopK
from ..costs.cluster import Placement
from ..costs.cost_model import KernelCost
from ..costs.steps import Compute
from ..devices import host, streams
from ..planner.default.network import planned_schemes
from ..planner.pieces import Pieces, around_each
from ..plans.profile import HostEstimate, Interval, KernelEstimate
from ..schemes import (
    CompressedAllGather,
    CompressedAllReduce,
    CompressedTwoWay,
    HalfPrecision,
    PowerSGD,
    ReduceScatter,
    Route,
    Scheme,
    SchemeOrCompressor,
    ways,
)
from ..tensors.bucket import Layout
from . import rehearsal
from .earlier import Costs, EarlierTimes
from .fitting import fit_kernels, load_scipy
from .rehearsal import Sample, rehearse, rehearse_dense

BUDGET_S = 4.0  # for the dense buckets; the size that exceeds the budget is still finished
FEWEST_SIZES = 3  # rehearsed whatever they take
NUMELS = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)  # of dense buckets
DEVICE_NUMELS = (1 << 12, 1 << 20, 1 << 24, 1 << 16, 1 << 22, 1 << 18)  # the same, where a call costs more than bytes
COPIED_NUMELS = (1 << 10, 1 << 16, 1 << 20, 1 << 22)  # of copies between an accelerator and the host
COPIES = 5
FETCH, SEND = "fetch", "send"
CPU = torch.device("cpu")
SHORTEST_S = 1e-8  # stands for times that the clock shows as 0

CANDIDATES: tuple[SchemeOrCompressor, ...] = (
    HalfPrecision(values="bfloat16"),
    CompressedAllReduce(Cast("bfloat16")),
    CompressedTwoWay(ErrorFeedback(BlockInt(8))),
    CompressedAllGather(ErrorFeedback(ScaledSign())),
    CompressedAllGather(ErrorFeedback(TopK(0.01))),
    PowerSGD(2),
)  # `measure` takes their kernels beside those of default plans


def measured_kernels(
    candidates: Sequence[SchemeOrCompressor],
    placement: Placement,
    highest: Highest,
    device: torch.device = CPU,
    budget_s: float = BUDGET_S,
    earlier: EarlierTimes | None = None,
) -> Pieces[dict[str, KernelEstimate]]:
    """Measures the costs of the kernels that the default plans' schemes and `candidates` use, by kernel name.

    Collective. It is a generator that measures a piece at each `next`. Costs are the slowest rank's, with the same bits
    on all ranks.

    Args:
        candidates: further compressors and schemes whose kernels are measured.
        placement: the node of each rank, on which the default plans' schemes depend.
        highest: returns the maximum of numbers over all ranks; collective.
        device: where the kernels run.
        budget_s: seconds that dense buckets may take; the size that exceeds them is still finished.
        earlier: times of earlier jobs that are used instead where all ranks have them; None: none.
    """
    planned = planned_schemes(placement)
    dense = [Route(("all_reduce",)), ReduceScatter(), *flat_schemes(candidates), *_adding(candidates)]

    def rehearsed() -> Pieces[list[Sample]]:
        found = yield from rehearse(planned, device)
        return found + (yield from _rehearsed_dense(dense, highest, device, budget_s))

    work = f"{_words(planned)}; {_words(dense)} of {_numels(device)} elements within {budget_s} s"
    return (yield from _known(work, rehearsed(), highest, device, earlier))


def _known(
    work: str, rehearsed: Pieces[list[Sample]], highest: Highest, device: torch.device, earlier: EarlierTimes | None
) -> Pieces[Costs]:
    """Returns the earlier costs of this work, or those of a rehearsal on shared cores where there are none.

    They are the slowest rank's, with the same bits on all ranks, whatever was in each rank's file.
    """
    measured = _fitted(_on_shared_cores(rehearsed, device), highest)
    costs = yield from measured if earlier is None else earlier.or_measured(work, measured, highest)
    return _of_slowest(costs, highest)


def _of_slowest(costs: Costs, highest: Highest) -> Costs:
    """Returns the highest costs over all ranks, by kernel; all ranks have the same kernels. Collective."""
    mine: list[float] = []
    for name in sorted(costs):
        for time_ in (costs[name].call_s, costs[name].byte_s):
            mine += [time_.value, time_.low, math.inf if time_.high is None else time_.high]
        mine.append(-costs[name].knee_bytes)
    numbers = iter(highest(mine))

    def interval() -> Interval:
        value, low, high = islice(numbers, 3)
        return Interval(value=value, low=low, high=None if high == math.inf else high)

    return {
        name: KernelEstimate(call_s=interval(), byte_s=interval(), knee_bytes=-next(numbers)) for name in sorted(costs)
    }


def _words(schemes: Sequence[Scheme[Any]]) -> str:
    """Returns a text that names the schemes, and the sizes at which those of default plans are timed."""
    return f"{list(schemes)!r} on {rehearsal.TABLES} and {rehearsal.BUCKETS}"


def _numels(device: torch.device) -> tuple[int, ...]:
    return NUMELS if device.type == "cpu" else DEVICE_NUMELS


def _rehearsed_dense(
    dense: Sequence[Scheme[Any]], highest: Highest, device: torch.device, budget_s: float
) -> Pieces[list[Sample]]:
    """Times schemes on dense buckets of several sizes, as far as the budget allows; `highest` is collective."""
    samples: list[Sample] = []
    if device.type != "cpu":
        yield from rehearse_dense(dense, NUMELS[0], device)  # compiles kernels
    spent = Spent()
    for number, numel in enumerate(_numels(device), start=1):
        samples += yield from around_each(rehearse_dense(dense, numel, device), spent.running)
        if highest([spent.wall_s])[0] > budget_s and number >= FEWEST_SIZES:
            break
    return samples


def measured_host(
    candidates: Sequence[SchemeOrCompressor],
    highest: Highest,
    device: torch.device,
    budget_s: float = BUDGET_S,
    earlier: EarlierTimes | None = None,
) -> Pieces[HostEstimate | None]:
    """Measures copies between an accelerator and the host, and the host's kernels for offloaded compression.

    Collective. It is a generator that measures a piece at each `next`, and returns None if `device` is the CPU. The
    kernels are those of the candidates' compressors, run with one thread of torch, as offloaded work is.

    Args:
        candidates: compressors, and schemes whose compressors count.
        highest: returns the maximum of numbers over all ranks; collective.
        device: the accelerator.
        budget_s: seconds that the kernels may take; the size that exceeds them is still finished.
        earlier: times of earlier jobs that are used instead where all ranks have them; None: none.
    """
    if not host.is_apart(device):
        return None
    copies = yield from _fitted(_copied(device), highest)
    schemes, kernels = flat_schemes(_compressors_of(candidates)), {}
    if schemes:
        known = None if earlier is None else earlier.with_threads(1)
        work = f"{_words(schemes)} of {NUMELS} elements within {budget_s} s"
        costs = _known(work, _rehearsed_dense(schemes, highest, CPU, budget_s), highest, CPU, known)
        kernels = yield from around_each(costs, _one_thread)
    return HostEstimate(fetch=copies[FETCH], send=copies[SEND], kernels=kernels)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Lets torch compute with one thread inside the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _copied(device: torch.device) -> Pieces[list[Sample]]:
    """Times copies of several sizes between the device and the host, one a piece."""
    samples: list[Sample] = []
    for numel in COPIED_NUMELS:
        samples += _copies(numel, device)
        yield
    return samples


def _copies(numel: int, device: torch.device) -> Iterator[Sample]:
    """Yields the medians of the seconds of copies of float32 (numel,) to the host and back, by the host's clock."""
    there = torch.zeros(numel, device=device)
    for kernel in (FETCH, SEND):
        times_s = []
        for _ in range(COPIES + 1):
            streams.settle(device)
            began_s = time.perf_counter()
            if kernel == FETCH:
                (here,) = host.fetch([there])
            else:
                host.send(here, there)
                streams.settle(device)
            times_s.append(time.perf_counter() - began_s)
        yield (Compute(kernel, 4.0 * numel),), statistics.median(times_s[1:])  # the first one takes new memory


def kernel_costs(
    schemes: tuple[Scheme[Any], ...],
    highest: Highest,
    device: torch.device = CPU,
    earlier: EarlierTimes | None = None,
) -> Pieces[dict[str, KernelCost]]:
    """Measures the costs of the kernels that the schemes use, by kernel name. Collective.

    It is a generator that measures a piece at each `next`. All ranks get the same bits, as each rank plans by its own
    copy.

    Args:
        schemes: the schemes, which are run without a network.
        highest: returns the maximum of numbers over all ranks; collective.
        device: where the kernels run.
        earlier: times of earlier jobs that are used instead where all ranks have them; None: none.
    """
    found = yield from _known(_words(schemes), rehearse(schemes, device), highest, device, earlier)
    return {name: estimate.cost for name, estimate in found.items()}


def flat_schemes(candidates: Sequence[SchemeOrCompressor]) -> list[Scheme[Any]]:
    """Returns the schemes of flat buckets whose kernels are to be timed for `candidates`.

    They are the schemes among the candidates, and for each compressor all schemes that can use it. A `Route` stands for
    its compressor, as it may need other nodes than this job has.

    Raises:
        ValueError: for a scheme of embedding tables, whose kernels are always measured, and for any other object.
    """
    schemes: list[Scheme[Any]] = []
    for candidate in candidates:
        if isinstance(candidate, Route):  # may need other nodes than this job has
            schemes += [] if candidate.compressor is None else ways(candidate.compressor)
        elif isinstance(candidate, Compressor):
            schemes += ways(candidate)
        elif isinstance(candidate, Scheme) and candidate.traits.layout is Layout.FLAT:
            schemes.append(candidate)
        else:
            raise ValueError(f"candidates must be compressors, or schemes of flat buckets, got {candidate!r}")
    return schemes


def _compressors_of(candidates: Sequence[SchemeOrCompressor]) -> list[Compressor[Any]]:
    """Returns the compressors among the candidates and those of their schemes, each once."""
    found = [each if isinstance(each, Compressor) else getattr(each, "compressor", None) for each in candidates]
    return [each for each in dict.fromkeys(found) if isinstance(each, Compressor)]


def _adding(candidates: Sequence[SchemeOrCompressor]) -> list[Route]:
    """Returns a scheme that adds payloads without decoding them, for the first compressor that allows it; else [].

    One is enough to time the kernel that adds payloads, which costs the same for all compressors.
    """
    compressors = [candidate for candidate in candidates if isinstance(candidate, Compressor)]
    able = [
        c
        for c in compressors
        if issubclass(c.traits.payload, Summand) and not c.traits.agrees and c.traits.most_summands is None
    ]
    return [Route(("compress@compute", "all_to_all", "all_gather", "decompress@compute"), c) for c in able[:1]]


@dataclass
class Spent:
    """The wall time and processor time, in seconds, that a thread has spent in `with` blocks of `running`."""

    wall_s: float = 0.0
    processor_s: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Adds the wall time and processor time of the `with` block to the sums."""
        began_s, began_processor_s = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.wall_s += time.perf_counter() - began_s
            self.processor_s += time.thread_time() - began_processor_s


def _on_shared_cores(rehearsed: Pieces[list[Sample]], device: torch.device) -> Pieces[list[Sample]]:
    """Runs `rehearsed` and multiplies its samples' processor seconds by wall time over processor time, at least 1.

    Samples of an accelerator are its own seconds, which stay as they are.
    """
    if device.type != "cpu":
        return (yield from rehearsed)
    spent = Spent()
    samples = yield from around_each(rehearsed, spent.running)
    stretch = max(spent.wall_s / spent.processor_s, 1.0)
    return [(computed, stretch * seconds) for computed, seconds in samples]


def _fitted(timed: Pieces[list[Sample]], highest: Highest) -> Pieces[Costs]:
    """Fits kernel costs, by kernel name, to each sample's maximum seconds over ranks; `highest` is collective."""
    samples = yield from timed
    yield from load_scipy()
    slowest_s = highest([max(seconds, SHORTEST_S) for _, seconds in samples])
    return fit_kernels([(computed, seconds) for (computed, _), seconds in zip(samples, slowest_s, strict=True)])
