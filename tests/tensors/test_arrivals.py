"""The elements of a parameter that arrived in a step, from the sections that arrived in its buckets."""

from __future__ import annotations

import torch

from gradsync.tensors.arrivals import Arrival, Arrivals
from gradsync.tensors.bucket import Bucket, Layout, Segment, TensorSpec


def bucket(*segments: tuple[str, int, int]) -> Bucket:
    specs = tuple(TensorSpec((stop - start,), torch.float32) for _, start, stop in segments)
    return Bucket("0", tuple(Segment(*each) for each in segments), specs, Layout.FLAT)


def test_sections_of_buckets_are_those_of_their_parameters() -> None:
    """Two buckets share a parameter; one received some elements only."""
    first = Arrival(bucket(("a", 0, 10), ("b", 0, 5)), [(2, 4), (8, 12)], frozen=True)
    second = Arrival(bucket(("b", 5, 9), ("c", 0, 3)), None, frozen=False)
    arrivals = Arrivals([first, second])
    assert arrivals.of("a") == [(2, 4), (8, 10)]
    assert arrivals.of("b") == [(0, 2), (5, 9)]
    assert arrivals.of("c") is arrivals.of("unknown") is None
    assert arrivals.freeze
    assert arrivals.unfrozen("b") == [(0, 2), (5, 9)]


def test_of_what_nobody_freezes_an_optimiser_may_change_all() -> None:
    arrivals = Arrivals([Arrival(bucket(("a", 0, 10)), [(0, 1)], frozen=False)])
    assert not arrivals.freeze and arrivals.unfrozen("a") is None and arrivals.of("a") == [(0, 1)]
    arrivals = Arrivals(
        [
            Arrival(bucket(("a", 0, 10)), [(0, 1)], frozen=False),
            Arrival(bucket(("a", 10, 20)), [(3, 4)], frozen=True),
        ]
    )
    assert arrivals.unfrozen("a") == [(0, 10), (13, 14)]


def test_what_brought_nothing_of_a_parameter_says_so() -> None:
    arrivals = Arrivals([Arrival(bucket(("a", 0, 10), ("b", 0, 5)), [(0, 4)], frozen=True)])
    assert arrivals.of("b") == []
    assert Arrivals().of("b") is None and not Arrivals().freeze
