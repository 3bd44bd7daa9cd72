"""Data-dependent regions give equal loads of skewed data, bounds that all ranks agree on, and drop nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsync.costs.cluster import Placement
from gradsync.costs.steps import Pattern, transfers
from gradsync.schemes import PARAMETER_SERVER_OF_ELEMENTS, BalancedElements, Scheme
from gradsync.schemes.formats import PartFormat
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.density import profile_rows
from gradsync_lab.rivals.regions import OkTopkLike, Regions
from tests.schemes.family import bits, run_scheme

NUMEL, RANKS, KEPT = 60_013, 4, 1200
HEAD_BYTES = 16


def top_of_skewed(rank: int, power: float = 5.0, kept: int = KEPT) -> Tensor:
    """Returns a rank's top-k of a tensor whose large values lie at its beginning, as a dense tensor."""
    generator = torch.Generator().manual_seed(rank)
    places = (NUMEL * torch.rand(4 * kept, generator=generator) ** power).long().unique()
    chosen = places[torch.randperm(len(places), generator=generator)[:kept]]
    x = torch.zeros(NUMEL)
    x[chosen] = torch.randn(len(chosen), generator=generator)
    return x


def regions_of(inputs: list[Tensor], bins: int) -> Regions:
    """Returns the regions computed independently from the inputs."""
    width = -(-NUMEL // (bins * RANKS))
    edges = [min(i * width, NUMEL) for i in range(bins * RANKS + 1)]
    below = [[int(x[:edge].count_nonzero()) for edge in edges[1:]] for x in inputs]
    flat = TensorSpec((NUMEL,), torch.float32)
    return Regions.of(torch.tensor(below, dtype=torch.float64), torch.tensor(edges), flat, RANKS)


def test_owners_of_skewed_data_receive_equally_much() -> None:
    inputs = [top_of_skewed(rank) for rank in range(RANKS)]
    regions = regions_of(inputs, OkTopkLike().bins)
    loads = [sum(column) for column in zip(*regions.counts, strict=True)]
    even = [sum(int(x[owner * 15_004 : (owner + 1) * 15_004].count_nonzero()) for x in inputs) for owner in range(4)]
    assert max(even) > 2 * sum(even) / RANKS, "the case must be skewed"
    assert max(loads) < 1.25 * sum(loads) / RANKS
    assert sum(loads) == sum(int(x.count_nonzero()) for x in inputs)


def test_bytes_are_those_of_the_regions_that_the_counts_give() -> None:
    """Bytes are exact: a histogram, each rank's part of every region, and each region's union to all other ranks."""
    inputs = [top_of_skewed(rank) for rank in range(RANKS)]
    regions = regions_of(inputs, 32)
    ledgers = run_scheme(OkTopkLike(bins=32), inputs, 1.0).ledgers
    for rank, x in enumerate(inputs):
        pushed = 0
        for owner, (start, stop) in enumerate(regions.bounds):
            form = PartFormat(stop - start, 1, torch.float32)
            pushed += int(form.nbytes(int(x[start:stop].count_nonzero()))) if owner != rank else 0
        start, stop = regions.bounds[rank]
        union = int(sum((y[start:stop] != 0).int() for y in inputs).count_nonzero())
        pulled = (RANKS - 1) * (HEAD_BYTES + int(PartFormat(stop - start, 1, torch.float32).nbytes(union)))
        histogram = (RANKS - 1) * 4 * 32 * RANKS
        assert [entry.sent_bytes for entry in ledgers[rank].entries] == [histogram, pushed, pulled]
        patterns = [Pattern.ALL_GATHER, Pattern.ALL_TO_ALL, Pattern.MESSAGES]
        assert [entry.pattern for entry in ledgers[rank].entries] == patterns


def test_the_busiest_rank_receives_less_than_with_an_even_split() -> None:
    inputs = [top_of_skewed(rank) for rank in range(RANKS)]
    profile = profile_rows([x.nonzero().flatten() for x in inputs], NUMEL)

    def busiest(scheme: Scheme[Tensor]) -> float:
        steps = scheme.steps((TensorSpec.of(inputs[0]),), (profile,), Placement.one_per_node(RANKS))
        return sum(transfer.busiest_bytes for transfer in transfers(steps))

    assert busiest(OkTopkLike()) < 0.8 * busiest(PARAMETER_SERVER_OF_ELEMENTS)


def test_steps_know_the_skew() -> None:
    inputs = [top_of_skewed(rank) for rank in range(RANKS)]
    profile = profile_rows([x.nonzero().flatten() for x in inputs], NUMEL)
    steps = OkTopkLike().steps((TensorSpec.of(inputs[0]),), (profile,), Placement.one_per_node(RANKS))
    ledgers = run_scheme(OkTopkLike(), inputs, 1.0).ledgers
    for number, transfer in enumerate(transfers(steps)):
        for rank, ledger in enumerate(ledgers):
            assert ledger.entries[number].sent_bytes == pytest.approx(transfer.sent_bytes(rank), rel=0.1)


@pytest.mark.parametrize(
    "places", [torch.arange(50), torch.tensor([NUMEL - 1]), torch.tensor([0]), torch.arange(0, NUMEL, RANKS)], ids=len
)
def test_whatever_the_bins_cannot_tell_apart_is_summed_all_the_same(places: Tensor) -> None:
    """All non-zeros in one bin leave the other owners regions without any."""
    inputs = [torch.zeros(NUMEL) for _ in range(RANKS)]
    for rank, x in enumerate(inputs):
        x[places] = 1.0 + rank / 3
    ours, outcome = run_scheme(BalancedElements(), inputs, 0.5), run_scheme(OkTopkLike(bins=1), inputs, 0.5)
    assert [bits(x) for x in outcome.results] == [bits(x) for x in ours.results]


def test_bins_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="bins must be at least 1, got 0"):
        OkTopkLike(bins=0)
