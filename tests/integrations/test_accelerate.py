"""Accelerate with gradsync on two ranks: parameters as with DDP, residuals in checkpoints, clear errors."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "accelerate.md"
EXAMPLE = ROOT / "examples" / "frameworks" / "accelerate_loop.py"
NOISE = 0.009  # range of the held-out loss over 5 seeds (0.031 to 0.040), two ranks with whole gradients
LIMIT_S = 120

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate: make integrations"),
    pytest.mark.timeout(2 * LIMIT_S),
]


def found(scenario: str) -> list[dict[str, Any]]:
    """Returns what each rank found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(HERE / "accelerate_ranks.py"), scenario]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    result: list[dict[str, Any]] = json.loads(line.removeprefix("FOUND "))
    return result


def test_parameters_are_those_of_accelerates_ddp() -> None:
    for each in found("equal"):
        assert each["difference"] == 0 and each["apart"] == 0
        assert each["moved"] > 0.01, "training changes parameters"
        assert each["steps"] == 8, "two batches each are exchanged once"
        assert each["kept"] == [0, True, True], "arguments of DDP are kept"


def test_a_job_goes_on_bit_by_bit_with_every_ranks_residuals() -> None:
    for rank, each in enumerate(found("resumed")):
        assert each["difference"] == 0 and each["apart"] == 0
        assert "has no state of gradsync" in each["told"], f"rank {rank}"


def test_bad_input_is_refused_on_every_rank() -> None:
    for each in found("refused"):
        assert each["late"].startswith("RuntimeError") and "before prepare()" in each["late"]
        assert each["twice"].startswith("RuntimeError") and "call it once" in each["twice"]
        assert each["model"].startswith("TypeError") and "expected an accelerate.Accelerator" in each["model"]
        assert each["hook"].startswith("ValueError") and "leave comm_hook out" in each["hook"]
        assert "attach(ddp_model)" in each["inner"]


def example(script: Path, *arguments: str) -> str:
    """Returns the last line that the example printed on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout.splitlines()[-1]


def loss(line: str) -> float:
    return float(line.split()[2].rstrip(","))


def test_the_example_equals_ddp_by_the_diff_in_the_docs(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    diff = re.search(r"```diff\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert diff, "the page shows the lines to change"
    added = [f"{line[1:]}\n" for line in diff[1].splitlines() if line.startswith("+")]
    assert len(added) <= 3 and all(text.count(line) == 1 for line in added)
    for line in added:
        text = text.replace(line, "")
    theirs = tmp_path / "with_ddp.py"
    theirs.write_text(text, encoding="utf-8")
    exact, lossy = example(EXAMPLE, "exact"), example(EXAMPLE)
    assert exact == example(theirs, "exact")
    assert exact.rpartition(" ")[2] != lossy.rpartition(" ")[2]
    assert loss(lossy) < loss(exact) + NOISE
