"""Hugging Face's Trainer with gradsync on two ranks: parameters as with DDP, residuals in checkpoints, clear errors."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.launching import (
    EXAMPLES,
    LIMIT_S,
    ROOT,
    Agent,
    last_line,
    loss,
    parameters,
    torchrun,
    without_gradsync,
)

RANKS = "transformers_ranks.py"
AGENT = Agent(
    "transformers.trainer",
    "transformers.trainer_seq2seq",
    "transformers.models.bert.modeling_bert",
    "transformers.models.t5.modeling_t5",
    "gradsync.integrations.transformers",
)
PAGE = ROOT / "docs" / "tutorials" / "hf-trainer.md"
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
    for each in AGENT.found(RANKS, "equal"):
        assert each["difference"] == 0 and each["apart"] == 0
        assert each["moved"] > 0.01, "training changes parameters"
        assert each["steps"] == 8, "two batches each are exchanged once"
        assert each["evaluated"], "evaluation returns the same numbers, the epoch among them"
        assert each["logged"] == [[f"gradsync/{name}" for name in METRICS]] * 2


def test_training_again_and_trials_go_through_gradsync() -> None:
    for each in AGENT.found(RANKS, "again"):
        assert each == {"difference": 0, "steps": 16, "of a trial": 8}


def test_sequences_are_trained_and_generated() -> None:
    for each in AGENT.found(RANKS, "translated"):
        assert each == {"difference": 0, "attached": True, "predicted": 512}


def test_a_job_goes_on_bit_by_bit_with_every_ranks_residuals() -> None:
    for rank, each in enumerate(AGENT.found(RANKS, "resumed")):
        assert each["difference"] == 0 and each["apart"] == 0
        assert "lacks gradsync-rank-1-of-2.safetensors" in each["told"], f"rank {rank}"
        assert each["anew"] == [True, 0], "residuals matter; a checkpoint without them is loaded"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transformers")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """Returns what each rank found in scenarios of one launch; the first one saves into `folder`."""
    return AGENT.found(RANKS, "resized+alone+varied+compiled", str(folder))


@pytest.fixture(scope="module")
def with_packages() -> list[dict[str, Any]]:
    """Returns what each rank found in scenarios that need packages beside transformers."""
    if missing := [name for name in ("optuna", "peft") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {' and '.join(missing)}: make integrations")
    return AGENT.found(RANKS, "adapted+searched")


def test_other_ways_of_training_end_with_the_parameters_of_the_trainers_ddp(found: list[dict[str, Any]]) -> None:
    for each in found:
        ways = each["varied"]
        equal = {name: (way["difference"], way["apart"]) for name, way in ways.items()}
        assert equal == dict.fromkeys(("best", "smaller batch", "new model", "bf16"), (0, 0))
        assert ways["best"]["steps"] == [4, 8], "early stopping ended both"
        assert (ways["smaller batch"]["steps"], ways["smaller batch"]["batch"]) == ([8], 7)
        assert (ways["new model"]["steps"], ways["bf16"]["steps"]) == ([8, 8], [8])


def test_errors_of_one_rank_alone_end_all(found: list[dict[str, Any]]) -> None:
    first, second = (each["alone"] for each in found)
    assert first["memory"].startswith("GroupError") and "rank 1 did not come this far" in first["memory"]
    assert second["memory"].startswith("GroupError") and "start with one that fits on every rank" in second["memory"]
    assert first["callback"].startswith("GroupError") and "rank 1 did not come this far" in first["callback"]
    assert second["callback"] == "ValueError: an error of the user's"


def test_a_compiled_model_is_trained_and_one_without_ddp_refused(found: list[dict[str, Any]]) -> None:
    for each in found:
        compiled = each["compiled"]
        assert compiled["difference"] == 0 and compiled["apart"] == 0 and compiled["steps"] == [8, 16]
        assert compiled["third"].startswith("RuntimeError") and "exchanged nothing" in compiled["third"]


def test_more_ranks_go_on_with_the_residuals_of_fewer(folder: Path, found: list[dict[str, Any]]) -> None:
    saved = [each["resized"]["owed"] for each in found]
    loaded = AGENT.found(RANKS, "resized", str(folder), ranks=3)
    assert sum(each["owed"] for each in loaded) == pytest.approx(sum(saved), rel=1e-6)
    assert all(saved)
    assert [(each["apart"], each["steps"]) for each in loaded] == [(0, 4)] * 3


def test_one_process_says_that_it_drops_the_residuals_of_more(folder: Path, found: list[dict[str, Any]]) -> None:
    assert all(each["resized"]["owed"] for each in found)
    (only,) = AGENT.found(RANKS, "dropped", str(folder), ranks=1)
    assert not only["attached"]
    alone, dropped = only["told"]
    assert "there is one process" in alone
    assert str(folder / "checkpoint-4" / "gradsync") in dropped and "it drops them" in dropped


def test_adapters_of_a_frozen_model_are_trained_and_resumed(with_packages: list[dict[str, Any]]) -> None:
    for each in with_packages:
        assert each["adapted"] == {"difference": 0, "apart": 0, "steps": [8], "batch": 8, "resumed": 0}


def test_trials_of_a_search_go_through_gradsync_and_pruning_is_refused_on_every_rank(
    with_packages: list[dict[str, Any]],
) -> None:
    for each in with_packages:
        searched = each["searched"]
        assert searched["difference"] == 0 and searched["of trials"] and searched["same best"]
        assert searched["steps"][:2] == [8, 8]
        assert searched["pruned"].startswith("RuntimeError") and "NopPruner()" in searched["pruned"]


def test_bad_input_is_refused_on_every_rank() -> None:
    for each in AGENT.found(RANKS, "refused"):
        assert each["sharded"].startswith("ValueError") and "the Trainer shards the model (FSDP)" in each["sharded"]
        assert each["late"].startswith("RuntimeError") and "before it" in each["late"]
        assert each["twice"].startswith("RuntimeError") and "call it once" in each["twice"]
        assert each["model"].startswith("TypeError") and "expected a transformers.Trainer" in each["model"]
        assert each["elsewhere"].startswith("RuntimeError") and "did not wrap the model" in each["elsewhere"]
        assert each["evaluated"].startswith("RuntimeError") and "evaluate() or predict()" in each["evaluated"]
        assert "attach(ddp_model)" in each["inner"]


def test_the_example_equals_ddp_by_the_diff_in_the_docs(tmp_path: Path) -> None:
    theirs = without_gradsync(EXAMPLE, PAGE, tmp_path)
    exact, lossy = last_line(AGENT.launched(EXAMPLE, "--exact")), last_line(torchrun(EXAMPLE))
    assert exact == last_line(AGENT.launched(theirs, "--exact"))
    assert parameters(exact) != parameters(lossy)
    assert loss(lossy) < loss(exact) + NOISE
