"""The fuzzer finds faults: each planted one makes a case fail that has no problems without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gradsync.comm import RecordingGroup
from gradsync.compressors import ErrorFeedback
from gradsync.compressors.feedback import RESIDUAL
from gradsync.engine.engine import Engine
from gradsync.engine.guard import ParameterGuard
from gradsync.schemes import AllReduce, BalancedParallelism
from gradsync_lab.fuzz.case import BucketCase, Case, Part, Spot
from gradsync_lab.fuzz.threads import judged

WEIGHT, BIAS = ("parts.mlp0.layers.0.weight", 0, 16), ("parts.mlp0.layers.0.bias", 0, 4)
TABLE = ("parts.table1.table.weight", 0, 32)
FEEDBACK = {"error_feedback": {"compressor": {"top_k": {"ratio": 0.25}}}}
CASE = Case(
    seed=0,
    size=3,
    steps=4,
    parts=(Part(key="mlp0", kind="mlp"), Part(key="table1", kind="table", sparse=True)),
    buckets=(
        BucketCase(segments=(WEIGHT,), scheme={"compressed_all_gather": {"compressor": FEEDBACK}}),
        BucketCase(segments=(BIAS,), scheme={"all_reduce": {}}),
        BucketCase(segments=(TABLE,), scheme={"balanced_parallelism": {}}),
    ),
)
SEEN = "the guard did not see"


def scaled_wrong(original: Any) -> Any:
    async def synchronize(self: AllReduce, x: Tensor, state: Any, group: Any, scale: float) -> Any:
        return await original(self, x, state, group, scale * (1 + 3e-5))

    return synchronize


def differs_by_rank(original: Any) -> Any:
    async def synchronize(self: AllReduce, x: Tensor, state: Any, group: Any, scale: float) -> Any:
        result, state = await original(self, x, state, group, scale)
        result[0] = torch.nextafter(result[0], result[0] + group.rank)
        return result, state

    return synchronize


def loses_a_residual(original: Any) -> Any:
    def compress(self: ErrorFeedback[Any], x: Tensor, state: Any) -> Any:
        payload, following = original(self, x, state)
        following.elements[RESIDUAL][-1] = 0.0
        return payload, following

    return compress


def loses_rows(original: Any) -> Any:
    async def synchronize(self: Any, x: Any, state: Any, group: Any, scale: float) -> Any:
        (rows,), state = await original(self, x, state, group, scale)
        rows.values[:1] = 0.0
        return (rows,), state

    return synchronize


def counts_a_byte_more(original: Any) -> Any:
    def sent_bytes(self: RecordingGroup, *args: Any) -> float:
        return float(original(self, *args)) + 1

    return sent_bytes


def renews_what_nobody_used(original: Any) -> Any:
    return lambda self, name: True


def sees_nothing(original: Any) -> Any:
    return lambda self: False


WRITTEN = CASE.model_copy(update={"written": Spot(step=1, rank=2), "steps": 5})
UNUSED = CASE.model_copy(update={"parts": (CASE.parts[0], CASE.parts[1].model_copy(update={"used": "never"}))})
FAULTS: list[tuple[type, str, Callable[[Any], Any], Case, str]] = [
    (AllReduce, "synchronize", scaled_wrong, CASE, "expected"),
    (AllReduce, "synchronize", differs_by_rank, CASE, "not the same bits"),
    (ErrorFeedback, "compress", loses_a_residual, CASE, "sent + residual is not gradient"),
    (BalancedParallelism, "synchronize", loses_rows, CASE, "expected"),
    (RecordingGroup, "_sent_bytes", counts_a_byte_more, CASE, "were predicted"),
    (Engine, "used", renews_what_nobody_used, UNUSED, "though no rank used the parameter"),
    (ParameterGuard, "is_due", sees_nothing, WRITTEN, SEEN),
]


@pytest.mark.parametrize("case", [CASE, WRITTEN, UNUSED], ids=["plain", "written", "unused"])
def test_a_library_without_faults_has_no_problems(case: Case) -> None:
    assert judged(case) == []


@pytest.mark.parametrize(("where", "name", "fault", "case", "words"), FAULTS, ids=[each[2].__name__ for each in FAULTS])
def test_a_planted_fault_is_found(where: type, name: str, fault: Callable[[Any], Any], case: Case, words: str) -> None:
    with patch.object(where, name, fault(getattr(where, name))):
        found = judged(case)
    assert any(words in problem for problem in found), found


def test_an_error_is_a_problem_and_its_cause_comes_first() -> None:
    def breaks(self: AllReduce, *args: Any) -> Any:
        group = args[2]
        if group.rank == 1:
            raise ValueError("planted")
        return original(self, *args)

    original = AllReduce.synchronize
    with patch.object(AllReduce, "synchronize", breaks):
        first, *others = judged(CASE)
    assert first.startswith("rank 1 raised ValueError: planted")
    assert len(others) == 2
