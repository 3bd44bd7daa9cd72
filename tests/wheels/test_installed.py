"""Each file of dist/ is installed into an empty environment, where no compiler is found, and run.

Torch and the other dependencies are not installed again: the environment sees the packages of the one that the tests
run in. So these tests say nothing about whether an index has all dependencies, except that `pip check` finds every
one that the metadata name, in a fitting version.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy
import pytest
import torch

import gradsync
from gradsync.kernels import native
from tests.wheels.built import NATIVE, PIP, SDISTS, WHEELS, said_by

HERE = Path(__file__).parent
GOMP = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
# Interpreters that are tried where the machine has them, with the kernels alone: torch is not installed for each.
OTHERS = ("3.12", "3.13", "3.14")
RUN = """
import gradsync, torch
from gradsync import kernels
x = torch.arange(8.0) - 4
indices, values = torch.zeros(2, dtype=torch.int32), torch.zeros(2)
kernels.top_k(x, indices, values)
print(gradsync.__file__, kernels.active(), gradsync.__version__, sorted(indices.tolist()), sep="|")
from gradsync.planner.solver import joint
print(joint.native is not None)
"""


def interpreter(version: str) -> str | None:
    """Returns the path of a CPython of this version, by the variable that `make wheels` knows or its usual name."""
    name = os.environ.get(f"PYTHON{version.replace('.', '')}", f"python{version}")
    command = [name, "-c", f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"]
    if shutil.which(name) is None or subprocess.run(command, capture_output=True, check=False).returncode:
        return None
    return name


def environment(folder: Path, python: str = sys.executable) -> Path:
    """Makes an empty environment, and returns its interpreter."""
    said_by(python, "-m", "venv", "--without-pip", folder)
    return folder / "bin" / "python"


def installed(folder: Path, file: Path, python: str = sys.executable) -> Path:
    """Installs a file alone, without an index and where no compiler is found; returns the environment's interpreter."""
    inside = environment(folder, python)
    # An sdist fetches what builds it; what pip has built of an earlier one is not to be taken.
    how = ["--no-index"] if file.suffix == ".whl" else ["--no-cache-dir"]
    none = {**os.environ, "CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    said_by(*PIP, "--python", inside, "install", *how, "--no-deps", file, env=none)
    return inside


def sees_packages(inside: Path) -> None:
    """Lets an environment see the packages of this one, without what its .pth files do: gradsync is the wheel's."""
    site = Path(said_by(inside, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")


def fits(file: Path) -> bool:
    """Whether this interpreter is one that the file was made for."""
    tag = file.stem.split("-")[2] if file.suffix == ".whl" else "py3"
    return tag == "py3" or (tag == f"cp3{sys.version_info.minor}") or (tag == "cp312" and sys.version_info >= (3, 12))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", [*WHEELS, *SDISTS], ids=lambda file: file.name)
def test_it_runs_in_an_empty_environment_without_a_compiler(file: Path, tmp_path: Path) -> None:
    if not fits(file):
        pytest.skip(f"for another interpreter than CPython {sys.version_info.major}.{sys.version_info.minor}")
    inside = installed(tmp_path / "env", file)
    sees_packages(inside)
    done = subprocess.run([inside, "-I", "-c", RUN], capture_output=True, text=True, check=True, cwd=tmp_path)
    where, active, version, chosen = done.stdout.splitlines()[0].split("|")
    assert Path(where).is_relative_to(tmp_path) and (version, chosen) == (gradsync.__version__, "[0, 1]")
    slow = "gradsync is slow here: torch operations run in place of its native kernels"
    assert [line.startswith(slow) for line in done.stderr.splitlines()] == ([] if file in NATIVE else [True])
    assert (active, done.stdout.splitlines()[1]) == (("native", "True") if file in NATIVE else ("reference", "False"))
    said_by(*PIP, "--python", inside, "check")
    if file in WHEELS:  # an sdist without a compiler becomes what the pure wheel is
        doctor = said_by(inside.with_name("gradsync"), "doctor", cwd=tmp_path)
        assert ("native, built for" in doctor) == (file in NATIVE) and "fault" not in doctor


def digests(python: str | Path, package: Path) -> dict[str, list[str]]:
    said = said_by(python, HERE / "kernels_alone.py", package, GOMP[0])
    found: dict[str, list[str]] = json.loads(said)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize("wheel", [each for each in NATIVE if "-abi3-" in each.name], ids=lambda wheel: wheel.name)
def test_kernels_alone_write_the_same_bits_under_other_interpreters(wheel: Path, version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no python{version}: untested there")
    inside = installed(tmp_path / "env", wheel, python)
    said_by(*PIP, "--python", inside, "install", f"numpy=={numpy.__version__}")
    find = "import importlib.util as u; print(u.find_spec('gradsync').submodule_search_locations[0])"
    package = Path(said_by(inside, "-c", find).strip())
    ours = Path(str(native.load().__file__)).parents[1]
    assert digests(inside, package) == digests(sys.executable, ours)
