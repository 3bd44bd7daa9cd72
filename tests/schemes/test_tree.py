"""The decision tree: as many leaves as published, each named by its words; users' constraints; more of it by data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from gradsync.schemes.tree import (
    BYTECOMP,
    COMPUTE,
    DEVICES,
    WITH_SUMS,
    Kind,
    LeafConstraints,
    Scope,
    compressions,
    is_flat,
    words_of,
)

ONE = (COMPUTE,)
COUNTS = {  # leaves of ByteComp's decision tree, worked out by other code
    1: {"T1": 2, "T2": 3, "T5": 5, "T3": 12, "T4": 19, "flat": 12, "hier": 162, "tree": 174},
    2: {"T1": 5, "T2": 12, "T5": 29, "T3": 63, "T4": 152, "flat": 63, "hier": 4278, "tree": 4341},
}
BY_COMPRESSIONS = {1: [9, 59, 72, 30, 4], 2: [9, 236, 1152, 1920, 1024]}


@pytest.mark.parametrize("devices", [1, 2])
def test_there_are_as_many_leaves_as_published(devices: int) -> None:
    leaves = BYTECOMP.leaves(DEVICES[:devices])
    assert len(set(leaves)) == len(leaves) == COUNTS[devices]["tree"]
    assert {symbol: BYTECOMP.count(symbol, devices) for symbol in COUNTS[devices]} == COUNTS[devices]
    assert sum(map(is_flat, leaves)) == COUNTS[devices]["flat"]
    counted = Counter(map(compressions, leaves))
    assert [counted[number] for number in range(5)] == BY_COMPRESSIONS[devices]


def test_words_tell_leaves_apart_and_are_read_back() -> None:
    leaves = WITH_SUMS.leaves()
    assert len({words_of(leaf) for leaf in leaves}) == len(leaves) == WITH_SUMS.count()
    for leaf in leaves[::37]:
        assert WITH_SUMS.parse(words_of(leaf)) == leaf


def test_steps_of_a_collective_belong_together_and_scopes_nest() -> None:
    for leaf in BYTECOMP.leaves(ONE):
        moves = [task for task in leaf if not task.kind.is_local]
        opened = []
        for task in moves:
            if task.kind.is_first:
                opened.append(task)
            elif task.kind.is_second:
                first = opened.pop()
                assert (task.first, task.scope) == (first.choice, first.scope)
                assert task.choice == ("broadcast" if first.choice in ("reduce", "gather") else "all_gather")
        assert not opened
        scopes = [task.scope for task in moves]
        inside = len(moves) - 2
        assert scopes == [Scope.ALL] * len(moves) or scopes == [Scope.NODE, *[Scope.ACROSS] * inside, Scope.NODE]


def test_what_is_moved_compressed_was_compressed_and_is_decompressed() -> None:
    for leaf in WITH_SUMS.leaves(ONE):
        compressed = False
        for task in leaf:
            if task.kind.is_local:
                assert compressed is (task.kind is Kind.DECOMP)
                compressed = not compressed
            else:
                assert task.kind.of_payloads is compressed
        assert not compressed


def test_a_device_or_a_collective_more_is_data() -> None:
    devices = (*DEVICES, "host")
    flat = replace(BYTECOMP, start="flat")
    assert len(set(flat.leaves(devices))) == flat.count(devices=3) > flat.count(devices=2) == 63
    rings = replace(BYTECOMP, collectives={**BYTECOMP.collectives, Kind.COMM: ("all_reduce", "ring")})
    with_all_reduce = sum(any(task.kind is Kind.COMM for task in leaf) for leaf in BYTECOMP.leaves(ONE))
    assert len(rings.leaves(ONE)) == 174 + with_all_reduce
    assert rings.parse(["ring"])[0].kind is Kind.COMM


def test_all_reduces_of_payloads_are_leaves_more() -> None:
    more = [leaf for leaf in WITH_SUMS.leaves(ONE) if any(task.kind is Kind.COMM_L for task in leaf)]
    assert set(WITH_SUMS.leaves(ONE)) == {*BYTECOMP.leaves(ONE), *more}
    # T4 follows a Comm1 of two collectives, a Comp Comm1C with and without a Decomp Comp; T2 has 3 ways to go on
    assert len(more) == 1 + 3 * 2 * 3


def test_constraints_leave_what_they_allow_for() -> None:
    leaves = set(BYTECOMP.leaves())
    assert len(BYTECOMP.leaves(constraints=LeafConstraints(most_compressions=1))) == 9 + 236
    assert len(BYTECOMP.leaves(constraints=LeafConstraints(flat_only=True))) == 63
    without = set(BYTECOMP.leaves(constraints=LeafConstraints(without=("reduce", "gather", "offload"))))
    assert without == {leaf for leaf in leaves if not {"reduce", "gather", "offload"} & {t.choice for t in leaf}}
    assert set(BYTECOMP.leaves(constraints=LeafConstraints())) == leaves


def test_constraints_that_leave_nothing_are_named_and_no_others() -> None:
    impossible = LeafConstraints(most_compressions=0, without=("gather", "all_reduce", "reduce", "reduce_scatter"))
    with pytest.raises(ValueError, match="no leaf of 4341 is left under") as caught:
        BYTECOMP.leaves(constraints=impossible)
    named = str(caught.value)
    assert "most_compressions=0 and without all_reduce and without reduce and without reduce_scatter" in named
    assert "gather:" not in named and "without gather" not in named


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LeafConstraints(most_compressions=-1), "most_compressions must be at least 0 or None, got -1"),
        (lambda: LeafConstraints(most_compressions=True), "most_compressions must be a whole number or None, got True"),
        (lambda: LeafConstraints(without="reduce"), "without must be a list, got 'reduce'"),
        (
            lambda: BYTECOMP.leaves(constraints=LeafConstraints(without=("ring",))),
            "names 'ring'; expected some of compute, off",
        ),
    ],
)
def test_constraints_that_are_none_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "end too early: expected all_reduce, compress@compute"),
        (("all_to_all",), "'all_to_all' may not come at the beginning; expected all_reduce, compress@"),
        (("reduce_scatter", "broadcast"), "'broadcast' may not come after reduce_scatter; expected all_gather"),
        (("compress@gpu", "all_gather"), "'compress@gpu' may not come at the beginning"),
        (("compress@compute", "all_gather"), "end too early: expected decompress@compute, decompress@offload"),
        (("all_reduce", "all_reduce"), "'all_reduce' may not come after all_reduce; expected the end"),
    ],
)
def test_words_that_are_no_leaf_are_refused_with_what_there_may_be(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BYTECOMP.parse(words)
