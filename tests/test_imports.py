"""`import gradsync` stays light: nothing that only some users need is loaded with it."""

from __future__ import annotations

import subprocess
import sys

HEAVY = [
    "torch",
    "triton",
    "plotly",
    "matplotlib",
    "pandas",
    "sklearn",
    "jinja2",
    "pyroute2",
    "lightning",
    "transformers",
    "typer",
    "rich",
]


def loaded_by(statement: str) -> set[str]:
    """Returns the modules in memory after `statement` in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_import_loads_no_optional_library() -> None:
    loaded = loaded_by("import gradsync")
    assert "gradsync" in loaded
    assert not loaded.intersection(HEAVY)


def test_the_check_would_notice() -> None:
    assert "typer" in loaded_by("import typer").intersection(HEAVY)


def test_attach_loads_no_search() -> None:
    loaded = loaded_by("from gradsync import attach, Plan")
    searching = {"gradsync.tuning.auto", "gradsync.planner.solver.joint", "gradsync.planner.search.candidates"}
    assert "gradsync.planner.default.plan" in loaded
    assert not loaded & searching
    assert searching <= loaded_by("from gradsync import AutoPlanner")
