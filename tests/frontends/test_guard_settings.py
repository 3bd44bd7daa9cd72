"""The guard's settings agree on all ranks; excluded parameters are not compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from gradsync.engine import guard
from tests.frontends.test_guard import attached, train, write
from tests.world import Ranks

World = Callable[[int], Ranks]


def other_settings(mine: list[dict[str, Any]], ddp: bool) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        attached(ddp=ddp, **mine[dist.get_rank()])
    attached()[2].detach()
    return str(caught.value)


@pytest.mark.parametrize("ddp", [False, True], ids=["attach", "ddp"])
def test_ranks_must_compare_alike(world: World, ddp: bool) -> None:
    for one, other in (({"verify_every": 5}, {}), ({}, {"verify_tolerance": 0.1})):
        for text in world(2).run(other_settings, [one, other], ddp):
            assert "the settings of attach differ between the ranks" in text and "verify_every=" in text


def excluded() -> None:
    model, optimizer, handle = attached(plan=None, exclude=["layers.2.*"], verify_every=1)
    for number in range(5):
        write(model, optimizer) if dist.get_rank() == 1 else None
        train(model, optimizer, number)
    handle.detach()


def test_what_is_excluded_is_not_compared(world: World) -> None:
    world(2).run(excluded)


def one_rank_alone() -> None:
    model, optimizer, handle = attached(verify_every=1)
    calls: list[Any] = []
    original = guard.digests_of
    guard.digests_of = lambda tensors: calls.append(tensors) or original(tensors)
    try:
        for number in range(4):
            train(model, optimizer, number)
    finally:
        guard.digests_of = original
    assert not calls
    handle.detach()


def test_one_rank_alone_compares_nothing(world: World) -> None:
    world(1).run(one_rank_alone)
