"""ByteComp's algorithms follow the publication and find the figures of our reference table."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from gradsync.costs.timeline import Activity, schedule
from gradsync.planner.solver.machine import Level, play, recurrence_s, step_s
from gradsync.planner.solver.problem import Curve, Demand, Option, Part, Problem, Resource, layerwise
from gradsync_lab.papers.reference import DENSE, DEVICE, HOST, OFFLOADED, bytecomp_problem
from gradsync_lab.rivals.greedy import bytecomp, bytecomp_device, bytecomp_offload
from tests.planner.solver.random_problems import any_chains, one_channel

TABLE = [  # worked out by other code, ms: none, all on device, algorithm 1, algorithms 1 and 2
    ("vgg16", "A", 397.00, 97.56, 89.46, 89.46),
    ("vgg16", "B", 164.56, 113.05, 93.21, 93.21),
    ("vgg16", "C", 85.61, 97.56, 85.61, 85.61),
    ("lstm", "A", 278.56, 84.60, 82.96, 82.67),
    ("bert-base", "A", 364.61, 124.51, 89.41, 87.87),
    ("bert-base", "B", 181.67, 192.33, 92.16, 92.16),
    ("bert-base", "C", 90.46, 120.82, 72.81, 72.81),
    ("gpt2", "A", 395.21, 258.63, 222.18, 221.12),
    ("gpt2", "B", 255.72, 307.63, 216.49, 216.49),
    ("gpt2", "C", 221.75, 252.55, 212.86, 212.86),
]


@pytest.mark.parametrize(("model", "case", "none", "all_on_device", "first", "both"), TABLE)
def test_our_reference_table_is_reached(
    model: str, case: str, none: float, all_on_device: float, first: float, both: float
) -> None:
    problem = bytecomp_problem(model, case)
    on_device = bytecomp_device(problem)
    offloaded = bytecomp_offload(problem, on_device.parts, OFFLOADED)
    found = [
        step_s(problem, layerwise(problem, DENSE)),
        step_s(problem, layerwise(problem, DEVICE)),
        on_device.seconds,
        offloaded.seconds,
    ]
    assert [1e3 * seconds for seconds in found] == pytest.approx([none, all_on_device, first, both], abs=0.0051)


@pytest.mark.parametrize(("case", "ms"), [("B", 80.26), ("C", 74.52)])
def test_lstm_gains_nothing_from_offloading_on_faster_links(case: str, ms: float) -> None:
    problem = bytecomp_problem("lstm", case)
    assert 1e3 * bytecomp(problem, OFFLOADED).seconds == pytest.approx(ms, abs=0.0051)
    assert 1e3 * bytecomp_device(problem).seconds == pytest.approx(ms, abs=0.0051)


def spelled_out(problem: Problem) -> tuple[Part, ...]:
    """Returns Algorithm 1's parts for one channel, with every F evaluated in full."""
    chosen = [DENSE] * problem.size

    def parts() -> tuple[Part, ...]:
        return tuple(Part(item, item + 1, option) for item, option in enumerate(chosen))

    def before_bubbles() -> int:
        ready = channel = last = 0.0
        for item, part in enumerate(parts()):
            *encode_s, transfer_s = problem.seconds(part.option, item, item + 1)
            ready += problem.gaps_s[item] + sum(encode_s)
            last = item if ready > channel else last
            channel = max(channel, ready) + transfer_s
        return int(last)

    queue = sorted(range(problem.size), key=lambda item: (-problem.nbytes[item], -item))
    queue = [item for item in queue if item >= before_bubbles()]
    while queue:
        item = queue.pop(0)
        tried = {}
        for option in (DENSE, DEVICE):
            chosen[item] = option
            tried[option] = recurrence_s(problem, parts(), Level.CHARGED)
        chosen[item] = DENSE if tried[DENSE] <= tried[DEVICE] else DEVICE
        queue = [other for other in queue if other >= before_bubbles()]
    return parts()


def test_algorithm_1_is_as_published() -> None:
    for seed in range(150):
        problem = one_channel(random.Random(seed), decode=False, most_items=9)
        assert bytecomp_device(problem).parts == spelled_out(problem), seed


def test_algorithm_2_takes_the_best_of_all_numbers_of_each_group() -> None:
    for seed in range(60):
        problem = one_channel(random.Random(seed), decode=False, most_items=6)
        groups = [[i for i, size in enumerate(problem.nbytes) if size == known] for known in set(problem.nbytes)]
        plans = []
        for counts in itertools.product(*(range(len(group) + 1) for group in groups)):
            moved = {item for group, count in zip(groups, counts, strict=True) for item in group[:count]}
            plans.append([Part(i, i + 1, HOST if i in moved else DEVICE) for i in range(problem.size)])
        found = bytecomp_offload(problem, layerwise(problem, DEVICE), OFFLOADED)
        assert found.seconds == min(step_s(problem, plan) for plan in plans), seed
        assert found.seconds == step_s(problem, found.parts)


def test_each_algorithm_only_improves_on_what_it_begins_with() -> None:
    for seed in range(60):
        problem = one_channel(random.Random(seed), decode=True)
        none, first = layerwise(problem, DENSE), bytecomp_device(problem)
        both = bytecomp(problem, OFFLOADED)
        both_s, first_s, none_s = (
            recurrence_s(problem, parts, Level.CHARGED) for parts in (both.parts, first.parts, none)
        )
        assert both_s <= first_s <= none_s, seed


def test_compressing_what_is_sent_before_a_bubble_gains_nothing() -> None:
    """Checks the paper's property 1: one channel, parts in order, no decoding."""
    moves = 0
    for seed in range(400):
        random_ = random.Random(seed)
        problem = one_channel(random_, decode=False)
        chosen = [random_.randrange(3) for _ in range(problem.size)]
        parts = [Part(item, item + 1, option) for item, option in enumerate(chosen)]
        sent = [task for task in play(problem, parts) if task.stream == "inter"]
        bubbles = [item for item in range(1, problem.size) if sent[item].start_s > sent[item - 1].end_s]
        for item in range(max(bubbles, default=0)):
            for option in (DEVICE, HOST) if chosen[item] == DENSE else ():
                changed = [*parts[:item], replace(parts[item], option=option), *parts[item + 1 :]]
                assert step_s(problem, changed) >= step_s(problem, parts), seed
                moves += 1
    assert moves > 200


def fixed(resource: Resource, *seconds: float) -> Demand:
    return Demand(resource, Curve.linear(0.0, 1.0), seconds)


def test_a_bubble_of_one_of_two_links_leaves_no_item_out() -> None:
    """Property 1 fails with two links: here the link between nodes is idle only because the link inside is not."""
    dense = Option("dense", (fixed(Resource.INTRA, 10, 10), fixed(Resource.INTER, 1, 1)))
    compressed = Option("compressed", (fixed(Resource.INTRA, 1, 1), fixed(Resource.INTER, 1, 1)))
    problem = Problem((0.0, 1.0), (2.0, 1.0), (dense, compressed), allowed=(frozenset({0, 1}), frozenset({0})))
    before = play(problem, layerwise(problem, 0))
    assert [(task.start_s, task.end_s) for task in before if task.stream == "inter"] == [(10, 11), (20, 21)]
    found = bytecomp_device(problem)
    assert found.parts == (Part(0, 1, 1), Part(1, 2, 0))
    assert found.seconds == 12.0


@pytest.mark.parametrize(("queue", "first_offloaded"), [("first", 22.0), ("", 21.5)])
def test_lemma_1_does_not_hold(queue: str, first_offloaded: float) -> None:
    """Offloading the *nearer* to the output layer is better, of two equal items, in order or served by readiness."""

    def seconds(offloaded: int) -> float:
        activities: list[Activity] = []
        before: tuple[int, ...] = ()
        for item, gap_s in enumerate((0.0, 1.0)):
            activities.append(Activity("backward", "compute", gap_s, before))
            before = (len(activities) - 1,)
            host = item == offloaded
            activities.append(Activity("encode", "core" if host else "compute", 2.0 if host else 0.5, before, not host))
            activities.append(Activity("transfer", "link", 10.0, (len(activities) - 1,), queue=queue))
        return max(task.end_s for task in schedule(activities))

    assert seconds(0) == first_offloaded
    assert seconds(1) == 20.5


def test_lemma_1_costs_algorithm_2_what_its_groups_do_not_offer() -> None:
    """Algorithm 2 does not try to offload the second of two equal items without the first."""
    device = Option("device", (fixed(Resource.COMPUTE, 2, 2), fixed(Resource.INTER, 10, 10)))
    host = Option("host", (fixed(Resource.OFFLOAD, 4, 4), fixed(Resource.INTER, 10, 10)))
    problem = Problem((0.0, 1.0), (1.0, 1.0), (device, host), rest_s=20.0)
    found = bytecomp_offload(problem, layerwise(problem, 0), {0: 1}, dense=-1)
    assert found.parts == (Part(0, 1, 1), Part(1, 2, 0))
    assert found.seconds == 24.0
    assert step_s(problem, (Part(0, 1, 0), Part(1, 2, 1))) == 23.0


def test_items_take_only_options_that_they_may() -> None:
    for seed in range(60):
        random_ = random.Random(seed)
        problem = any_chains(random_)
        allowed = tuple(frozenset(random_.sample(range(3), random_.randrange(1, 4))) for _ in range(problem.size))
        problem = replace(problem, allowed=allowed)
        found = bytecomp(problem, {1: 2})  # plays its plan, which checks it
        assert found.seconds == step_s(problem, found.parts)


def test_too_many_combinations_are_refused() -> None:
    problem = bytecomp_problem("bert-base", "A")
    with pytest.raises(ValueError, match=r"would try \d+ combinations of 8 groups, at most 1000 are allowed"):
        bytecomp_offload(problem, layerwise(problem, DEVICE), OFFLOADED, most_combinations=1000)


def test_a_plan_of_merged_items_is_refused() -> None:
    problem = bytecomp_problem("lstm", "A")
    with pytest.raises(ValueError, match="a part for each of the 10 items, got 1"):
        bytecomp_offload(problem, (Part(0, 10, DEVICE),), OFFLOADED)


def test_no_items_need_no_plan() -> None:
    assert bytecomp(Problem((), (), (Option("dense", ()),), rest_s=1.0), {}).seconds == 1.0
