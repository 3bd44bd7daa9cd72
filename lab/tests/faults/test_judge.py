"""The judge tells good from bad endings by hand-made events; each verdict can fail."""

from __future__ import annotations

from typing import Any

import pytest

from gradsync_lab.faults.cases import GRACE_S, TIMEOUT_S, Fault, Phase
from gradsync_lab.faults.judge import Ending, RankVerdict, judge, named, says_where
from lab.tests.faults.events import STRUCK, case, ended, error, event, fault, started_again, survivor, went_on


def test_survivors_that_raise_in_time_and_start_again_end_well() -> None:
    found = judge(case(), [fault(), *survivor(0), *survivor(2)])
    assert found.struck and found.good and found.ending is Ending.CLEAR
    assert [each.rank for each in found.ranks] == [0, 2]
    assert all(each.names_victim and not each.blames and each.says_where and each.again for each in found.ranks)
    assert found.ranks[0].after_s == pytest.approx(5.1)


def test_a_fault_that_did_not_strike_is_no_case() -> None:
    assert not judge(case(), [*went_on(0), *went_on(2)]).struck


@pytest.mark.parametrize(
    ("changes", "ending"),
    [
        ({"after_s": TIMEOUT_S + GRACE_S + 0.1}, Ending.LATE),
        ({"ours": False, "type": "DistStoreError"}, Ending.UNCLEAR),
        ({"ours": False, "ddps": True, "type": "RuntimeError"}, Ending.DDPS),
        ({"ours": False, "type": "RuntimeError", "text": "rank 1 could not attach", "where": "attach"}, Ending.UNCLEAR),
    ],
)
def test_errors_that_are_late_or_not_ours_are_bad(changes: dict[str, Any], ending: Ending) -> None:
    found = judge(case(), [fault(), *survivor(0), *survivor(2, **changes)])
    assert not found.good and found.ending is ending


def test_time_counts_from_the_call_that_raised_where_it_began_after_the_fault() -> None:
    """A slow link lets some steps pass before a message is late."""
    slow = case(fault=Fault.LINK_LOSS, phase=Phase.ANY)
    began = STRUCK + 20.0
    events = [fault(), *(each for rank in range(3) for each in survivor(rank, after_s=25.1, began=began))]
    found = judge(slow, events)
    assert found.good and found.ranks[0].after_s == pytest.approx(5.1)
    assert judge(slow, [fault(), *survivor(0, after_s=25.1), *went_on(1), *went_on(2)]).ending is Ending.LATE


def test_what_a_rank_said_of_its_own_attach_is_clear() -> None:
    said = {"ours": False, "type": "RuntimeError", "text": "rank 1 could not attach: a bad sample", "where": "attach"}
    victim = [error(1, 0.0, ours=False, type="ValueError", where="attach"), started_again(1), ended(1)]
    found = judge(
        case(fault=Fault.EXCEPTION, phase=Phase.ATTACH), [fault(), *survivor(0, **said), *victim, *survivor(2, **said)]
    )
    assert found.good and found.ranks[0].names_victim and found.ranks[0].says_where
    other = {**said, "text": "rank 0 could not attach: a bad sample"}
    found = judge(case(fault=Fault.EXCEPTION, phase=Phase.ATTACH), [fault(), *survivor(2, **other), *victim])
    assert found.ranks[-1].ending is Ending.UNCLEAR and found.ranks[-1].blames == [0]


def test_a_rank_that_hangs_or_dies_is_bad() -> None:
    hung = event(-1, "hung", 60.0, of=2, stacks="File x")
    found = judge(case(), [fault(), *survivor(0), hung])
    assert found.ending is Ending.HUNG and found.ranks[1].stacks == "File x" and not found.good
    assert judge(case(), [fault(), *survivor(0)]).ending is Ending.DIED
    hung_later = [error(2), event(-1, "hung", 60.0, of=2, stacks="")]
    found = judge(case(), [fault(), *survivor(0), *hung_later])
    assert found.ending is Ending.CLEAR and not found.again and not found.good


def test_a_rank_that_cannot_start_again_is_bad() -> None:
    found = judge(case(), [fault(), *survivor(0), error(2), started_again(2, ok=False), ended(2)])
    assert found.ending is Ending.CLEAR and not found.again and not found.good


def test_threads_that_are_left_are_bad_and_other_leftovers_are_counted() -> None:
    kept = [error(2), started_again(2), ended(2, threads=["gradsync board"], tasks=7, descriptors=20)]
    found = judge(case(), [fault(), *survivor(0), *kept])
    assert not found.good and found.threads_left == ["gradsync board"]
    assert found.ranks[1].left == (["gradsync board"], 6, 6)
    counted = [error(2), started_again(2), ended(2, tasks=7, descriptors=20)]
    assert judge(case(), [fault(), *survivor(0), *counted]).good


def test_ranks_must_go_on_where_they_can_and_with_the_same_parameters() -> None:
    slow = case(fault=Fault.SLOW)
    assert judge(slow, [fault(), *went_on(0), *went_on(1), *went_on(2)]).ending is Ending.WENT_ON
    found = judge(slow, [fault(), *survivor(0), *went_on(1), *went_on(2)])
    assert found.ending is Ending.GAVE_UP and not found.good
    found = judge(slow, [fault(), *went_on(0), *went_on(1), *went_on(2, digest="b")])
    assert not found.alike and not found.good


def test_the_victim_of_an_exception_must_start_again_too() -> None:
    raised = case(fault=Fault.EXCEPTION)
    own = error(1, 0.0, ours=False, type="ValueError", text="exception (injected)")
    assert judge(raised, [fault(), *survivor(0), own, started_again(1), ended(1), *survivor(2)]).good
    found = judge(raised, [fault(), *survivor(0), own, started_again(1, ok=False), ended(1), *survivor(2)])
    assert not found.again
    assert judge(case(), [fault(), *survivor(0), *survivor(2)]).again, "one that is dead need not"


def test_a_rank_that_is_cut_off_raises_too_but_need_not_start_again() -> None:
    down = case(fault=Fault.LINK_DOWN, phase=Phase.ANY)
    cut_off = [error(1, text="bucket '0', step 4: every rank waits"), ended(1, threads=["gradsync board"])]
    found = judge(down, [fault(), *survivor(0), *cut_off, *survivor(2)])
    assert found.good and found.ranks[1].again is None and found.ranks[1].names_victim is None
    assert judge(down, [fault(), *survivor(0), error(1, 11.0), *survivor(2)]).ending is Ending.LATE


@pytest.mark.parametrize(
    ("text", "victim", "blames"),
    [
        ("a connection broke", False, []),
        ("rank 1 did not come this far", True, []),
        ("rank 0: bucket '0', step 4: a connection broke", False, [0]),
        ("rank 0: bucket '0', step 4: rank 1 did not come this far", True, []),
        ("ranks 0, 1 did not come this far", True, [0]),
        ("ranks 0 and 3 did not come this far", False, [0, 3]),
        ("rank 2: backward ended with an error on this rank", False, []),
        ("rank 11 did not come this far", False, [11]),
    ],
)
def test_the_victim_is_named_and_who_passes_a_failure_on_is_not_blamed(
    text: str, victim: bool, blames: list[int]
) -> None:
    assert named(text, 1, reader=2) == (victim, blames)


def test_the_hook_attaches_in_the_first_backward() -> None:
    assert says_where("backward", 0, "rank 1 did not come to attach within 5 s")
    assert not says_where("backward", 1, "rank 1 did not come to attach within 5 s")


@pytest.mark.parametrize(
    ("where", "text", "says"),
    [
        ("backward", "bucket '0', stage 'push', step 4: gone", True),
        ("backward", "bucket '0', stage 'push', step 5: gone", False),
        ("backward", "step 4: gone", False),
        ("backward", "bucket '0': gone", False),
        ("forward", "bucket '0', step 3: gone", True),
        ("attach", "rank 1 could not attach", True),
        ("attach", "wait timeout after 12500ms", False),
        ("load_state_dict", "rank 1 did not come to loading of state", True),
    ],
)
def test_an_error_says_where_by_bucket_and_step_or_by_phase(where: str, text: str, says: bool) -> None:
    assert says_where(where, 4, text) is says


def test_verdicts_go_through_json() -> None:
    found = judge(case(), [fault(), *survivor(0), *survivor(2)])
    assert type(found).model_validate_json(found.model_dump_json()) == found
    assert isinstance(found.ranks[0], RankVerdict)
