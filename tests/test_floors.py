"""The house has floors: a module imports only from lower ones, and only the outside libraries its floor allows."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "gradsync"

FLOORS: list[set[str]] = [
    {"cluster", "drift", "expressions", "maxplus", "steps", "stopwatch", "timeline", "trial"},
    {"memory"},
    {"costs", "kernels"},
    {"comm", "witness"},
    {"bucket", "forecast", "sparse", "stamp"},
    {"arrivals", "density", "gradients", "positions"},
    {"compressors", "gradient_views"},
    {"schemes", "observation", "footprint", "state", "lars", "guard"},
    {"document"},
    {"plan", "lane", "recording", "sparsity", "profile"},
    {"planning", "optim", "fitting", "freezing"},
    {"stepping"},
    {"engine", "planner", "characterization"},
    {"overlap", "torch_hooks", "uneven", "wrappers"},
    {"buffers", "model_changes"},
    {"agreement", "autograd", "checkpoint", "lab", "mean_model", "measurement", "report", "simulator", "workloads"},
    {"auto", "averaging", "choosing"},
    {"ddp", "regrouping"},
    {"fronts"},
    {"adapters"},
    {"attach"},
    {"data_parallel"},
    {"bench"},
    {"cli"},
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}

TRITON = "gradsync.kernels.triton"  # imported only where tensors are on a device
_TENSORS = {"torch", "numpy", "jaxtyping"}
OUTSIDE: list[set[str]] = [  # third-party libraries that a module may load when it is imported, by floor
    set(),
    *[_TENSORS] * 7,
    *[_TENSORS | {"pydantic"}] * (len(FLOORS) - 9),
    {"typer", "rich"},
]


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names of all imports in `tree`, which is the code of a module in `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            # `from gradsync import plan` names a module, `from gradsync.plan import Plan` does not: keep both readings
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def loaded_at_once(tree: ast.Module) -> ast.Module:
    """The module without its functions and what is for the type checker only: there, any library may be imported."""

    class Loaded(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            self.generic_visit(node)
            return node.orelse if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING") else node

    return Loaded().visit(tree)


def violations(name: str, source: str, package: str) -> list[str]:
    """What is wrong with the imports of a file of the top-level module `name`."""
    floor = FLOOR_OF[name]
    found = []
    for target in imported(ast.parse(source), package):
        first, _, rest = target.partition(".")
        top = rest.partition(".")[0]
        if first == "gradsync" and top in FLOOR_OF and top != name and FLOOR_OF[top] >= floor:
            found.append(
                f"{name} (floor {floor}) imports {target} (floor {FLOOR_OF[top]}): only lower floors may be used"
            )
        elif first == "gradsync" and top not in FLOOR_OF and top != "__version__":
            found.append(f"{name} imports {target} from the package itself: import from the module that defines it")
    for target in imported(loaded_at_once(ast.parse(source)), package):
        library = target.partition(".")[0]
        allowed = OUTSIDE[floor] | ({"triton"} if package == TRITON else set())
        if library != "gradsync" and library not in sys.stdlib_module_names and library not in allowed:
            found.append(f"{name} (floor {floor}) imports {library} at its top, allowed there: {sorted(allowed)}")
    return found


def modules() -> list[str]:
    children = (child for child in PACKAGE.iterdir() if child.suffix == ".py" or any(child.glob("*.py")))
    return sorted(child.stem for child in children if child.stem != "__init__")


def test_every_module_has_a_floor() -> None:
    unknown = [name for name in modules() if name not in FLOOR_OF]
    assert not unknown, f"add {unknown} to FLOORS in {Path(__file__).name}, as low as their imports allow"


@pytest.mark.parametrize("name", [name for name in modules() if name in FLOOR_OF])
def test_modules_import_only_from_lower_floors(name: str) -> None:
    files = [PACKAGE / f"{name}.py"] if (PACKAGE / f"{name}.py").exists() else sorted((PACKAGE / name).rglob("*.py"))
    found = []
    for file in files:
        package = ".".join(["gradsync", *file.relative_to(PACKAGE).parts[:-1]])
        found += [f"{file.relative_to(PACKAGE)}: {text}" for text in violations(name, file.read_text(), package)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("sparse", "from gradsync.engine import Engine"),
        ("sparse", "from gradsync import engine"),
        ("sparse", "from . import engine"),
        ("sparse", "from .engine import Engine"),
        ("costs", "import gradsync.comm.group"),
        ("costs", "def f():\n    from gradsync.comm import group"),
        ("sparse", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gradsync.plan import Plan"),
        ("sparse", "from gradsync import attach"),
        ("sparse", "from gradsync import ddp_hook"),
        ("steps", "import torch"),
        ("kernels", "import triton"),
        ("sparse", "try:\n    import pandas\nexcept ImportError:\n    pandas = None"),
        ("engine", "class A:\n    import scipy"),
    ],
)
def test_the_check_finds(name: str, source: str) -> None:
    assert violations(name, source, "gradsync")


@pytest.mark.parametrize(
    ("name", "package", "source"),
    [
        ("sparse", "gradsync", "import torch\nfrom gradsync.steps import Transfer"),
        ("comm", "gradsync.comm", "from .local import LocalGroup\nfrom gradsync.comm.group import Group"),
        ("comm", "gradsync.comm", "from ..steps import Transfer"),
        ("report", "gradsync.report", "async def f():\n    import plotly"),
        ("report", "gradsync.report", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas"),
        ("cli", "gradsync.cli", "import typer\nfrom gradsync import __version__"),
    ],
)
def test_the_check_lets_pass(name: str, package: str, source: str) -> None:
    assert not violations(name, source, package)
