"""The quick start, done as a stranger does it: each of its commands, in an empty environment, from the wheel.

The environment sees torch and the other packages of the one that the tests run in, as `test_installed.py` says. Where
no network namespaces can be made, the demo runs on loopback, and the step of the lab is skipped with the reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from typing import NamedTuple

import pytest

from tests.wheels.built import NATIVE, PIP, ROOT, said_by
from tests.wheels.test_installed import environment, fits, sees_packages

PAGE = ROOT / "docs" / "tutorials" / "quick-start.md"
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
SCRIPT = next(text for language, text in FENCES if language == "python")
COMMANDS = [line.partition("  #")[0].strip() for language, text in FENCES if not language for line in text.splitlines()]
INSTALL, MANY_NODES = "pip install . ./lab", "--nnodes 4"
MOST_COMMANDS = 5  # to the own model
MOST_CHANGED_LINES = 3
OF_LAB, NO_LAB = "gradsync lab run", "No lab: "  # what needs namespaces, and what it says without
SECONDS = 280  # of a command: the quick demo takes the longest

# Whichever test comes first waits for all commands.
pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("first_hour")]


class Ran(NamedTuple):
    """A command of the page, as it ran; `refused` is why it could not, for want of network namespaces."""

    command: str
    seconds: float
    printed: str
    refused: str


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> list[Ran]:
    """Runs the page's commands in order, and returns what they printed; some things take other words here.

    The wheels come from dist/ and from the folder of the lab, the demo is a quick one, and what needs several machines
    is left out.
    """
    wheel = next((file for file in NATIVE if fits(file)), None)
    if wheel is None:
        pytest.skip("no wheel for this interpreter: make wheels")
    folder = tmp_path_factory.mktemp("first_hour")
    inside = environment(folder / "env")
    sees_packages(inside)
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    torchrun = inside.with_name("torchrun")
    torchrun.write_text(f"#!{inside}\nfrom torch.distributed.run import main\nmain()\n", encoding="utf-8")
    torchrun.chmod(0o755)
    none = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    environ = {**os.environ, **none, "PATH": f"{inside.parent}:{os.environ['PATH']}"}
    pip = " ".join(map(str, [*PIP, "--python", inside, "install", "--no-deps"]))
    found = []
    for command in COMMANDS:
        if MANY_NODES in command:
            continue
        here = command.replace(INSTALL, f"{pip} {wheel} {ROOT / 'lab'}")
        if here.startswith("gradsync demo"):
            here += " --quick"
        began = time.monotonic()
        done = subprocess.run(
            here, shell=True, cwd=folder, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        refused = done.stderr.partition(NO_LAB)[2].strip() if command.startswith(OF_LAB) else ""
        assert done.returncode == (2 if refused else 0), f"{command}\n{done.stdout}\n{done.stderr}"
        found.append(Ran(command, time.monotonic() - began, done.stdout, refused))
        print(f"{found[-1].seconds:6.1f} s  {command}{refused and f': skipped, {refused}'}")
    assert said_by(inside, "-I", "-c", "import gradsync; print(gradsync.__file__)").startswith(str(folder))
    return found


def of(hour: list[Ran], begins: str) -> str:
    """Returns what the command that begins so printed."""
    return ran(hour, begins).printed


def ran(hour: list[Ran], begins: str) -> Ran:
    return next(each for each in hour if each.command.startswith(begins))


def test_the_own_model_trains_after_few_commands(hour: list[Ran]) -> None:
    before = [each.command for each in hour].index("torchrun --nproc-per-node 2 train.py")
    assert hour[0].command == INSTALL and before < MOST_COMMANDS
    assert "kB a step" in of(hour, "torchrun --nproc-per-node 2 train.py")


def test_few_lines_of_a_script_for_ddp_change() -> None:
    needed = [line for line in SCRIPT.splitlines() if "gradsync" in line]
    assert any("in place of DistributedDataParallel(model)" in line for line in needed)
    assert len(needed) <= MOST_CHANGED_LINES


def test_the_machine_is_examined_without_a_fault(hour: list[Ran]) -> None:
    assert "native, built for" in of(hour, "gradsync doctor")


def test_a_plan_is_made_and_explained(hour: list[Ran]) -> None:
    printed = of(hour, "gradsync plan profile.json -o")
    assert " ms" in printed and "longer than the best plan" in printed


def test_the_demo_ends_with_a_report_that_says_who_was_faster(hour: list[Ran]) -> None:
    printed = " ".join(of(hour, "gradsync report").split())
    assert printed.startswith("gradsync is ") and "of its step time" in printed


def test_the_own_script_runs_in_the_lab(hour: list[Ran]) -> None:
    step = ran(hour, OF_LAB)
    if step.refused:
        assert "loopback" in of(hour, "gradsync demo"), "it says so"
        pytest.skip(f"`{step.command}` needs network namespaces: {step.refused}")
    assert "[0] " in step.printed and "kB a step" in step.printed
