"""TorchRec with gradsync for what it does not shard: parameters as with its own wrapper, checkpoints, clear errors."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "torchrec.md"
EXAMPLE = ROOT / "examples" / "frameworks" / "torchrec_tables.py"
NOISE = 0.007  # range of the held-out loss over 5 seeds (0.022 to 0.030) with whole gradients
LIMIT_S = 200

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="needs torchrec: make integrations"),
    pytest.mark.timeout(4 * LIMIT_S),
]


def launched(script: Path, *arguments: str) -> str:
    """Returns the last line that two ranks of a script printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Returns what each scenario found; all run in one job, as importing TorchRec takes most of the time."""
    result: dict[str, Any] = json.loads(launched(HERE / "torchrec_ranks.py").removeprefix("FOUND "))
    return result


def test_parameters_and_tables_are_those_of_torchrecs_wrapper(found: dict[str, Any]) -> None:
    assert found["equal"]["difference"] == 0
    assert found["equal"]["apart"] == 0
    assert found["equal"]["moved"] > 0.01, "training changes parameters"
    assert found["equal"]["tables moved"] > 1e-3, "and tables"
    assert found["equal"]["keys"], "checkpoints have the same keys"


def test_only_unsharded_parameters_are_exchanged(found: dict[str, Any]) -> None:
    names = found["equal"]["names"]
    assert names == sorted(f"network.{layer}.{kind}" for layer in (0, 1, 3) for kind in ("bias", "weight"))
    assert found["equal"]["steps"] == 8


def test_nothing_is_attached_where_nothing_is_left(found: dict[str, Any]) -> None:
    assert found["only tables"]


def test_a_job_goes_on_bit_by_bit(found: dict[str, Any]) -> None:
    assert found["resume"]["difference"] == 0
    assert found["resume"]["lost"] > 1e-3, "residuals matter here"


BAD = {
    "ddp": "got one in torch's DistributedDataParallel already",
    "ours": "got one in gradsync's DistributedDataParallel already",
    "attached": "RuntimeError: gradsync is attached to this model",
    "torchft": "got one in torchft's DistributedDataParallel already",
    "inside of torchft": "RuntimeError: torchft's DistributedDataParallel averages the gradients of this model",
    "no group": "RuntimeError: this ShardingEnv has no process group",
    "buffers": "ValueError: GradsyncWrapper got forward_sync_buffers",
    "unknown": "TypeError: DistributedDataParallel.__init__() got an unexpected keyword argument 'shards'",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_on_both_ranks(found: dict[str, Any], name: str) -> None:
    for said in found["bad input"][name]:
        assert BAD[name] in said


def without_gradsync(example: str) -> str:
    """Returns the example as it is without gradsync, by the first diff in the docs, backwards."""
    diff = re.search(r"```diff\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert diff, "the page shows the lines to change"
    assert len(re.findall(r"^\+", diff[1], re.MULTILINE)) <= 3
    for line in diff[1].splitlines():
        if line.startswith("+"):
            assert example.count(line[1:]) == 1, f"the example has the page's line {line[1:]!r}"
    imported, wrapped, removed = (line[1:] for line in diff[1].splitlines())
    return example.replace(imported + "\n", "").replace(wrapped, removed)


def loss(line: str) -> float:
    return float(re.findall(r"loss ([0-9.]+)", line)[0])


def test_the_example_equals_torchrecs_wrapper_by_the_diff_in_the_docs(tmp_path: Path) -> None:
    theirs = tmp_path / "without.py"
    theirs.write_text(without_gradsync(EXAMPLE.read_text(encoding="utf-8")), encoding="utf-8")
    exact = launched(EXAMPLE, "exact")
    assert exact == launched(theirs, "exact")
    lossy = launched(EXAMPLE)
    assert lossy != exact
    assert loss(lossy) < loss(exact) + NOISE


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 80
