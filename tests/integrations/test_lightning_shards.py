"""Models in shards under Lightning's Trainer with gradsync on 2 x 2 ranks: parameters, checkpoints, clear errors."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.launching import HERE, LIMIT_S, Agent

AGENT = Agent("lightning", "torch.distributed.fsdp", "gradsync.integrations.lightning")
Results = dict[str, dict[str, Any]]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning: make integrations"),
    pytest.mark.timeout(2 * LIMIT_S),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Returns what the scenarios found, by name."""
    folder: Path = tmp_path_factory.mktemp("lightning_shards")
    printed = AGENT.launched(HERE / "lightning_shards_ranks.py", str(folder), ranks=4)
    lines = [line.partition(" ") for line in printed.splitlines()]
    return {name: json.loads(text) for name, _, text in lines if name in ("exact", "resumed", "refused")}


def test_parameters_are_those_of_lightnings_own_strategy(said: Results) -> None:
    assert said["exact"] == {"plain": [0, 8], "accumulated": [0, 8]}


@pytest.mark.parametrize("kept_as", ["folder", "file"])
def test_a_job_goes_on_bit_by_bit_with_every_ranks_residuals(said: Results, kept_as: str) -> None:
    assert said["resumed"][kept_as] == 0 < said["resumed"]["lossy"]


def test_a_checkpoint_of_lightnings_own_strategy_is_gone_on_with(said: Results) -> None:
    assert said["resumed"]["plain"] == 0


def test_a_checkpoint_without_state_leaves_none_of_the_one_that_it_replaces(said: Results) -> None:
    assert said["resumed"]["replaced"] == [True, False]


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("nothing", "ValueError: GradsyncShardedStrategy: configure_model() of Module left no module in shards"),
        ("two roots", "left 'net.0', 'net.2' in shards, and nothing around them"),
        ("outside", "'scale' is a parameter of Module outside of 'net'"),
        ("no replicas", "the model is on a mesh of shards only"),
        ("early", "RuntimeError: GradsyncShardedStrategy has no attachment yet"),
        ("unknown", "TypeError: "),
    ],
)
def test_bad_input_raises_on_every_rank(said: Results, way: str, text: str) -> None:
    assert text in said["refused"][way]
