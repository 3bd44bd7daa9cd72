"""Rivals keep what every scheme promises, see `tests/schemes/contract.py`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from gradsync.schemes import BalancedElements, Scheme, from_expression, registered, to_expression
from gradsync_lab.rivals.gossip import Gossip
from gradsync_lab.rivals.regions import OkTopkLike
from gradsync_lab.rivals.zen_hash import ZenHash
from tests.frontends.test_oracle import bag_of_words
from tests.frontends.twins import detach
from tests.schemes.contract import contract
from tests.schemes.family import Member
from tests.schemes.test_elements import any_density
from tests.test_settings import assert_wrong_settings_are_refused
from tests.world import Ranks

pytestmark = pytest.mark.usefixtures("stale_memory")

CASES = ("no elements", "one element", "even", "zeros of both signs", "hot columns", "few non-zeros")
RIVALS = [
    Member(OkTopkLike(bins=16), lambda n: 2, sections=4, spread=0.25, sizes=(1, 3), only=CASES),
    Member(ZenHash(), lambda n: 2, sections=4, dealt=True, sizes=(1, 3), only=CASES),
    Member(
        ZenHash(expected=1),  # memory for 64 elements of an owner
        roundings=lambda n: 2,
        sections=6,
        dealt=True,
        title="without room",
        sizes=(3,),
        only=("even", "zeros of both signs", "few non-zeros"),
    ),
]

EVERY_RIVAL = [ZenHash(), OkTopkLike(), Gossip.ring()]

globals().update(contract(RIVALS))
test_any_density_may_follow_any_other = any_density([ZenHash, OkTopkLike])


def test_every_registered_rival_is_a_row_of_the_table() -> None:
    """Gossip is left out: it averages neighbours, and has a contract of its own."""
    rivals = {name for name, scheme in registered().items() if scheme.__module__.startswith("gradsync_lab.")}
    assert {member.scheme.name for member in RIVALS} == rivals - {Gossip.name}
    assert {scheme.name for scheme in EVERY_RIVAL} == rivals


@pytest.mark.parametrize("rival", EVERY_RIVAL, ids=lambda rival: rival.name)
def test_expressions_return_to_the_rival_they_came_from(rival: Scheme[Any]) -> None:
    assert from_expression(to_expression(rival)) == rival


@pytest.mark.parametrize("rival", EVERY_RIVAL, ids=lambda rival: rival.name)
def test_a_setting_of_a_wrong_type_is_refused(rival: Scheme[Any]) -> None:
    assert_wrong_settings_are_refused(rival)


def rivals_of_elements() -> None:
    detach(bag_of_words(BalancedElements(capacity=(60, 150)), ZenHash())[1])
    detach(bag_of_words(BalancedElements(capacity=(3, 5)), OkTopkLike())[1])  # no room for most steps


def test_gradients_of_rivals_are_ddps_to_the_bit_on_two_ranks(world: Callable[[int], Ranks]) -> None:
    world(2).run(rivals_of_elements)


def test_a_plan_that_names_a_rival_is_read_where_the_lab_is_installed() -> None:
    """The lab's classes are found by their names, whoever reads the plan."""
    code = "from gradsync.schemes import from_expression as f; print(*(f({n: {}}).name for n in %r))"
    names = ["zen_hash", "ok_topk_like"]
    told = subprocess.run([sys.executable, "-c", code % names], check=True, capture_output=True, text=True)
    assert told.stdout.split() == names
