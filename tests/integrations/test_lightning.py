"""Lightning's Trainer and Fabric with gradsync: parameters as with DDP, checkpoints of all ranks, clear errors."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.launching import EXAMPLES, HERE, LIMIT_S, ROOT, Agent, loss, torchrun

RANKS = HERE / "lightning_ranks.py"
PAGE = ROOT / "docs" / "tutorials" / "lightning.md"
EXAMPLE = EXAMPLES / "lightning_trainer.py"
AGENT = Agent("lightning", "gradsync.integrations.lightning")

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning: make integrations"),
    pytest.mark.timeout(2 * LIMIT_S),
]

Results = dict[str, dict[str, Any]]


def results(printed: str) -> Results:
    found = (re.fullmatch(r"(\w+) (\{.*\})", line) for line in printed.splitlines())
    return {match[1]: json.loads(match[2]) for match in found if match}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def said(folder: Path) -> Results:
    """Returns what each scenario found; all run in one job, as importing Lightning takes most of a run's time."""
    return results(AGENT.launched(RANKS, str(folder)))


EQUAL = (
    "exact",
    "accumulation",
    "manual",
    "manual_accumulation",
    "idle",
    "freezing",
    "resume",
    "saved_after_fit",
    "nothing_left",
    "fit_twice",
    "fabric",
    "fabric_resume",
    "fabric_two_setups",
)


@pytest.mark.parametrize("name", EQUAL)
def test_parameters_are_those_of_ddp_or_of_the_run_without_interruption(said: Results, name: str) -> None:
    assert said[name]["difference"] == 0
    assert said[name]["apart"] == 0
    assert said[name]["moved"] > 0.01, "training changes parameters"


@pytest.mark.parametrize("name", ["accumulation", "manual_accumulation"])
def test_accumulation_over_two_halves_the_exchanges(said: Results, name: str) -> None:
    assert said[name]["steps"] == 8


def test_residuals_matter_where_resuming_is_tested(said: Results) -> None:
    assert said["resume"]["without"] > 1e-3
    assert said["resume"]["exact"] > 1e-3


def test_freezing_matters_and_is_the_same_in_manual_optimisation(said: Results) -> None:
    assert said["freezing"]["manual"] == 0 < said["freezing"]["matters"]


def test_a_module_with_several_models_is_saved_with_the_state_of_each(said: Results) -> None:
    assert said["fabric_two_setups"]["saved"] == ["model.first", "model.second"]


def test_only_fit_attaches_and_each_fit_anew(said: Results) -> None:
    assert said["fit_twice"]["none yet"]
    assert not said["fit_twice"]["left"]
    assert said["fit_twice"]["anew"]


def test_a_plan_of_parameters_ends_with_one_model(said: Results) -> None:
    assert said["averaging"]["what"] == "parameter"
    assert said["averaging"]["apart"] == 0


def test_the_callback_logs_metrics(said: Results) -> None:
    assert {"gradsync/sent_mb", "gradsync/exposed_ms", "gradsync/plan_changes", "gradsync/comparisons"} <= set(
        said["logging_of_metrics"]["heading"].split(",")
    )
    assert said["logging_of_metrics"]["rows"] == 4  # of 16 steps
    assert said["logging_of_metrics"]["plans"] == 2, "once in each of two runs, where Lightning logs"


def test_a_checkpoint_written_after_an_error_says_why_it_has_no_state(said: Results) -> None:
    assert said["exception"]["error"] == "RuntimeError: out of memory"
    assert "interrupted" in said["exception"]["saved"]["missing"]


def test_a_checkpoint_from_a_signal_handler_says_why_it_has_no_state(said: Results) -> None:
    assert "signal" in said["signal"]["saved"]["missing"]


def test_the_settled_plan_is_loaded(said: Results) -> None:
    assert said["settled_plan"] == {"settled at once": True, "same plan": True}


def test_another_number_of_ranks_continues(said: Results, folder: Path) -> None:
    assert said["saved_after_fit"], "this run saved"
    alone = results(AGENT.launched(RANKS, str(folder), "other_number_of_ranks", ranks=1))["other_number_of_ranks"]
    assert alone == {"ranks": 1, "steps": 16}  # the second epoch, with the batches of both


BAD = {
    "hook": "ValueError: GradsyncStrategy got ddp_comm_hook",
    "fabric hook": "ValueError: GradsyncFabricStrategy got ddp_comm_hook",
    "sharding": "TypeError: GradsyncStrategy got unknown arguments sharding_strategy",
    "sharding callback": "TypeError: GradsyncCallback logs what GradsyncStrategy exchanges, but the Trainer has",
    "other trainer": "ValueError: You selected an invalid strategy name",
    "other fabric": "ValueError: You selected an invalid strategy name",
    "setup": "RuntimeError: gradsync is attached to the model already, and GradsyncStrategy attaches to it by itself",
    "on_fit_start": "RuntimeError: gradsync is attached to this model",
    "wrapper": "ValueError: gradsync.DistributedDataParallel synchronises its model itself",
    "inner in ddp": "RuntimeError: the model is inside DistributedDataParallel",
    "no fit": "RuntimeError: GradsyncStrategy has no attachment yet",
    "another rank": "the part 'rank 1' is that of rank 0",
    "lacks a rank": "ValueError: loading of state: the checkpoint must have the parts of all ranks",
    "sharded model": "GradsyncShardedStrategy",
    "fabric setup": "ValueError: this plan averages parameters after the steps of one optimiser, got 0",
    "fabric wrapper": "RuntimeError: the model contains DistributedDataParallel at '_forward_module'",
    "fabric key": "ValueError: the key 'gradsync' of a checkpoint",
    "plan": "TypeError: plan must be",
    "optimisers": "ValueError: this plan averages parameters after the steps of one optimiser, got 2",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_on_every_rank(said: Results, name: str) -> None:
    assert BAD[name] in said["bad_input"][name]


def with_ddp(example: str) -> str:
    """Returns the example as it is without gradsync, by the first diff in the docs, backwards."""
    diff = re.search(r"```diff\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert diff, "the page shows the lines to change"
    lines = diff[1].splitlines()
    assert len([line for line in lines if line.startswith("+")]) <= 3
    removed, imported, added = lines[1], lines[0], lines[2]
    assert example.count(added[1:]) == 1, "the example has the page's line"
    assert imported[1:].split("import ")[1] in example
    return example.replace(added[1:], removed[1:])


def last_line(printed: str) -> str:
    return [line for line in printed.splitlines() if "held-out" in line][-1]


def test_the_example_equals_ddp_by_the_diff_in_the_docs(tmp_path: Path) -> None:
    theirs = tmp_path / "with_ddp.py"
    theirs.write_text(with_ddp(EXAMPLE.read_text(encoding="utf-8")), encoding="utf-8")
    ours = last_line(AGENT.launched(EXAMPLE, "exact"))
    assert ours == last_line(AGENT.launched(theirs, "exact", "ddp"))
    lossy = last_line(torchrun(EXAMPLE))
    assert ours != lossy
    assert loss(lossy) < loss(ours) + 0.05


@pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="needs pytorch-lightning")
def test_the_other_package_has_the_same_strategy() -> None:
    assert "ranks agree: True" in torchrun(HERE / "pytorch_lightning_ranks.py")


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 80
