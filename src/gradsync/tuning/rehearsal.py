"""Times the computations of schemes without a network; all ranks run in turns on one thread (a rehearsal).

Planners need the costs of a scheme's kernels on this machine. The time between two awaits of a scheme is that of the
`Compute` steps between two `Transfer`s in `Scheme.steps`. So a few runs at different sizes give the cost of each kernel
as the scheme calls it. In training other work between these calls displaces a kernel's data from a core's own caches;
rehearsals overwrite these caches too. On an accelerator all this is timed by the device's own clock.
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
from ..devices import streams
from ..planner.pieces import Pieces
from ..schemes.base import Scheme, State
from ..schemes.compressed import Compressed
from ..schemes.route import Route
from ..schemes.tables import Tables
from ..tensors.bucket import Bucket, Layout, Segment, TensorSpec
from ..tensors.density import DensityProfile, profile_rows
from ..tensors.sparse import SparseRows

RANKS = 4
CPU = torch.device("cpu")
MOST_CACHED_BYTES = 4 << 20  # in the caches of one core: written before kernels are timed
MOST_CACHED_ON_DEVICE_BYTES = 128 << 20  # in the caches of an accelerator
FILLS_ON_DEVICE = 64  # some milliseconds
REPEATS = 3
DENSE_REPEATS = 5
TABLES = ((200_000, 16, 6_000), (100_000, 64, 3_000), (2_000, 32, 100))  # rows, dim, touched
BUCKETS = ((1 << 18, 0.01), (1 << 18, 0.1), (1 << 14, 0.05))  # elements, density

Sample = tuple[tuple[Compute, ...], float]  # what one rank computed, and its seconds


def rehearse(schemes: Sequence[Scheme[Any]], device: torch.device = CPU) -> Pieces[list[Sample]]:
    """Times the computations of each scheme, without a network, on sparse tables or flat buckets of several sizes.

    It is a generator that runs a scheme once at each `next`. It returns samples: some computations each, and their
    seconds.
    """
    samples: list[Sample] = []
    for scheme in schemes:
        flat = scheme.traits.layout is Layout.FLAT
        for inputs, specs, profile in _buckets(device) if flat else _tables(device):
            fitting = scheme.planned_for([profile])
            computed = parts(fitting.steps(specs, (profile,), Placement.one_per_node(RANKS)))
            samples += _samples(computed, (yield from times_between_awaits_s(fitting, inputs)))
    return samples


def rehearse_dense(schemes: Sequence[Scheme[Any]], numel: int, device: torch.device = CPU) -> Pieces[list[Sample]]:
    """Times the computations of schemes, without a network, on one dense square matrix of about `numel` elements.

    State, such as a compressor's residual, is passed from run to run as in the first steps of training. It is a
    generator that runs a scheme once at each `next`. It returns samples: some computations each, and their seconds.
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
        inputs = [torch.randn(flat.numel, generator=generator).to(device) for _ in range(ranks)]
        profile = DensityProfile(flat.numel, float(flat.numel))
        computed = parts(scheme.steps(bucket.specs, (profile,), Placement.one_per_node(ranks)))
        states = [scheme.init(bucket, group) for group in LocalGroup.world(ranks)]
        samples += _samples(computed, (yield from times_between_awaits_s(scheme, inputs, states, DENSE_REPEATS)))
    return samples


def parts(steps: Sequence[Step]) -> list[tuple[Compute, ...]]:
    """Splits a scheme's `steps` at its transfers: returns the computations before, between and after them.

    Each list may be empty; there is one more than there are transfers.
    """
    found: list[list[Compute]] = [[]]
    for step in steps:
        if isinstance(step, Transfer):
            found.append([])
        else:
            found[-1].append(step)
    return [tuple(part) for part in found]


def times_between_awaits_s(
    scheme: Scheme[Any], inputs: Sequence[Any], states: Sequence[State] | None = None, repeats: int = REPEATS
) -> Pieces[list[float]]:
    """Times `scheme.synchronize`: returns seconds before its first await, between awaits, and after the last one.

    All ranks run on one thread, without a network. It is a generator that runs the scheme once at each `next`. Seconds
    are the mean over the ranks and the median over the repeats. On the CPU they are processor time, since other
    processes may use the cores while a job starts. One more run comes first and does not count.

    Args:
        inputs: the scheme's input on each rank: a flat bucket, which is copied, or tables.
        states: the scheme's state on each rank before the first run; None: empty ones.
        repeats: the number of runs that count.
    """
    groups, device = LocalGroup.world(len(inputs)), _device_of(inputs[0])
    states = [{} for _ in inputs] if states is None else states
    runs = []
    yield  # the caller has made the inputs, which takes as long as a run
    for _ in range(repeats + 1):
        copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]  # flat buckets are overwritten
        each = zip(copies, states, groups, strict=True)
        coroutines = [scheme.synchronize(x, state, group, 1.0) for x, state, group in each]
        ended, seconds = drive_in_turns(coroutines, _cache_filler(device), streams.streams_of(device).work_moment)
        states = [state for _, state in ended]
        runs.append(seconds)
        yield
    return [statistics.median(times) for times in zip(*runs[1:], strict=True)]


def _samples(computed: Sequence[tuple[Compute, ...]], seconds: Sequence[float]) -> list[Sample]:
    """Pairs each nonempty list of computations with its measured seconds."""
    return [(part, s) for part, s in zip(computed, seconds, strict=True) if part]


def _device_of(x: Any) -> torch.device:
    """Returns the device of a flat bucket, or of tables with their rows."""
    device: torch.device = x.device if isinstance(x, torch.Tensor) else x[0].values.device
    return device


def _cache_filler(device: torch.device) -> Callable[[], object]:
    """Returns a function that overwrites memory as large as the device's caches, to displace other data from them."""
    if device.type == "cpu":
        return torch.empty(MOST_CACHED_BYTES, dtype=torch.uint8).zero_
    many = torch.empty(MOST_CACHED_ON_DEVICE_BYTES, dtype=torch.uint8, device=device)

    def fill() -> None:
        for _ in range(FILLS_ON_DEVICE):  # so long that the host submits all of a pass before the device begins it
            many.zero_()

    return fill


def _ranks(scheme: Scheme[Any]) -> int:
    """Returns the number of ranks to rehearse a scheme with: `RANKS`, or another one that its compressor requires."""
    compressor = scheme.compressor if isinstance(scheme, Compressed | Route) else None
    if compressor is None:
        return RANKS
    return compressor.traits.made_for_ranks or min(compressor.traits.most_summands or RANKS, RANKS)


def _tables(device: torch.device) -> Iterator[tuple[list[Tables], tuple[TensorSpec, ...], DensityProfile]]:
    """Yields inputs of one row-sparse table each, with random rows on each rank; also its spec and density profile."""
    for num_rows, dim, touched in TABLES:
        generator = torch.Generator().manual_seed(num_rows + touched)
        lists = [torch.randint(num_rows, (touched,), generator=generator) for _ in range(RANKS)]
        inputs: list[Tables] = [
            (SparseRows(rows.to(device), torch.randn(touched, dim, generator=generator).to(device), num_rows),)
            for rows in lists
        ]
        yield inputs, (TensorSpec((num_rows, dim), torch.float32),), profile_rows(lists, num_rows)


def _buckets(device: torch.device) -> Iterator[tuple[list[torch.Tensor], tuple[TensorSpec, ...], DensityProfile]]:
    """Yields inputs of one flat bucket each, with random non-zeros on each rank; also its spec and density profile."""
    for numel, density in BUCKETS:
        generator = torch.Generator().manual_seed(numel)
        inputs = [
            (torch.randn(numel, generator=generator) * (torch.rand(numel, generator=generator) < density)).to(device)
            for _ in range(RANKS)
        ]
        profile = profile_rows([x.cpu().nonzero().flatten() for x in inputs], numel)
        yield inputs, (TensorSpec((numel,), torch.float32),), profile
