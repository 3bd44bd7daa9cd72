"""Scenarios accept what the lab can build and refuse all else with a clear message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradsync_lab.cluster import Scenario, counters
from gradsync_lab.cluster.scenario import (
    parse_background,
    parse_moving_background,
    parse_slow,
    parse_stalls,
    rate_bytes_per_s,
)


def test_the_spellings_of_the_command_line_are_read() -> None:
    assert parse_slow(["3=100mbit", "0=1gbit"]) == {3: "100mbit", 0: "1gbit"}
    assert parse_background(["0->2=300mbit", "1->0=5mbit"]) == ((0, 2, "300mbit"), (1, 0, "5mbit"))
    assert parse_moving_background("100mbit@4s") == ("100mbit", 4.0)
    assert parse_stalls("500ms@4s") == (0.5, 4.0)
    assert parse_slow([]) == {}
    assert parse_background([]) == ()


@pytest.mark.parametrize("text", ["3:100mbit", "100mbit", "a=1gbit", "3=", ""])
def test_misspelt_slow_node_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NODE=RATE, like 3=100mbit"):
        parse_slow([text])


@pytest.mark.parametrize("text", ["0-2=1gbit", "0->2", "->2=1gbit", ""])
def test_misspelt_background_traffic_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="FROM->TO=RATE, like 0->2=300mbit"):
        parse_background([text])


@pytest.mark.parametrize("text", ["100mbit", "", "4s"])
def test_misspelt_moving_traffic_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="RATE@TIME, like 100mbit@4s"):
        parse_moving_background(text)


@pytest.mark.parametrize("text", ["500ms", "", "500ms:4s"])
def test_misspelt_stalls_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="TIME@TIME between them, like 500ms@4s"):
        parse_stalls(text)


@pytest.mark.parametrize("read", [parse_moving_background, parse_stalls])
@pytest.mark.parametrize("time", ["", "4", "4min", "-4s", "4s@4s"])
def test_times_that_are_none_are_refused(read: Callable[[str], object], time: str) -> None:
    with pytest.raises(ValueError, match="a duration must look like"):
        read(f"1s@{time}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 0}, "1 to 200 nodes, got 0"),
        ({"nodes": 201}, "1 to 200 nodes, got 201"),
        ({"nodes": 2, "ranks_per_node": 0}, "ranks_per_node must be at least 1, got 0"),
        ({"nodes": 4, "rack_size": 2}, "rack_size and trunk go together"),
        ({"nodes": 4, "trunk": "1gbit"}, "rack_size and trunk go together"),
        ({"nodes": 4, "rack_size": 0, "trunk": "1gbit"}, "rack_size must be at least 1, got 0"),
        ({"nodes": 2, "slow": {2: "1mbit"}}, r"no node 2: the nodes are 0\.\.1"),
        ({"nodes": 2, "background": ((0, 5, "1mbit"),)}, r"no node 5: the nodes are 0\.\.1"),
        ({"nodes": 2, "background": ((1, 1, "1mbit"),)}, "two nodes, got 1->1"),
        ({"nodes": 2, "background": ((0, 1, "unshaped"),)}, "link rate"),
        ({"nodes": 2, "background": ((0, 1, "100gbit"),)}, "got 100gbit"),
        ({"nodes": 2, "background": ((0, 1, "1mbit"), (0, 1, "2mbit"))}, "once from a node to another"),
        ({"nodes": 2, "moving_background": ("unshaped", 4.0)}, "link rate"),
        ({"nodes": 2, "moving_background": ("", 4.0)}, "link rate must look like .* got ''"),
        ({"nodes": 2, "moving_background": ("100gbit", 4.0)}, "got 100gbit"),
        ({"nodes": 1, "moving_background": ("1mbit", 4.0)}, "needs two nodes .* got 1 nodes"),
        ({"nodes": 2, "moving_background": ("1mbit", 0.0)}, "a time above 0 s, got 2 nodes and 0.0"),
        ({"nodes": 2, "moving_background": ("1mbit", float("inf"))}, "a time above 0 s"),
        (
            {"nodes": 2, "background": ((0, 1, "1mbit"), (1, 0, "1mbit")), "moving_background": ("1mbit", 4.0)},
            "two nodes without other background traffic",
        ),
        ({"nodes": 2, "stalls": (0.0, 4.0)}, r"two times above 0 s, got \(0.0, 4.0\)"),
        ({"nodes": 2, "stalls": (0.5, float("inf"))}, "two times above 0 s"),
        ({"nodes": 2, "link": "fast"}, "link rate must look like .* got 'fast'"),
        ({"nodes": 2, "slow": {1: "0mbit"}}, "positive, .* got '0mbit'"),
        ({"nodes": 4, "rack_size": 2, "trunk": "1GB/s"}, "got '1GB/s'"),
        ({"nodes": 2, "link": "100gbit"}, "8kbit .. 34.36gbit, got 100gbit; `unshaped` sets no limit"),
        ({"nodes": 2, "link": "1kbit"}, "8kbit .. 34.36gbit, got 1kbit"),
    ],
)
def test_impossible_scenario_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scenario(**settings)


def test_rates_racks_and_ranks_of_nodes() -> None:
    scenario = Scenario(nodes=5, ranks_per_node=2, rack_size=2, trunk="unshaped", slow={3: "8mbit", 4: "unshaped"})
    assert [scenario.rate_of(node) for node in range(5)] == [125e6, 125e6, 125e6, 1e6, None]
    assert [scenario.rack_of(node) for node in range(5)] == [0, 0, 1, 1, 2]
    assert (scenario.racks, scenario.world_size) == (3, 10)
    assert rate_bytes_per_s("unshaped") is None


HEADER = "Inter-|   Receive\n face |bytes\n"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("    lo: 10 1 0 0 0 0 0 0 10 1\neth-lab: 7000 1 0 0 0 0 0 0 9000 1\n", (9000, 7000)),
        ("    lo: 10 1 0 0 0 0 0 0 11 1\n  eth0: 7000 1 0 0 0 0 0 0 9000 1\n", (11, 10)),
    ],
    ids=["node", "loopback"],
)
def test_counters_are_the_links_in_a_node_and_loopbacks_elsewhere(
    lines: str, expected: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "dev"
    file.write_text(HEADER + lines, encoding="ascii")
    monkeypatch.setattr(counters, "COUNTERS", file)
    counted: Callable[[], tuple[int, int]] = counters.interface_bytes
    assert counted() == expected
