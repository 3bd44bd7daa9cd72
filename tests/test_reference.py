"""The reference has every public name once, with a docstring, all fields and the types in its signature.

The page of commands is up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import runpy
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from functools import cache, cached_property
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

# Types in signatures that are not in the reference; names of modules end in a dot.
INSIDE = (
    # made by `attach` and its engine, and passed between them and public classes
    "gradsync.frontends.checkpoint.Source",
    "gradsync.engine.engine.Engine",
    "gradsync.engine.plan_control.Follows",
    "gradsync.frontends.arguments.Arguments",
    "gradsync.frontends.switching.FrontendSwitch",
    # made by the engine or by `run_local`, which pass them to groups and what groups run
    "gradsync.devices.streams.",
    "gradsync.comm.local._SharedMemory",
    # made by schemes and compressors for their own kernels, and for the steps between push and pull
    "gradsync.kernels.",
    "gradsync.compressors.transform.Tiling",
    "gradsync.schemes.dense.OwnedRange",
    "gradsync.schemes.formats.",
    "gradsync.schemes.legs.",
    "gradsync.schemes.partitioned.OwnedColumns",
    "gradsync.schemes.powersgd.Parts",
    "gradsync.schemes.row_owners.",
    "gradsync.schemes.space.Schedule",
    "gradsync.schemes.tables.",
    # the numbers of the search, behind the plan that it finds
    "gradsync.planner.search.options.Formulation",
    "gradsync.planner.solver.",
)


def source_of(module: str) -> Path:
    """Returns the file that says what a module has: its stub, if it has one."""
    place = ROOT / "src" / Path(*module.split("."))
    files = place / "__init__.pyi", place / "__init__.py", place.with_suffix(".py")
    return next(path for path in files if path.exists())


@cache
def statements(module: str) -> list[ast.stmt]:
    """Returns the statements of a module, and those that it has for type checkers only."""
    body = ast.parse(source_of(module).read_text(encoding="utf-8")).body
    return [*body, *(inner for node in body if isinstance(node, ast.If) for inner in node.body)]


def imported(module: str, name: str) -> str | None:
    """Returns the path by which a module imports a name; None for a name that it does not import."""
    for node in statements(module):
        if isinstance(node, ast.ImportFrom):
            for each in node.names:
                if (each.asname or each.name) == name:
                    package = module if source_of(module).stem == "__init__" else module.rpartition(".")[0]
                    above = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
                    return ".".join([*above, *([node.module] if node.module else []), each.name])
    return None


def names_of(node: ast.stmt) -> set[str | None]:
    """Returns the names that a statement defines."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)}


def home_of(path: str) -> str | None:
    """Returns the path at which a name of gradsync is defined, through all imports; None for names of others."""
    module, _, name = path.rpartition(".")
    if module.split(".")[0] != "gradsync":
        return None
    if any(name in names_of(node) for node in statements(module)):
        return path
    origin = imported(module, name)
    return home_of(origin) if origin is not None else None


def definition(path: str) -> tuple[ast.stmt, ast.stmt | None]:
    """Returns the statement that defines a name, and the statement after it."""
    home = home_of(path)
    assert home is not None, f"{path} is not defined"
    module, _, name = home.rpartition(".")
    body = statements(module)
    at = next(at for at, node in enumerate(body) if name in names_of(node))
    return body[at], body[at + 1] if at + 1 < len(body) else None


HOMES = {home_of(path) for path in NAMED}


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


def fields_of(found: type) -> list[str]:
    """Returns the public fields of a dataclass, pydantic model or NamedTuple, and the words of an enum; else none."""
    names = [field.name for field in dataclasses.fields(found)] if dataclasses.is_dataclass(found) else []
    names += [member.name for member in found] if issubclass(found, Enum) else []
    names += [*getattr(found, "model_fields", ()), *(getattr(found, "_fields", ()) if issubclass(found, tuple) else ())]
    return [name for name in names if not name.startswith("_")]


def described_in(docstring: str | None) -> set[str]:
    """Returns the names of which the section `Attributes:` of a docstring has a description."""
    _, _, section = inspect.cleandoc(docstring or "").partition("\nAttributes:\n")
    entries = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
    lists = re.findall(r"^    (\w+(?:, \w+)*): \S", entries, re.MULTILINE)
    return {name for names in lists for name in names.split(", ")}


@pytest.mark.parametrize("path", [path for path in NAMED if "integrations" not in path])
def test_fields_are_described(path: str) -> None:
    """A field that a class inherits may be described by that class, if the reference has it."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if inspect.isclass(found):
        bases = [base for base in found.__mro__ if f"{base.__module__}.{base.__name__}" in HOMES]
        described = set().union(*(described_in(vars(base).get("__doc__")) for base in bases))
        assert [field for field in fields_of(found) if field not in described] == []


def test_the_check_sees_descriptions() -> None:
    text = """It has fields.

    Attributes:
        first: one.
            second: no field.
        third, fourth: two.

    Raises:
        fifth: no field.
    """
    assert described_in(text) == {"first", "third", "fourth"}
    assert described_in("It has none.\n\n    Args:\n        first: one.") == set()


def annotations_in(node: ast.stmt) -> Iterator[ast.expr]:
    """Yields the annotations of a function's arguments and result, or of a class's public fields and methods."""
    if isinstance(node, ast.FunctionDef):
        given = node.args
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        yield from (each.annotation for each in arguments if each is not None and each.annotation is not None)
        yield from [node.returns] if node.returns is not None else []
    elif isinstance(node, ast.AnnAssign):
        yield node.annotation
    elif isinstance(node, ast.ClassDef):
        for inner in node.body:
            names = {name for name in names_of(inner) if name is not None}
            if any(not name.startswith("_") or name in ("__init__", "__call__") for name in names):
                yield from annotations_in(inner)


def types_in(annotation: ast.AST, module: str) -> Iterator[str]:
    """Yields the paths at which the types of gradsync in an annotation are defined."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        yield from types_in(annotation.slice.elts[0], module)  # the others are bounds
        return
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        return
    found = None
    if isinstance(annotation, ast.Name):
        found = home_of(f"{module}.{annotation.id}")
    elif isinstance(annotation, ast.Attribute) and isinstance(annotation.value, ast.Name):
        origin = imported(module, annotation.value.id)
        found = home_of(f"{origin}.{annotation.attr}") if origin is not None else None
    elif isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        yield from types_in(ast.parse(annotation.value, mode="eval"), module)
    if found is not None:
        node, _ = definition(found)
        value = node.value if isinstance(node, ast.Assign) else None
        kind = re.split(r"\W", ast.unparse(value))[0] if value is not None else ""
        if kind == "Annotated":
            yield from types_in(value, found.rpartition(".")[0])
        elif kind not in ("Literal", "ParamSpec", "TypeVar"):
            yield found
    for inner in ast.iter_child_nodes(annotation):
        yield from types_in(inner, module)


@pytest.mark.parametrize("path", NAMED)
def test_types_in_signatures_are_in_the_reference(path: str) -> None:
    home = home_of(path)
    assert home is not None
    module = home.rpartition(".")[0]
    types = {found for each in annotations_in(definition(path)[0]) for found in types_in(each, module)}
    assert {each for each in types - HOMES if not each.startswith(INSIDE)} == set()


def test_nothing_is_inside_for_no_reason() -> None:
    homes = [home for home in map(home_of, NAMED) if home is not None]
    types = {
        found
        for home in homes
        for each in annotations_in(definition(home)[0])
        for found in types_in(each, home.rpartition(".")[0])
    }
    assert [name for name in INSIDE if not any(found.startswith(name) for found in types)] == []
    assert [home for home in homes if home.startswith(INSIDE)] == []


def test_other_modules_are_named_above_their_types() -> None:
    text = (REFERENCE / "api" / "types.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        module, *lines = section.split()
        assert {name.rpartition(".")[0] for name in lines if name != ":::"} == {module}


def test_page_of_commands_is_what_the_commands_say() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "command_line.py"))["page"]()
    assert (REFERENCE / "command-line.md").read_text(encoding="utf-8") == page, "write it: python docs/command_line.py"
