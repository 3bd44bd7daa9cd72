"""Every training forward takes buffers from rank 0, whatever their kind, even when they change during training."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync.planner import AveragingPlanner
from gradsync.tuning.auto import AutoPlanner
from tests.frontends.twins import Twin, assert_same_on_all_ranks, compare_with_ddp
from tests.world import Ranks

World = Callable[[int], Ranks]


class Critic(nn.Module):
    """A critic with batch normalisation and a running mean on which gradients depend."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        self.register_buffer("scale", torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x) * self.scale
        return result


def several_forwards_before_one_backward() -> None:
    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        real, fake, third = (twin.model(torch.randn(8, 4)) for _ in range(3))
        (real.square() - fake + third * real).mean().backward()
        twin.optimizer.step()

    compare_with_ddp(Critic, step)


class Centred(nn.Module):
    """A network with a running mean that its training forward reads, as running normalisers and codebooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.3)
        result: Tensor = self.linear(x - self.mean)
        return result


def an_accumulation_gets_buffers_before_its_first_forward() -> None:
    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        most = 3 if number % 2 else 1 + dist.get_rank()  # as many forwards on all ranks, and as many as each has
        for micro in range(most):
            with nullcontext() if micro == most - 1 else twin.no_sync():
                twin.model(torch.randn(8, 4)).square().mean().backward()
        twin.optimizer.step()

    compare_with_ddp(Centred, step)


def a_buffer_that_training_writes_to_is_still_watched() -> None:
    """Autograd must still refuse a buffer that the module itself overwrites between forward and backward."""
    model = Critic()
    gradsync.attach(model, timeout=10)
    first = model(torch.randn(8, 4))
    model.scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first + model(torch.randn(8, 4))).sum().backward()


class Masked(nn.Module):
    """A module that registers a mask when it needs one, and replaces it by a larger one as inputs grow."""

    def __init__(self, *, normalises: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        if normalises:
            self.norm = nn.BatchNorm1d(1)
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or len(self.mask) < len(x):
            self.register_buffer("mask", torch.rand(len(x), 1), persistent=False)
        hidden = self.linear(x) * self.mask[: len(x)]
        result: Tensor = self.norm(hidden) if hasattr(self, "norm") else hidden
        return result


def buffers_that_appear_go_and_grow() -> None:
    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        if number == 4:
            twin.module.mask = None
        twin.model(torch.randn(4 + number, 4)).square().mean().backward()
        twin.optimizer.step()

    compare_with_ddp(Masked, step, steps=6)


def a_model_without_buffers_at_attach_keeps_later_ones_to_its_ranks() -> None:
    """Checks DDP's rule: a mask that one rank makes in an evaluation is not exchanged."""

    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        if number == 1 and dist.get_rank() == 0:
            with torch.no_grad():
                twin.module(torch.randn(9, 4))
        twin.model(torch.randn(4, 4)).square().mean().backward()
        twin.optimizer.step()

    compare_with_ddp(lambda: Masked(normalises=False), step)


def a_module_that_comes_brings_its_buffers() -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    gradsync.attach(model, timeout=10)
    model.append(nn.BatchNorm1d(3, affine=False))
    model[2].running_mean.fill_(1.0 + dist.get_rank())
    seen = []
    model[2].register_forward_pre_hook(lambda module, _: seen.append(module.running_mean.clone()))
    model(torch.randn(4, 3)).sum().backward()
    torch.testing.assert_close(seen[0], torch.ones(3))


def rows(rank: int) -> Tensor:
    return torch.arange(1.0, 7.0).view(2, 3) + 10 * rank


def compressed(rank: int, layout: torch.layout) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch's, that these layouts are in beta state
        return rows(rank).to_sparse(layout=layout)


KINDS: dict[str, Callable[[int], Tensor]] = {
    "slice": lambda rank: rows(rank)[:, ::2],
    "expanded": lambda rank: rows(rank)[:, :1].expand(2, 5),
    "one_expanded": lambda rank: torch.full((1,), 1.0 + rank).expand(4),
    "windows": lambda rank: rows(rank).flatten().unfold(0, 3, 1),
    "imag": lambda rank: torch.complex(rows(rank), -rows(rank)).imag,
    "real": lambda rank: torch.complex(rows(rank), -rows(rank)).real,
    "conjugate": lambda rank: torch.complex(rows(rank), -rows(rank)).conj(),
    "imag_of_conjugate": lambda rank: torch.complex(rows(rank), rows(rank)).conj().imag,
    "float8": lambda rank: rows(rank).to(torch.float8_e4m3fn),
    "uint16": lambda rank: rows(rank).to(torch.uint16),
    "coo": lambda rank: rows(rank).to_sparse(),
    "csr": lambda rank: compressed(rank, torch.sparse_csr),
    "csc": lambda rank: compressed(rank, torch.sparse_csc),
    "bool": lambda rank: rows(rank) > 5,
    "empty_expanded": lambda rank: torch.zeros(0, 1).expand(0, 3),
    "scalar": torch.tensor,
}


def plain(tensor: Tensor) -> Tensor:
    return tensor.to_dense().resolve_conj().resolve_neg().contiguous().to(torch.complex64)


def a_buffer_of_kind(kind: str) -> None:
    model = nn.Linear(3, 1)
    model.register_buffer("b", KINDS[kind](dist.get_rank()))
    gradsync.attach(model, timeout=10)
    assert torch.equal(plain(model.b), plain(KINDS[kind](0))), "at attach"
    for number in range(2):
        other = KINDS[kind](dist.get_rank() + number)
        if kind.endswith("expanded") or kind == "windows" or number:
            model.b = other  # replaced
        else:
            model.b.copy_(other)
        model(torch.ones(2, 3)).sum().backward()
        assert torch.equal(plain(model.b), plain(KINDS[kind](number))), f"in step {number}"


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_of_any_kind_are_rank_0s(world: World, kind: str) -> None:
    world(2).run(a_buffer_of_kind, kind)


def sparse_ones_that_fill_up() -> None:
    model = nn.Linear(3, 1)
    model.register_buffer("b", torch.eye(3).to_sparse())
    gradsync.attach(model, timeout=10)
    for number in range(3):
        model.b = (torch.tril(torch.ones(3, 3), number) * (1 + dist.get_rank())).to_sparse()
        model(torch.ones(2, 3)).sum().backward()
        assert torch.equal(model.b.to_dense(), torch.tril(torch.ones(3, 3), number))


def own(rank: int) -> nn.Module:
    model = nn.BatchNorm1d(3)
    model.register_buffer("queue", torch.full((2 + rank,), float(rank)))  # of another length on each rank
    return model


def excluded_buffers_are_each_ranks_own() -> None:
    for how in ("exclude", "pattern", "ignored", "none"):
        model = own(dist.get_rank())
        if how == "ignored":
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["queue"])
        exclude = {"exclude": ["queue"], "pattern": ["q*"]}.get(how, [])
        model.running_mean.fill_(float(dist.get_rank()))
        gradsync.attach(model, timeout=10, exclude=exclude, broadcast_buffers=how != "none")
        kept = float(dist.get_rank()) if how == "none" else 0.0
        assert float(model.running_mean[0]) == kept, how
        for _ in range(2):
            model(torch.randn(4, 3)).sum().backward()
            assert torch.equal(model.queue, torch.full((2 + dist.get_rank(),), float(dist.get_rank()))), how
        model.register_buffer("queue", torch.ones(5 + dist.get_rank()))
        model(torch.randn(4, 3)).sum().backward()


def parameters_that_ddp_ignores_are_left_alone() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
        return model

    torch.manual_seed(dist.get_rank())
    model = make()
    bias = model[0].bias.detach().clone()
    handle = gradsync.attach(model, timeout=10)
    model(torch.randn(2, 3)).sum().backward()
    assert torch.equal(model[0].bias, bias)
    assert all("0.bias" not in bucket.names for bucket in handle.plan.buckets)
    handle.detach()
    gradsync.attach(DistributedDataParallel(make()), timeout=10)


def buffers_left_alone_by_plans_of_parameters(how: str) -> None:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model.register_buffer("count", torch.tensor([rank]))
    model.register_buffer("queue", torch.full((2 + rank,), float(rank)))
    model[2].running_mean.fill_(float(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = {"exclude": ["count", "queue", "2.running_mean"]} if how == "exclude" else {"broadcast_buffers": False}
    handle = gradsync.attach(model, optimizer, AveragingPlanner(most_local_steps=1), timeout=15, **own)
    for _ in range(2):
        optimizer.zero_grad()
        model[1](model[0](torch.randn(4, 3))).square().sum().backward()
        optimizer.step()
    handle.consensus()
    assert model.count.tolist() == [rank] and model.queue.tolist() == [float(rank)] * (2 + rank)
    assert float(model[2].running_mean[0]) == rank
    if how == "exclude":
        assert_same_on_all_ranks({"mean": model[1].running_mean, "variance": model[1].running_var})
    handle.detach()


@pytest.mark.parametrize("how", ["exclude", "broadcast_buffers"])
def test_plans_of_parameters_leave_such_buffers_alone(world: World, how: str) -> None:
    world(2).run(buffers_left_alone_by_plans_of_parameters, how)


CASES = [
    several_forwards_before_one_backward,
    an_accumulation_gets_buffers_before_its_first_forward,
    a_buffer_that_training_writes_to_is_still_watched,
    buffers_that_appear_go_and_grow,
    a_model_without_buffers_at_attach_keeps_later_ones_to_its_ranks,
    a_module_that_comes_brings_its_buffers,
    sparse_ones_that_fill_up,
    excluded_buffers_are_each_ranks_own,
    parameters_that_ddp_ignores_are_left_alone,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(world: World, case: Callable[[], None]) -> None:
    world(2).run(case)


@pytest.mark.parametrize("case", [several_forwards_before_one_backward, buffers_that_appear_go_and_grow])
def test_three_ranks(world: World, case: Callable[[], None]) -> None:
    world(3).run(case)


def changed(kind: str) -> str:
    """Returns the error of a step after buffers have changed on one rank, or differently."""
    model = nn.BatchNorm1d(3)
    model.register_buffer("b", torch.zeros(4))
    gradsync.attach(model, timeout=6)
    model(torch.randn(4, 3)).sum().backward()
    rank = dist.get_rank()
    if kind == "not alike":
        model.b = torch.zeros(5 + rank)
    elif kind == "rank 0 only" and rank == 0:
        model.b = torch.zeros(1000)
    elif kind == "rank 1 only" and rank == 1:
        model.b = torch.zeros(1)
    elif kind == "gone on rank 1" and rank == 1:
        model.b = None
    elif kind == "sparse on rank 1":
        model.b = torch.zeros(4).to_sparse() if rank == 1 else torch.ones(5)
    elif kind == "names":
        model.register_buffer(f"c{rank}", torch.zeros(2))
    began_s = time.monotonic()
    try:
        for _ in range(2):
            model(torch.randn(4, 3)).sum().backward()
    except (RuntimeError, ValueError) as error:
        assert time.monotonic() - began_s < 8, "found before the timeout, or at it"
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("not alike", "the buffer 'b' is 5 float32 on rank 0 and 6 float32 on rank 1"),
        ("sparse on rank 1", "the buffer 'b' is 5 float32 on rank 0 and 4 float32 sparse_coo of 0 elements on rank 1"),
        ("names", "the buffer 'c0' is 2 float32 on rank 0 and not there on rank 1"),
        ("rank 0 only", "'b: 4 float32' became 'b: 1000 float32'; if not on all ranks, exclude=['b']"),
        ("rank 1 only", "'b: 4 float32' became 'b: 1 float32'; if not on all ranks, exclude=['b']"),
        ("gone on rank 1", "'b: 4 float32' became 'nothing'; if not on all ranks, exclude=['b']"),
    ],
)
def test_buffers_that_change_otherwise_on_the_ranks_raise_on_all(world: World, kind: str, text: str) -> None:
    for said in world(2).run(changed, kind):
        assert text in said and "exclude=[" in said, said


def attach_with(kind: str) -> str:
    model = nn.Linear(3, 1)
    with warnings.catch_warnings(action="ignore"):  # torch's, that nested tensors are a prototype
        made = rows(0).to("meta") if kind == "meta" else torch.nested.nested_tensor([rows(0), rows(1)])
    model.register_buffer("b", made)
    try:
        gradsync.attach(model, timeout=10)
    except ValueError as error:
        gradsync.attach(model, timeout=10, exclude=["b"]).detach()
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(("kind", "text"), [("meta", "is on the meta device"), ("nested", "(nested)")])
def test_what_cannot_be_broadcast_is_refused_with_the_remedy(world: World, kind: str, text: str) -> None:
    for said in world(2).run(attach_with, kind):
        assert said.startswith("the buffer 'b' is") and text in said and "exclude=['b']" in said, said


NOT_AVERAGED: dict[str, Callable[[], Tensor]] = {
    "share memory": lambda: torch.ones(1, 4).expand(3, 4),
    "share memory (expand)": lambda: torch.ones(1, dtype=torch.int64).expand(3),
    "is sparse (torch.sparse_coo)": lambda: torch.eye(3).to_sparse(),
    "is sparse (torch.sparse_csr)": lambda: compressed(0, torch.sparse_csr),
    "is of torch.float8_e4m3fn": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "is of torch.float8_e5m2": lambda: torch.ones(0).to(torch.float8_e5m2),
}


def averaged_with(kind: str) -> list[str]:
    """Returns what plans of parameters say of the buffer at attach; trains with it excluded."""
    said, planner = [], AveragingPlanner(most_local_steps=1)
    for plan in (planner, AutoPlanner(averaging=planner)):
        model = nn.Linear(3, 1)
        model.register_buffer("b", NOT_AVERAGED[kind]())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError) as raised:
            gradsync.attach(model, optimizer, plan, timeout=10)
        said.append(str(raised.value))
        handle = gradsync.attach(model, optimizer, plan, timeout=10, exclude=["b"])
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        handle.consensus()
        handle.detach()
    return said


@pytest.mark.parametrize("kind", NOT_AVERAGED)
def test_what_cannot_be_averaged_is_refused_with_the_remedy(world: World, kind: str) -> None:
    for said in world(2).run(averaged_with, kind):
        for text in said:
            assert text.startswith("the buffer 'b' ") and kind in text and "exclude=['b']" in text, text


def complex_ones_stay() -> None:
    model = nn.Linear(3, 1)
    model.register_buffer("b", torch.ones(1, dtype=torch.complex64).expand(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gradsync.attach(model, optimizer, AveragingPlanner(most_local_steps=1), timeout=10)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    handle.consensus()
    handle.detach()


def test_complex_buffers_pass_where_others_are_averaged(world: World) -> None:
    world(2).run(complex_ones_stay)
