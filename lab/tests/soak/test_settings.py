"""The faults of a soak are drawn from its seed, and its files are complete only when all ranks have written theirs."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from gradsync_lab.faults.cases import LINK_FAULTS
from gradsync_lab.soak.settings import KINDS, LAST_SHARE, Folder, Settings, replaced


def settings(hours: float = 2.0, **changes: Any) -> Settings:
    usual: dict[str, Any] = {"ranks": 3, "step_s": 0.1, "every": 50, "seed": 0, "links": True}
    return Settings.of(hours, **{**usual, **changes})


def test_a_seed_gives_the_same_faults_again() -> None:
    assert settings().strikes == settings().strikes != settings(seed=1).strikes
    assert Settings.model_validate_json(settings().model_dump_json()) == settings()


def test_faults_are_as_many_as_asked_for_and_leave_time_to_go_on() -> None:
    assert settings().steps == 72_000 and settings(faults=7).faults == 7
    counts = [settings(seed=seed).faults for seed in range(200)]
    assert min(counts) >= 40 and 47 < statistics.mean(counts) < 50, "a Poisson process of 24 an hour, but at least 20"
    strikes = settings(faults=500).strikes
    assert [strike.step for strike in strikes] == sorted(strike.step for strike in strikes)
    assert max(strike.step for strike in strikes) < LAST_SHARE * 72_000
    assert {strike.fault for strike in strikes} == set(KINDS)
    assert not {strike.fault for strike in settings(faults=500, links=False).strikes} & set(LINK_FAULTS)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks"):
        settings(ranks=1)


def test_a_checkpoint_counts_once_all_ranks_have_written_it(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for step, rank in ((100, 0), (100, 1), (200, 0), (50, 0), (50, 1)):
        folder.checkpoint(step, rank).touch()
    folder.checkpoint(200, 1).with_name(folder.checkpoint(200, 1).name + ".part").touch()
    assert folder.complete(2) == [50, 100]
    replaced(folder.status(0), "one")
    replaced(folder.status(0), "two")
    assert folder.status(0).read_text() == "two"
