"""Disturbs an emulated cluster while a job runs: traffic that moves from link to link, ranks that stall."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from .scenario import Scenario


class Disturbed(Protocol):
    """The interface of an emulated cluster (`Lab`) that disturbances use."""

    scenario: Scenario

    def start_background(self, source: int, target: int, rate: str) -> None: ...

    def stop_background(self, source: int, target: int) -> None: ...

    def pause(self, rank: int) -> None: ...

    def resume(self, rank: int) -> None: ...


@contextmanager
def disturbances(lab: Disturbed) -> Iterator[None]:
    """Runs the disturbances of the lab's scenario inside the block, each in a thread, drawn by the scenario's seed.

    Raises:
        Exception: at the end, the error of a disturbance that could not go on, as measurements were not disturbed as
            intended.
    """
    scenario, ended = lab.scenario, threading.Event()
    errors: list[Exception] = []

    def keep_on(disturb: Callable[[Disturbed, threading.Event], None]) -> None:
        try:
            disturb(lab, ended)
        except Exception as error:  # raised below
            errors.append(error)

    under_way: list[Callable[[Disturbed, threading.Event], None]] = []
    if scenario.moving_background is not None:
        under_way.append(_move_background)
    if scenario.stalls is not None:
        under_way.append(_stall)
    threads = [threading.Thread(target=keep_on, args=(each,), daemon=True) for each in under_way]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def _move_background(lab: Disturbed, ended: threading.Event) -> None:
    """Runs one flow that moves between random pairs of nodes; pairs with permanent background traffic are not used."""
    assert lab.scenario.moving_background is not None
    rate, stays_s = lab.scenario.moving_background
    draw, free = random.Random(lab.scenario.seed), lab.scenario.pairs_without_background
    pair = draw.choice(free)
    while not ended.is_set():
        lab.start_background(*pair, rate)
        ended.wait(stays_s)
        lab.stop_background(*pair)
        pair = draw.choice([other for other in free if other != pair] or free)


def _stall(lab: Disturbed, ended: threading.Event) -> None:
    """Stops one random rank at a time, for the scenario's stall time.

    The pauses between stalls are exponentially distributed with the scenario's mean.
    """
    assert lab.scenario.stalls is not None
    stall_s, every_s = lab.scenario.stalls
    draw = random.Random(lab.scenario.seed)
    while not ended.wait(draw.expovariate(1 / every_s)):
        rank = draw.randrange(lab.scenario.world_size)
        with suppress(KeyError, ProcessLookupError):  # not started yet, or ended
            lab.pause(rank)
            ended.wait(stall_s)
            lab.resume(rank)
