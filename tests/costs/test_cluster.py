"""The network as numbers: what users write is parsed, or refused with the expected form."""

from __future__ import annotations

import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gradsync.costs.cluster import Cluster, Link, Placement, format_rate, parse_duration_s, parse_rate_bytes_per_s


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("1gbit", 125e6),
        ("200mbit", 25e6),
        ("25Gbps", 3.125e9),
        ("2.5 Gbit/s", 312.5e6),
        (" 10 Mbit ", 1.25e6),
        (".5Tbps", 62.5e9),
        ("800kbit", 1e5),
        ("8bit", 1.0),
    ],
)
def test_rates_are_bits_with_decimal_prefixes(text: str, bytes_per_s: float) -> None:
    assert parse_rate_bytes_per_s(text) == pytest.approx(bytes_per_s, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gbit",
        "1",
        "1g",
        "0gbit",
        "-1gbit",
        "1e9bit",
        "1 GB/s",
        "1GBps",
        "1gbit x",
        "0.5bit",
        "9999tbit",
        "9" * 400 + "gbit",
    ],
)
def test_what_is_no_rate_in_bits_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"must look like 200mbit, 1gbit or 25Gbps and be positive, 1bit to 8000tbit, got " + repr(text)[:9],
    ):
        parse_rate_bytes_per_s(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("10ms", 0.01), ("50us", 5e-5), ("1.5s", 1.5), ("100ns", 1e-7), (" 0 s ", 0.0)]
)
def test_durations_are_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["", "10", "ms", "-1ms", "10 min", "10MS", "1001s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must look like 10ms, 50us or 1.5s, at most 1000s, got " + repr(text)):
        parse_duration_s(text)


@given(st.floats(min_value=0.5, max_value=1e14))
def test_formatted_rates_are_read_back_to_four_digits(bytes_per_s: float) -> None:
    assert parse_rate_bytes_per_s(format_rate(bytes_per_s)) == pytest.approx(bytes_per_s, rel=1e-3)


def test_links_are_positive_and_latencies_not_negative() -> None:
    assert Link.parse("1gbit", "10ms") == Link(125e6, 0.01)
    for bandwidth in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="bandwidth_bytes_per_s must be greater than 0"):
            Link(bandwidth)
    with pytest.raises(ValueError, match=r"latency_s must be in \[0, inf\), got -1"):
        Link(1.0, -1.0)


def test_ranks_are_numbered_node_by_node() -> None:
    cluster = Cluster(3, Link.parse("1gbit"), ranks_per_node=2)
    assert cluster.world_size == 6
    assert cluster.placement() == Placement((0, 0, 1, 1, 2, 2))
    assert Placement.one_per_node(3) == Placement((0, 1, 2))
    assert Placement.one_per_node(3).size == 3


def test_a_slow_node_has_its_own_link() -> None:
    fast, slow = Link.parse("10gbit"), Link.parse("1gbit")
    cluster = Cluster(3, fast, slow={1: slow})
    assert [cluster.link_of(node) for node in range(3)] == [fast, slow, fast]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 0}, "Cluster.nodes must be at least 1, got 0"),
        ({"ranks_per_node": 0}, "Cluster.ranks_per_node must be at least 1, got 0"),
        ({"slow": {4: Link(1.0)}}, "Cluster.slow names node 4, but the nodes are 0..3"),
        ({"rack_size": 2}, "rack_size and Cluster.trunk go together"),
        ({"trunk": Link(1.0)}, "rack_size and Cluster.trunk go together"),
        ({"rack_size": 0, "trunk": Link(1.0)}, "Cluster.rack_size must be at least 1 or None, got 0"),
        ({"nodes": 10**9}, "must be at most 131072 ranks, got 1000000000 times 1"),
        ({"ranks_per_node": 10**8}, "must be at most 131072 ranks, got 4 times 100000000"),
        ({"nodes": 3.0}, "Cluster.nodes must be a whole number, got 3.0"),
        ({"nodes": True}, "Cluster.nodes must be a whole number, got True"),
        ({"link": 1e9}, "Cluster.link must be .*Link, got 1000000000.0"),
    ],
)
def test_impossible_clusters_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster(**{"nodes": 4, "link": Link(1.0), **settings})


FULL = """
nodes = 4
ranks_per_node = 2
link = { rate = "10gbit", latency = "10ms" }
intra = "200gbit"
slow = { 3 = { rate = "1gbit" } }
rack_size = 2
trunk = { rate = "40gbit" }
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def test_a_cluster_is_read_from_toml(tmp_path: Path) -> None:
    assert Cluster.load(write(tmp_path, FULL)) == Cluster(
        nodes=4,
        ranks_per_node=2,
        link=Link(1.25e9, 0.01),
        intra=Link(25e9),
        slow={3: Link(125e6)},
        rack_size=2,
        trunk=Link(5e9),
    )
    assert Cluster.load(write(tmp_path, 'nodes = 2\nlink = "1gbit"')) == Cluster(2, Link(125e6))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('nodes = 2\nlink = "1gbit"\nnode = 3', "unknown key 'node'; a cluster has intra, link, nodes"),
        ('link = "1gbit"', "the key 'nodes' is missing"),
        ("nodes = 2", "the key 'link' is missing"),
        ('nodes = "2"\nlink = "1gbit"', "nodes must be a whole number, got '2'"),
        ('nodes = 2.5\nlink = "1gbit"', "nodes must be a whole number, got 2.5"),
        ('nodes = 2\nranks_per_node = true\nlink = "1gbit"', "ranks_per_node must be a whole number, got True"),
        ('nodes = 0\nlink = "1gbit"', "Cluster.nodes must be at least 1, got 0"),
        ('nodes = 2\nlink = "fast"', "link: a link rate must look like .* got 'fast'"),
        ("nodes = 2\nlink = 1000", 'link must look like { rate = "1gbit", latency = "50us" }, got 1000'),
        ("nodes = 2\nlink = { rate = 1000 }", "link must look like .* got {'rate': 1000}"),
        ('nodes = 2\nlink = { latency = "1ms" }', "link must look like"),
        ('nodes = 2\nlink = { rate = "1gbit", loss = "1%" }', "link must look like"),
        ('nodes = 2\nlink = { rate = "1gbit", latency = "1" }', "link: a duration must look like .* got '1'"),
        ('nodes = 2\nlink = "1gbit"\nslow = 1', "slow must look like .* got 1"),
        ('nodes = 2\nlink = "1gbit"\nslow = { first = "1mbit" }', "slow must look like"),
        ('nodes = 2\nlink = "1gbit"\nslow = { 1 = "1" }', r"slow\.1: a link rate must look like"),
        ('nodes = 2\nlink = "1gbit"\nslow = { 2 = "1mbit" }', r"names node 2, but the nodes are 0\.\.1"),
    ],
)
def test_errors_in_the_file_name_the_key_and_what_was_expected(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=message.replace("{ ", r"\{ ").replace(" }", r" \}")) as caught:
        Cluster.load(path)
    assert re.match(re.escape(str(path)), str(caught.value)) or "Cluster." in str(caught.value)


def test_a_placement_says_who_shares_a_node_and_who_has_the_same_place_on_others() -> None:
    placement = Placement.regular(3, 2)
    assert placement == Placement((0, 0, 1, 1, 2, 2))
    assert (placement.num_nodes, placement.ranks_per_node, placement.is_hierarchy) == (3, 2, True)
    assert [placement.within(rank) for rank in (0, 3)] == [(0, 1), (2, 3)]
    assert [placement.across(rank) for rank in (0, 3)] == [(0, 2, 4), (1, 3, 5)]
    assert placement.of((1, 3, 5)) == Placement((0, 1, 2))
    strewn = Placement((7, 4, 4, 7))
    assert (strewn.within(3), strewn.across(3), strewn.across(0)) == ((0, 3), (2, 3), (0, 1))


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node"), [((0, 1, 2), 1), ((5, 5, 5), 3), ((0,), 1), ((0, 0, 1), None), ((0, 1, 1, 1), None)]
)
def test_one_node_one_rank_a_node_and_uneven_nodes_make_no_hierarchy(
    nodes: tuple[int, ...], ranks_per_node: int | None
) -> None:
    placement = Placement(nodes)
    assert not placement.is_hierarchy
    assert placement.ranks_per_node == ranks_per_node


def test_a_group_across_uneven_nodes_is_refused_with_their_numbers() -> None:
    with pytest.raises(ValueError, match="the nodes have 2, 1 ranks; a group across nodes needs as many ranks on each"):
        Placement((0, 0, 1)).across(0)
