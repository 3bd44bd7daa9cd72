"""Cases run in standing processes; those that hang or die are named, with the place where they were."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Literal

import pytest

from gradsync_lab.fuzz import workers
from gradsync_lab.fuzz.case import BucketCase, Case, Part, Spot
from gradsync_lab.fuzz.replay import problems_of
from gradsync_lab.fuzz.workers import Workers

RANGES = (("parts.mlp0.layers.0.weight", 0, 16), ("parts.mlp0.layers.0.bias", 0, 4))
CASE = Case(
    seed=0,
    world="processes",
    frontend="attach",
    size=2,
    parts=(Part(key="mlp0", kind="mlp"),),
    buckets=(BucketCase(segments=RANGES, scheme={"all_reduce": {}}),),
    ddp=True,
)
UNWATCHED = CASE.model_copy(update={"written": Spot(step=0, rank=1), "steps": 3, "verify_every": 0, "ddp": False})


@pytest.fixture(scope="module")
def standing() -> Iterator[Workers]:
    with Workers(3) as some:
        yield some


@pytest.mark.parametrize("frontend", ["attach", "ddp_hook", "class"])
@pytest.mark.parametrize("size", [1, 3, 2])
def test_processes_have_no_problems_without_faults(
    standing: Workers, frontend: Literal["attach", "ddp_hook", "class"], size: int
) -> None:
    settings = {"frontend": frontend, "size": size, "steps": 3, "micro": 2, "zero": "never", "clip": True}
    assert standing.judged(CASE.model_copy(update=settings)) == []


def test_state_goes_on_under_a_new_attachment(standing: Workers) -> None:
    feedback = {"error_feedback": {"compressor": {"top_k": {"ratio": 0.1}}}}
    bucket = BucketCase(segments=RANGES, scheme={"compressed_two_way": {"compressor": feedback, "sums": None}})
    assert standing.judged(CASE.model_copy(update={"buckets": (bucket,), "steps": 4, "reload_at": 2})) == []


def test_a_guard_that_is_off_is_a_problem_when_a_rank_writes(standing: Workers) -> None:
    assert "the guard did not see that rank 1 wrote" in standing.judged(UNWATCHED)[0]
    assert standing.judged(UNWATCHED.model_copy(update={"verify_every": 1})) == []


def test_a_process_that_dies_is_a_problem_and_the_next_case_runs(standing: Workers) -> None:
    standing.judged(CASE)
    os.kill(standing._processes[1].pid, signal.SIGKILL)
    standing._processes[1].join()
    assert any(problem.startswith("died: rank 1 ended with code -9") for problem in standing.judged(CASE))
    assert standing.judged(CASE) == []


@pytest.mark.parametrize("world", ["threads", "processes"])
def test_a_case_that_hangs_shows_where_and_is_ended(monkeypatch: pytest.MonkeyPatch, world: str) -> None:
    """Takes a case that would train for hours for one that hangs."""
    monkeypatch.setattr(workers, "LIMIT_S", 3.0)
    endless = {"steps": 10**7, "world": world, "frontend": "engine" if world == "threads" else "attach"}
    with Workers(1 if world == "threads" else 2) as some:
        found = some.judged(CASE.model_copy(update=endless))
        assert found[0].startswith("hung: rank 0 did not answer within 3 s")
        assert "in _step" in found[0] or "in traced" in found[0]
        assert not some._processes


def test_a_case_is_replayed_from_json() -> None:
    assert problems_of(CASE.model_copy(update={"world": "threads", "frontend": "engine"}).to_json()) == []
    with pytest.raises(ValueError, match="size"):
        problems_of('{"seed": 0, "size": 9, "parts": []}')
