"""Measures kernel costs on this job's processors: all ranks time schemes without a network, and costs are fitted.

`measure` times candidate schemes at several sizes; the default planner times only the schemes of its plans, once per
process. All ranks measure at the same time, so that ranks on shared cores slow each other down as they do when they
exchange gradients.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

import torch

from ..comm.links import Highest
from ..compressors import BlockInt, Cast, Compressor, ErrorFeedback, ScaledSign, Summand, TopK
from ..costs.cluster import Placement
from ..costs.cost_model import KernelCost
from ..costs.steps import Compute
from ..devices import host, streams
from ..planner.default.network import planned_schemes
from ..plans.profile import HostEstimate, KernelEstimate
from ..schemes import (
    AllReduce,
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
from .fitting import fit_kernels
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
) -> dict[str, KernelEstimate]:
    """Measures kernel costs on the device for the default plans' schemes and `candidates`, by kernel name. Collective.

    `highest` returns the maximum of numbers over all ranks: the slowest rank's seconds count. All ranks fit the same
    samples, and may round differently.
    """
    dense = [AllReduce(), ReduceScatter(), *flat_schemes(candidates), *_adding(candidates)]

    def rehearsal() -> list[Sample]:
        return rehearse(planned_schemes(placement), device) + _rehearsed_dense(dense, highest, device, budget_s)

    return _fitted(_on_shared_cores(rehearsal, device), highest)


def _rehearsed_dense(
    dense: Sequence[Scheme[Any]], highest: Highest, device: torch.device, budget_s: float
) -> list[Sample]:
    """Times schemes on dense buckets of several sizes, as far as the budget allows; `highest` is collective."""
    samples: list[Sample] = []
    if device.type != "cpu":
        rehearse_dense(dense, NUMELS[0], device)  # compiles kernels
    began_s = time.perf_counter()
    for number, numel in enumerate(NUMELS if device.type == "cpu" else DEVICE_NUMELS, start=1):
        samples += rehearse_dense(dense, numel, device)
        if highest([time.perf_counter() - began_s])[0] > budget_s and number >= FEWEST_SIZES:
            break
    return samples


def measured_host(
    candidates: Sequence[SchemeOrCompressor], highest: Highest, device: torch.device, budget_s: float = BUDGET_S
) -> HostEstimate | None:
    """Measures copies between the device and the host, and the host's kernels; None on the CPU. Collective.

    The kernels are those of the candidates' compressors, with one thread of torch, as offloaded work has.
    """
    if not host.is_apart(device):
        return None
    copies = _fitted([sample for numel in COPIED_NUMELS for sample in _copies(numel, device)], highest)
    schemes = flat_schemes(_compressors_of(candidates))
    threads, kernels = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    try:
        if schemes:
            samples = _on_shared_cores(lambda: _rehearsed_dense(schemes, highest, CPU, budget_s), CPU)
            kernels = _fitted(samples, highest)
    finally:
        torch.set_num_threads(threads)
    return HostEstimate(fetch=copies[FETCH], send=copies[SEND], kernels=kernels)


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
    schemes: tuple[Scheme[Any], ...], highest: Highest, device: torch.device = CPU
) -> dict[str, KernelCost]:
    """Measures kernel costs of the schemes on the device, by kernel name; collective: `highest` is that of all ranks.

    A process times the same schemes once only. All ranks get the same bits, as each rank plans by its own copy.
    """
    costs = {name: estimate.cost for name, estimate in _fitted(_rehearsed(schemes, device), highest).items()}
    numbers = iter(highest([number for cost in costs.values() for number in astuple(cost)]))
    return {name: KernelCost(next(numbers), next(numbers), next(numbers)) for name in costs}


def flat_schemes(candidates: Sequence[SchemeOrCompressor]) -> list[Scheme[Any]]:
    """Returns the flat-bucket schemes to time: the schemes among the candidates, and each compressor's schemes.

    A `Route` stands for its compressor, as it may need other nodes than this job has.

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


@functools.cache
def _rehearsed(schemes: tuple[Scheme[Any], ...], device: torch.device) -> list[Sample]:
    """Times the schemes' kernels in this process, once for the same schemes and device, and returns the samples."""
    return _on_shared_cores(lambda: rehearse(schemes, device), device)


def _on_shared_cores(rehearsal: Callable[[], list[Sample]], device: torch.device) -> list[Sample]:
    """Runs `rehearsal` and multiplies its samples' processor seconds by wall time over processor time, at least 1.

    Samples of an accelerator are its own seconds, which stay as they are.
    """
    if device.type != "cpu":
        return rehearsal()
    began_s, began_cpu_s = time.perf_counter(), time.thread_time()
    samples = rehearsal()
    stretch = max((time.perf_counter() - began_s) / (time.thread_time() - began_cpu_s), 1.0)
    return [(computed, stretch * seconds) for computed, seconds in samples]


def _fitted(samples: Sequence[Sample], highest: Highest) -> dict[str, KernelEstimate]:
    """Fits kernel costs, by kernel name, to each sample's maximum seconds over ranks; `highest` is collective."""
    slowest_s = highest([max(seconds, SHORTEST_S) for _, seconds in samples])
    return fit_kernels([(computed, seconds) for (computed, _), seconds in zip(samples, slowest_s, strict=True)])
