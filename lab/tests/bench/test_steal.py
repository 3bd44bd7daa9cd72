"""Measurements that the host of a virtual machine disturbed are repeated, within the limit of patience."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gradsync_lab.bench import steal
from gradsync_lab.bench.steal import Patience, Steal


class Host:
    """Writes a stat file: each read finds 100 more ticks, of which `shares` are stolen in turn, then none."""

    def __init__(self, file: Path, shares: list[float]) -> None:
        self._file, self._shares = file, iter([*shares])
        self._stolen = self._others = 0
        self.exists = file.exists

    def read_text(self, encoding: str) -> str:
        share = next(self._shares, 0.0)
        self._stolen += round(100 * share)
        self._others += round(100 * (1 - share))
        ticks = f"cpu  {self._others} 0 0 0 0 0 0 {self._stolen} 7 0\ncpu0 1 2 3\n"
        self._file.write_text(ticks, encoding=encoding)
        return self._file.read_text(encoding=encoding)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Records the seconds waited, by a clock that only waiting moves."""
    seconds: list[float] = []
    monkeypatch.setattr(steal.time, "sleep", seconds.append)
    monkeypatch.setattr(steal.time, "monotonic", lambda: sum(seconds))
    return seconds


def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shares: list[float]) -> None:
    file = tmp_path / "stat"
    file.touch()
    monkeypatch.setattr(steal, "STAT", Host(file, shares))


def test_the_share_is_of_all_time_since_then(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host(monkeypatch, tmp_path, [0.5, 0.2])
    assert Steal().share == pytest.approx(0.2)


@pytest.mark.parametrize("text", [None, "cpu  1 2 3 4\n"])
def test_where_no_figure_is_known_nothing_is_stolen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "stat"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(steal, "STAT", file)
    assert Steal().share == 0.0
    assert not Patience(10.0).is_lost(Steal())


def test_what_was_disturbed_is_lost_once_the_host_has_calmed_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slept: list[float]
) -> None:
    host(monkeypatch, tmp_path, [0.0, 0.4, *[0.0, 0.3], *[0.0, 0.2], *[0.0, 0.01]])
    since = Steal()
    slept.append(4.0)
    assert Patience(100.0).is_lost(since)
    assert slept[1:] == [steal.WINDOW_S] * 3, "two windows with too much of it, and one without"


def test_what_was_not_disturbed_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slept: list[float]) -> None:
    host(monkeypatch, tmp_path, [0.0, steal.MOST_STOLEN])
    assert not Patience(100.0).is_lost(Steal())
    assert slept == []


@pytest.mark.parametrize(("patience_s", "lost"), [(0.0, [False, False]), (10.0, [True, False])])
def test_patience_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slept: list[float], patience_s: float, lost: list[bool]
) -> None:
    host(monkeypatch, tmp_path, [0.5] * 100)
    patience, found = Patience(patience_s), []
    for _ in lost:
        since = Steal()
        slept.append(4.0)
        found.append(patience.is_lost(since))
    assert found == lost
    assert sum(slept) <= max(patience_s, 4.0) + 4.0 + steal.WINDOW_S


def test_ranks_decide_alike() -> None:
    """Ranks use the figures that `agreed` returns, not their own."""
    asked: list[float] = []

    def agreed(figure: float) -> float:
        asked.append(figure)
        return 1.0

    assert Patience(0.5, agreed).is_lost(Steal())
    assert len(asked) == 2, "the share, and what it cost; then no patience was left, on any rank"
