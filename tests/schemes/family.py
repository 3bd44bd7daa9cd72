"""The scheme family under test: one row a scheme, the data they meet, and how a scheme is run on ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.comm import LENGTH_BYTES, Ledger, LocalGroup, RecordingGroup, drive, run_local
from gradsync.costs.cluster import Placement
from gradsync.schemes import (
    BLOCKS_OF_256,
    DOUBLING_OF_ELEMENTS,
    DOUBLING_OF_ROWS,
    POINTS,
    SPLIT_OF_ELEMENTS,
    Aggregation,
    AGSparse,
    AllReduce,
    Balance,
    BalancedElements,
    BalancedParallelism,
    Communication,
    ElementPoint,
    HalfPrecision,
    Hierarchical,
    Partition,
    Point,
    ReduceScatter,
    Route,
    RowPoint,
    Scheme,
    SparseReduceScatter,
    is_flat,
)
from gradsync.schemes.formats import PartFormat
from gradsync.tensors.bucket import Layout, TensorSpec
from gradsync.tensors.density import DensityProfile, profile_rows, profile_tables
from gradsync.tensors.index_formats import IndexFormat
from gradsync.tensors.sparse import SparseRows

Tables = tuple[SparseRows, ...]
SIZES = (1, 2, 3, 4, 8)


@dataclass(frozen=True)
class Member:
    """`roundings(n)`: how often a value is rounded to the bucket's dtype on its way through n ranks.

    `sections`: of each tensor in a message, aligned one by one; none where bytes do not depend on the data.
    `dealt`: elements go to owners by a seeded map, whose shares are equal only on average.
    `instead`: the stages of its other way, if it takes one where the data is not sparse.
    `plan` makes the scheme for what the ranks bring, where its settings depend on that; `title` tells such rows apart.
    `sizes` and `only`: the numbers of ranks and the cases it meets; None: all there are.
    `wire`: the type that values are rounded to on their way, where it is narrower than the bucket's.
    `spread`: share by which bytes may differ from the predicted ones, where they depend on more than mean densities.
    `types` it meets, among as many ranks as show what types change.
    `ranks_per_node`: of so many ranks, where nodes have more than one.
    """

    scheme: Scheme[Any]
    roundings: Callable[[int], int]
    sections: int = 0
    dealt: bool = False
    instead: tuple[str, ...] = ()
    title: str = ""
    plan: Callable[[Sequence[Tables]], Scheme[Any]] | None = None
    sizes: tuple[int, ...] = SIZES
    only: tuple[str, ...] | None = None
    spread: float = 0.0
    ranks_per_node: Callable[[int], int] = lambda size: 1
    types: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

    def placement(self, size: int) -> Placement:
        return Placement.regular(size // self.ranks_per_node(size), self.ranks_per_node(size))

    wire: torch.dtype | None = None

    @property
    def nested(self) -> bool:
        """Whether nodes have several ranks."""
        return self.ranks_per_node(8) > 1

    @property
    def skewed(self) -> bool:
        """Whether owners have consecutive rows."""
        return getattr(self.scheme, "balance", None) is Balance.IMBALANCED

    @property
    def cases(self) -> Sequence[str]:
        return self.only if self.only is not None else CASES[self.scheme.traits.layout]

    @property
    def name(self) -> str:
        return f"{self.scheme.name} {self.title}".strip()

    def planned(self, inputs: Sequence[Any]) -> Scheme[Any]:
        """The scheme for these ranks' tables, on their nodes."""
        scheme = self.plan(inputs) if self.plan is not None else self.scheme
        if isinstance(scheme, Hierarchical) or (isinstance(scheme, Route) and not is_flat(scheme.leaf)):
            return replace(scheme, ranks_per_node=self.ranks_per_node(len(inputs)))
        return scheme


def profiles_of(inputs: Sequence[Any]) -> tuple[DensityProfile, ...]:
    """The exact profile of the ranks' tables, or of the elements of their flat tensors."""
    if isinstance(inputs[0], torch.Tensor):
        found = [x.nonzero().flatten() for x in inputs]
        numel = inputs[0].numel()
        in_blocks = profile_rows([torch.unique(indices // 256) for indices in found], -(-numel // 256))
        return (replace(profile_rows(found, numel), blocks={256: in_blocks}),)
    return profile_tables([(c[0].num_rows, [t.indices for t in c]) for c in zip(*inputs, strict=True)])


ROW_SCHEMES: tuple[Scheme[Any], ...] = (AGSparse(), BalancedParallelism())


def measured(scheme: Scheme[Any]) -> Callable[[Sequence[Tables]], Scheme[Any]]:
    """Returns the scheme that the planner makes for the ranks' tables: every rank's rows fit."""
    return lambda inputs: scheme.planned_for(profiles_of(inputs))


def generous(inputs: Sequence[Tables]) -> BalancedParallelism:
    """Room for every row there is; nothing is known of common rows."""
    rows = tuple(table.num_rows for table in inputs[0])
    return BalancedParallelism(capacity=rows, same_rows=tuple(range(len(rows))))


def without_room(scheme: Scheme[Any]) -> Callable[[Sequence[Tables]], Scheme[Any]]:
    """No row fits, on any rank."""

    def planned(inputs: Sequence[Tables]) -> Scheme[Any]:
        tables = len(inputs[0])
        room: Any = {"capacity": (0,) * tables, "same_rows": tuple(range(tables))}
        return replace(scheme, **room)

    return planned


ELEMENT_CASES = [
    "zeros of both signs",
    "a dense region",
    "hot columns",
    "every other rank without non-zeros",
    "few non-zeros",
]
ROUTE_CASES = ("no elements", "one element", "prime")
MEMBERS = [
    Member(AllReduce(), roundings=lambda n: n + 1),  # scaled, then the transport's own sum in the bucket's dtype
    Member(ReduceScatter(), roundings=lambda n: 2, sizes=(1, 3, 4), only=("no elements", "one element", "prime")),
    *(
        Member(Route(tasks), roundings=lambda n: n + 1, title=tasks[0], sizes=(1, 3, 4), only=ROUTE_CASES)
        for tasks in (("all_reduce",), ("reduce_scatter", "all_gather"), ("reduce", "broadcast"))
    ),
    Member(AGSparse(), roundings=lambda n: 2, sections=2),  # repeated rows merged before they are sent, then the sum
    Member(BalancedParallelism(), roundings=lambda n: 2, sections=2),
    Member(BalancedParallelism(), roundings=lambda n: 2, sections=2, title="with room", plan=generous),
    Member(
        BalancedParallelism(owners="table_stripe"),
        roundings=lambda n: 2,
        sections=2,
        title="by tables",
        sizes=(1, 3, 4),
        only=("four tables", "fewer columns than ranks", "the same rows on some ranks", "rank 1 absent"),
    ),
    *(Member(s, lambda n: 2, sections=2, title="as measured", plan=measured(s)) for s in ROW_SCHEMES),
    *(Member(s, lambda n: 2, sections=2, title="without room", plan=without_room(s)) for s in ROW_SCHEMES),
    Member(
        SparseReduceScatter(),
        roundings=lambda n: 2,
        sections=4,
        dealt=True,
        sizes=(1, 3, 4),
        only=("no elements", "prime", "zeros of both signs", "few non-zeros"),
    ),
    Member(BalancedElements(), roundings=lambda n: n + 1, sections=4, dealt=True, instead=("sizes", "all_reduce")),
    Member(
        BalancedElements(),
        roundings=lambda n: n + 1,
        sections=4,
        dealt=True,
        instead=("push", "all_reduce"),
        title="as measured",
        plan=measured(BalancedElements()),
        sizes=(1, 3),
    ),
    Member(
        BalancedElements(capacity=(0, 0)),
        roundings=lambda n: n + 1,
        sections=4,
        dealt=True,
        instead=("push", "all_reduce"),
        title="without room",
        sizes=(3,),
        only=("even", "zeros of both signs", "few non-zeros"),
    ),
]
POINT_CASES = {
    Layout.ROWS: ("uniform", "repeated and unsorted", "rank 1 absent", "four tables", "table without rows"),
    Layout.FLAT: ("no elements", "prime", "a dense region", "few non-zeros"),
}
CHAIN = str(Point(Communication.RING, Aggregation.INCREMENTAL, Partition.CENTRALIZATION))


def point_member(scheme: Any, title: str) -> Member:
    """A point of the design space: all of them do the same to a partial sum, so that fewer cases tell."""
    return Member(
        scheme,
        roundings=lambda n: 2,
        sections=2,
        title=title,
        sizes=(1, 3, 4),
        only=POINT_CASES[scheme.traits.layout],
        spread=0.35 if title == CHAIN else 0.25,  # of a chain it matters which ranks bring nothing
    )


POINT_MEMBERS = [point_member(kind.at(p), str(p)) for kind in (RowPoint, ElementPoint) for p in POINTS]
POINT_MEMBERS += [
    point_member(BLOCKS_OF_256, "blocks of 256"),
    point_member(SPLIT_OF_ELEMENTS, "split"),
    point_member(ElementPoint(owners="hash"), "hashed elements"),
    point_member(RowPoint(owners="hash"), "hashed rows"),
    point_member(ElementPoint(push_format="dense"), "dense elements"),
]
SHAPES = {"2x2 and 2x3": {4: 2, 6: 3, 8: 4}, "3x2": {6: 2, 8: 2}}  # nodes x ranks: ranks -> ranks a node
TABLE_STRIPES = BalancedParallelism(owners="table_stripe")
NESTED_CASES = {
    Layout.FLAT: ("prime", "few non-zeros", "a dense region"),
    Layout.ROWS: ("rank 1 absent", "four tables", "the same rows on some ranks"),
}


def nested_member(intra: Any, inter: Any, shapes: str, *, planned: bool = False, **promises: Any) -> Member:
    """Two schemes, one inside nodes of several shapes and one between them; `planned` for what the ranks bring."""
    scheme = Hierarchical(intra, inter)

    def ranks_per_node(size: int) -> int:
        return SHAPES[shapes].get(size, 1)

    def plan(inputs: Sequence[Tables]) -> Scheme[Any]:
        return replace(scheme, ranks_per_node=ranks_per_node(len(inputs))).planned_for(profiles_of(inputs))

    return Member(
        scheme,
        roundings=promises.pop("roundings", lambda n: 2),
        title=f"{intra.name} and {inter.name} on {shapes}{' as measured' if planned else ''}",
        plan=plan if planned else None,
        sizes=tuple(size for size in SHAPES[shapes] if size < 8),
        only=NESTED_CASES[scheme.traits.layout],
        ranks_per_node=ranks_per_node,
        types=(torch.float32, torch.bfloat16),
        **promises,
    )


NESTED_MEMBERS = [
    nested_member(intra, inter, shapes, **promises)
    for shapes, intra, inter, promises in (
        ("2x2 and 2x3", ReduceScatter(), AllReduce(), {"roundings": lambda n: n + 1}),
        ("3x2", ReduceScatter(), BalancedElements(), {"sections": 4, "dealt": True}),
        ("2x2 and 2x3", SparseReduceScatter(), BalancedElements(), {"sections": 8, "dealt": True}),
        ("3x2", SparseReduceScatter(), BalancedElements(), {"sections": 8, "dealt": True, "planned": True}),
        ("3x2", SparseReduceScatter(), AllReduce(), {"roundings": lambda n: n + 1, "sections": 4, "dealt": True}),
        ("2x2 and 2x3", ReduceScatter(), DOUBLING_OF_ELEMENTS, {"sections": 2, "spread": 0.3}),
        ("2x2 and 2x3", TABLE_STRIPES, BalancedParallelism(), {"sections": 4}),
        ("3x2", TABLE_STRIPES, AGSparse(), {"sections": 4}),
        ("3x2", TABLE_STRIPES, DOUBLING_OF_ROWS, {"sections": 2, "spread": 0.3}),
    )
]


NESTED_MEMBERS += [
    Member(
        Route(tasks),
        roundings=lambda n: 3,
        title=" ".join(tasks),
        sizes=(4, 6),
        only=("prime", "one element"),
        ranks_per_node=lambda size: SHAPES["2x2 and 2x3"].get(size, 1),
        types=(torch.float32, torch.bfloat16),
    )
    for tasks in (
        ("reduce_scatter", "all_reduce", "all_gather"),
        ("reduce_scatter", "reduce_scatter", "all_gather", "all_gather"),
        ("reduce", "reduce", "broadcast", "broadcast"),
    )
]


def rounded_member(inner: Scheme[Any], values: str, **settings: Any) -> Member:
    """A scheme for 16-bit values, met with wider ones: what is new is at its ends."""
    scheme = HalfPrecision(inner, values)
    return Member(
        scheme,
        roundings=lambda n: 3,  # at its source, where repeated rows are merged, and the sum
        title=f"of {inner.name} {values}",
        plan=measured(scheme),
        sizes=(3,),
        only=POINT_CASES[inner.traits.layout],
        wire=getattr(torch, values),
        **settings,
    )


ROUNDED_MEMBERS = [
    rounded_member(BalancedParallelism(), "float16", sections=2),
    rounded_member(BalancedElements(), "bfloat16", sections=4, dealt=True, instead=("push", "all_reduce")),
]
ALL_MEMBERS = [*MEMBERS, *POINT_MEMBERS, *NESTED_MEMBERS, *ROUNDED_MEMBERS]
ROW_MEMBERS = [member for member in MEMBERS if member.scheme.traits.layout is Layout.ROWS]
FLOAT32_ADDITIONS = 256  # more than any case adds up for one element


def table(
    generator: torch.Generator, indices: Tensor, num_rows: int, dim: int, dtype: torch.dtype, *, present: bool = True
) -> SparseRows:
    values = torch.randn(len(indices), dim, generator=generator, dtype=torch.float64).to(dtype)
    return SparseRows(indices, values, num_rows, present)


def draw(generator: torch.Generator, count: int, num_rows: int) -> Tensor:
    """Row indices, unsorted and with repetitions."""
    return torch.randint(num_rows, (count,), generator=generator)


def embedding_gradient(generator: torch.Generator, dtype: torch.dtype) -> SparseRows:
    """Returns a gradient as autograd leaves it in `nn.Embedding(sparse=True)`: COO, not coalesced."""
    embedding = nn.Embedding(40, 6, sparse=True, dtype=dtype)
    (embedding(draw(generator, 25, 40)) * torch.randn(25, 6, generator=generator).to(dtype)).sum().backward()
    gradient = embedding.weight.grad
    assert gradient is not None and not gradient.is_coalesced()
    return SparseRows.from_torch(gradient)


def row_case(case: str, rank: int, dtype: torch.dtype) -> Tables:
    """One rank's tables."""
    g = torch.Generator().manual_seed(100 + rank)
    nothing = torch.empty(0, dtype=torch.int64)
    match case:
        case "uniform":
            return (table(g, torch.randperm(64, generator=g)[: 10 + rank], 64, 8, dtype),)
        case "skewed":
            return (table(g, (64 * torch.rand(40, generator=g) ** 6).long(), 64, 8, dtype),)
        case "repeated and unsorted":
            return (table(g, draw(g, 30, 5), 64, 8, dtype),)
        case "embedding gradient":
            return (embedding_gradient(g, dtype),)
        case "every other rank without rows":
            return (table(g, draw(g, 12, 64) if rank % 2 == 0 else nothing, 64, 8, dtype),)
        case "rank 1 absent":
            if rank == 1:
                return (SparseRows.absent((64, 8), dtype, torch.device("cpu")),)
            return (table(g, draw(g, 12, 64), 64, 8, dtype),)
        case "absent everywhere":
            return (SparseRows.absent((64, 8), dtype, torch.device("cpu")),)
        case "no rows anywhere":
            return (table(g, nothing, 64, 8, dtype),)
        case "one table absent":
            absent = SparseRows.absent((64, 8), dtype, torch.device("cpu"))
            return (absent, table(g, draw(g, 12, 30), 30, 4, dtype))
        case "two tables":
            return (table(g, draw(g, 12, 64), 64, 8, dtype), table(g, draw(g, 7, 9), 9, 3, dtype))
        case "four tables":
            dims = ((64, 1), (17, 5), (20, 0), (100, 16))
            return tuple(table(g, draw(g, 3 + rank + rows // 8, rows), rows, dim, dtype) for rows, dim in dims)
        case "one column":
            return (table(g, draw(g, 12, 64), 64, 1, dtype),)
        case "fewer columns than ranks":
            return (table(g, draw(g, 12, 64), 64, 3, dtype),)
        case "odd columns and rows":
            return (table(g, draw(g, 21, 61), 61, 13, dtype),)
        case "table without rows":
            return (table(g, nothing, 0, 8, dtype),)
        case "two tables with the same rows":
            ids = draw(g, 20, 64)
            return tuple(table(g, ids.clone(), 64, dim, dtype) for dim in (5, 1))
        case "the same rows on some ranks":
            ids = draw(g, 20, 64)
            other = draw(g, 20, 64) if rank == 1 else ids
            return (table(g, ids, 64, 4, dtype), table(g, other, 64, 1, dtype), table(g, ids, 64, 2, dtype))
        case "aligned":  # 8 rows each: a section of any width is a multiple of 8 bytes
            return (table(g, torch.randperm(64, generator=g)[:8], 64, 16, dtype),)
    raise ValueError(case)


ROW_CASES = [
    "uniform",
    "skewed",
    "repeated and unsorted",
    "embedding gradient",
    "every other rank without rows",
    "rank 1 absent",
    "absent everywhere",
    "no rows anywhere",
    "one table absent",
    "two tables",
    "four tables",
    "one column",
    "fewer columns than ranks",
    "odd columns and rows",
    "table without rows",
    "two tables with the same rows",
    "the same rows on some ranks",
    "aligned",
]
FLAT_SIZES = {"no elements": 0, "one element": 1, "prime": 17, "even": 1024}
ELEMENTS = 4099  # of the cases below, most of which are zero


def element_case(case: str, rank: int, dtype: torch.dtype) -> Tensor:
    """One rank's flat tensor."""
    g = torch.Generator().manual_seed(100 + rank)
    x, places = torch.zeros(ELEMENTS, dtype=dtype), torch.arange(ELEMENTS)
    match case:
        case "zeros of both signs":
            x[rank::3] = -0.0
            return x
        case "a dense region":
            chosen = places[100 : 100 + ELEMENTS // 5]
        case "hot columns":
            chosen = places[(places % 64 == 5) | (places % 64 == 48)]
        case "every other rank without non-zeros":
            chosen = torch.randperm(ELEMENTS, generator=g)[:40] if rank % 2 == 0 else places[:0]
        case "few non-zeros":
            chosen = torch.randperm(ELEMENTS, generator=g)[: ELEMENTS // 50 + rank]
        case _:
            raise ValueError(case)
    x[chosen] = torch.randn(len(chosen), generator=g, dtype=torch.float64).to(dtype)
    return x


CASES = {Layout.FLAT: [*FLAT_SIZES, *ELEMENT_CASES], Layout.ROWS: ROW_CASES}


def make_inputs(scheme: Scheme[Any], case: str, size: int, dtype: torch.dtype) -> list[Any]:
    """Returns the gradients of each rank."""
    if scheme.traits.layout is Layout.ROWS:
        return [row_case(case, rank, dtype) for rank in range(size)]
    if case in ELEMENT_CASES:
        return [element_case(case, rank, dtype) for rank in range(size)]
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(FLAT_SIZES[case], generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)]


@dataclass(frozen=True)
class Outcome:
    """The results of a run, by rank."""

    results: list[Any]
    states: list[Any]
    ledgers: list[Ledger]
    awaits: list[int]


class Counted:
    """A coroutine that counts what it awaits."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.coroutine = coroutine
        self.awaits = 0

    def send(self, value: Any) -> Any:
        pending = self.coroutine.send(value)
        self.awaits += 1
        return pending


def run(member: Member, inputs: Sequence[Any], scale: float, states: Sequence[Any] | None = None) -> Outcome:
    """Returns the outcome of the member's scheme for these inputs, one for each rank."""
    return run_scheme(member.planned(inputs), inputs, scale, states, member.placement(len(inputs)))


@cache
def mean_of(member: Member, case: str, size: int, dtype: torch.dtype) -> Outcome:
    """Returns the outcome for a case, run once for all tests that look at it."""
    return run(member, make_inputs(member.scheme, case, size, dtype), 1 / size)


def run_scheme(
    scheme: Scheme[Any],
    inputs: Sequence[Any],
    scale: float,
    states: Sequence[Any] | None = None,
    placement: Placement | None = None,
) -> Outcome:
    """`synchronize` on one thread a rank, over a recording group. The inputs stay as they are."""
    ledgers = [Ledger() for _ in inputs]

    def rank_main(group: LocalGroup) -> tuple[Any, Any, int]:
        recording = RecordingGroup(group, ledgers[group.rank])
        state = states[group.rank] if states is not None else {}
        coroutine = Counted(scheme.synchronize(mine(inputs[group.rank]), state, recording, scale))
        result, next_state = drive(coroutine, timeout_s=20)
        return result, next_state, coroutine.awaits

    everything = run_local(len(inputs), rank_main, placement=placement)
    return Outcome(
        [result for result, _, _ in everything],
        [state for _, state, _ in everything],
        ledgers,
        [awaits for _, _, awaits in everything],
    )


def mine(x: Any) -> Any:
    """Flat buckets may be overwritten: a copy. Tables may not: themselves."""
    return x.clone() if isinstance(x, Tensor) else x


def copy_of(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.clone()
    return tuple(replace(t, indices=t.indices.clone(), values=t.values.clone()) for t in x)


def replayed_bytes(scheme: Any, inputs: Sequence[Any]) -> list[int]:
    """Returns the bytes that each rank sends at a point of the design space: its schedule is played with these rows."""
    flat, size = scheme.traits.layout is Layout.FLAT, len(inputs)
    plan = scheme.schedule(size)
    tables = [(_blocks_of(x, scheme.block),) if flat else x for x in inputs]
    maps = [scheme.owners_of(table.num_rows, plan.blocks) for table in tables[0]]
    held: list[dict[Any, list[Any]]] = [{} for _ in inputs]
    for rank, own in enumerate(tables):
        rows = [torch.unique(table.indices) for table in own]
        split = [
            of.split(replace(table, indices=indices, values=torch.zeros(len(indices), 0)))
            for of, table, indices in zip(maps, own, rows, strict=True)
        ]
        for block in range(plan.blocks):
            held[rank][block, (rank,)] = [parts[block].indices for parts in split]
    sent = [0] * size
    for each in plan.rounds:
        arrived: list[dict[Any, list[Any]]] = [{} for _ in inputs]
        for message in each.messages:
            sent[message.source] += LENGTH_BYTES
            for partial in message.partials:
                travelled = []
                for of, table, indices in zip(maps, tables[0], held[message.source][partial], strict=True):
                    whole = len(partial[1]) in (1, size)
                    dtype = table.values.dtype if whole else torch.promote_types(table.values.dtype, torch.float32)
                    form = PartFormat(of.length, table.dim, dtype, scheme.formats)
                    sent[message.source] += 8 + int(form.nbytes(len(indices)))
                    dense = form.choice(len(indices)) is IndexFormat.DENSE
                    travelled.append(torch.arange(of.length) if dense else indices)
                arrived[message.destination][partial] = travelled
        for rank in range(size):
            held[rank].update(arrived[rank])
        for merge in each.merges:
            parts = [held[merge.rank].pop(partial) for partial in merge.partials]
            held[merge.rank][merge.sum] = [torch.unique(torch.cat(column)) for column in zip(*parts, strict=True)]
    return sent


def _blocks_of(x: Tensor, block: int) -> SparseRows:
    """A flat tensor's blocks that are not zero."""
    blocks = -(-x.numel() // block)
    padded = torch.zeros(blocks * block, dtype=x.dtype)
    padded[: x.numel()] = x
    return SparseRows.from_dense(padded.view(blocks, block))


def to_dense(x: Any, entry: Callable[[Tensor], Tensor] = Tensor.double) -> list[Tensor]:
    """Returns float64 tensors, one for each tensor of the bucket, of the values that `entry` gives."""
    if isinstance(x, Tensor):
        return [entry(x)]
    return [torch.zeros(t.num_rows, t.dim, dtype=torch.float64).index_add_(0, t.indices, entry(t.values)) for t in x]


def specs_of(x: Any) -> tuple[TensorSpec, ...]:
    if isinstance(x, Tensor):
        return (TensorSpec.of(x),)
    return tuple(TensorSpec((t.num_rows, t.dim), t.values.dtype) for t in x)


def bits(x: Any) -> list[bytes]:
    tensors = [x] if isinstance(x, Tensor) else [part for t in x for part in (t.indices, t.values)]
    flags = b"" if isinstance(x, Tensor) else bytes(t.present for t in x)
    return [flags, *(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)]


def assert_is_scaled_sum(member: Member, results: Sequence[Any], inputs: Sequence[Any], scale: float) -> None:
    """Every element within the rounding that the member states, of the float64 sum."""
    dtype = specs_of(inputs[0])[0].dtype
    rounded = member.wire if member.wire is not None and member.wire.itemsize < dtype.itemsize else dtype
    single = torch.finfo(torch.float64 if rounded is torch.float64 else torch.float32)
    info, roundings = torch.finfo(rounded), member.roundings(len(inputs))
    subnormal = roundings * len(inputs) * max(1.0, abs(scale)) * info.smallest_normal * info.eps  # of each rank's share
    for position in range(len(specs_of(inputs[0]))):
        brought = [to_dense(x)[position] for x in inputs]
        expected = scale * sum(brought)
        magnitude = abs(scale) * sum(b.abs() for b in brought)
        added = abs(scale) * sum(to_dense(x, lambda v: v.double().abs())[position] for x in inputs)  # may cancel out
        allowed = roundings * info.eps / 2 * magnitude + FLOAT32_ADDITIONS * single.eps * added + subnormal
        for rank, result in enumerate(results):
            error = (to_dense(result)[position] - expected).abs()
            assert bool((error <= allowed).all()), f"rank {rank}: off by {float((error - allowed).max())} too much"
