"""`Peers` tells the other ranks what is no gradient, and stops all where one rank fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from gradsync.comm import GroupError, LocalGroup, run_local
from gradsync.devices.streams import NoStreams
from gradsync.engine.peers import Peers

STEP = 7


@contextmanager
def peers_of(group: LocalGroup) -> Iterator[Peers]:
    peers = Peers(group, torch.device("cpu"), NoStreams(), timeout_s=20, step=lambda: STEP)
    peers.start()
    try:
        yield peers
    finally:
        peers.close()


def error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def test_what_ranks_tell_comes_back_by_rank() -> None:
    def main(group: LocalGroup) -> list[object]:
        with peers_of(group) as peers:
            return peers.tell("ranks", {"rank": group.rank})

    assert run_local(3, main) == [[{"rank": rank} for rank in range(3)]] * 3


def test_a_problem_of_one_rank_is_raised_on_all_and_stops_nothing() -> None:
    def main(group: LocalGroup) -> tuple[str, str, list[int]]:
        with peers_of(group) as peers:
            problem = ValueError("no room") if group.rank == 1 else None
            told = error_of(lambda: peers.agree("a look", problem))
            differs = error_of(lambda: peers.agree("a look", None, f"plan {group.rank}"))
            return told, differs, peers.tell("ranks", group.rank)

    of_one, of_other = run_local(2, main)
    assert of_one[0] == "a look: rank 1 could not: no room" and of_other[0] == "no room"
    for _, differs, told in (of_one, of_other):
        assert differs == "a look: the ranks differ: plan 0 on rank 0, plan 1 on rank 1" and told == [0, 1]


def test_an_error_inside_a_call_stops_all_later_calls_and_names_the_step() -> None:
    def fail(group: LocalGroup) -> Tensor:
        if group.rank == 1:
            raise OSError("no space left")
        return group.all_reduce(torch.zeros(1)).wait(20)

    def main(group: LocalGroup) -> tuple[str, str]:
        with peers_of(group) as peers:
            with pytest.raises((OSError, GroupError)) as caught:
                peers.call("sums", fail)
            return str(caught.value), error_of(lambda: peers.tell("ranks", 0))

    (heard, after), (own, also) = run_local(2, main)
    assert "no space left" in heard and own == "no space left"
    for text in (after, also):
        assert f"gradient synchronisation stopped earlier: sums, step {STEP}: " in text and "no space left" in text


def test_asides_run_before_the_end_of_the_step_and_raise_there() -> None:
    def main(group: LocalGroup) -> list[float]:
        with peers_of(group) as peers:
            summed = peers.aside(lambda group: group.all_reduce(torch.ones(1)).wait(20).tolist())
            peers.end_asides()
            peers.begin_step()
            peers.aside(lambda group: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                peers.end_asides()
            peers.begin_step()
            peers.end_asides()  # those of the step before are forgotten
            return summed.result()

    assert run_local(2, main) == [[2.0], [2.0]]


def test_nobody_is_talked_to_after_close() -> None:
    def main(group: LocalGroup) -> str:
        with peers_of(group) as peers:
            pass
        return error_of(lambda: peers.tell("ranks", 0))

    for text in run_local(2, main):
        assert "gradsync was detached from this model; attach again" in text
