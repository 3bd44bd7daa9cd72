"""Helpers that open and train a workload, for the tests of all workloads."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any, TypeVar

import pytest
import torch

from gradsync_lab.workloads import DataUnavailableError, Workload, load

W = TypeVar("W", bound=Workload)


def opened(kind: type[W], **options: Any) -> W:
    """Returns the open workload of this class."""
    workload = load(kind.name, **options)
    assert isinstance(workload, kind)
    return workload


def opened_or_skip(kind: type[W]) -> W:
    """Returns the open workload on its real data; without them the test is skipped, with the reason."""
    try:
        return opened(kind)
    except DataUnavailableError as error:
        pytest.skip(f"needs the real data of {kind.name}: {error}")


def train(workload: Workload, steps: int, *, sparse: bool) -> tuple[Any, list[float]]:
    """Returns the model after `steps` steps of one rank, and the losses."""
    model = workload.model(sparse=sparse)
    optimizer = workload.optimizer(model)
    losses = []
    for batch in islice(workload.batches(0, 1, seed=0), steps):
        optimizer.zero_grad()
        loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def assert_trains_alike(workload: Workload, steps: int, *, losses_within: float, weights_within: float) -> None:
    """Asserts that training with sparse and with dense gradients of tables gives the same losses and weights."""
    (sparse_model, sparse_losses), (dense_model, dense_losses) = (
        train(workload, steps, sparse=sparse) for sparse in (True, False)
    )
    assert sparse_losses == pytest.approx(dense_losses, abs=losses_within)
    for (name, one), (_, other) in zip(sparse_model.named_parameters(), dense_model.named_parameters(), strict=True):
        named = partial("{}: {}".format, name)
        torch.testing.assert_close(one, other, rtol=0, atol=weights_within, msg=named)
