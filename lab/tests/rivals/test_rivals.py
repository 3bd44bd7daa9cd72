"""Rivals decide as their papers say, one item at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradsync.planner.solver.machine import step_s
from gradsync.planner.solver.problem import Curve, Part, check_parts, layerwise
from gradsync_lab.papers.reference import DENSE, DEVICE, HOST, bytecomp_problem
from gradsync_lab.rivals.rivals import SeCoPa, byteps_compress

SERVER = SeCoPa(
    nodes=4,
    send=Curve.linear(1.0, 1.0),
    encode=Curve.linear(2.0, 0.125),
    decode=Curve.linear(1.0, 0.125),
    wire_ratio=0.25,
)


def test_costs_count_sends_encodings_and_decodings() -> None:
    assert SERVER.dense_s(8.0, 2) == 6 * (1 + 4)
    # 6 sends of 1 byte, 3 encodings and 5 decodings of 4 dense bytes
    assert SERVER.compressed_s(8.0, 2) == 6 * (1 + 1) + 3 * (2 + 0.5) + 5 * (1 + 0.5)
    # with 4 partitions no more than n encodings and 2(n-1) decodings, of 2 dense bytes
    assert SERVER.compressed_s(8.0, 4) == 6 * (1 + 0.5) + 4 * (2 + 0.25) + 6 * (1 + 0.25)
    assert replace(SERVER, ring=True).compressed_s(8.0, 1) == 6 * (1 + 2) + 4 * (2 + 1) + 4 * (1 + 1)


def test_only_items_whose_sends_cost_more_than_coding_are_compressed() -> None:
    assert SERVER.choose(1.0) == (False, 4)
    assert SERVER.choose(100.0) == (True, 4)
    best = min((SERVER.compressed_s(100.0, count), True, count) for count in range(1, 5))
    assert SERVER.choose(100.0) == best[1:]
    assert best[0] < min(SERVER.dense_s(100.0, count) for count in range(1, 5))


def test_of_equal_costs_the_simplest_is_chosen() -> None:
    free = Curve.linear(0.0, 0.0)
    assert SeCoPa(2, free, free, free, 0.1).choose(5.0) == (False, 1)


def test_the_rule_looks_at_sizes_only_and_loses_to_overlap() -> None:
    """GPT2 at 100 Gb/s hides most of its communication: savings of single items do not shorten the step."""
    problem = bytecomp_problem("gpt2", "C")
    rule = SeCoPa(
        nodes=8,
        send=Curve.linear(0.3e-3 / 14, 8e-11 / 2),
        encode=Curve.linear(1e-5, 1e-12),
        decode=Curve.linear(2e-6, 1e-13),
        wire_ratio=1 / 32,
    )
    parts = rule.parts(problem, DENSE, DEVICE)
    compressed = {problem.nbytes[part.start] for part in parts if part.option == DEVICE}
    assert compressed and min(compressed) > max(set(problem.nbytes) - compressed)
    assert step_s(problem, parts) > step_s(problem, layerwise(problem, DENSE))


def test_byteps_compresses_on_the_host_from_a_size_on() -> None:
    problem = bytecomp_problem("lstm", "A")
    parts = byteps_compress(problem, DENSE, HOST)
    assert [part.option for part in parts] == [HOST, HOST, HOST, DENSE, DENSE, HOST, HOST, DENSE, DENSE, HOST]
    check_parts(problem, parts)


def test_an_item_takes_only_what_it_may() -> None:
    problem = bytecomp_problem("lstm", "A")
    problem = replace(problem, allowed=(frozenset({DENSE}),) * 9 + (frozenset({DEVICE, HOST}),))
    assert byteps_compress(problem, DENSE, HOST)[0] == Part(0, 1, DENSE)
    assert byteps_compress(problem, DENSE, DENSE)[9] == Part(9, 10, DEVICE)


def test_a_cluster_of_one_node_is_refused() -> None:
    with pytest.raises(ValueError, match="nodes must be 2 or more, got 1"):
        replace(SERVER, nodes=1)
    with pytest.raises(ValueError, match="wire_ratio must be positive, got 0"):
        replace(SERVER, wire_ratio=0.0)
