"""Scenarios are clusters that a lab can build, each with the one bottleneck of its name."""

from __future__ import annotations

from typing import Any

import pytest

from gradsync_lab.bench.scenarios import SCENARIOS, settings_of
from gradsync_lab.cluster import Scenario

NODES = [4, 5, 7, 8, 16]
LINKS = ["200mbit", "1gbit", "333mbit"]


def scenario(name: str, nodes: int, link: str) -> Scenario:
    return Scenario(nodes=nodes, link=link, **settings_of(name, nodes, link))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_lab_can_be_all_of_them(name: str, nodes: int, link: str) -> None:
    """Settings outside the scenario's own are the lab's defaults."""
    own: dict[str, set[str]] = {
        "uniform": set(),
        "slow-node": {"slow"},
        "slower-node": {"slow"},
        "racks": {"rack_size", "trunk"},
        "contention": {"moving_background"},
        "stalls": {"stalls"},
    }
    made, plain = vars(scenario(name, nodes, link)), vars(Scenario(nodes=nodes, link=link))
    assert {setting for setting in made if made[setting] != plain[setting]} == own[name]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize(("name", "share"), [("slow-node", 1 / 4), ("slower-node", 1 / 10)])
def test_one_node_is_slow(name: str, share: float, nodes: int, link: str) -> None:
    made = scenario(name, nodes, link)
    usual, *others = sorted({made.rate_of(node) or 0.0 for node in range(nodes)}, reverse=True)
    assert len(made.slow) == 1 and others == [pytest.approx(share * usual, rel=1e-3)]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("nodes", NODES)
def test_there_are_two_racks_whose_uplinks_carry_a_quarter_of_what_nodes_could_send(nodes: int, link: str) -> None:
    made = scenario("racks", nodes, link)
    assert made.racks == 2 and made.trunk is not None and made.rack_size is not None
    trunk = Scenario(nodes=1, link=made.trunk).rate_of(0)
    assert trunk == pytest.approx((made.rate_of(0) or 0.0) * made.rack_size / 4, rel=1e-3)


def test_a_flow_moves_and_ranks_stall_every_few_seconds() -> None:
    assert settings_of("contention", 4, "1gbit") == {"moving_background": ("750mbit", 4.0)}
    assert settings_of("stalls", 4, "1gbit") == {"stalls": (0.5, 4.0)}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("trunk", 4, "1gbit"), "unknown scenario 'trunk'; there are uniform, slow-node,"),
        (("racks", 3, "1gbit"), "at least 4 nodes, got 3"),
        (("racks", 4, "unshaped"), "a link with a rate, such as 1gbit, got unshaped"),
        (("racks", 4, "fast"), "link rate must look like"),
    ],
)
def test_what_is_no_scenario_is_refused(asked: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings_of(*asked)
