"""Measures how backward, network transfers and compression slow each other down when they run at the same time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..comm import Group
from ..comm.links import Exchange, barrier, highest_over
from ..compressors import BlockInt, ErrorFeedback
from ..costs.steps import Pattern
from ..devices import streams
from ..devices.streams import Moment
from ..planner.pieces import Pieces
from ..plans.profile import Interval
from ..tensors.bucket import FlatSpec, Segment
from .fitting import fit_slowdown
from .stopwatch import StepMoments

PROBE_BYTES = 1 << 20  # of the transfer by which the length of others is chosen
TRANSFER_BYTES = (64 << 10, 4 << 20)  # of one transfer beside backward, the fewest and the most
DEVICE_TRANSFER_BYTES = (4 << 20, 256 << 20)  # between accelerators
MOST_ASIDE_S = 2.0  # that several transfers or computations beside one backward may take
KERNEL_NUMEL = 1 << 16  # of the tensor that is compressed beside backward
DEVICE_KERNEL_NUMEL = 1 << 22  # on an accelerator, where a call costs as much as many bytes
KERNEL_RUNS = 20  # by which the length of a compression is told
ALONE_RUNS = 3  # of a disturbance without a backward
EXCHANGE_S = 0.03  # that a transfer with kernels beside it is to take, if `TRANSFER_BYTES` allow
KERNELS_SHARE = 0.5  # of that transfer's time, in which kernels run
EXCHANGE_RUNS = 10  # of that transfer

Slowdowns = tuple[Interval | None, Interval | None]  # of a transfer by compression, and of compression by a transfer


@dataclass
class Aside:
    """A transfer or compression that a measurement ran during one backward on this rank.

    It says when that began and ended, and `alone_s`, the seconds that it takes without a backward.
    """

    alone_s: float = 0.0
    began: Moment | None = None  # None: there was none in this step
    ended: Moment | None = None

    @property
    def took_s(self) -> float:
        """The seconds that the transfer or compression took during backward; 0 if there was none."""
        return 0.0 if self.began is None or self.ended is None else self.ended.since(self.began)

    def shared_s(self, step: StepMoments) -> float:
        """Returns the seconds in which this transfer or compression ran beside the step's backward; 0 without one."""
        if self.began is None or self.ended is None:
            return 0.0
        began_s, ended_s = self.began.since(step.resumed), self.ended.since(step.resumed)
        times = step.times()
        return max(min(ended_s, times.ended_s) - max(began_s, times.began_s), 0.0)


@dataclass(frozen=True)
class Disturbance:
    """Work to run during backward: `times` calls of `run()`, which take `alone_s` seconds in all when alone."""

    run: Callable[[], None]
    times: int
    alone_s: float
    together: bool  # all ranks take part, and wait for each other before its time begins

    def do(self) -> None:
        for _ in range(self.times):
            self.run()


def transfers(group: Group, lasts_s: float, timeout_s: float) -> Pieces[Disturbance]:
    """Makes and times one or more all-reduces that later run during backward, and last about `lasts_s` seconds in all.

    Collective. It is a generator that makes one exchange at each `next` and returns the `Disturbance`. `timeout_s`:
    seconds to wait for the other ranks.
    """
    exchange, once_s = yield from _all_reduce(group, lasts_s, timeout_s)

    def run() -> None:
        exchange.issue().wait(timeout_s)

    return (yield from _disturbance(run, _times(lasts_s, once_s), group, timeout_s, together=True))


def _all_reduce(group: Group, lasts_s: float, timeout_s: float) -> Pieces[tuple[Exchange, float]]:
    """Returns an all-reduce that takes about `lasts_s` seconds, and the seconds measured for it. Collective.

    Its size is between two bounds, `TRANSFER_BYTES` on the CPU, so it may take less or more.
    """
    highest = highest_over(group, timeout_s)

    def once_s(nbytes: int) -> Pieces[float]:
        exchange, mine_s = Exchange.of(group, Pattern.ALL_REDUCE, nbytes), []
        for _ in range(4):
            mine_s.append(exchange.seconds(group, timeout_s))
            yield
        return statistics.median(highest(mine_s)[1:])

    fewest, most = TRANSFER_BYTES if group.payload_device.type == "cpu" else DEVICE_TRANSFER_BYTES
    probe_s = yield from once_s(PROBE_BYTES)
    nbytes = min(max(int(PROBE_BYTES * lasts_s / probe_s), fewest), most)
    return Exchange.of(group, Pattern.ALL_REDUCE, nbytes), (yield from once_s(nbytes))


def computation(group: Group, lasts_s: float, timeout_s: float) -> Pieces[Disturbance]:
    """Makes and times compressions of noise that later run during backward, and last about `lasts_s` seconds in all.

    Collective. It is a generator that measures a piece at each `next` and returns the `Disturbance`. `timeout_s`:
    seconds to wait for the other ranks.
    """
    run, once_s = _compression(group.payload_device)
    yield
    return (yield from _disturbance(run, _times(lasts_s, once_s), group, timeout_s, together=False))


def _compression(device: torch.device) -> tuple[Callable[[], None], float]:
    """Returns a function that compresses a tensor of noise on the device, and the seconds of one call."""
    compressor, numel = ErrorFeedback(BlockInt(8)), KERNEL_NUMEL if device.type == "cpu" else DEVICE_KERNEL_NUMEL
    spec = FlatSpec((Segment("beside", 0, numel),), ((numel,),), torch.float32)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
    _, state = compressor.compress(values, compressor.init(spec))  # a residual that is where the values are

    def run() -> None:
        compressor.compress(values, state)

    run()
    return run, _seconds_of(run, KERNEL_RUNS, device) / KERNEL_RUNS


def transfer_beside_kernels(group: Group, timeout_s: float) -> Pieces[Slowdowns]:
    """Measures how an all-reduce and a compression, run at the same time, slow each other down. Collective.

    It is a generator that measures a piece at each `next`. One thread issues the all-reduce and compresses, as the
    engine's communication thread does.

    Returns:
        The factors by which the all-reduce, and the compression, takes longer; the same on all ranks. Both are None for
        a group of one rank.
    """
    if group.size == 1:
        return None, None
    exchange, exchange_s = yield from _all_reduce(group, EXCHANGE_S, timeout_s)
    device = group.payload_device
    clock = streams.streams_of(device)
    run, run_s = _compression(device)
    (run_s,) = highest_over(group, timeout_s)([run_s])
    yield
    times = _times(KERNELS_SHARE * exchange_s, run_s)
    figures = []
    for _ in range(EXCHANGE_RUNS):
        exchange_alone_s = exchange.seconds(group, timeout_s)
        yield
        barrier(group, timeout_s)
        kernels_alone_s = _seconds_of(run, times, device)
        yield
        barrier(group, timeout_s)
        began = clock.moment()
        pending = exchange.issue()
        kernels_s = _seconds_of(run, times, device)
        pending.wait(timeout_s)
        figures.append((exchange_alone_s, clock.moment().since(began), kernels_alone_s, kernels_s))
        yield
    mine = torch.tensor(figures, dtype=torch.float64, device=group.device)
    arrived = torch.stack(list(group.all_gather(mine.flatten()).wait(timeout_s)))
    of_ranks = arrived.view(group.size, *mine.shape).cpu().numpy()
    exchange_alone, exchange_together, kernels_alone, kernels_together = np.moveaxis(of_ranks, 2, 0)
    return (
        fit_slowdown(exchange_alone, exchange_together, kernels_together),
        fit_slowdown(kernels_alone, kernels_together, kernels_together),
    )


def _seconds_of(run: Callable[[], None], times: int, device: torch.device) -> float:
    """Returns the seconds that the device takes for `times` calls of `run()`."""
    clock = streams.streams_of(device)
    began = clock.moment()
    for _ in range(times):
        run()
    return clock.moment().since(began)


def _times(lasts_s: float, once_s: float) -> int:
    """Returns how many runs of `once_s` seconds fill `lasts_s`, or `MOST_ASIDE_S` where that is less; at least 1."""
    return max(math.ceil(min(lasts_s, MOST_ASIDE_S) / once_s), 1)


def _disturbance(
    run: Callable[[], None], times: int, group: Group, timeout_s: float, *, together: bool
) -> Pieces[Disturbance]:
    """Returns work to run during backward, `times` calls of `run`, with its seconds without a backward. Collective.

    All ranks run it at the same time to measure these. `together`: during backward, too, all ranks start it together.
    """
    disturbance = Disturbance(run, times, 0.0, together)
    seconds = []
    for _ in range(ALONE_RUNS):
        barrier(group, timeout_s)
        seconds.append(_seconds_of(disturbance.do, 1, group.payload_device))
        yield
    return replace(disturbance, alone_s=statistics.median(seconds))
