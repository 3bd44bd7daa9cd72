"""A wheel holds the library and nothing else, and its native modules need no more than what torch needs or brings."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import tarfile
from email.message import Message
from pathlib import Path

import pytest

import gradsync
from tests.wheels.built import DIST, NATIVE, PURE, ROOT, SDISTS, WHEELS, said_by, unpacked

MODULES = ("kernels/_kernels_avx2", "kernels/_kernels_base", "planner/_search")
# Which any manylinux system has; and libgomp, which torch brings and loads before our modules.
LIBRARIES = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "libgomp.so.1"}
TORCH_GLIBC = (2, 28)  # of torch's own wheels
ID = [wheel.stem.partition("-")[2] for wheel in WHEELS]

needs_binutils = pytest.mark.skipif(shutil.which("objdump") is None, reason="needs readelf and objdump (binutils)")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """Each wheel with the folder of its files."""
    return {wheel: unpacked(wheel, tmp_path_factory.mktemp("wheel")) for wheel in WHEELS}


def sources() -> set[str]:
    """Returns the files of the package in the checkout, as git knows them."""
    listed = said_by("git", "ls-files", "src/gradsync", cwd=ROOT).split()
    return {name.removeprefix("src/") for name in listed}


def metadata(folder: Path) -> Message:
    return email.message_from_string(next(folder.glob("*.dist-info/METADATA")).read_text(encoding="utf-8"))


def natives(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.so"))


def test_there_is_something_to_look_at() -> None:
    assert len(SDISTS) == 1 and WHEELS, "make wheels builds them"
    assert len(PURE) <= 1 and {wheel.stem.split("-")[2] for wheel in NATIVE} <= {"cp311", "cp312"}


@pytest.mark.parametrize("wheel", WHEELS, ids=ID)
def test_a_wheel_holds_the_package_and_what_describes_it(wheel: Path, folders: dict[Path, Path]) -> None:
    folder = folders[wheel]
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    described = {name for name in files if name.startswith(f"gradsync-{gradsync.__version__}.dist-info/")}
    modules = {str(path.relative_to(folder)) for path in natives(folder)}
    assert files - described - modules == sources()
    kinds = {name.partition("/")[2] for name in described}
    assert {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"} <= kinds
    licence = next(folder.glob("*.dist-info/licenses/LICENSE")).read_bytes()
    assert licence == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("wheel", WHEELS, ids=ID)
def test_a_wheel_says_what_it_is(wheel: Path, folders: dict[Path, Path]) -> None:
    said = metadata(folders[wheel])
    assert (said["Name"], said["Version"]) == ("gradsync", gradsync.__version__)
    assert (said["Requires-Python"], said["License-Expression"]) == (">=3.11", "Apache-2.0")
    about = next(folders[wheel].glob("*.dist-info/WHEEL")).read_text(encoding="utf-8")
    assert f"Root-Is-Purelib: {'true' if wheel in PURE else 'false'}" in about


@pytest.mark.parametrize("wheel", WHEELS, ids=ID)
def test_native_wheels_have_all_modules_and_the_pure_one_none(wheel: Path, folders: dict[Path, Path]) -> None:
    if wheel in PURE:
        assert not natives(folders[wheel])
        return
    python, abi = wheel.stem.split("-")[2:4]
    assert (python, abi) in {("cp311", "cp311"), ("cp312", "abi3")}
    suffix = ".abi3.so" if abi == "abi3" else ".cpython-311-x86_64-linux-gnu.so"
    found = [str(path.relative_to(folders[wheel] / "gradsync")) for path in natives(folders[wheel])]
    assert found == [f"{module}{suffix}" for module in MODULES]


@pytest.mark.parametrize("wheel", NATIVE, ids=lambda wheel: wheel.stem.partition("-")[2])
def test_a_native_wheel_runs_where_torch_runs(wheel: Path) -> None:
    tags = re.findall(r"manylinux_(\d+)_(\d+)_x86_64", wheel.stem)
    assert tags and min((int(major), int(minor)) for major, minor in tags) <= TORCH_GLIBC


@needs_binutils
@pytest.mark.parametrize("wheel", NATIVE, ids=lambda wheel: wheel.stem.partition("-")[2])
def test_native_modules_need_few_libraries_and_name_no_folder(wheel: Path, folders: dict[Path, Path]) -> None:
    for module in natives(folders[wheel]):
        dynamic = said_by("readelf", "--dynamic", "--wide", module)
        assert set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)) <= LIBRARIES, "libstdc++ is linked in"
        assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
        assert not re.search(re.escape(str(ROOT)).encode() + b"|pip-build-env", module.read_bytes()), "a builder's path"
        assert not said_by("readelf", "--sections", "--wide", module).count(".debug_")


@needs_binutils
@pytest.mark.parametrize("wheel", NATIVE, ids=lambda wheel: wheel.stem.partition("-")[2])
def test_native_modules_show_only_how_python_starts_them(wheel: Path, folders: dict[Path, Path]) -> None:
    """Else the loader may mix a C++ library of ours with torch's."""
    for module in natives(folders[wheel]):
        shown = said_by("readelf", "--dyn-syms", "--wide", module)
        defined = {
            line.split()[7]
            for line in shown.splitlines()
            if re.search(r"\b(GLOBAL|WEAK|UNIQUE)\b", line) and " UND " not in line
        }
        assert defined == {f"PyInit_{module.name.partition('.')[0]}"}


def instructions(module: Path) -> set[str]:
    """Returns the widest kinds of vector instructions in a module: avx, avx512."""
    found = set()
    with subprocess.Popen(
        ["objdump", "--disassemble", "--no-show-raw-insn", module], stdout=subprocess.PIPE, text=True
    ) as dump:
        for line in dump.stdout or ():
            if "%zmm" in line or "%k1" in line:
                found.add("avx512")
            elif "%ymm" in line:
                found.add("avx")
    return found


@needs_binutils
@pytest.mark.parametrize("wheel", NATIVE, ids=lambda wheel: wheel.stem.partition("-")[2])
def test_native_modules_are_for_any_machine_and_for_avx2_and_none_for_the_builder(
    wheel: Path, folders: dict[Path, Path]
) -> None:
    avx2, base, search = natives(folders[wheel])
    assert (instructions(base), instructions(search)) == (set(), set())
    assert instructions(avx2) == {"avx"}


@pytest.mark.parametrize("sdist", SDISTS, ids=["sdist"])
def test_the_sdist_holds_what_is_built_and_read_but_no_tests_and_no_records(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    top = {name.partition("/")[0] for name in names}
    assert top == {
        ".gitignore", "CHANGELOG.md", "CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "csrc", "docs", "examples",
        "pyproject.toml", "src",
    }  # fmt: skip
    assert not [name for name in names if name.endswith((".so", ".whl", ".jsonl", ".pyc"))]
    assert {name for name in names if name.startswith("src/gradsync/")} == {f"src/{name}" for name in sources()}
    assert sdist.name == f"gradsync-{gradsync.__version__}.tar.gz" and sdist.stat().st_size < 2 << 20
    assert DIST == sdist.parent
