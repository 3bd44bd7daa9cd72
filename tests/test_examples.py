"""Every example runs as its docstring says, and stays short enough to be read."""

from __future__ import annotations

import io
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.forked import run_on_two_ranks
from tests.frontends.test_state_checkpoints import quiet_library
from tests.world import Ranks

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
MOST_LINES = 80


@pytest.mark.parametrize("path", EXAMPLES[:-1], ids=lambda path: path.stem)
def test_example_runs_on_two_ranks(path: Path, tmp_path: Path) -> None:
    """The environment is the one that torchrun gives to ranks."""
    printed = run_on_two_ranks([sys.executable, str(path)], tmp_path, limit_s=110)
    assert "".join(printed).strip(), "an example shows something"


def test_the_last_example_runs_under_torchrun() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(EXAMPLES[-1]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip(), "an example shows something"


def test_the_script_of_the_quick_start_runs_on_two_ranks(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "tutorials" / "quick-start.md").read_text(encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text(page.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    printed = "".join(run_on_two_ranks([sys.executable, str(script)], tmp_path, limit_s=110))
    assert "% dense) -> " in printed and "kB a step" in printed


def from_a_folder(folder: str) -> tuple[list[float], int]:
    """Runs the example of models in shards in the present process group; returns losses, and how often it loaded."""
    given = [str(next(path for path in EXAMPLES if path.stem == "hsdp")), folder]
    destroy = dist.destroy_process_group
    of_the_test = patch.multiple(
        dist,
        init_process_group=lambda backend: None,
        destroy_process_group=lambda group=None: None if group is None else destroy(group),
    )
    printed = io.StringIO()
    with of_the_test, patch.object(sys, "argv", given), patch.object(dcp, "load", wraps=dcp.load) as load:
        with redirect_stdout(printed), quiet_library():
            runpy.run_path(given[0], run_name="__main__")
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed.getvalue())], load.call_count


@pytest.mark.waiting
def test_the_example_of_models_in_shards_goes_on_from_its_checkpoint(
    world: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """Two replicas of two shards save, go on, and leave what two replicas of one shard go on from."""
    (first, loads), *_ = world(4).run(from_a_folder, str(tmp_path))
    (second, loads_then), *_ = world(4).run(from_a_folder, str(tmp_path))
    (third, loads_on_two), *_ = world(2).run(from_a_folder, str(tmp_path))
    assert (loads, loads_then, loads_on_two) == (0, 1, 1)
    assert second[0] < first[-1] < first[0] and third[0] < first[-1]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
