"""Settings shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it in its workers, and consoles keep what they find when made
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts; ranks as processes share the cores
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything loads Triton

if TYPE_CHECKING:
    from tests.world import Ranks


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on loopback, `gradsync.bench.launch.Loopback`, are `tests.forked.Forked`."""
    from gradsync.bench import launch
    from tests.forked import AS_SUBPROCESS

    monkeypatch.setattr(launch, "subprocess", AS_SUBPROCESS)


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], Ranks]]:
    """`world(n).run(function, *arguments)`: calls a module-level function on n <= 4 ranks that stand ready."""
    from tests.world import Ranks, World

    standing = World(4)
    yield lambda size: Ranks(standing, size)
    standing.close()
