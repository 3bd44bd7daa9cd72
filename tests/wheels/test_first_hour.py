"""The quick start, done as a stranger does it: each of its commands, in an empty environment, from the wheel.

The environment sees torch and the other packages of the one that the tests run in, as `test_installed.py` says. Where
no network namespaces can be made, the demo runs on loopback, and the step of the lab is skipped with the reason.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.wheels.built import NATIVE, PIP, ROOT, said_by
from tests.wheels.test_installed import environment, fits, sees_packages

PAGE = ROOT / "docs" / "tutorials" / "quick-start.md"
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
SCRIPT = next(text for language, text in FENCES if language == "python")
PLAIN = Path(__file__).with_name("plain_ddp.py").read_text(encoding="utf-8")  # the same training under DDP


def commands(language: str) -> list[str]:
    """Returns the commands in the page's blocks of a language, without comments."""
    return [line.partition("  #")[0].strip() for of, text in FENCES if of == language for line in text.splitlines()]


# What the clone's machine compiles; machines without a compiler install these, after `make wheels`.
INSTALL, WHEEL, OF_WHEEL = "pip install . ./lab", "make wheels", commands("bash")
COMMANDS = [each for line in commands("") for each in (OF_WHEEL if line == INSTALL else [line])]
MANY_NODES = "--nnodes 4"
MOST_COMMANDS = 5  # to the own model; `make wheels` is done once for all nodes
AS_BEFORE = "torchrun --nproc-per-node 2 plain.py"  # no command of the page
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
    """Runs the page's commands in order, and the script under plain DDP, and returns what they printed.

    The wheel is in dist/ already, the demo is a quick one, and what needs several machines is left out.
    """
    wheel = next((file for file in NATIVE if fits(file)), None)
    if wheel is None:
        pytest.skip("no wheel for this interpreter: make wheels")
    folder = tmp_path_factory.mktemp("first_hour")
    inside = environment(folder / "env")
    sees_packages(inside)
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    (folder / "plain.py").write_text(PLAIN, encoding="utf-8")
    for name in ("dist", "lab"):
        (folder / name).symlink_to(ROOT / name)
    pip = " ".join(map(str, PIP))
    for name, text in (
        ("torchrun", f"#!{inside}\nfrom torch.distributed.run import main\nmain()\n"),
        ("pip", f'#!/bin/sh\nexec {pip} --python {inside} "$@" --no-deps\n'),  # torch is there, and not fetched again
    ):
        inside.with_name(name).write_text(text, encoding="utf-8")
        inside.with_name(name).chmod(0o755)
    none = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    environ = {**os.environ, **none, "PATH": f"{inside.parent}:{os.environ['PATH']}"}
    found = []
    for command in (*COMMANDS, AS_BEFORE):
        if MANY_NODES in command or command.startswith(WHEEL):
            continue
        here = command.replace("cp311", wheel.stem.split("-")[2])
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
    before = COMMANDS.index("torchrun --nproc-per-node 2 train.py")
    assert INSTALL in commands("") and COMMANDS[0].startswith(WHEEL) and before < MOST_COMMANDS
    assert "kB a step" in of(hour, "torchrun --nproc-per-node 2 train.py")


def test_two_lines_of_a_script_for_ddp_change(hour: list[Ran]) -> None:
    """A script for DDP, which trains, differs up to the end of its loop in the import and in the wrapped model."""
    plain = PLAIN.partition("\n\n")[2]  # without its docstring
    lines = [line for line in difflib.ndiff(plain.splitlines(), SCRIPT.splitlines()) if line[0] in "+-" and line[2:]]
    gone = [line[2:].strip() for line in lines if line[0] == "-"]
    come = [line[2:].strip() for line in lines if line[0] == "+"]
    assert gone == ["from torch.nn.parallel import DistributedDataParallel", "model = DistributedDataParallel(model)"]
    assert come[0] == "import gradsync" and come[1].startswith("handle = gradsync.attach(model)  #")
    behind = SCRIPT.partition("optimizer.step()")[2]
    assert all(line in behind for line in come[2:]), "the rest shows what gradsync did, as the page says"
    assert ran(hour, AS_BEFORE), "and a script without these lines trains"


def test_the_machine_is_examined_without_a_fault(hour: list[Ran]) -> None:
    assert "native, built for" in of(hour, "gradsync doctor")


def test_a_plan_is_made_and_explained(hour: list[Ran]) -> None:
    printed = of(hour, "gradsync plan profile.json -o")
    assert " ms" in printed and "longer than the best plan" in printed
    assert all(word in of(hour, "gradsync explain plan.json") for word in (" ms", "DDP"))


def test_the_demo_ends_with_a_report_that_says_who_was_faster(hour: list[Ran]) -> None:
    printed = " ".join(of(hour, "gradsync report").split())
    assert printed.startswith("gradsync is ") and "of its step time" in printed


def test_the_own_script_runs_in_the_lab(hour: list[Ran]) -> None:
    step = ran(hour, OF_LAB)
    if step.refused:
        assert "loopback" in of(hour, "gradsync demo"), "it says so"
        pytest.skip(f"`{step.command}` needs network namespaces: {step.refused}")
    assert "[0] " in step.printed and "kB a step" in step.printed
