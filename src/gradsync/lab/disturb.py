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
    """Inside, those of the lab's scenario go on, each in a thread of its own; drawn by the scenario's seed."""
    scenario, ended = lab.scenario, threading.Event()
    under_way: list[Callable[[Disturbed, threading.Event], None]] = []
    if scenario.moving_background is not None:
        under_way.append(_move_background)
    if scenario.stalls is not None:
        under_way.append(_stall)
    threads = [threading.Thread(target=each, args=(lab, ended), daemon=True) for each in under_way]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _move_background(lab: Disturbed, ended: threading.Event) -> None:
    """One flow, which has another pair of nodes each time."""
    assert lab.scenario.moving_background is not None
    rate, stays_s = lab.scenario.moving_background
    draw, before = random.Random(lab.scenario.seed), (-1, -1)
    while not ended.is_set():
        pair = before
        while pair == before:
            source, target = draw.sample(range(lab.scenario.nodes), 2)
            pair = (source, target)
        lab.start_background(*pair, rate)
        ended.wait(stays_s)
        lab.stop_background(*pair)
        before = pair if lab.scenario.nodes > 2 else before


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
