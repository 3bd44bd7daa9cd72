"""The native code does nothing undefined: all kernels over their edges, under the address and UB sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", ["base", "avx2"])
def test_no_kernel_leaves_its_buffers_or_does_what_is_undefined(variant: str, tmp_path: Path) -> None:
    if COMPILER is None or not compiles(tmp_path, *SANITIZE):
        pytest.skip("no C++ compiler with the libraries of the address and undefined behaviour sanitizers")
    if variant == "avx2" and not BASE.has_avx2():
        pytest.skip("this machine does not run AVX2")
    openmp = ["-fopenmp"] if compiles(tmp_path, "-fopenmp") else []
    machine = ["-march=x86-64-v3"] if variant == "avx2" else []
    sources = [path for path in sorted((ROOT / "csrc").glob("*.cpp")) if path.name != "bind.cpp"]
    program = tmp_path / "sanitize"
    build = subprocess.run(
        [str(COMPILER), "-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", *SANITIZE, *openmp, *machine]
        + ["-Wno-unknown-pragmas", "-DMODULE_NAME=sanitized", f"-I{ROOT / 'csrc'}"]
        + [str(Path(__file__).with_name("sanitize.cpp")), *map(str, sources), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    run = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
