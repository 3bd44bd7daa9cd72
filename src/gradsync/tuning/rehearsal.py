"""What schemes compute, timed without a network: all ranks of a group in turns, in one thread of one process.

Selection needs to know what a scheme's kernels take on this machine. A scheme's time between two awaits is that of the
`Compute` steps between two `Transfer`s of its `steps`, so that a few runs at different sizes tell the cost of each
kernel as the scheme calls it, with all that lies around it. In a step much else is computed in between: kernels find
little of their data in a core's own caches, and so they do here.
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
from ..schemes.base import Scheme
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

Sample = tuple[tuple[Compute, ...], float]  # what was computed, and the seconds it took


def rehearse(schemes: Sequence[Scheme[Any]]) -> list[Sample]:
    """What each scheme computes between two awaits, and how long that takes on one rank, for data of several sizes."""
    samples: list[Sample] = []
    for scheme in schemes:
        for inputs, specs, profile in _buckets() if scheme.traits.layout is Layout.FLAT else _tables():
            fitting = scheme.planned_for([profile])
            computed = parts(fitting.steps(specs, (profile,), Placement.one_per_node(RANKS)))
            runs = [segments_s(fitting, inputs) for _ in range(REPEATS + 1)][1:]
            seconds = [statistics.median(times) for times in zip(*runs, strict=True)]
            samples += [(part, s) for part, s in zip(computed, seconds, strict=True) if part]
    return samples


def rehearse_dense(schemes: Sequence[Scheme[Any]], numel: int) -> list[Sample]:
    """The same of schemes of flat buckets, compressors among them, for one square matrix of about `numel` elements.

    As in the first steps, of which the median is taken; what a scheme keeps it keeps from one to the next.
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
        groups = LocalGroup.world(ranks)
        states = [scheme.init(bucket, group) for group in groups]
        runs = []
        for _ in range(DENSE_REPEATS + 1):
            copies = [x.clone() for x in inputs]
            each = zip(copies, states, groups, strict=True)
            coroutines = [scheme.synchronize(x, state, group, 1.0) for x, state, group in each]
            ended, seconds = drive_in_turns(coroutines, _use_caches())
            states = [state for _, state in ended]
            runs.append(seconds)
        medians_s = [statistics.median(times) for times in zip(*runs[1:], strict=True)]
        samples += [(part, s) for part, s in zip(computed, medians_s, strict=True) if part]
    return samples


def parts(steps: Sequence[Step]) -> list[tuple[Compute, ...]]:
    """The computations before, between and behind the transfers."""
    found: list[list[Compute]] = [[]]
    for step in steps:
        if isinstance(step, Transfer):
            found.append([])
        else:
            found[-1].append(step)
    return [tuple(part) for part in found]


def segments_s(scheme: Scheme[Any], inputs: Sequence[Any]) -> list[float]:
    """Seconds before the first await, between awaits and behind the last, mean over the ranks with these inputs.

    Of processor time, as others may use the cores while a job starts.
    """
    groups = LocalGroup.world(len(inputs))
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]  # flat buckets are overwritten
    runs = [scheme.synchronize(x, {}, group, 1.0) for x, group in zip(copies, groups, strict=True)]
    return drive_in_turns(runs, _use_caches())[1]


def _use_caches() -> Callable[[], object]:
    """What leaves nothing else in a core's own caches."""
    return torch.empty(MOST_CACHED_BYTES, dtype=torch.uint8).zero_


def _ranks(scheme: Scheme[Any]) -> int:
    """How many rehearse it: others than usual where its compressor is made for them, or sums numbers of fewer."""
    compressor = scheme.compressor if isinstance(scheme, Compressed | Route) else None
    if compressor is None:
        return RANKS
    return compressor.traits.made_for_ranks or min(compressor.traits.most_summands or RANKS, RANKS)


def _tables() -> Iterator[tuple[list[Tables], tuple[TensorSpec, ...], DensityProfile]]:
    """One table each, of ranks that touch rows at random."""
    for num_rows, dim, touched in TABLES:
        generator = torch.Generator().manual_seed(num_rows + touched)
        lists = [torch.randint(num_rows, (touched,), generator=generator) for _ in range(RANKS)]
        inputs: list[Tables] = [
            (SparseRows(rows, torch.randn(touched, dim, generator=generator), num_rows),) for rows in lists
        ]
        yield inputs, (TensorSpec((num_rows, dim), torch.float32),), profile_rows(lists, num_rows)


def _buckets() -> Iterator[tuple[list[torch.Tensor], tuple[TensorSpec, ...], DensityProfile]]:
    """Flat buckets of ranks whose elements are not zero at random."""
    for numel, density in BUCKETS:
        generator = torch.Generator().manual_seed(numel)
        inputs = [
            torch.randn(numel, generator=generator) * (torch.rand(numel, generator=generator) < density)
            for _ in range(RANKS)
        ]
        profile = profile_rows([x.nonzero().flatten() for x in inputs], numel)
        yield inputs, (TensorSpec((numel,), torch.float32),), profile
