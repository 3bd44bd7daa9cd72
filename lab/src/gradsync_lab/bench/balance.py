"""Measures how evenly owner maps spread a gradient's non-zeros: Zen's imbalance ratios (OSDI 2025, section 2).

No times are measured. An owner map assigns each row or element to the rank that sums it, its owner. With n ranks, push
imbalance is the most elements that a rank sends to one owner, divided by an n-th of the rank's elements; pull imbalance
is the most sums of one owner, divided by an n-th of all non-zero sums. 1 is ideal. All maps get the same random
gradients; a map with a seed gets another seed for each gradient. All figures follow from the first seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle, islice, repeat
from typing import Any

import torch
from torch import Tensor

from gradsync import kernels
from gradsync.characterization.statistics import Estimate
from gradsync.schemes.elements import nonzeros
from gradsync.schemes.owners import striped
from gradsync.schemes.row_owners import EvenSplit
from gradsync.schemes.tables import OwnRows, RowGroup, common_groups, single_groups
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.sparse import SparseRows

from ..report.record import Balance, Imbalance, Record, Spread
from ..workloads import Workload
from .patterns import PATTERNS, UNIT, Pattern
from .provenance import code, machine
from .topk import TopKWorkload, load

BASELINE = "hash"  # the paper's owner map
MOST_RANKS_OF_WORKLOADS = 16  # gradients of more ranks take minutes to compute
STEPS_OF_WORKLOADS = 2  # different gradients, taken in turns; the seed of a map differs in every draw

ALIKE_DRAWS = 32  # draws of a pattern without randomness for each draw of other patterns

Rows = tuple[Tensor, ...]  # the touched rows of each table, (count,) int64, ascending


@dataclass(frozen=True)
class BalanceSpec:
    """The settings of a run: size and number of random gradients, numbers of ranks, workloads with real gradients."""

    workloads: tuple[str, ...] = ("deepfm", "lstm", "topk")
    options: dict[str, Any] = field(default_factory=dict)
    elements: int = 1 << 24
    ranks: tuple[int, ...] = (8, 16, 128)
    repeats: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.elements < UNIT or self.elements % UNIT:
            raise ValueError(f"elements must be a multiple of {UNIT}, got {self.elements}")
        if not self.ranks or min(self.ranks) < 1:
            raise ValueError(f"ranks must be positive numbers, got {list(self.ranks)}")
        if self.repeats < 2:
            raise ValueError(f"repeats must be at least 2, for a standard error, got {self.repeats}")

    @property
    def cases(self) -> list[tuple[str, int]]:
        """Returns (name of pattern or workload, number of ranks) of each case: patterns first."""
        few = [n for n in self.ranks if n <= MOST_RANKS_OF_WORKLOADS]
        return [(name, n) for name in PATTERNS for n in self.ranks] + [
            (name, n) for name in self.workloads for n in few
        ]


@dataclass(frozen=True)
class Gradient:
    """The non-zero rows of tables on each rank; a flat bucket counts as a table with rows of one element."""

    specs: tuple[TensorSpec, ...]
    ranks: tuple[Rows, ...]  # a single one if all ranks are alike
    groups: tuple[RowGroup, ...]  # tables with the same rows on all ranks

    @cached_property
    def union(self) -> Rows:
        """Returns, for each table, the rows that are non-zero on any rank."""
        if len(self.ranks) == 1:
            return self.ranks[0]
        of_tables = zip(self.specs, zip(*self.ranks, strict=True), strict=True)
        return tuple(_indices(kernels.unite_rows(rows, spec.num_rows)) for spec, rows in of_tables)

    @property
    def is_flat(self) -> bool:
        return all(spec.dim == 1 for spec in self.specs)

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.specs)

    @property
    def density(self) -> float:
        """Returns the share of elements in non-zero rows, as mean over the ranks."""
        return statistics.fmean(map(self.elements, self.ranks)) / self.numel

    def elements(self, rows: Rows) -> int:
        return sum(len(of_table) * spec.dim for of_table, spec in zip(rows, self.specs, strict=True))


def _indices(union: kernels.RowUnion) -> Tensor:
    indices = torch.empty(union.count, dtype=torch.int64)
    union.write_indices(indices)
    return indices


RowCounts = Callable[[Tensor, int, int, int], Sequence[int]]  # rows, of how many, owners, seed -> each owner's


def even_split(rows: Tensor, num_rows: int, n: int, seed: int) -> Sequence[int]:
    parts = EvenSplit(num_rows, n).split(SparseRows(rows, rows.new_empty(len(rows), 0), num_rows))
    return [part.nnz for part in parts]


def hashed(rows: Tensor, num_rows: int, n: int, seed: int) -> Sequence[int]:
    """Returns each owner's number of rows by the first hash of Zen's hierarchical hashing, which decides owners."""
    return kernels.partition_hashed(rows, num_rows, n, seed).counts


def rotated_stripe(rows: Tensor, num_rows: int, n: int, seed: int) -> Sequence[int]:
    return kernels.partition_rotated(rows, num_rows, n, seed).counts


BY_ROW: dict[str, RowCounts] = {"even_split": even_split, BASELINE: hashed, "rotated_stripe": rotated_stripe}
OF_TABLES = "column_stripe"
SUBJECTS = (*(name for name in BY_ROW if name != BASELINE), OF_TABLES)


def loads(gradient: Gradient, rows: Rows, owners: str, n: int, seed: int, *, pulled: bool) -> list[int]:
    """Returns how many elements of `rows` each of `n` owners (ranks that sum) receives or, if `pulled`, sends back.

    `owners` names the map from rows, or from columns for `column_stripe`, to owners. Columns left over by stripes are
    summed by all owners: each receives them, none sends them back.
    """
    if owners in BY_ROW:
        tables = zip(rows, gradient.specs, strict=True)
        counts = [(BY_ROW[owners](of_table, spec.num_rows, n, seed), spec.dim) for of_table, spec in tables]
        return [sum(of_owners[owner] * dim for of_owners, dim in counts) for owner in range(n)]
    stripes = striped(gradient.groups, n)
    shared = [0 if pulled else sum(piece.width for piece in pieces) for pieces in stripes.shared]
    return [
        sum(len(rows[g.first]) * (own + all_) for g, own, all_ in zip(gradient.groups, widths, shared, strict=True))
        for widths in stripes.widths
    ]


def imbalance(gradient: Gradient, rows: Rows, owners: str, n: int, seed: int, *, pulled: bool) -> float:
    """Returns the largest load of an owner divided by an even share; 1 for a gradient without non-zeros."""
    total = gradient.elements(rows)
    return n * max(loads(gradient, rows, owners, n, seed, pulled=pulled)) / total if total else 1.0


def push_imbalance(gradient: Gradient, owners: str, n: int, seed: int) -> float:
    """Returns the most elements that a rank sends to one owner, over an even share of the rank's; of the worst rank."""
    return max(imbalance(gradient, rows, owners, n, seed, pulled=False) for rows in gradient.ranks)


def pull_imbalance(gradient: Gradient, owners: str, n: int, seed: int) -> float:
    return imbalance(gradient, gradient.union, owners, n, seed, pulled=True)


def drawn(pattern: Pattern, elements: int, n: int, seed: int) -> Gradient:
    """Draws a random gradient of this pattern on `n` ranks, with `elements` elements each, from the seed."""
    spec = TensorSpec((elements // pattern.dim, pattern.dim), torch.float32)
    generator = torch.Generator().manual_seed(seed)
    ranks = tuple((pattern.draw(spec.num_rows, generator),) for _ in range(1 if pattern.alike else n))
    return Gradient((spec,), ranks, single_groups((spec,)))


def computed(workload: Workload, n: int, seed: int) -> Iterator[Gradient]:
    """Yields the workload's sparse gradients of successive batches on `n` ranks, all at the initial weights.

    For the workload `topk` they are the sparsified gradients.

    Raises:
        ValueError: the workload has no sparse gradients.
    """
    model = workload.model(sparse=True, seed=seed)
    batches = [workload.batches(rank, n, seed) for rank in range(n)]
    while True:
        if isinstance(workload, TopKWorkload):
            flat = [workload.sparsified(model, mine) for mine in batches]
            spec = TensorSpec((flat[0].numel(), 1), flat[0].dtype)
            yield Gradient((spec,), tuple((nonzeros(x)[0].long(),) for x in flat), single_groups((spec,)))
            continue
        tables = []
        for mine in batches:
            model.zero_grad()
            workload.loss(model, next(mine)).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None and p.grad.is_sparse]
            if not gradients:
                raise ValueError(f"workload {workload.name!r} has no sparse gradients; take deepfm, lstm, nmt or topk")
            tables.append(tuple(map(SparseRows.from_torch, gradients)))
        yield of_tables(tables)


def of_tables(ranks: Sequence[tuple[SparseRows, ...]]) -> Gradient:
    """Returns the `Gradient` made of each rank's row-sparse tables."""
    surveys = [OwnRows.of(tables) for tables in ranks]
    specs = tuple(TensorSpec((table.num_rows, table.dim), table.values.dtype) for table in ranks[0])
    rows = tuple(tuple(map(_indices, survey.unions)) for survey in surveys)
    return Gradient(specs, rows, common_groups([survey.header.tolist() for survey in surveys], specs))


def run_balance(spec: BalanceSpec, on_event: Callable[[dict[str, Any]], None]) -> list[Record]:
    """Measures how evenly owner maps, from rows or elements to the ranks that sum them, spread non-zeros over ranks.

    Returns a record of imbalance for each gradient, number of ranks and owner map, against Zen's hash.

    Raises:
        ValueError: a workload's gradients are not sparse.
    """
    tasks = {name: load(name, **spec.options) for name in spec.workloads}  # missing data are reported before the work
    records = []
    for name, n in spec.cases:
        if name in tasks:
            steps = list(islice(computed(tasks[name], n, spec.seed), STEPS_OF_WORKLOADS))
            records += _records(name, n, islice(cycle(steps), spec.repeats), spec, tasks[name].options)
        else:
            records += _records(name, n, _draws(PATTERNS[name], spec, n), spec, {})
        on_event({"gradient": name, "ranks": n})
    return records


def _draws(pattern: Pattern, spec: BalanceSpec, n: int) -> Iterator[Gradient]:
    """Yields a pattern's gradients: `spec.repeats` random ones, or `ALIKE_DRAWS` times as many copies of a fixed one.

    A fixed pattern has the same indices on all ranks. Only the seeds of the owner maps then vary the imbalance, so that
    more copies are needed for its mean.
    """
    if pattern.alike:
        return repeat(drawn(pattern, spec.elements, n, spec.seed), spec.repeats * ALIKE_DRAWS)
    return (drawn(pattern, spec.elements, n, spec.seed + draw) for draw in range(spec.repeats))


@dataclass
class _Figures:
    """The imbalances and densities of one case, a list entry for each gradient drawn."""

    of_maps: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # push and pull
    again: list[float] = field(default_factory=list)  # push of the baseline with other seeds
    densities: list[float] = field(default_factory=list)

    def add(self, gradient: Gradient, n: int, seed: int) -> None:
        for owners in BY_ROW if gradient.is_flat else (*BY_ROW, OF_TABLES):  # an element has no columns
            both = (push_imbalance(gradient, owners, n, seed), pull_imbalance(gradient, owners, n, seed))
            self.of_maps.setdefault(owners, []).append(both)
        self.again.append(push_imbalance(gradient, BASELINE, n, -1 - seed))  # not the seed of any draw
        self.densities.append(gradient.density)


def _records(
    name: str, n: int, gradients: Iterator[Gradient], spec: BalanceSpec, options: dict[str, Any]
) -> list[Record]:
    figures = _Figures()
    for draw, gradient in enumerate(gradients):
        figures.add(gradient, n, spec.seed + draw)
        elements = gradient.numel
    baseline = figures.of_maps[BASELINE]
    pushes = [push for push, _ in baseline]
    params = {"gradient": name, "ranks": n, "elements": elements, "density": statistics.fmean(figures.densities)}
    return [
        Record(
            case="balance",
            metric="imbalance",
            subject=owners,
            baseline=BASELINE,
            params=params,
            options=options,
            repeats=len(baseline),
            subject_s=None,
            baseline_s=None,
            ratio=_ratios([push for push, _ in of_draws], pushes),
            aa=_ratios(figures.again, pushes),
            balance=Balance(
                subject=_means(of_draws),
                baseline=_means(baseline),
                excess=_means([(a - x, b - y) for (a, b), (x, y) in zip(of_draws, baseline, strict=True)]),
            ),
            seeds=[spec.seed],
            **code(),
            environment=machine(),
        )
        for owners, of_draws in figures.of_maps.items()
        if owners != BASELINE
    ]


def _ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def _means(draws: Sequence[tuple[float, float]]) -> Imbalance:
    push, pull = (
        Estimate(value=statistics.fmean(column), error=statistics.stdev(column) / math.sqrt(len(column)))
        for column in zip(*draws, strict=True)
    )
    return Imbalance(push=push, pull=pull)
