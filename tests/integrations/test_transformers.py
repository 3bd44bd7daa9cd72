"""Hugging Face's Trainer with gradsync on two ranks: parameters as with DDP, residuals in checkpoints, clear errors."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.integrations.launching import (
    EXAMPLES,
    LIMIT_S,
    ROOT,
    last_line,
    launched,
    loss,
    on_ranks,
    parameters,
    without_gradsync,
)

RANKS = "transformers_ranks.py"
PAGE = ROOT / "docs" / "hf-trainer.md"
EXAMPLE = EXAMPLES / "hf_trainer.py"
NOISE = 0.012  # range of the held-out loss over 5 seeds (0.016 to 0.028), two ranks with whole gradients
METRICS = ("communication_ms", "comparisons", "differences", "exposed_ms", "plan_changes", "sent_mb")

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="needs transformers: make integrations"
    ),
    pytest.mark.timeout(2 * LIMIT_S),
]


def test_parameters_are_those_of_the_trainers_ddp() -> None:
    for each in on_ranks(RANKS, "equal"):
        assert each["difference"] == 0 and each["apart"] == 0
        assert each["moved"] > 0.01, "training changes parameters"
        assert each["steps"] == 8, "two batches each are exchanged once"
        assert each["evaluated"], "evaluation returns the same numbers, the epoch among them"
        assert each["logged"] == [[f"gradsync/{name}" for name in METRICS]] * 2


def test_training_again_and_trials_go_through_gradsync() -> None:
    for each in on_ranks(RANKS, "again"):
        assert each == {"difference": 0, "steps": 16, "of a trial": 8}


def test_sequences_are_trained_and_generated() -> None:
    for each in on_ranks(RANKS, "translated"):
        assert each == {"difference": 0, "attached": True, "predicted": 512}


def test_a_job_goes_on_bit_by_bit_with_every_ranks_residuals() -> None:
    for rank, each in enumerate(on_ranks(RANKS, "resumed")):
        assert each["difference"] == 0 and each["apart"] == 0
        assert "lacks gradsync-rank-1-of-2.safetensors" in each["told"], f"rank {rank}"
        assert each["anew"] == [True, 0], "residuals matter; a checkpoint without them is loaded"


def test_bad_input_is_refused_on_every_rank() -> None:
    for each in on_ranks(RANKS, "refused"):
        assert each["late"].startswith("RuntimeError") and "before it" in each["late"]
        assert each["twice"].startswith("RuntimeError") and "call it once" in each["twice"]
        assert each["model"].startswith("TypeError") and "expected a transformers.Trainer" in each["model"]
        assert each["elsewhere"].startswith("RuntimeError") and "did not wrap the model" in each["elsewhere"]
        assert each["evaluated"].startswith("RuntimeError") and "evaluate() or predict()" in each["evaluated"]
        assert "attach(ddp_model)" in each["inner"]


def test_the_example_equals_ddp_by_the_diff_in_the_docs(tmp_path: Path) -> None:
    theirs = without_gradsync(EXAMPLE, PAGE, tmp_path)
    exact, lossy = last_line(launched(EXAMPLE, "--exact")), last_line(launched(EXAMPLE))
    assert exact == last_line(launched(theirs, "--exact"))
    assert parameters(exact) != parameters(lossy)
    assert loss(lossy) < loss(exact) + NOISE
