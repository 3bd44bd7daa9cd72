"""Simulated workers of a parameter server take turns in pushing gradients at the parameters that they pulled."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, RMSprop

from gradsync_lab.bench.asynchronous import Asynchronous
from gradsync_lab.bench.converge import training
from gradsync_lab.workloads import load


class Scales(nn.Module):
    """A model of three numbers and a normalisation that sees the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 4.0]))
        self.norm = nn.BatchNorm1d(1, affine=False, momentum=1.0)


class Quadratic:
    """A workload whose gradient is the model's parameters plus the worker's number.

    The workload records which worker takes a batch.
    """

    def __init__(self, kind: type[Optimizer] = SGD, **settings: Any) -> None:
        self.kind, self.settings = kind, {"lr": 0.5, **settings}
        self.turns: list[int] = []

    def model(self, *, sparse: bool, seed: int = 0) -> nn.Module:
        assert not sparse
        return Scales()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.kind(model.parameters(), **self.settings)

    def batches(self, rank: int, world_size: int, seed: int) -> Iterator[Tensor]:
        while True:
            self.turns.append(rank)
            yield torch.tensor(float(rank))

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        model.norm(torch.stack([batch - 1, batch + 1]).view(2, 1))
        return model.weight.square().sum() / 2 + batch * model.weight.sum()


def after(workload: Quadratic, steps: int, *, seed: int = 0, ranks: int = 3) -> Any:
    simulated = Asynchronous(workload, seed=seed, ranks=ranks)
    return next(islice(simulated.train(), steps - 1, None))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_are_those_where_their_worker_pulled_last(momentum: float) -> None:
    workload, ranks = Quadratic(momentum=momentum), 3
    model = after(workload, 6, ranks=ranks)
    served, velocity = Scales().weight.detach(), torch.zeros(3)
    pulled = [served] * ranks
    for worker in workload.turns:
        velocity = momentum * velocity + pulled[worker] + worker
        served = served - 0.5 / ranks * velocity
        pulled[worker] = served
    torch.testing.assert_close(model.weight.detach(), served)


def test_adagrad_has_the_sums_of_mean_gradients() -> None:
    """Adagrad's rate is not divided, but its gradients are."""
    workload, ranks = Quadratic(Adagrad, initial_accumulator_value=0.1), 3
    model = after(workload, 4, ranks=ranks)
    served, sums = Scales().weight.detach(), torch.full((3,), 0.1)
    pulled = [served] * ranks
    for worker in workload.turns:
        gradient = (pulled[worker] + worker) / ranks
        sums = sums + gradient.square()
        served = served - 0.5 * gradient / sums.sqrt()
        pulled[worker] = served
    torch.testing.assert_close(model.weight.detach(), served)


def test_a_step_is_a_push_of_each_worker_in_an_order_of_its_own_by_the_seed() -> None:
    def turns(seed: int) -> list[list[int]]:
        after(workload := Quadratic(), 8, seed=seed, ranks=4)
        return [workload.turns[start : start + 4] for start in range(0, len(workload.turns), 4)]

    steps = turns(0)
    assert len(steps) == 8 and all(sorted(step) == [0, 1, 2, 3] for step in steps)
    assert len(set(map(tuple, steps))) > 1
    assert turns(0) == steps != turns(1)


def test_statistics_of_normalisation_are_the_mean_of_the_workers() -> None:
    assert after(Quadratic(), 2, ranks=3).norm.running_mean == 1.0, "of 0, 1 and 2"


def test_one_worker_trains_as_one_rank() -> None:
    task = load("alexnet", data="digits", batch_size=8, learning_rate=0.01)
    alone = islice(training(task, "dense", seed=3, ranks=1), 3)
    for ours, theirs in zip(Asynchronous(task, seed=3, ranks=1).train(), alone, strict=False):
        for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, expected)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="by SGD, Adagrad, Adam, AdamW; got RMSprop"):
        Asynchronous(Quadratic(RMSprop), seed=0, ranks=2)
