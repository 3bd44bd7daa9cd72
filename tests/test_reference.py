"""The reference has every public name once, all of them have docstrings, and the page of commands is up to date."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
from collections import Counter
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
NAMED = [
    name
    for page in sorted((REFERENCE / "api").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]
METHODS = (FunctionType, classmethod, staticmethod, property, cached_property)
WHOLE = (
    "gradsync",
    "gradsync.planner",
    "gradsync.compressors",
    "gradsync.schemes",
    "gradsync.optim",
    "gradsync.state",
    "gradsync.comm",
)


def source_of(module: str) -> Path:
    """Returns the file that says what a module has: its stub, if it has one."""
    place = ROOT / "src" / Path(*module.split("."))
    files = place / "__init__.pyi", place / "__init__.py", place.with_suffix(".py")
    return next(path for path in files if path.exists())


def definition(path: str) -> tuple[ast.stmt, ast.stmt | None]:
    """Returns the statement that defines a name, and the statement after it."""
    module, _, name = path.rpartition(".")
    body = ast.parse(source_of(module).read_text(encoding="utf-8")).body
    for at, node in enumerate(body):
        if isinstance(node, ast.ImportFrom) and name in {each.asname or each.name for each in node.names}:
            package = module if source_of(module).stem == "__init__" else module.rpartition(".")[0]
            above = package.split(".")[: len(package.split(".")) - (node.level - 1)]
            original = next(each.name for each in node.names if (each.asname or each.name) == name)
            return definition(".".join([*above, *([node.module] if node.module else []), original]))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = {getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)}
        if name in names:
            return node, body[at + 1] if at + 1 < len(body) else None
    raise AssertionError(f"{path} is not defined")


def has_docstring(path: str) -> bool:
    node, after = definition(path)
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return ast.get_docstring(node) is not None
    return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)


def public(module: ModuleType) -> set[str]:
    """Returns the paths of a module's public names that are no modules."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    return {f"{module.__name__}.{name}" for name in names if not inspect.ismodule(getattr(module, name))}


def undocumented_members(found: Any) -> list[str]:
    """Returns the public methods and properties of a class that no docstring describes, its own or its classes'."""
    described: dict[str, bool] = {}
    for base in found.__mro__:
        for name, member in vars(base).items():
            if not name.startswith("_") and isinstance(member, METHODS):
                theirs = not base.__module__.startswith("gradsync")
                described[name] = described.get(name, theirs) or bool(member.__doc__)
    return [f"{found.__name__}.{name}" for name, done in described.items() if not done]


def test_reference_names_everything_public_once() -> None:
    assert [name for name, count in Counter(NAMED).items() if count > 1] == []
    for name in WHOLE:
        listed = {each for each in NAMED if each.rpartition(".")[0] == name}
        assert listed == public(importlib.import_module(name)), name


@pytest.mark.parametrize("path", NAMED)
def test_public_names_have_docstrings(path: str) -> None:
    assert has_docstring(path)
    module, _, name = path.rpartition(".")
    if "integrations" not in module:  # which import their frameworks
        found = getattr(importlib.import_module(module), name)
        assert (undocumented_members(found) if inspect.isclass(found) else []) == []


def test_page_of_commands_is_what_the_commands_say() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "command_line.py"))["page"]()
    assert (REFERENCE / "command-line.md").read_text(encoding="utf-8") == page, "write it: python docs/command_line.py"
