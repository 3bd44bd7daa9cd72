"""Workloads train on a GPU over NCCL: ranks that share it are hosts of their own to NCCL, and others are not."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

from gradsync.cli import app
from gradsync_lab import workloads
from gradsync_lab.bench import card
from gradsync_lab.bench.card import OnCard, own_card

NCCL = ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE")


@pytest.mark.parametrize(
    ("cards", "ranks", "shares", "found"), [(1, 2, True, "cuda:0"), (2, 2, False, "cuda:1"), (2, 4, True, "cuda:1")]
)
def test_ranks_that_share_a_gpu_are_hosts_to_nccl(cards: int, ranks: int, shares: bool, found: str) -> None:
    with (
        patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "lan"}),
        patch.object(card.torch.cuda, "device_count", return_value=cards),
        patch.object(card.torch.cuda, "set_device") as current,
        patch.object(card.dist, "get_rank", return_value=1),
        patch.object(card.dist, "get_world_size", return_value=ranks),
    ):
        for name in NCCL:
            os.environ.pop(name, None)
        assert own_card() == torch.device(found)
        current.assert_called_once_with(torch.device(found))
        told = {name: os.environ[name] for name in NCCL if name in os.environ}
    assert told == (dict(zip(NCCL, ("rank 1", "lan", "1"), strict=True)) if shares else {})


def test_a_workload_on_a_device_is_the_same_workload() -> None:
    real = workloads.load("dense20")
    there = OnCard(real, torch.device("cpu"))
    losses = []
    for each in (real, there):
        model, batches = each.model(sparse=False, seed=3), each.batches(1, 2, 5)
        optimizer = each.optimizer(model)
        for _ in range(3):
            loss = each.loss(model, next(batches))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == losses[1] and there.batch_size == real.batch_size


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    command = ["bench", "train", "--workload", "dense20", "--methods", "ddp_default,gradsync", "--device", "cuda"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and "device cuda needs a GPU" in done.output


def test_emulated_computation_is_for_the_cpu() -> None:
    done = CliRunner().invoke(app, ["bench", "train", "--emulate-compute", "--device", "cuda"])
    assert done.exit_code == 2 and "for the CPU" in done.output


def test_the_grid_of_defaults_is_for_the_cpu() -> None:
    done = CliRunner().invoke(app, ["bench", "train", "--grid", "defaults", "--device", "cuda", "--json", "x.json"])
    assert done.exit_code == 2 and "leave out --device" in done.output
