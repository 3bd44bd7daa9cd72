"""What happens to a lab while a job runs: traffic that moves from link to link, ranks that stall."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from .scenario import Scenario


class Disturbed(Protocol):
    """Of a lab, what is done to it."""

    scenario: Scenario

    def start_background(self, source: int, target: int, rate: str) -> None: ...

    def stop_background(self, source: int, target: int) -> None: ...

    def pause(self, rank: int) -> None: ...

    def resume(self, rank: int) -> None: ...


@contextmanager
def disturbances(lab: Disturbed) -> Iterator[None]:
    """Inside, those of the lab's scenario go on, each in a thread of its own; drawn by the scenario's seed.

    One that could not go on raises at the end why: what was measured meanwhile was not disturbed as it should be.
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
    """One flow, which has another pair of nodes each time, of those between which none runs all the time."""
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
    """One rank at a time; pauses between stalls are as long as chance has it, and on average as asked for."""
    assert lab.scenario.stalls is not None
    stall_s, every_s = lab.scenario.stalls
    draw = random.Random(lab.scenario.seed)
    while not ended.wait(draw.expovariate(1 / every_s)):
        rank = draw.randrange(lab.scenario.world_size)
        with suppress(KeyError, ProcessLookupError):  # not started yet, or ended
            lab.pause(rank)
            ended.wait(stall_s)
            lab.resume(rank)
