"""Rehearsals: the computations of schemes, timed without a network, all ranks in turns on one thread.

Planners need the costs of a scheme's kernels on this machine. The time between two awaits of a scheme is that of the
`Compute` steps between two `Transfer`s of its `steps`. So a few runs at different sizes tell the cost of each kernel as
the scheme calls it. A training step computes much else in between, which leaves little of a kernel's data in a core's
own caches; rehearsals overwrite these caches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..comm import LocalGroup, drive_in_turns
from ..costs.cluster import Placement
from ..costs.steps import Compute, Step, Transfer
from ..schemes.base import Scheme, State
from ..schemes.compressed import Compressed
from ..schemes.route import Route
from ..schemes.tables import Tables
from ..tensors.bucket import Bucket, Layout, Segment, TensorSpec
from ..tensors.density import DensityProfile, profile_rows
from ..tensors.sparse import SparseRows

RANKS = 4
MOST_CACHED_BYTES = 4 << 20  # in the caches of one core: written before kernels are timed
REPEATS = 3
DENSE_REPEATS = 5
TABLES = ((200_000, 16, 6_000), (100_000, 64, 3_000), (2_000, 32, 100))  # rows, dim, touched
BUCKETS = ((1 << 18, 0.01), (1 << 18, 0.1), (1 << 14, 0.05))  # elements, density

Sample = tuple[tuple[Compute, ...], float]  # what one rank computed, and its seconds


def rehearse(schemes: Sequence[Scheme[Any]]) -> list[Sample]:
    """Returns the samples of each scheme for sparse data of several sizes: tables, or flat buckets."""
    samples: list[Sample] = []
    for scheme in schemes:
        for inputs, specs, profile in _buckets() if scheme.traits.layout is Layout.FLAT else _tables():
            fitting = scheme.planned_for([profile])
            computed = parts(fitting.steps(specs, (profile,), Placement.one_per_node(RANKS)))
            samples += _samples(computed, segments_s(fitting, inputs))
    return samples


def rehearse_dense(schemes: Sequence[Scheme[Any]], numel: int) -> list[Sample]:
    """Returns the samples of schemes of flat buckets for one dense square matrix of about `numel` elements.

    State, as a compressor's residual, goes from run to run as in the first steps of training.
    """
    side = math.isqrt(numel)
    matrix = TensorSpec((side, side), torch.float32)
    generator = torch.Generator().manual_seed(side)
    samples: list[Sample] = []
    for scheme in schemes:
        bucket = Bucket(
            "rehearsal", (Segment("matrix", 0, matrix.numel),), (matrix,), Layout.FLAT, scheme.traits.carries_flags
        )
        (flat,) = bucket.specs
        ranks = _ranks(scheme)
        inputs = [torch.randn(flat.numel, generator=generator) for _ in range(ranks)]
        profile = DensityProfile(flat.numel, float(flat.numel))
        computed = parts(scheme.steps(bucket.specs, (profile,), Placement.one_per_node(ranks)))
        states = [scheme.init(bucket, group) for group in LocalGroup.world(ranks)]
        samples += _samples(computed, segments_s(scheme, inputs, states, DENSE_REPEATS))
    return samples


def parts(steps: Sequence[Step]) -> list[tuple[Compute, ...]]:
    """Returns the computations before, between and behind the transfers."""
    found: list[list[Compute]] = [[]]
    for step in steps:
        if isinstance(step, Transfer):
            found.append([])
        else:
            found[-1].append(step)
    return [tuple(part) for part in found]


def segments_s(
    scheme: Scheme[Any], inputs: Sequence[Any], states: Sequence[State] | None = None, repeats: int = REPEATS
) -> list[float]:
    """Returns seconds before the first await of `synchronize`, between awaits, and behind the last one.

    Seconds are processor time, since others may use the cores while a job starts: the mean over the ranks, the median
    over the repeats. One run more, the first, does not count.

    Args:
        inputs: one for each rank; kept as they are.
        states: one for each rank, before the first run; None: nothing.
    """
    groups = LocalGroup.world(len(inputs))
    states = [{} for _ in inputs] if states is None else states
    runs = []
    for _ in range(repeats + 1):
        copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]  # flat buckets are overwritten
        each = zip(copies, states, groups, strict=True)
        coroutines = [scheme.synchronize(x, state, group, 1.0) for x, state, group in each]
        ended, seconds = drive_in_turns(coroutines, _use_caches())
        states = [state for _, state in ended]
        runs.append(seconds)
    return [statistics.median(times) for times in zip(*runs[1:], strict=True)]


def _samples(computed: Sequence[tuple[Compute, ...]], seconds: Sequence[float]) -> list[Sample]:
    """Returns the segments in which something is computed."""
    return [(part, s) for part, s in zip(computed, seconds, strict=True) if part]


def _use_caches() -> Callable[[], object]:
    """Returns a function that fills a core's own caches."""
    return torch.empty(MOST_CACHED_BYTES, dtype=torch.uint8).zero_


def _ranks(scheme: Scheme[Any]) -> int:
    """Returns how many ranks rehearse the scheme; some compressors are made for a number, or sum at most so many."""
    compressor = scheme.compressor if isinstance(scheme, Compressed | Route) else None
    if compressor is None:
        return RANKS
    return compressor.traits.made_for_ranks or min(compressor.traits.most_summands or RANKS, RANKS)


def _tables() -> Iterator[tuple[list[Tables], tuple[TensorSpec, ...], DensityProfile]]:
    """Yields tables, one at a time, whose ranks touch rows at random."""
    for num_rows, dim, touched in TABLES:
        generator = torch.Generator().manual_seed(num_rows + touched)
        lists = [torch.randint(num_rows, (touched,), generator=generator) for _ in range(RANKS)]
        inputs: list[Tables] = [
            (SparseRows(rows, torch.randn(touched, dim, generator=generator), num_rows),) for rows in lists
        ]
        yield inputs, (TensorSpec((num_rows, dim), torch.float32),), profile_rows(lists, num_rows)


def _buckets() -> Iterator[tuple[list[torch.Tensor], tuple[TensorSpec, ...], DensityProfile]]:
    """Yields flat buckets in which random elements of each rank are not zero."""
    for numel, density in BUCKETS:
        generator = torch.Generator().manual_seed(numel)
        inputs = [
            torch.randn(numel, generator=generator) * (torch.rand(numel, generator=generator) < density)
            for _ in range(RANKS)
        ]
        profile = profile_rows([x.nonzero().flatten() for x in inputs], numel)
        yield inputs, (TensorSpec((numel,), torch.float32),), profile
