"""The default plan: all-reduce for dense gradients, a sparse scheme for sparse ones.

Gradients count as sparse if they have the sparse layout, or if they are dense but were found to be mostly zero. The
cheapest scheme is chosen by the network's costs if these were measured, else by bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ...costs.cluster import Placement
from ...costs.steps import Step, transfers
from ...plans.plan import BucketPlan, Plan, default_order
from ...schemes import DOUBLING_OF_ROWS, AGSparse, BalancedParallelism, Scheme, select
from ...tensors.bucket import Layout, TensorSpec, cut_by_bytes
from ...tensors.density import DensityProfile, ParameterProfile
from .flat import dense_schemes, element_schemes, flat_scheme, flat_spec, two_level_schemes, with_early_middle_stages
from .network import Network

FIRST_BUCKET_BYTES = 1 << 20  # size of DDP's first bucket, for an early start of communication
BUCKET_BYTES = 25 << 20  # DDP's default, so that dense models run as with DDP
FEWEST_BUCKET_BYTES = 1 << 20  # smallest size worth a trial: a ring at 1 Gbit/s takes 13 ms, 5 of them latency
MOST_OF_DENSE = 0.5  # most of the dense cost that a sparse scheme may take, as the gradient may get less sparse
WORTH_A_TRIAL = 1.5  # other schemes are tried up to so many times the cheapest one's cost; estimates are rough
SCHEMES_TO_TRY = 3  # at most, for tables
BUCKETS_TO_OVERLAP = 4  # number of buckets for the medium size: a guess that a trial checks

SPARSE_SCHEMES: tuple[Scheme[Any], ...] = (BalancedParallelism(), AGSparse())
"""The schemes that default plans choose from for tables with sparse gradients."""


def default_plans(profiles: Sequence[ParameterProfile], world_size: int, network: Network | None = None) -> list[Plan]:
    """Returns the plans that the engine should try on real training steps, the best guess first.

    Small dense buckets hide more of their exchange behind backward but cost more calls, and on a fast network take
    cores from backward. Tables (parameters with sparse gradients) that are ready early may be sent at once or with the
    others. The last dense bucket may go first, as it is ready first, or fill the link between the stages (collectives)
    of a table's scheme. Dense gradients that were found to be sparse cost a scan and save bytes. Also tried: the next
    two schemes for tables, if not far off, and all other buckets without a first stage inside nodes, as that takes
    cores from backward.

    Args:
        profiles: parameters in model order, with what was measured of each.
        world_size: the number of ranks.
        network: measured costs of links and kernels; None if they were not measured.
    """
    if world_size == 1:
        return [default_plan(profiles, world_size)]
    found = found_schemes(profiles, world_size, network)
    between = sum(p.tensor.nbytes for p in profiles if not p.sparse and p.name not in found) // BUCKETS_TO_OVERLAP
    sizes = [BUCKET_BYTES, FEWEST_BUCKET_BYTES]
    if between >= 2 * FEWEST_BUCKET_BYTES and not BUCKET_BYTES / 2 < between < 2 * BUCKET_BYTES:
        sizes.insert(1, between)
    ways: list[dict[str, Any]] = [{"bucket_bytes": size} for size in sizes]
    ways += [{"dense_between": True}, {"tables_at_the_end": True}, {"by_layout": True}]
    ways += [{"choice": choice} for choice in range(1, SCHEMES_TO_TRY)]
    ways += [{"bucket_bytes": size, "one_level": True} for size in (sizes[0], sizes[-1])]
    plans = [default_plan(profiles, world_size, network, **way) for way in ways]
    return list({plan.digest: plan for plan in plans}.values())


def default_plan(
    profiles: Sequence[ParameterProfile],
    world_size: int,
    network: Network | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    tables_at_the_end: bool = False,
    dense_between: bool = False,
    by_layout: bool = False,
    choice: int = 0,
    one_level: bool = False,
) -> Plan:
    """Returns a plan with DDP-sized buckets of dense parameters in ready order, and buckets of sparse tables.

    Tables (parameters with sparse gradients) of one dtype share a bucket if they are ready together, or if their
    gradients are known to have the same non-zero rows. A table that is ready earlier than some dense parameters is
    exchanged at once, with all its stages (collectives). Deterministic in its arguments, which are the same on every
    rank.

    Args:
        profiles: parameters in model order, with what was measured of each. Before readiness was measured (`position`
            all equal) the reverse of model order is taken, as backward runs.
        world_size: the number of ranks.
        network: measured costs of links and kernels; None if they were not measured.
        bucket_bytes: size of dense buckets, in bytes.
        tables_at_the_end: puts all tables of one dtype into one bucket behind the dense ones.
        dense_between: sends the last dense bucket just before the last stage of the tables behind it, not before all of
            their stages.
        by_layout: treats dense gradients that were found to be sparse as dense. Otherwise these go by rows together
            with the tables, or by elements in a bucket each.
        choice: which scheme tables have, of those worth a trial, from 0: the cheapest. The last where there are fewer.
        one_level: sums flat buckets (all but those of tables) among all ranks at once, not inside nodes first.
    """
    specs = {p.name: p.tensor for p in profiles}
    levels = Placement.one_per_node(world_size) if one_level else _placement(world_size, network)
    found = {} if by_layout else found_schemes(profiles, world_size, network, levels)
    profiles = [replace(p, sparse=p.sparse or _by_rows(found.get(p.name))) for p in profiles]
    ready = in_ready_order(profiles)
    by_element = [p for p in ready if p.name in found and not p.sparse]
    dense = dense_buckets([p for p in ready if not p.sparse and p.name not in found], bucket_bytes)
    buckets: list[PlannedBucket] = [
        (ps, flat_scheme(dense_schemes(levels), flat_spec(ps), (), network)) for ps in dense
    ]
    buckets += [([p], found[p.name]) for p in by_element]
    at_the_end = tables_at_the_end or len({p.position for p in profiles}) <= 1
    runs = [[p for p in ready if p.sparse]] if at_the_end else _table_runs(ready)
    for run in runs:
        for _, tables in _by_dtype(run):
            schemes = sparse_schemes(tables, world_size, network)
            buckets.append((tables, schemes[min(choice, len(schemes) - 1)]))
    if not at_the_end:
        buckets.sort(key=lambda bucket: max(p.position for p in bucket[0]))
    named = [([p.name for p in members], scheme) for members, scheme in buckets]
    plan = Plan.make(specs, world_size, named)
    turns = _order(plan, dense_between=dense_between)
    return plan.model_copy(update={"order": tuple(with_early_middle_stages(turns, plan))})


PlannedBucket = tuple[list[ParameterProfile], Scheme[Any]]


def _by_rows(scheme: Scheme[Any] | None) -> bool:
    return scheme is not None and scheme.traits.layout is Layout.ROWS


def _by_dtype(profiles: Sequence[ParameterProfile]) -> list[tuple[str, list[ParameterProfile]]]:
    ordered = sorted(profiles, key=lambda p: str(p.tensor.dtype))
    return [(dtype, list(same)) for dtype, same in groupby(ordered, key=lambda p: str(p.tensor.dtype))]


def in_ready_order(profiles: Sequence[ParameterProfile]) -> list[ParameterProfile]:
    """Sorts parameters, given in model order, by when they become ready; unmeasured ones in reverse model order."""
    return sorted(reversed(profiles), key=lambda p: p.position)


def dense_buckets(ready: Sequence[ParameterProfile], bucket_bytes: int) -> Iterator[list[ParameterProfile]]:
    """Yields each dense bucket's parameters: one dtype, in ready order, until there are `bucket_bytes`."""
    known, first_bytes = {p.name: p for p in ready}, min(FIRST_BUCKET_BYTES, bucket_bytes)
    for _, same in _by_dtype(ready):
        for names in cut_by_bytes([(p.name, p.tensor.nbytes) for p in same], first_bytes, bucket_bytes):
            yield [known[name] for name in names]


def _table_runs(ready: Sequence[ParameterProfile]) -> list[list[ParameterProfile]]:
    """Returns lists of tables that become ready one after another, without a dense parameter between them."""
    last = {_rows_of(p): p.position for p in ready if p.sparse}  # tables with the same rows go with the last of them
    placed = sorted(ready, key=lambda p: last[_rows_of(p)] if p.sparse else p.position)
    return [list(run) for sparse, run in groupby(placed, key=lambda p: p.sparse) if sparse]


def _rows_of(table: ParameterProfile) -> tuple[str, str]:
    """Returns a key that is equal for tables known to have the same non-zero rows."""
    pattern = table.density.pattern if table.density is not None else ""
    return str(table.tensor.dtype), pattern or table.name


def _order(plan: Plan, *, dense_between: bool) -> Iterator[tuple[str, str]]:
    """Yields (bucket, stage) turns, first stages first; a table before the last dense bucket has all turns at once.

    `dense_between` is explained at `default_plan`.
    """
    layouts = [bucket.scheme.traits.layout for bucket in plan.buckets]
    tail = max((i for i, layout in enumerate(layouts) if layout is Layout.FLAT), default=-1) + 1
    dense: list[BucketPlan] = []
    for bucket, layout in zip(plan.buckets[:tail], layouts, strict=False):
        dense.append(bucket)
        if layout is Layout.ROWS:
            yield from default_order(dense, plan.world)
            dense = []
    tables = default_order(plan.buckets[tail:], plan.world)
    if not (dense_between and tables and dense):
        yield from default_order([*dense, *plan.buckets[tail:]], plan.world)
        return
    last_turns = {(bucket.id, bucket.scheme.stages(plan.world)[-1]) for bucket in plan.buckets[tail:]}
    place = next(i for i, turn in enumerate(tables) if turn in last_turns)
    first, last = default_order(dense[:-1], plan.world), default_order(dense[-1:], plan.world)
    yield from [*first, *tables[:place], *last, *tables[place:]]


def found_schemes(
    profiles: Sequence[ParameterProfile],
    world_size: int,
    network: Network | None = None,
    levels: Placement | None = None,
) -> dict[str, Scheme[Any]]:
    """Returns sparse schemes, by parameter name, for dense gradients that are mostly zero, where they save enough.

    They must cost at most half of the dense scheme, in seconds or bytes.

    Args:
        profiles: parameters in model order, with what was measured of each.
        world_size: the number of ranks.
        network: measured costs of links and kernels; None: bytes are compared.
        levels: the node of each rank, for schemes that send elements inside nodes first; None: the network's nodes.
    """
    levels = levels or _placement(world_size, network)
    found = {p.name: _scheme_of_found(p, world_size, network, levels) for p in profiles if p.found and world_size > 1}
    return {name: scheme for name, scheme in found.items() if scheme is not None}


def _scheme_of_found(
    profile: ParameterProfile, world_size: int, network: Network | None, levels: Placement
) -> Scheme[Any] | None:
    """Returns the cheaper scheme for a mostly zero gradient, by rows or by elements; None if neither saves enough."""
    placement, spec, flat = _placement(world_size, network), profile.tensor, flat_spec([profile])
    prices: list[tuple[float, Scheme[Any]]] = []
    if profile.density is not None:
        by_row = sparse_schemes([profile], world_size, network)[0]
        prices.append((price(by_row.steps((spec,), (profile.density,), placement), network), by_row))
    if profile.elements is not None:
        by_element = flat_scheme(element_schemes(levels), flat, (profile.elements,), network)
        prices.append((price(by_element.steps((flat,), (profile.elements,), placement), network), by_element))
    lowest, scheme = min(prices, key=lambda priced: priced[0])
    dense = flat_scheme(dense_schemes(levels), flat, (), network)
    return scheme if lowest <= MOST_OF_DENSE * price(dense.steps((flat,), (), placement), network) else None


def price(steps: Sequence[Step], network: Network | None) -> float:
    """Returns the cost of a scheme's computations and transfers (`steps`), by which schemes are compared.

    It is their seconds or, if the network was not measured (None), the bytes on the busiest link.
    """
    if network is None:
        return sum(transfer.busiest_bytes for transfer in transfers(steps))
    return network.cost.total_s(steps, network.placement)


def _placement(world_size: int, network: Network | None) -> Placement:
    return Placement.one_per_node(world_size) if network is None else network.placement


def timed_schemes(placement: Placement) -> tuple[Scheme[Any], ...]:
    """Returns the schemes for tables (sparse gradients) that compete by expected time where the network was measured.

    Where `placement` has several ranks on each node, some sum inside nodes first, then across them.
    """
    inside = BalancedParallelism(owners="table_stripe")
    hierarchies = two_level_schemes([(inside, between) for between in SPARSE_SCHEMES], placement)
    return (*SPARSE_SCHEMES, DOUBLING_OF_ROWS, *hierarchies)


def sparse_schemes(
    tables: Sequence[ParameterProfile], world_size: int, network: Network | None = None
) -> list[Scheme[Any]]:
    """Returns the schemes for a bucket of tables (sparse gradients) that are worth a trial, the best first.

    It is only one if densities or network are unknown. If several schemes then move as many bytes, the one with the
    fewest collectives wins. Messages of the schemes have room (a capacity) for as many rows as the densities let
    expect, see `Scheme.planned_for`.

    Args:
        tables: the bucket's parameters, with what was measured of each.
        world_size: the number of ranks.
        network: measured costs of links and kernels; None if they were not measured.
    """
    densities = [p.density for p in tables]
    if any(d is None for d in densities):
        return [SPARSE_SCHEMES[0]]
    known: tuple[DensityProfile, ...] = tuple(d for d in densities if d is not None)
    specs: tuple[TensorSpec, ...] = tuple(p.tensor for p in tables)
    placement = _placement(world_size, network)
    if network is None:
        fitting = [scheme.planned_for(known) for scheme in SPARSE_SCHEMES]
        return [min(fitting, key=lambda s: (price(s.steps(specs, known, placement), None), len(s.stages(world_size))))]
    fitting = [scheme.planned_for(known) for scheme in timed_schemes(placement)]
    found = select(fitting, specs, known, placement, network.cost)
    others = [choice for choice in found.choices if choice != found.chosen]
    worth_it = [choice.scheme for choice in others if choice.seconds <= WORTH_A_TRIAL * found.chosen.seconds]
    return [found.chosen.scheme, *worth_it]
