"""Cases are drawn from a seed, fit together, and cover all that they shall."""

from __future__ import annotations

import pytest

from gradsync_lab.faults.campaign import LINKS_FROM, case_of, numbers
from gradsync_lab.faults.cases import LINK_FAULTS, OF_STATE, PHASES, PLANS, Case, Fault, Frontend, draw


def test_a_seed_gives_the_same_cases_again_and_another_seed_others() -> None:
    first = [case_of(5, number) for number in numbers(20, 5)]
    assert first == [case_of(5, number) for number in numbers(20, 5)]
    assert first != [case_of(6, number) for number in numbers(20, 5)]
    assert [Case.model_validate_json(each.model_dump_json()) for each in first] == first


def test_a_longer_campaign_begins_with_the_cases_of_a_shorter_one() -> None:
    assert set(numbers(20, 5)) <= set(numbers(50, 9))


@pytest.mark.parametrize("links", [False, True])
def test_cases_fit_together_and_cover_everything(links: bool) -> None:
    cases = [draw(0, number, links=links) for number in range(1500)]
    for case in cases:
        assert (case.fault in LINK_FAULTS) is links is case.is_of_link
        assert case.phase in PHASES[case.fault] and case.plan in PLANS[case.frontend]
        assert 0 <= case.victim < case.size <= 4 and 1 <= case.step < case.steps - 2
        assert not (case.frontend is Frontend.HOOK and case.phase in OF_STATE), "the hook has no state of its own"
    wanted = {(fault, phase) for fault in Fault for phase in PHASES[fault] if (fault in LINK_FAULTS) is links}
    assert {(case.fault, case.phase) for case in cases} == wanted
    assert {(case.frontend, case.plan) for case in cases} == {(f, plan) for f in Frontend for plan in PLANS[f]}
    assert {case.store_on_rank_0 for case in cases} == {False, True}
    assert case_of(0, LINKS_FROM).is_of_link and not case_of(0, 0).is_of_link


def test_the_victim_is_among_the_survivors_where_it_must_raise_or_go_on() -> None:
    by_fault = {case.fault: case for case in (draw(0, n, links=n % 2 == 0) for n in range(1000))}
    with_victim = {fault for fault, case in by_fault.items() if case.victim in case.survivors}
    assert with_victim == {Fault.PAUSE, Fault.SLOW, Fault.UNLIKE, *LINK_FAULTS}
    without = {fault for fault, case in by_fault.items() if case.victim not in case.again}
    assert without == {Fault.KILL, Fault.STOP, Fault.LINK_DOWN}
