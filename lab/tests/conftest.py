"""Fixtures of the lab's tests."""

from __future__ import annotations

import pytest

from gradsync_lab.bench import launch
from tests.forked import AS_SUBPROCESS


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on loopback, `gradsync_lab.bench.launch.Loopback`, are `tests.forked.Forked`."""
    monkeypatch.setattr(launch, "subprocess", AS_SUBPROCESS)
