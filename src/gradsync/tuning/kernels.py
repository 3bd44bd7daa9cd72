"""What kernels of schemes and compressors take on this job's processors, at several sizes, with intervals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..compressors import BlockInt, Cast, Compressor, ErrorFeedback, ScaledSign, Summand, TopK
from ..costs.cluster import Placement
from ..costs.steps import Compute
from ..planner.network import INSIDE_NODES, PLANNED
from ..plans.profile import KernelEstimate
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
from .links import Highest
from .rehearsal import rehearse, rehearse_dense

BUDGET_S = 4.0  # of the dense buckets, beside one size more; at the fewest three sizes are rehearsed
FEWEST_SIZES = 3
NUMELS = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)  # of dense buckets
SHORTEST_S = 1e-8  # what the clock shows as nothing

CANDIDATES: tuple[SchemeOrCompressor, ...] = (
    HalfPrecision(values="bfloat16"),
    CompressedAllReduce(Cast("bfloat16")),
    CompressedTwoWay(ErrorFeedback(BlockInt(8))),
    CompressedAllGather(ErrorFeedback(ScaledSign())),
    CompressedAllGather(ErrorFeedback(TopK(0.01))),
    PowerSGD(2),
)  # whose kernels are measured beside those of default plans


def flat_schemes(candidates: Sequence[SchemeOrCompressor]) -> list[Scheme[Any]]:
    """The schemes among them, and all those that may carry the payloads of a compressor.

    Raises:
        ValueError: for what is neither, and for schemes of tables, which are measured anyway.
    """
    schemes: list[Scheme[Any]] = []
    for candidate in candidates:
        if isinstance(candidate, Route):  # other nodes than here may be what it needs
            schemes += [] if candidate.compressor is None else ways(candidate.compressor)
        elif isinstance(candidate, Compressor):
            schemes += ways(candidate)
        elif isinstance(candidate, Scheme) and candidate.traits.layout is Layout.FLAT:
            schemes.append(candidate)
        else:
            raise ValueError(f"candidates must be compressors, or schemes of flat buckets, got {candidate!r}")
    return schemes


def _adding(candidates: Sequence[SchemeOrCompressor]) -> list[Route]:
    """What adds payloads on their way, as routes do and no other scheme: one costs what all of them do."""
    compressors = [candidate for candidate in candidates if isinstance(candidate, Compressor)]
    able = [
        c
        for c in compressors
        if issubclass(c.traits.payload, Summand) and not c.traits.agrees and c.traits.most_summands is None
    ]
    return [Route(("compress@compute", "all_to_all", "all_gather", "decompress@compute"), c) for c in able[:1]]


def measured_kernels(
    candidates: Sequence[SchemeOrCompressor], placement: Placement, highest: Highest, budget_s: float = BUDGET_S
) -> dict[str, KernelEstimate]:
    """Of the schemes of default plans and of the candidates, by the slowest rank. Collective, by `highest`.

    Where ranks share cores, all of them rehearse at once: a second of work takes longer than a second, as it will when
    they exchange gradients.
    """
    dense = [AllReduce(), ReduceScatter(), *flat_schemes(candidates), *_adding(candidates)]
    began_s, began_cpu_s = time.perf_counter(), time.thread_time()
    samples = rehearse((*PLANNED, *INSIDE_NODES) if placement.is_hierarchy else PLANNED)
    dense_s = time.perf_counter()
    for number, numel in enumerate(NUMELS, start=1):
        samples += rehearse_dense(dense, numel)
        if highest([time.perf_counter() - dense_s])[0] > budget_s and number >= FEWEST_SIZES:
            break
    sharing = max((time.perf_counter() - began_s) / (time.thread_time() - began_cpu_s), 1.0)
    slowest_s = highest([max(sharing * seconds, SHORTEST_S) for _, seconds in samples])
    computed: list[tuple[Compute, ...]] = [steps for steps, _ in samples]
    return fit_kernels(list(zip(computed, slowest_s, strict=True)))
