"""The native code does nothing undefined: all kernels over their edges, under the address and UB sanitizers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gradsync import kernels
from tests.kernels.native import BASE

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++") or shutil.which("clang++")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def compiles(folder: Path, *flags: str) -> bool:
    """Whether the compiler has the libraries that the flags need."""
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    command = [str(COMPILER), *flags, str(source), "-o", str(folder / "empty")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module", params=["base", "avx2"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`sanitize.cpp` with all kernels, built as the module of this name is, under the sanitizers."""
    folder = tmp_path_factory.mktemp("sanitize")
    if COMPILER is None or not compiles(folder, *SANITIZE):
        pytest.skip("no C++ compiler with the libraries of the address and undefined behaviour sanitizers")
    if request.param == "avx2" and not BASE.has_avx2():
        pytest.skip("this machine does not run AVX2")
    openmp = ["-fopenmp"] if compiles(folder, "-fopenmp") else []
    machine = ["-march=x86-64-v3"] if request.param == "avx2" else []
    sources = [path for path in sorted((ROOT / "csrc").glob("*.cpp")) if path.name != "bind.cpp"]
    build = subprocess.run(
        [str(COMPILER), "-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", *SANITIZE, *openmp, *machine]
        + ["-Wno-unknown-pragmas", "-DMODULE_NAME=sanitized", f"-I{ROOT / 'csrc'}"]
        + [str(Path(__file__).with_name("sanitize.cpp")), *map(str, sources), "-o", str(folder / "sanitize")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    return folder / "sanitize"


@pytest.mark.timeout(300)
def test_no_kernel_leaves_its_buffers_or_does_what_is_undefined(program: Path) -> None:
    run = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kernel", [*kernels._TABLE, "scatter_rows adding"])
def test_a_kernel_that_leaves_its_buffer_is_noticed(kernel: str, program: Path) -> None:
    run = subprocess.run([str(program), kernel], capture_output=True, text=True, check=False)
    assert run.returncode not in (0, 2), f"{kernel} was given a buffer one entry short, and nothing was noticed"
    # A vector that begins inside of the buffer and ends outside is an unknown crash to gcc's sanitizer.
    assert re.search("ERROR: AddressSanitizer: (heap-buffer-overflow|unknown-crash)", run.stderr), run.stderr
