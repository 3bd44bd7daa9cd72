"""`Monitor`: operations on streams that do not end are named while the host goes on. gloo stands in for NCCL."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from gradsync.comm import GroupError, StreamGroup, TorchGroup
from gradsync.comm.group import waiting_at
from gradsync.comm.monitor import LOOK_S, Monitor
from gradsync.comm.stream_group import GRACE_S
from gradsync.costs.cluster import Placement
from tests.world import Ranks

pytestmark = pytest.mark.waiting

World = Callable[[int], Ranks]

PLACE = "bucket '0', stage 'push', step 7"
TIMEOUT_S = 3.0


class OnStreams(StreamGroup):
    """A group whose operations are gloo's, and whose waits return at once, as NCCL's do."""

    def all_reduce(self, buffer: torch.Tensor) -> Any:
        work = dist.all_reduce(buffer, group=self._own, async_op=True)
        return self._pending(SimpleNamespace(wait=lambda: None, is_completed=work.is_completed), lambda: buffer)


def reduce_until_it_raises(group: OnStreams, limit_s: float) -> tuple[str, tuple[int, ...], float]:
    """Issues an operation and goes on, until a further one raises; returns the error, its ranks, and the seconds."""
    began_s = time.monotonic()
    with waiting_at(lambda: PLACE):
        group.all_reduce(torch.ones(2)).wait(TIMEOUT_S)
    assert time.monotonic() - began_s < LOOK_S, "the host goes on"
    with pytest.raises(GroupError) as caught:
        while time.monotonic() - began_s < limit_s:
            time.sleep(0.1)
            group._require_none_late()
    return str(caught.value), caught.value.ranks, time.monotonic() - began_s


def wait_for_an_absent_rank(absent: int) -> tuple[str, tuple[int, ...], float]:
    group = OnStreams(timeout_s=TIMEOUT_S)
    found = ("", (), 0.0) if group.rank == absent else reduce_until_it_raises(group, 20.0)
    dist.barrier()
    group.close()
    return found


@pytest.mark.parametrize("absent", [0, 2])
def test_the_rank_that_does_not_come_is_named_with_bucket_stage_and_step(world: World, absent: int) -> None:
    found = world(3).run(wait_for_an_absent_rank, absent)
    for rank in {0, 1, 2} - {absent}:
        text, ranks, seconds = found[rank]
        assert text.startswith(PLACE) and f"rank {absent} did not come this far" in text, found
        assert ranks == (absent,) and TIMEOUT_S <= seconds <= TIMEOUT_S + 5.0, found


def hear_of_a_failure() -> tuple[str, tuple[int, ...], float]:
    group, found = OnStreams(timeout_s=60.0), ("", (), 0.0)
    if group.rank == 1:
        group.announce_failure("out of coffee")
    else:
        found = reduce_until_it_raises(group, 20.0)
    dist.barrier()
    group.close()
    return found


def test_a_failure_elsewhere_is_told_long_before_the_timeout(world: World) -> None:
    found = world(2).run(hear_of_a_failure)
    assert found[0][0].startswith(PLACE) and "out of coffee" in found[0][0] and found[0][1] == (1,)


def reduce_often() -> tuple[float, int, bool]:
    group = OnStreams(timeout_s=TIMEOUT_S)
    for _ in range(200):
        total = group.all_reduce(torch.ones(2)).wait(TIMEOUT_S)
    if group.rank < 2:
        part = group.subgroup((0, 1))
        assert isinstance(part, OnStreams) and part._monitor is group._monitor
    dist.barrier()
    time.sleep(2 * LOOK_S)
    found = float(total[0]), len(group._monitor._state.operations), group._monitor.error is None
    group.close()
    return found


def test_operations_that_end_are_forgotten(world: World) -> None:
    assert world(3).run(reduce_often) == [(3.0, 0, True)] * 3


def test_the_watchdog_of_the_backend_comes_later_than_the_monitor() -> None:
    group = object.__new__(StreamGroup)
    assert group._patience_s(3.0) == 3.0 + GRACE_S > TorchGroup._patience_s(group, 3.0)


def test_long_waits_are_told_once_and_errors_logged(caplog: pytest.LogCaptureFixture) -> None:
    told: list[GroupError | None] = [None, None, GroupError("rank 4 left", [4])]
    whereabouts = Mock(told=lambda number: told.pop(0))
    with patch("gradsync.comm.monitor.LOOK_S", 0.01), patch("gradsync.comm.monitor.WARNING_S", 0.01):
        monitor = Monitor(60.0)
        monitor.watch(Mock(is_completed=lambda: False), whereabouts, 0, PLACE)
        while monitor.error is None:
            time.sleep(0.01)
    monitor.stop()
    assert str(monitor.error) == f"{PLACE}: rank 4 left" and monitor.error.ranks == (4,)
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
    whereabouts.announce_failure.assert_not_called()


def watched(completed: Any, told: Any) -> Monitor:
    """A monitor of one operation, when its thread has ended."""
    with patch("gradsync.comm.monitor.LOOK_S", 0.01):
        monitor = Monitor(60.0)
        monitor.watch(Mock(is_completed=completed), Mock(told=told), 0, PLACE)
        assert monitor._state.ended.wait(10)
    return monitor


def test_a_device_that_fails_ends_the_watch_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    monitor = watched(Mock(side_effect=[False, False, RuntimeError("device-side assert")]), lambda number: None)
    while monitor._state.operations:
        time.sleep(0.01)
    assert monitor.error is None and "device-side assert" in caplog.text
    for _ in range(3):
        monitor.watch(Mock(), Mock(), 1, PLACE)
    assert not monitor._state.operations, "nothing is kept of what nobody watches"


def test_notices_that_cannot_be_read_are_an_error() -> None:
    monitor = watched(lambda: False, Mock(side_effect=GroupError("the entry cannot be read")))
    while monitor.error is None:
        time.sleep(0.01)
    assert str(monitor.error) == "the entry cannot be read"


def test_where_no_rank_is_to_blame_none_is_named() -> None:
    whereabouts = Mock(told=lambda number: None, why_broken=lambda number, why: GroupError("every rank waits"))
    with patch("gradsync.comm.monitor.LOOK_S", 0.01):
        monitor = Monitor(0.01)
        monitor.watch(Mock(is_completed=lambda: False), whereabouts, 0, PLACE)
        assert monitor._state.ended.wait(10)
    whereabouts.announce_failure.assert_called_once_with(f"{PLACE}: every rank waits", ())


def links_of_a_hierarchy() -> list[tuple[float | None, float, float | None]]:
    group = StreamGroup(timeout_s=20.0, placement=Placement.regular(2, 2))
    found = [(g.alpha_s, g.stage_s, g.bytes_per_s) for g in (group, group.within_node(), group.across_nodes())]
    group.close()
    return found


def test_links_are_measured_alike_on_all_ranks_inside_and_across_nodes(world: World) -> None:
    first, *others = world(4).run(links_of_a_hierarchy)
    assert all(found == first for found in others)
    assert all(alpha_s is not None and bytes_per_s for alpha_s, _, bytes_per_s in first)


def wait_for_a_device_that_hangs() -> str:
    group = StreamGroup(timeout_s=5.0)
    with pytest.raises(GroupError) as caught, waiting_at(lambda: PLACE):
        group.reach(SimpleNamespace(has_passed=False), 0.1)  # type: ignore[arg-type]
    group.close()
    return str(caught.value)


def test_a_device_that_does_not_get_to_a_moment_is_not_waited_for_for_ever(world: World) -> None:
    for said in world(2).run(wait_for_a_device_that_hangs):
        assert PLACE in said and "within 0 s" in said
