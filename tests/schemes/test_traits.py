"""Traits: stated once by each scheme and compressor, derived by those that are made of others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.comm import LocalGroup, drive, run_local
from gradsync.compressors import (
    CountSketch,
    ErrorFeedback,
    MomentumCorrection,
    SharedBlockInt,
    Signum,
    Threshold,
    TopK,
    Warmup,
    dgc,
)
from gradsync.schemes import (
    AllReduce,
    BalancedElements,
    CoarseGrained,
    CompressedAllGather,
    CompressedTwoWay,
    HalfPrecision,
    Hierarchical,
    MajorityVote,
    PowerSGD,
    ReduceScatter,
    Route,
    Scheme,
    Shuffled,
    Sparsified,
    Traits,
    ways,
)
from gradsync.tensors.bucket import Layout

PAIR = (((0, 1),),)
FLAT = Traits(Layout.FLAT)


@dataclass(frozen=True)
class Smallest(Scheme[Tensor]):
    """A scheme with what every scheme must have, and no more."""

    traits = FLAT

    def stages(self, size: int) -> tuple[str, ...]:
        return ("sum",)

    async def synchronize(self, x: Tensor, state: Any, group: Any, scale: float) -> Any:
        return await group.all_reduce(x.mul_(scale)), state

    def steps(self, *known: Any, **more: Any) -> Any:
        return ()


def test_stages_synchronize_steps_and_traits_make_a_scheme() -> None:
    def rank_main(group: LocalGroup) -> Tensor:
        result, _ = drive(Smallest().synchronize(torch.ones(3), {}, group, 0.5), timeout_s=20)
        return result

    assert [result.tolist() for result in run_local(2, rank_main)] == [[1.0] * 3] * 2


@pytest.mark.parametrize("missing", ["stages", "steps", "traits"])
def test_a_scheme_that_lacks_one_of_them_cannot_be_made(missing: str) -> None:
    known = {name: vars(Smallest)[name] for name in ("stages", "synchronize", "steps", "traits") if name != missing}
    unfinished: Any = type("Unfinished", (Scheme,), known)
    with pytest.raises(TypeError, match=missing):
        unfinished()


@pytest.mark.parametrize(
    ("traits", "exact", "carries_flags"),
    [
        (FLAT, True, True),
        (Traits(Layout.FLAT, lossy=True), False, False),
        (Traits(Layout.FLAT, mixes=True), False, False),
        (Traits(Layout.FLAT, lossy=True, carries_flags=True), False, True),
        (replace(FLAT, lossy=True), False, True),
    ],
)
def test_who_loses_or_mixes_is_not_exact_and_must_say_that_it_carries_flags(
    traits: Traits, exact: bool, carries_flags: bool
) -> None:
    assert (traits.exact, traits.carries_flags) == (exact, carries_flags)


@pytest.mark.parametrize(
    "scheme",
    [
        HalfPrecision(),
        Hierarchical(),
        CoarseGrained(),
        Shuffled(PAIR),
        Route(("compress@compute", "all_gather", "decompress@compute"), TopK(0.1)),
    ],
    ids=lambda scheme: scheme.name,
)
def test_traits_that_follow_from_settings_are_worked_out_once(scheme: Scheme[Any]) -> None:
    assert scheme.traits is scheme.traits
    assert scheme == replace(scheme) and hash(scheme) == hash(replace(scheme))


def test_half_precision_is_what_its_inner_scheme_is_but_loses() -> None:
    for inner in (AllReduce(), BalancedElements(), PowerSGD(), CoarseGrained(freeze=True), Shuffled(PAIR)):
        assert HalfPrecision(inner).traits == replace(inner.traits, lossy=True)


def test_a_hierarchy_is_what_its_parts_are() -> None:
    assert Hierarchical(ReduceScatter(), AllReduce(), 2).traits == FLAT
    lossy = Hierarchical(ReduceScatter(), PowerSGD(), 2).traits
    assert lossy == Traits(Layout.FLAT, lossy=True, carries_flags=False, depends_on_shapes=True)
    assert Hierarchical(ReduceScatter(), CoarseGrained(freeze=True)).traits.freezes


def test_averages_of_groups_lose_what_their_scheme_loses() -> None:
    assert [Shuffled(PAIR, scheme=s).traits.lossy for s in (AllReduce(), HalfPrecision())] == [False, True]
    assert not Shuffled(PAIR).traits.exact


def test_a_route_prepares_where_a_compression_that_asks_nobody_comes_first() -> None:
    first = Route(("compress@offload", "all_gather", "decompress@offload"), TopK(0.1)).traits
    assert (first.prepares, first.offloads, first.exact) == (True, True, False)
    agreeing = Route(("compress@compute", "all_reduce", "decompress@compute"), SharedBlockInt(8)).traits
    assert (agreeing.prepares, agreeing.offloads) == (False, False)
    assert Route(("all_reduce",)).traits == FLAT


def test_feedback_has_the_traits_of_its_compressor_and_a_warm_up_the_narrowest_of_its_stages() -> None:
    assert ErrorFeedback(SharedBlockInt(8)).traits == SharedBlockInt(8).traits
    assert Warmup((SharedBlockInt(8), SharedBlockInt(16)), (0, 5)).traits.most_summands == 8


def test_error_feedback_of_a_warm_up_with_sketches_is_refused() -> None:
    sketches = CountSketch(0.5, 0.1)
    with pytest.raises(ValueError, match="does not decode to the sum of its decoded payloads"):
        ErrorFeedback(Warmup((sketches, sketches), (0, 5)))


ABSOLUTE = ErrorFeedback(Warmup((TopK(0.1), Threshold(0.5)), (0, 5)))


@pytest.mark.parametrize(
    ("scheme", "follows"),
    [
        (MajorityVote(), False),
        (MajorityVote(Signum(), "two_way"), False),
        *((way, False) for way in ways(ABSOLUTE)),
        *((way, False) for way in ways(dgc(0.1, clip=1.0, ranks=2))),
        (CompressedTwoWay(ErrorFeedback(TopK(0.1)), sums=ABSOLUTE), False),
        (Hierarchical(ReduceScatter(), CompressedAllGather(ABSOLUTE), 2), False),
        (HalfPrecision(CompressedAllGather(ABSOLUTE)), False),
        (Route(("compress@compute", "all_gather", "decompress@compute"), ABSOLUTE), False),
        *((way, True) for way in ways(MomentumCorrection(TopK(0.1)))),
        (Sparsified(ErrorFeedback(Threshold(0.0))), True),
        (Hierarchical(ReduceScatter(), PowerSGD(), 2), True),
        (Route(("all_reduce",)), True),
    ],
    ids=str,
)
def test_a_scheme_follows_a_loss_scale_if_all_its_parts_do(scheme: Scheme[Any], follows: bool) -> None:
    assert scheme.traits.follows_scale is follows


def test_all_ways_of_a_compressor_lose_and_carry_flags() -> None:
    found = [way.traits for way in ways(TopK(0.1))]
    assert CompressedAllGather(TopK(0.1)).traits in found
    assert {(each.lossy, each.carries_flags, each.layout) for each in found} == {(True, True, Layout.FLAT)}
