"""The memory that the default sparse schemes take beside messages and result: a quarter of the messages, a bitmap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsync.comm import Ledger, LocalGroup, RecordingGroup, drive, run_local
from gradsync.schemes import BalancedElements, BalancedParallelism
from gradsync.tensors.density import profile_rows
from gradsync.tensors.sparse import SparseRows
from gradsync_lab.bench.memory import peak_bytes


def peak_and_traffic(scheme: Any, tensors: list[Any]) -> list[tuple[int, int]]:
    """Per rank: the peak beside its input, and the bytes of messages that it sent or got, of equal sizes here."""
    taken: dict[int, tuple[int, int]] = {}

    def synchronize(group: LocalGroup) -> None:
        ledger = Ledger()
        recording, x = RecordingGroup(group, ledger), tensors[group.rank]
        given = [x] if isinstance(x, torch.Tensor) else [x[0].indices, x[0].values]
        peak = peak_bytes(lambda: drive(scheme.synchronize(x, {}, recording, 1.0), timeout_s=20), given)
        taken[group.rank] = peak, 2 * ledger.sent_bytes

    run_local(len(tensors), synchronize)
    return [taken[rank] for rank in range(len(tensors))]


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "by sizes"])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.05, 0.1])
@pytest.mark.parametrize("size", [4, 8])
def test_balanced_elements_take_a_bitmap_beside_their_messages(size: int, density: float, planned: bool) -> None:
    numel, generator = 1 << 18, torch.Generator().manual_seed(0)
    chosen = [torch.rand(numel, generator=generator) < density for _ in range(size)]
    tensors = [torch.where(mask, torch.randn(numel, generator=generator), torch.zeros(())) for mask in chosen]
    profile = profile_rows([mask.nonzero().flatten() for mask in chosen], numel)
    scheme = BalancedElements().planned_for([profile]) if planned else BalancedElements()
    for peak, traffic in peak_and_traffic(scheme, tensors):
        assert peak <= 1.25 * traffic + numel / 8


@pytest.mark.parametrize("dim", [16, 128])
def test_balanced_parallelism_takes_less_than_messages_and_result(dim: int) -> None:
    size, num_rows, generator = 4, 50_000, torch.Generator().manual_seed(0)
    lists = [(torch.rand(2000, generator=generator) ** 3 * num_rows).long() for _ in range(size)]
    tables = [(SparseRows(indices, torch.randn(len(indices), dim), num_rows),) for indices in lists]
    profile = profile_rows(lists, num_rows)
    result = torch.cat(lists).unique().numel() * (8 + 4 * dim)
    for peak, traffic in peak_and_traffic(BalancedParallelism().planned_for([profile]), tables):
        assert peak <= 1.25 * traffic + num_rows / 8 + result
