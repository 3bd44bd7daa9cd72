"""Models in shards under Accelerate with gradsync on 2 x 2 ranks: parameters, checkpoints, clear errors."""

from __future__ import annotations

import importlib.util

import pytest

from tests.integrations.launching import LIMIT_S, Agent

RANKS = "accelerate_shards_ranks.py"
AGENT = Agent("accelerate", "torch.distributed.fsdp", "gradsync.integrations.accelerate")

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate: make integrations"),
    pytest.mark.timeout(2 * LIMIT_S),
]


def test_parameters_are_those_of_accelerate_alone() -> None:
    expected = {"difference": 0, "steps": 8, "replicas": 2, "metrics": True}
    assert AGENT.found(RANKS, "equal", ranks=4) == [expected] * 4


def test_a_job_goes_on_bit_by_bit_with_every_ranks_residuals() -> None:
    assert AGENT.found(RANKS, "resumed", ranks=4) == [{"difference": 0, "lossy": True}] * 4


def test_bad_input_is_refused_on_every_rank() -> None:
    for each in AGENT.found(RANKS, "refused", ranks=4):
        assert each["twice"].startswith("RuntimeError") and "call it once" in each["twice"]
        assert each["first version"].startswith("ValueError") and "fsdp_version=2" in each["first version"]
        assert each["no replicas"].startswith("ValueError") and "dp_replicate_size" in each["no replicas"]
        assert each["fp16"].startswith("ValueError") and "expected 'bf16' or 'no'" in each["fp16"]
        assert each["shared"].startswith("ValueError") and "communicator='shared'" in each["shared"]
