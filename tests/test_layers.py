"""Rooms load few outside libraries when they are imported, and import each other as pyproject.toml's contracts say."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "gradsync"
TRITON = "kernels/triton"  # imported only where tensors are on a device
TENSORS = {"torch", "numpy", "jaxtyping"}
SETTINGS = TENSORS | {"annotated_types"}  # bounds in annotations, of which pydantic, loaded late, makes validators
DATA = TENSORS | {"pydantic"}
# Frameworks, each loaded by the adapter for it.
FRAMEWORKS = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "ray", "torchrec", "transformers"}
# Third-party libraries that a room may load when it is imported; import-linter cannot tell imports inside functions.
OUTSIDE = {
    "devices": {"torch"},
    "inputs": {"annotated_types"},
    "costs": {"numpy"},
    "kernels": TENSORS,
    "tensors": TENSORS,
    "comm": SETTINGS,
    "compressors": SETTINGS,
    "schemes": SETTINGS,
    "state": SETTINGS,
    "optim": TENSORS,
    "plans": DATA,
    "engine": DATA,
    "planner": DATA,
    "characterization": DATA,
    "tuning": DATA,
    "frontends": DATA,
    "integrations": {"torch", "pyarrow", *FRAMEWORKS},
    "diagnosis": TENSORS,
    "cli": {"typer", "rich"},
}


def loaded_at_once(tree: ast.Module) -> ast.Module:
    """Returns the module without functions and `TYPE_CHECKING` blocks, which may import any library."""

    class Loaded(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            self.generic_visit(node)
            return node.orelse if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING") else node

    return Loaded().visit(tree)


def libraries(source: str) -> Iterator[str]:
    """Top-level names of the outside libraries that a module loads when it is imported."""
    for node in ast.walk(loaded_at_once(ast.parse(source))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in names:
            top = name.partition(".")[0]
            if top != "gradsync" and top not in sys.stdlib_module_names:
                yield top


def rooms() -> list[str]:
    return sorted(child.name for child in PACKAGE.iterdir() if child.is_dir() and any(child.rglob("*.py")))


def test_the_package_is_rooms_alone() -> None:
    assert [file.name for file in PACKAGE.glob("*.py")] == ["__init__.py"]
    assert rooms() == sorted(OUTSIDE), "a new room needs a line here and a layer in pyproject.toml"


@pytest.mark.parametrize("room", rooms())
def test_a_room_loads_few_libraries(room: str) -> None:
    for file in sorted((PACKAGE / room).rglob("*.py")):
        here = file.relative_to(PACKAGE)
        allowed = OUTSIDE[room] | ({"triton"} if here.is_relative_to(TRITON) else set())
        allowed |= {"lazy_loader"} if file.name == "__init__.py" else set()
        too_many = set(libraries(file.read_text())) - allowed
        assert not too_many, f"{here} loads {sorted(too_many)} at its top, allowed there: {sorted(allowed)}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.distributed as dist", ["torch"]),
        ("try:\n    import pandas\nexcept ImportError:\n    pandas = None", ["pandas"]),
        ("class A:\n    import scipy", ["scipy"]),
        ("import sys\nfrom gradsync.costs.steps import Transfer\nfrom .local import LocalGroup", []),
        ("async def f():\n    import plotly", []),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas", []),
    ],
)
def test_the_check_tells_imports_at_the_top_from_others(source: str, found: list[str]) -> None:
    assert list(libraries(source)) == found


MOST_LINES = 60  # of a function, without its docstring


def test_functions_are_short() -> None:
    """Functions of command lines may be longer: each of their arguments is an option with its help."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "cli" not in file.parts:
                lines = (node.end_lineno or 0) - node.lineno + 1
                if ast.get_docstring(node):
                    lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
                assert lines <= MOST_LINES, f"{file.relative_to(PACKAGE)}: {node.name} has {lines} lines"


def test_only_one_module_calls_the_modules_of_torch_for_accelerators() -> None:
    """Streams of the wrong device, or of a device that is not there, are mistakes that no test on a CPU would see."""
    names = {"cuda", "accelerator", "xpu", "mps", "Stream", "Event"}
    found = {
        f"{path.relative_to(PACKAGE)}: {ast.unparse(node)}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "torch"
    }
    allowed = ("devices/", TRITON)
    assert not {each for each in found if not each.startswith(allowed)}
