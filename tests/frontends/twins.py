"""Two copies of one model on each rank: one under torch's DDP, the oracle, one with gradsync attached."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from tests.world import new_oracle_group

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Oracle(DistributedDataParallel):
    """DDP of torch 2.13 in its broadcast of buffers: torch 2.11 allows one forward before a backward only."""

    def _sync_buffers(self) -> None:
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.modules_buffers)):
            super()._sync_buffers()


@dataclass
class Twin:
    """One of the two copies, with what a training loop needs."""

    module: nn.Module  # the user's own model
    model: nn.Module  # what is called: the same, or DDP around it
    optimizer: torch.optim.Optimizer
    no_sync: Callable[[], AbstractContextManager[None]]
    handle: gradsync.Attachment | None = None  # None: this is the oracle

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in self.module.named_parameters()}


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def plain(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def make_twins(
    make: Callable[[], nn.Module],
    *,
    optimizer: Optimizers = plain,
    options: dict[str, Any] | None = None,
    **ddp_options: Any,
) -> tuple[Twin, Twin]:
    """Returns (the oracle, ours), with initial weights that differ between ranks until wrapping broadcasts them."""
    torch.manual_seed(dist.get_rank())
    module = make()
    ddp = Oracle(module, process_group=new_oracle_group(), **ddp_options)
    oracle = Twin(module, ddp, optimizer(list(module.parameters())), ddp.no_sync)
    torch.manual_seed(dist.get_rank())
    module = make()
    handle = gradsync.attach(module, **{"timeout": 15, **(options or {})})
    return oracle, Twin(module, module, optimizer(list(module.parameters())), handle.no_sync, handle)


Step = Callable[[Twin, int], None]


def compare_with_ddp(
    make: Callable[[], nn.Module], step: Step, *, steps: int = 4, **settings: Any
) -> tuple[Twin, Twin]:
    """Runs `step(twin, number)` on both, each with the same random numbers, and compares after every step."""
    twins = make_twins(make, **settings)
    follow(twins, step, steps=steps)
    detach(twins)


def follow(twins: tuple[Twin, Twin], step: Step, *, steps: int) -> None:
    """Steps with both, comparing gradients after every step and weights at the end."""
    for number in range(steps):
        for twin in twins:
            torch.manual_seed(1000 * number + dist.get_rank())
            step(twin, number)
        assert_same_gradients(twins[0].gradients(), twins[1].gradients(), f"after step {number}")
    assert_same_weights(*twins)


def detach(twins: tuple[Twin, Twin]) -> None:
    if twins[1].handle is not None:
        twins[1].handle.detach()


def assert_same_gradients(theirs: dict[str, Tensor | None], ours: dict[str, Tensor | None], when: str) -> None:
    """Asserts None where the oracle has None, the same layout, and values to `tolerance_for` these models."""
    tolerance = tolerance_for(theirs)
    assert theirs.keys() == ours.keys()
    for name, expected in theirs.items():
        got = ours[name]
        where = f"{name} {when}"
        assert (got is None) == (expected is None), f"{where}: expected {expected}, got {got}"
        if expected is None or got is None:
            continue
        assert got.layout is expected.layout, f"{where}: layout {got.layout}, expected {expected.layout}"
        assert got.dtype is expected.dtype, f"{where}: {got.dtype}, expected {expected.dtype}"
        if got.layout is torch.strided:
            assert got.stride() == expected.stride(), f"{where}: {got.stride()}, expected {expected.stride()}"
        torch.testing.assert_close(
            got.to_dense(), expected.to_dense(), equal_nan=True, msg=lambda text, at=where: f"{at}: {text}", **tolerance
        )


def tolerance_for(gradients: dict[str, Tensor | None]) -> dict[str, float]:
    """Returns None on two ranks, as a + b == b + a; else tolerances, as sums depend on order."""
    sparse = any(g is not None and g.layout is not torch.strided for g in gradients.values())
    rounded = sparse or dist.get_world_size() > 2
    return {"rtol": 1e-5, "atol": 1e-6} if rounded else {"rtol": 0, "atol": 0}


def assert_same_weights(theirs: Twin, ours: Twin) -> None:
    expected = theirs.module.state_dict()
    got = ours.module.state_dict()
    tolerance = tolerance_for(theirs.gradients())
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, equal_nan=True, msg=lambda t, n=name: f"{n}: {t}", **tolerance)
    assert_same_on_all_ranks(dict(ours.module.named_parameters()))


def assert_same_on_all_ranks(tensors: dict[str, Tensor | None]) -> None:
    """Asserts that all ranks have the same tensors, bit by bit."""
    for name, tensor in tensors.items():
        present = torch.tensor([float(tensor is not None)])
        dist.all_reduce(present)
        assert float(present) in (0.0, dist.get_world_size()), f"{name} is None on some ranks only"
        if tensor is None:
            continue
        mine = tensor.detach().to_dense().contiguous()
        first = mine.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(torch.nan_to_num(mine), torch.nan_to_num(first)), f"{name} differs from rank 0's"


def averaged(gradient: Tensor) -> Tensor:
    """Returns the dense mean over the ranks: the oracle where DDP has none."""
    total = gradient.detach().to_dense().clone() / dist.get_world_size()
    dist.all_reduce(total)
    return total
