"""Ray Train with gradsync on a real cluster of two workers: parameters as with DDP, checkpoints, clear errors."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.launching import EXAMPLES, HERE, LIMIT_S, ROOT, last_line, loss, parameters, without_gradsync

PAGE = ROOT / "docs" / "tutorials" / "ray.md"
EXAMPLE = EXAMPLES / "ray_train.py"
RAY_LIMIT_S = 2 * LIMIT_S  # Ray starts four or more processes for each job, one after the other
# Controllers look at their workers 20 times as often as by default: each report waits for that.
QUICK = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
NOISE = 0.009  # range of the held-out loss over 5 seeds (0.031 to 0.040), two ranks with whole gradients

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: make integrations"),
    pytest.mark.timeout(2 * RAY_LIMIT_S),
]


def run(script: Path, *arguments: str) -> str:
    """Returns what a script printed. Ray starts its workers; its files (also a token, in HOME) go when they have ended.

    The folder is not pytest's: its name would be too long for Ray's sockets.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        env = {**os.environ, "HOME": folder, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        env |= QUICK | {"RAY_AUTH_MODE": "token", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, str(script), *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=RAY_LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Returns what each scenario found; all run on one cluster, as starting it takes most of the time."""
    line = next(line for line in run(HERE / "ray_workers.py").splitlines() if line.startswith("FOUND "))
    result: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return result


def test_parameters_are_those_of_rays_ddp(found: dict[str, Any]) -> None:
    assert found["equal"]["difference"] == 0
    assert found["equal"]["with arguments"] == 0
    assert found["equal"]["apart"] == 0
    assert found["equal"]["moved"] > 0.01, "training changes parameters"
    assert found["equal"]["steps"] == 8, "two batches each are exchanged once"


def test_a_job_that_failed_goes_on_bit_by_bit(found: dict[str, Any]) -> None:
    assert 0 < found["failed"]["first"] <= 4, "the first attempt failed at 4"
    assert found["failed"]["after"] == found["without resuming"]["whole"]
    assert found["without resuming"]["lost"] > 1e-4, "residuals matter here"


def test_folders_of_ranks_are_merged_where_only_rank_0_reports_one(found: dict[str, Any]) -> None:
    states = [f"gradsync-rank-{rank}-of-2.safetensors" for rank in range(2)]
    assert found["failed"]["files"] == [*states, "training.pt"]
    assert found["asynchronous"] == [[*states, "of-rank-0"], [*states, "of-rank-0", "of-rank-1"]]


def test_fewer_workers_go_on(found: dict[str, Any]) -> None:
    assert found["fewer"]["ranks"] == 1
    assert found["fewer"]["first"] == 8


def test_metrics_of_gradsync_are_reported(found: dict[str, Any]) -> None:
    metrics = found["failed"]["metrics"]
    assert metrics["step"] == 8
    assert 0 < metrics["gradsync/sent_mb"] < 0.01
    assert {"gradsync/exposed_ms", "gradsync/plan_changes", "gradsync/comparisons"} <= metrics.keys()


def test_the_plan_is_logged_once(found: dict[str, Any]) -> None:
    assert found["failed"]["log"].count("gradsync's plan has settled:") == 1


BAD = {
    "fsdp": "ValueError: parallel_strategy must be 'ddp', got 'fsdp': for a model in shards call ray.train.torch.prep",
    "none": "ValueError: parallel_strategy must be 'ddp', got None: to attach yourself, call ray.train.torch.prepare",
    "twice": "ValueError: the model is in gradsync's DistributedDataParallel already",
    "by ray": "ValueError: the model is in torch's DistributedDataParallel already",
    "attached": "RuntimeError: gradsync is attached to this model",
    "sharded": "RuntimeError: FSDP models are not supported",
    "torchft": "ValueError: the model is in torchft's DistributedDataParallel already",
    "inside of torchft": "RuntimeError: torchft's DistributedDataParallel averages the gradients of this model",
    "no model": "TypeError: the model must be a torch.nn.Module",
    "other world": "RuntimeError: Ray Train has 4 workers, and the process group 2 ranks",
    "not attached": "ValueError: gradsync is not attached to the model that report() got",
    "elsewhere": "ValueError: report() writes this rank's state of gradsync to the checkpoint's folder",
    "no upload": "ValueError: with CheckpointUploadMode.NO_UPLOAD all ranks report the folder",
    "no state": "MissingStateError: ",
    "another rank": "ValueError: the part 'rank ",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_on_both_workers(found: dict[str, Any], name: str) -> None:
    for said in found["bad input"][name]:
        assert BAD[name] in said


def test_a_checkpoint_of_another_rank_than_0_only_is_refused(found: dict[str, Any]) -> None:
    nothing, said = found["bad input"]["rank 1 only"]
    assert nothing == "no error", "rank 0 reports no checkpoint; Ray ends it with rank 1"
    assert said.startswith("ValueError: rank 1 reports a checkpoint, and rank 0 does not")


def test_local_mode_without_a_process_group_is_refused(found: dict[str, Any]) -> None:
    assert found["local"].startswith("RuntimeError: Ray Train's local mode (num_workers=0) has no process group")


def test_the_example_equals_ddp_by_the_diff_in_the_docs(tmp_path: Path) -> None:
    theirs = without_gradsync(EXAMPLE, PAGE, tmp_path)
    exact, lossy = last_line(run(EXAMPLE, "exact")), last_line(run(EXAMPLE))
    assert exact == last_line(run(theirs, "exact"))
    assert parameters(lossy) != parameters(exact)
    assert loss(lossy) < loss(exact) + NOISE
