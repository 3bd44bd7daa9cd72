"""gradsync on a card trains as DDP does, over NCCL too, waits for nothing in steady steps, overlaps, and is ordered."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradsync.plans.profile import Profile
from tests.gpu import work
from tests.world import Ranks

World = Callable[[int], Ranks]

NAMES = [*work.EXACT, *work.LOSSY, *work.TABLES, "default"]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_on_one_card_train_as_ddp_does(world: World, card: str, name: str) -> None:
    (off, largest, first), (_, _, second) = world(2).run(work.beside_ddp, card, name, "attach", limit_s=110)
    assert first == second, "all ranks hold the same bits"
    if name in work.EXACT:
        assert off == 0.0
    elif name not in work.LOSSY:  # rows are added in another order
        assert off <= 1e-5 * largest


@pytest.mark.parametrize("frontend", ["class", "hook"])
def test_so_they_do_by_every_frontend(world: World, card: str, frontend: str) -> None:
    for off, _, _ in world(2).run(work.beside_ddp, card, "all_reduce", frontend, limit_s=110):
        assert off == 0.0


def test_a_job_on_the_card_is_measured_and_planned(world: World, card: str) -> None:
    (text, settled, first), (other, _, second) = world(2).run(work.planned, card, limit_s=110)
    assert settled and text == other and first == second
    profile = Profile.from_json(text)
    assert profile.device == card.partition(":")[0]
    if profile.device != "cpu":
        assert profile.card and profile.host is not None and profile.host.fetch.call_s.value > 0


def test_operations_run_on_nccl(world: World, card: str) -> None:
    assert world(1).run(work.operations, card) == [[True] * 5]


@pytest.mark.parametrize("name", ["all_reduce", "int8", "top_k", "powersgd"])
def test_steady_steps_wait_for_nothing(world: World, card: str, name: str) -> None:
    world(1).run(work.syncs_of_a_steady_step, card, name)


@pytest.mark.usefixtures("only_on_a_card")
def test_compression_overlaps_backward(world: World, card: str) -> None:
    ((shared_us, busiest_us),) = world(1).run(work.overlap_of_a_step, card)
    assert shared_us > 0.05 * busiest_us, f"{shared_us:.0f} of {busiest_us:.0f} us"


@pytest.mark.usefixtures("only_on_a_card")
def test_torch_s_sanitizer_finds_no_unordered_access(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.work", str(tmp_path / "rendezvous")],
        env=os.environ | {"TORCH_CUDA_SANITIZER": "1"}, check=False, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert run.returncode == 0 and "no fault was found" in run.stdout, run.stderr[-3000:]
    assert "CSAN" not in run.stderr and "possible race" not in run.stderr.lower(), run.stderr[-3000:]
