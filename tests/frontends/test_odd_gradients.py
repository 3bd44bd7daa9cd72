"""Unusual sparse gradients through attach() on real process groups: averaged, or refused by all ranks.

Repeated, unsorted and negative indices, indices beyond the table, rows that are not contiguous in memory, values that
are not finite, ranks with nothing, and tables of more than 2^31 elements.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync import Plan, attach
from gradsync.schemes import AGSparse, AllReduce, BalancedParallelism, Scheme
from gradsync.tensors.bucket import TensorSpec
from tests.frontends.models import HiddenTable
from tests.world import Ranks

World = Callable[[int], Ranks]

ROWS, DIM = 20, 4
PLANS: dict[str, Scheme[Any] | None] = {"none": None, "agsparse": AGSparse(), "balanced": BalancedParallelism()}
every_plan = pytest.mark.parametrize("plan", PLANS)


def gradient_of(kind: str, shape: torch.Size) -> Tensor:
    """Returns this rank's gradient of a table; `shape` is (rows, 4)."""
    rank, last = dist.get_rank(), shape[0] - 1
    indices = torch.tensor([last - rank, 3, 1])
    values = torch.arange(12.0).view(3, DIM) + rank
    match kind:
        case "repeated and unsorted":
            indices = torch.tensor([7, 2 + rank, 7])
        case "rows apart":
            values = (torch.arange(12.0) + rank).view(DIM, 3).T
        case "indices apart":
            indices = torch.stack([indices, indices.flip(0)], dim=1)[:, 0]
        case "the same row again and again":
            values = torch.full((1, 1), 1.0 + rank).expand(3, DIM)
        case "not finite":
            values[0] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
        case "inf against -inf":
            indices, values = torch.tensor([5, 6, 7]), values.fill_(float("inf") if rank == 0 else -float("inf"))
        case "zeros of both signs":
            indices, values = torch.tensor([5, 6, 7]), values.fill_(-0.0 if rank == 0 else 0.0)
        case "negative zeros everywhere":
            values = torch.full_like(values, -0.0)
        case "nothing on one rank":
            indices, values = (indices, values) if rank == 0 else (indices[:0], values[:0])
        case "nothing on any rank":
            indices, values = indices[:0], values[:0]
        case "too large on one rank" if rank == 1:
            indices[1] = shape[0]
        case "far too large on one rank" if rank == 1:
            indices[1] = 2**40
        case "negative on one rank" if rank == 1:
            indices[1] = -1
        case "negative on all ranks":
            indices[0] = -(2**40)
    return torch.sparse_coo_tensor(indices.unsqueeze(0), values, shape, check_invariants=False)


class Table(nn.Module):
    """A table whose gradient in each backward is `gradient_of(kind)`, whatever was looked up, and a dense layer."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)
        self.out = nn.Linear(DIM, 1)
        self.kind = "as it is"
        self.table.weight.register_hook(lambda gradient: gradient_of(self.kind, gradient.shape))

    def forward(self) -> Tensor:
        result: Tensor = self.out(self.table(torch.tensor([0]))).sum()
        return result


def attached(model: Table, plan: str, **settings: int) -> gradsync.Attachment:
    scheme = AllReduce() if plan == "all_reduce" else PLANS[plan]
    if scheme is None:
        return attach(model, timeout=10, **settings)
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    dense = [name for name in specs if name != "table.weight"]
    buckets = [(["table.weight"], scheme), (dense, AllReduce())]
    return attach(model, plan=Plan.make(specs, dist.get_world_size(), buckets), timeout=10, **settings)


def of_all_ranks(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors of all ranks, which have one shape."""
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def synchronised(kinds: list[str], plan: str) -> None:
    """Takes two steps of each kind; gradients must be the float64 mean of all ranks', with the same bits everywhere."""
    model = Table(torch.zeros(ROWS, DIM))
    handle = attached(model, plan)
    for kind in kinds:
        try:
            synchronised_twice(kind, model)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from error
    handle.detach()


def synchronised_twice(kind: str, model: Table) -> None:
    model.kind = kind
    mine = gradient_of(kind, torch.Size((ROWS, DIM)))
    dense = torch.zeros(ROWS, DIM, dtype=torch.float64).index_add_(0, mine._indices()[0], mine._values().double())
    parts = of_all_ranks(dense)
    for _ in range(2):
        model.zero_grad()
        model().backward()
        got = model.table.weight.grad
        assert got is not None and got.layout is torch.sparse_coo and got.is_coalesced()
        expected = sum(parts) / len(parts)
        torch.testing.assert_close(got.to_dense().double(), expected, rtol=1e-6, atol=0, equal_nan=True)
        bits = got.to_dense().view(torch.int32).masked_fill(got.to_dense().isnan(), 0)
        assert all(torch.equal(bits, other) for other in of_all_ranks(bits))


@every_plan
def test_a_gradient_of_rows_is_averaged_whatever_it_looks_like(world: World, plan: str) -> None:
    kinds = [
        "as it is",
        "repeated and unsorted",
        "rows apart",
        "indices apart",
        "the same row again and again",
        "not finite",
        "inf against -inf",
        "zeros of both signs",
        "negative zeros everywhere",
        "nothing on one rank",
        "nothing on any rank",
    ]
    world(3).run(synchronised, kinds, plan)


def refused(kind: str, plan: str, good_steps: int) -> list[str]:
    """Returns the error of a step with bad rows after `good_steps` good ones, and of the step after it."""
    model = Table(torch.zeros(ROWS, DIM))
    handle = attached(model, plan)
    for _ in range(good_steps):
        model().backward()
    said = []
    for kind_now in (kind, "as it is"):
        model.kind = kind_now
        model.zero_grad()
        try:
            model().backward()
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    handle.detach()
    attach(nn.Linear(2, 1), timeout=10).detach()  # the ranks are still in step
    return said


@every_plan
@pytest.mark.parametrize(
    ("kind", "index", "good_steps"),
    [
        ("too large on one rank", ROWS, 0),
        ("far too large on one rank", 2**40, 1),
        ("negative on one rank", -1, 1),
        ("negative on all ranks", -(2**40), 0),
    ],
)
def test_rows_outside_of_the_table_raise_on_every_rank(
    world: World, kind: str, index: int, good_steps: int, plan: str
) -> None:
    for bad, after in world(3).run(refused, kind, plan, good_steps):
        assert re.search(rf"index {index} .* is outside \[0, num_rows={ROWS}\)", bad), bad
        assert "stopped earlier" in after


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("too large on one rank", f"size is {ROWS} but found index {ROWS}"),
        ("negative on one rank", "negative index -1"),
    ],
)
def test_rows_outside_of_a_table_that_travels_dense_raise_on_every_rank(world: World, kind: str, reason: str) -> None:
    for rank, (bad, after) in enumerate(world(3).run(refused, kind, "all_reduce", 1)):
        assert (reason if rank == 1 else "rank 1: backward ended with an error") in bad
        assert "stopped earlier" in after


def rows_apart_by_torch_itself() -> None:
    """Transposes the output of an embedding: the values of the gradient that torch makes are transposed as well."""
    table = nn.Embedding(ROWS, DIM, sparse=True)
    seen: list[tuple[int, ...]] = []
    table.weight.register_hook(lambda gradient: seen.append(gradient._values().stride()))
    handle = attach(table, timeout=10)
    weights = torch.arange(12.0).view(DIM, 3)
    for _ in range(2):
        table.zero_grad()
        (table(torch.tensor([3, 9, 3])).t() * weights).sum().backward()
        got = table.weight.grad
        assert got is not None
        expected = torch.zeros(ROWS, DIM).index_add_(0, torch.tensor([3, 9, 3]), weights.t())
        assert torch.equal(got.to_dense(), expected)
    assert seen == [(1, 3)] * 2, "else this tests nothing"
    handle.detach()


def test_an_embedding_whose_output_is_transposed_is_averaged(world: World) -> None:
    world(2).run(rows_apart_by_torch_itself)


def a_table_of_more_than_2_31_elements(plan: str, folder: str) -> None:
    """Trains a table in a file with holes: steps touch a few rows; broadcast and guard would touch all."""
    rows = 2**29 + 5
    file = Path(folder) / f"table{dist.get_rank()}"
    model = Table(torch.from_file(str(file), shared=True, size=rows * DIM).view(rows, DIM))
    assert model.table.weight.numel() > 2**31
    with patch.object(sys.modules["gradsync.frontends.attach"], "level"):
        handle = attached(model, plan, verify_every=0)
    optimizer = torch.optim.SGD([model.table.weight], lr=1.0)
    expected: dict[int, Tensor] = {}
    for kind in ("as it is", "repeated and unsorted", "rows apart"):
        model.kind = kind
        optimizer.zero_grad()
        model().backward()
        got = model.table.weight.grad
        assert got is not None and got.layout is torch.sparse_coo and got.shape == (rows, DIM)
        mine = gradient_of(kind, got.shape)
        for indices, values in zip(of_all_ranks(mine._indices()[0]), of_all_ranks(mine._values()), strict=True):
            for row, value in zip(indices.tolist(), values, strict=True):
                expected[row] = expected.get(row, torch.zeros(DIM)) - value / 2
        optimizer.step()
    assert rows - 1 in expected
    for row, value in expected.items():
        torch.testing.assert_close(model.table.weight.detach()[row], value)
    handle.detach()


@every_plan
def test_a_table_of_more_than_2_31_elements_is_averaged(world: World, plan: str, tmp_path: Path) -> None:
    world(2).run(a_table_of_more_than_2_31_elements, plan, str(tmp_path))


class FunctionalTie(nn.Module):
    """A table with sparse gradients that is the output layer, too, which no module says: its gradients are dense."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 4, sparse=True)
        self.other = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.embedding(ids), self.embedding.weight)


class Tied(FunctionalTie):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 12, bias=False)
        self.head.weight = self.embedding.weight


def train_with_a_table_that_one_rank_uses_at_times(
    make: Callable[[], nn.Module], kind: Scheme[Any], uses: list[bool]
) -> tuple[list[str], list[float]]:
    """Returns the layouts of the table's gradients on this rank, and the table; rank 1 uses it in some steps only."""
    torch.manual_seed(0)
    model = make().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    specs = {name: TensorSpec.of(parameter) for name, parameter in model.named_parameters()}
    table, *others = sorted(specs, key=lambda name: name != "embedding.weight")
    plan = Plan.make(specs, dist.get_world_size(), [([table], kind), (others, AllReduce())])
    handle = attach(model, plan=plan)
    layouts = []
    for used in uses:
        if used or dist.get_rank() == 0:
            model(torch.randint(12, (3, 2))).square().mean().backward()
        else:
            model.other(torch.randn(2, 4).bfloat16()).mean().backward()
        layouts.append(str(model.embedding.weight.grad.layout))
        optimizer.step()
        optimizer.zero_grad()
    handle.detach()
    return layouts, model.embedding.weight.flatten().tolist()


@pytest.mark.parametrize("kind", [AllReduce(), BalancedParallelism()], ids=["flat", "rows"])
@pytest.mark.parametrize("uses", [[True, False, False], [False, True, False]])
@pytest.mark.parametrize("make", [FunctionalTie, Tied])
def test_all_ranks_get_gradients_of_one_layout(
    world: World, make: Callable[[], nn.Module], kind: Scheme[Any], uses: list[bool]
) -> None:
    """Else roundings of optimisers differ, or an optimiser that takes no sparse gradients raises on one rank alone."""
    (layouts, weights), other = world(2).run(train_with_a_table_that_one_rank_uses_at_times, make, kind, uses)
    assert (layouts, weights) == other and layouts == ["torch.strided"] * len(uses)


def train_with_a_table_that_is_dense_at_times() -> tuple[list[str], list[float]]:
    """Trains a table that no module announces as sparse; rank 1 adds a dense gradient in the second step."""
    torch.manual_seed(0)
    model = HiddenTable().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    specs = {name: TensorSpec.of(parameter) for name, parameter in model.named_parameters()}
    segments: list[tuple[list[str], Scheme[Any]]] = [(["table"], BalancedParallelism())]
    segments.append(([name for name in specs if name != "table"], AllReduce()))
    handle = attach(model, plan=Plan.make(specs, dist.get_world_size(), segments))
    layouts = []
    for step in range(3):
        loss = model(torch.randint(25, (4, 3))).square().mean()
        if step == dist.get_rank() == 1:
            loss = loss + model.table.square().mean()
        loss.backward()
        layouts.append(str(model.table.grad.layout))
        optimizer.step()
        optimizer.zero_grad()
    handle.detach()
    return layouts, model.table.flatten().tolist()


def test_a_table_that_is_dense_on_one_rank_is_sparse_as_on_the_others(world: World) -> None:
    (layouts, weights), other = world(2).run(train_with_a_table_that_is_dense_at_times)
    assert (layouts, weights) == other and layouts == ["torch.sparse_coo"] * 3


class Scaled(nn.Embedding):
    """A table with a further parameter of its own, whose gradients are dense."""

    def __init__(self) -> None:
        super().__init__(12, 4, sparse=True)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale


def layouts_of_a_table_beside_a_scale() -> tuple[str, str]:
    model = Scaled()
    handle = attach(model)
    model(torch.tensor([1, 2])).sum().backward()
    handle.detach()
    return str(model.weight.grad.layout), str(model.scale.grad.layout)


def attach_beside_tables_that_are_excluded() -> None:
    """Attaches a model that has another table on each rank, which is left alone."""
    model = nn.ModuleDict({"shared": nn.Linear(2, 2), f"expert_{dist.get_rank()}": nn.Embedding(50, 4, sparse=True)})
    attach(model, exclude=["expert_*"]).detach()


def test_only_the_tables_that_are_synchronised_count_as_sparse(world: World) -> None:
    assert world(2).run(layouts_of_a_table_beside_a_scale) == [("torch.sparse_coo", "torch.strided")] * 2
    world(2).run(attach_beside_tables_that_are_excluded)


def layouts_with_a_dense_gradient_at_times() -> list[str]:
    """Returns the layouts of a table under the default planner, which looks at the first two steps."""
    model = HiddenTable()
    handle = attach(model)
    layouts = []
    for step in range(4):
        model.zero_grad()
        loss = model(torch.randint(25, (4, 3))).square().mean()
        (loss + model.table.square().mean() if step == 1 else loss).backward()
        layouts.append(str(model.table.grad.layout))
    handle.detach()
    return layouts


def test_a_later_look_does_not_change_the_layout(world: World) -> None:
    assert world(2).run(layouts_with_a_dense_gradient_at_times) == [["torch.sparse_coo"] * 4] * 2


def gradient_in_own_memory() -> tuple[float, float]:
    """Returns the sums of the gradient and of the user's memory; the table is sparse on rank 0, dense on rank 1."""
    torch.manual_seed(0)
    model, memory = HiddenTable(), torch.zeros(25, 4)
    specs = {name: TensorSpec.of(parameter) for name, parameter in model.named_parameters()}
    handle = attach(model, plan=Plan.make(specs, dist.get_world_size(), [(list(specs), AllReduce())]))
    loss = model(torch.randint(25, (4, 3))).square().mean()
    if dist.get_rank() == 1:
        model.table.grad = memory
        loss = loss + model.table.square().mean()
    loss.backward()
    handle.detach()
    return float(model.table.grad.to_dense().sum()), float(memory.sum())


def test_memory_of_the_user_has_the_mean_where_the_gradient_becomes_sparse(world: World) -> None:
    (mean, _), (got, memory) = world(2).run(gradient_in_own_memory)
    assert got == mean and memory == pytest.approx(mean, abs=1e-5)
