"""TorchRec with gradsync for what it does not shard: parameters as with its own wrapper, checkpoints, clear errors."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.launching import (
    EXAMPLES,
    HERE,
    LIMIT_S,
    ROOT,
    Agent,
    found_in,
    last_line,
    loss,
    parameters,
    torchrun,
    without_gradsync,
)

PAGE = ROOT / "docs" / "tutorials" / "torchrec.md"
EXAMPLE = EXAMPLES / "torchrec_tables.py"
AGENT = Agent("torchrec", "gradsync.integrations.torchrec")
NOISE = 0.007  # range of the held-out loss over 5 seeds (0.022 to 0.030) with whole gradients

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="needs torchrec: make integrations"),
    pytest.mark.timeout(4 * LIMIT_S),
]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Returns what each scenario found; all run in one job, as importing TorchRec takes most of the time."""
    result: dict[str, Any] = found_in(AGENT.launched(HERE / "torchrec_ranks.py"))
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


def test_the_example_equals_torchrecs_wrapper_by_the_diff_in_the_docs(tmp_path: Path) -> None:
    theirs = without_gradsync(EXAMPLE, PAGE, tmp_path)
    exact, lossy = last_line(AGENT.launched(EXAMPLE, "exact")), last_line(torchrun(EXAMPLE))
    assert exact == last_line(AGENT.launched(theirs, "exact"))
    assert parameters(lossy) != parameters(exact)
    assert loss(lossy) < loss(exact) + NOISE
