"""Every example runs as its docstring says, and stays short enough to be read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import run_on_two_ranks

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
MOST_LINES = 80


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_on_two_ranks(path: Path, tmp_path: Path) -> None:
    """The environment is the one that torchrun gives to ranks."""
    printed = run_on_two_ranks([sys.executable, str(path)], tmp_path, limit_s=110)
    assert "".join(printed).strip(), "an example shows something"


def test_an_example_runs_under_torchrun() -> None:
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


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
