"""Settings and fixtures that the tests of the library and of the lab share."""

from __future__ import annotations

import importlib.util
import logging
import os
import runpy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it in its workers, and consoles keep what they find when made
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts; ranks as processes share the cores
# Ranks and commands inherit it; kept in a name, as the folder goes with it.
CACHE = tempfile.TemporaryDirectory(prefix="gradsync-cache-")
os.environ["GRADSYNC_CACHE_DIR"] = CACHE.name
hypothesis.settings.register_profile("untimed", deadline=None)  # what an example takes says how busy the machine is
hypothesis.settings.load_profile("untimed")

pytest.register_assert_rewrite("tests.schemes.contract", "tests.schemes.family")

AWAKE = Path(__file__).parent / "lab" / "src" / "gradsync_lab" / "cluster" / "awake.py"

if TYPE_CHECKING:
    from tests.world import Ranks


def pytest_configure(config: pytest.Config) -> None:
    """Loads torch in processes that run tests; the controller of pytest-xdist, for which its workers wait, runs none.

    The controller keeps processors awake instead: ranks wait for each other all the time.
    """
    if config.getoption("dist", "no") != "no":
        stack = ExitStack()
        stack.enter_context(runpy.run_path(str(AWAKE))["awake"]())  # not imported: the package would load torch
        config.add_cleanup(stack.close)
        return
    import torch

    import gradsync.cli.console  # noqa: F401 (a console keeps COLUMNS as it finds them when it is made; tests set them)

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything loads Triton
    # pytest hangs its handlers on every logger that does not propagate, six times a test; torch has many.
    for name in list(logging.root.manager.loggerDict):
        logging.getLogger(name).propagate = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts tests with a long `timeout` first: started last, one of them would leave the other workers idle.

    Skips those of Triton where it is missing.
    """
    if importlib.util.find_spec("triton") is None:
        for item in items:
            if item.get_closest_marker("interpreted") is not None:
                item.add_marker(pytest.mark.skip("Triton is not installed: pip install triton"))
    usual_s = float(config.getini("timeout"))

    def allowed_s(item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        return max(usual_s, *marker.args, *marker.kwargs.values()) if marker is not None else usual_s

    items.sort(key=allowed_s, reverse=True)


@pytest.fixture(scope="module")
def stale_memory() -> Iterator[None]:
    """Fills all memory that `gradsync.tensors.allocator` gives out with bytes of former tensors, NaN among them."""
    from itertools import cycle
    from unittest.mock import patch

    import torch

    from gradsync.tensors import allocator as memory

    left = cycle((0xFF, 0x5A, 0x7F))

    def empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        borrowed = memory._blocks.lend(max(1, numel * dtype.itemsize)).fill_(next(left))
        return borrowed[: numel * dtype.itemsize].view(dtype)

    with patch.object(memory, "empty", empty):
        yield


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], Ranks]]:
    """Yields `world`: `world(n).run(function, *arguments)` calls a module-level function on n <= 4 processes."""
    from tests.world import Ranks, World

    standing = World(4)
    yield lambda size: Ranks(standing, size)
    standing.close()
