"""A scheme in which each rank is the owner of one region of a flat bucket, that is, sums its elements.

The data decide where regions end, so that owners get equally many non-zeros. Zen (OSDI 2025) rejects such regions as
too costly where the bounds are found by sorting; Ok-Topk renews the bounds every so many steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync import kernels
from gradsync.comm import Group
from gradsync.compressors.expressions import register
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import Compute, Pattern, Step, Transfer
from gradsync.inputs.settings import PositiveInt
from gradsync.schemes.base import Scheme, State, Traits
from gradsync.schemes.elements import Sums, counts_in, elements_of, nonzeros
from gradsync.schemes.formats import PartFormat, PartMessage
from gradsync.tensors.bucket import Layout, TensorSpec
from gradsync.tensors.density import DensityProfile
from gradsync.tensors.sparse import index_dtype


@register
@dataclass(frozen=True)
class OkTopkLike(Scheme[Tensor]):
    """Ok-Topk's sparse all-reduce (Li and Hoefler, PPoPP 2022) without its second selection. Exact.

    Each rank is the owner of a region of consecutive elements, and sums it. The bounds are set so that each owner
    receives equally many non-zeros of all ranks together, however skewed the non-zeros lie. Ok-Topk keeps the bounds
    for some steps; here all ranks count their non-zeros in even bins and exchange the counts in every step. So the
    bounds always fit the data, and the counts give the sizes of the messages to owners (push).

    Ok-Topk then drops all but the k largest sums, which bounds its volume by 6k(n-1)/n values, and evens out the
    owners' results before they travel. Here all sums travel, straight from their owners (pull): nothing that a rank had
    selected is lost, and pull costs the size of the union. NaN and infinity count as non-zeros; -0.0 is zero and comes
    out as 0.0.

    Wire per rank: 4(n-1) bytes a bin; push and pull (n-1)/n * (positions + values), of the rank's own non-zeros and of
    the union.
    """

    bins: PositiveInt = 64  # per owner: a region is within about a 64th of its share where bins are alike

    traits = Traits(Layout.FLAT)

    def stages(self, size: int) -> tuple[str, ...]:
        return ("histogram", "push", "pull")

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        indices, values = nonzeros(x)
        # Histogram: count where the non-zeros of all ranks lie.
        edges = _edges(x.numel(), self.bins * group.size, x.device)
        below = torch.searchsorted(indices, (edges[1:] - 1).to(indices.dtype), right=True).to(indices.dtype)
        all_below = torch.stack(await group.all_gather(below)).cpu().double()
        regions = Regions.of(all_below, edges.cpu(), TensorSpec.of(x), group.size)
        # Push: send each owner its region.
        parts = await _push(indices, values, regions, group)
        # Pull: receive each owner's sums.
        sums = Sums.of(parts, regions.forms[group.rank], scale)
        return _join(await _pull(sums, regions, group), regions, x), state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        """Returns the computations and transfers of one `synchronize`, in order, for cost models to predict its time.

        The profile counts a rank's non-zero elements as rows; without one, all are non-zero. `step` is not used.
        """
        (flat,) = specs
        n, index_nbytes = placement.size, index_dtype(flat.numel).itemsize
        profile = elements_of(flat, profiles)
        found = profile.rows * (index_nbytes + flat.itemsize)
        edges = _edges(flat.numel, self.bins * n, torch.device("cpu"))
        regions = Regions.of(_expected_below(profile, edges), edges, flat, n)
        push = tuple(float(form.nbytes(count)) for form, count in zip(regions.forms, regions.counts[0], strict=True))
        unions = [profile.share(low, high, n) * profile.union_rows(n) for low, high in regions.bounds]
        fits = [min(union, float(form.length)) for union, form in zip(unions, regions.forms, strict=True)]
        pull = [Sums.head + float(form.nbytes(union)) for form, union in zip(regions.forms, fits, strict=True)]
        messages = [(owner, other, pull[owner]) for owner in range(n) for other in range(n) if other != owner]
        return (
            Compute("find_elements", flat.nbytes + 3 * found),
            Transfer("histogram", Pattern.ALL_GATHER, (float(index_nbytes * self.bins * n),) * n),
            Compute("pack_regions", found + sum(push), calls=n),
            Transfer("push", Pattern.ALL_TO_ALL, push),
            Compute("sum_elements", n * max(push) + max(pull)),
            Transfer.of_messages("pull", n, messages),
            Compute("join_regions", sum(pull) + flat.nbytes, calls=n),
        )


@dataclass(frozen=True)
class Regions:
    """Each owner's region of the flat bucket (which that rank sums), and how many non-zeros each rank has in each."""

    bounds: tuple[tuple[int, int], ...]  # [start, stop) of each owner's region
    forms: tuple[PartFormat, ...]  # message format of each owner's region
    counts: tuple[tuple[float, ...], ...]  # [rank][owner] non-zeros; whole numbers, or expected ones

    @classmethod
    def of(cls, below: Tensor, edges: Tensor, flat: TensorSpec, size: int) -> Regions:
        """Returns the regions that give all owners equally many non-zeros, as nearly as the bins allow.

        A region may be empty.

        Args:
            below: (ranks, bins) float64, each rank's number of non-zeros below the end of each bin.
            edges: (bins + 1,) int64, where bins begin and end.
            flat: shape and dtype of the bucket.
            size: number of owners.
        """
        behind = torch.cat([below.new_zeros(len(below), 1), below], dim=1)
        total = behind.sum(dim=0)
        wanted = total[-1] * torch.arange(size + 1, dtype=torch.float64) / size
        after = torch.searchsorted(total, wanted).clamp(max=len(edges) - 1)
        before = (after - 1).clamp(min=0)
        cuts = torch.where(wanted - total[before] < total[after] - wanted, before, after)
        cuts[0], cuts[-1] = 0, len(edges) - 1
        starts = edges[cuts].tolist()
        counts = (behind[:, cuts[1:]] - behind[:, cuts[:-1]]).tolist()
        bounds = tuple(zip(starts, starts[1:], strict=False))
        forms = tuple(PartFormat(stop - start, 1, flat.dtype) for start, stop in bounds)
        return cls(bounds, forms, tuple(map(tuple, counts)))


def _edges(numel: int, bins: int, device: torch.device) -> Tensor:
    """Returns where bins of equally many elements begin and end, (bins + 1,) int64.

    With fewer elements than bins, the last ones are empty.
    """
    width = -(-numel // bins)
    return (torch.arange(bins + 1, device=device) * width).clamp(max=numel)


def _expected_below(profile: DensityProfile, edges: Tensor) -> Tensor:
    """Returns a rank's expected non-zeros below the end of each bin, (1, bins) float64.

    Non-zeros are assumed to lie evenly inside each of the equal parts whose shares the profile has.
    """
    shares = torch.tensor([0.0, *(profile.shares or (1.0,))], dtype=torch.float64)
    below, places = shares.cumsum(0), edges[1:] / max(profile.num_rows, 1) * (len(shares) - 1)
    lower = places.floor().long().clamp(max=len(shares) - 2)
    return profile.rows * (below[lower] + (places - lower) * shares[lower + 1])[None]


async def _push(indices: Tensor, values: Tensor, regions: Regions, group: Group) -> list[PartMessage]:
    """Sends each owner its region's non-zeros, and returns all ranks' parts of this rank's region."""
    counts = [[int(count) for count in row] for row in regions.counts]
    mine, size = counts[group.rank], group.size
    sent = [int(form.nbytes(count)) for form, count in zip(regions.forms, mine, strict=True)]
    message = values.new_empty(sum(sent), dtype=torch.uint8)
    parts = list(torch.split(message, sent))
    pieces = zip(torch.split(indices, mine), torch.split(values, mine), strict=True)
    for owner, (of_owner, brought) in enumerate(pieces):
        part = regions.forms[owner].part(parts[owner], mine[owner])
        part.put(of_owner - regions.bounds[owner][0], brought[:, None])
    form, received = regions.forms[group.rank], [row[group.rank] for row in counts]
    nbytes = [int(form.nbytes(count)) for count in received]
    largest = max(int(regions.forms[owner].nbytes(row[owner])) for row in counts for owner in range(size))
    arrived = await group.all_to_all(message, sent, nbytes, largest=largest)
    return [form.part(part, count) for part, count in zip(arrived, received, strict=True)]


async def _pull(sums: Sums, regions: Regions, group: Group) -> list[PartMessage]:
    """Sends this rank's sums to all ranks and returns all owners' sums; every rank knows bounds on their sizes."""
    sums.write_count()
    summed = [math.ceil(sum(column)) for column in zip(*regions.counts, strict=True)]
    most = [int(f.nbytes(min(count, f.length))) for f, count in zip(regions.forms, summed, strict=True)]
    others = [rank for rank in range(group.size) if rank != group.rank]
    outgoing = dict.fromkeys(others, sums.message)
    arrived = await group.swap(outgoing, others, Sums.head + max(most), sums.message.device)
    messages = [sums.message if rank == group.rank else arrived[rank] for rank in range(group.size)]
    unions = [union for (union,) in counts_in(messages, Sums.head)]
    return [
        form.part(message[Sums.head :], union)
        for form, message, union in zip(regions.forms, messages, unions, strict=True)
    ]


def _join(totals: Sequence[PartMessage], regions: Regions, x: Tensor) -> Tensor:
    """Overwrites the flat bucket `x` with the owners' sums, and with zero where there are none, and returns `x`."""
    x.zero_()
    for total, (start, stop) in zip(totals, regions.bounds, strict=True):
        indices, values = total.get()
        kernels.scatter_rows(indices, values, x[start:stop].view(-1, 1), accumulate=False)
    return x
