"""The native code does nothing undefined: all kernels over their edges, under the address and UB sanitizers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gradsync.kernels import choice
from tests.kernels.native import BASE

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++") or shutil.which("clang++")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
DRIVER = ["-O0", "-fno-sanitize=undefined"]  # calls kernels whatever they are built for, and has no code of theirs


def compiles(folder: Path, *flags: str) -> bool:
    """Whether the compiler has the libraries for the sanitizer flags."""
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    command = [str(COMPILER), *flags, str(source), "-o", str(folder / "empty")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`kernels.cpp` with all kernels under the sanitizers, built as each native module is; all files side by side."""
    folder = tmp_path_factory.mktemp("sanitize")
    if COMPILER is None or not compiles(folder, *SANITIZE):
        pytest.skip("no C++ compiler with the libraries of the address and undefined behaviour sanitizers")
    common = [*SANITIZE, *(["-fopenmp"] if compiles(folder, "-fopenmp") else [])]
    machines = {"base": [], **({"avx2": ["-march=x86-64-v3"]} if BASE.has_avx2() else {})}
    driver = Path(__file__).with_name("kernels.cpp")
    jobs: list[list[str]] = []
    objects: dict[str, list[str]] = {variant: [] for variant in machines}
    for path in [driver, *kernel_sources()]:  # the largest first
        depends = path != driver and "__AVX2__" in with_headers(path)
        for variant, machine in machines.items() if depends else [("any", [])]:
            compiled = str(folder / f"{path.stem}.{variant}.o")
            jobs.append([str(path), "-c", "-o", compiled, *common, *machine, *(DRIVER if path == driver else ["-Og"])])
            for program in [variant] if depends else machines:
                # Of an inline function the first definition is linked: the kernels', which are optimised.
                objects[program].insert(0, compiled)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build, jobs))
        list(pool.map(build, [[*objects[name], "-o", str(folder / name), *common] for name in machines]))
    return {variant: folder / variant for variant in machines}


def kernel_sources() -> list[Path]:
    """Returns all sources but the binding to Python, the largest first."""
    files = [path for path in (ROOT / "csrc").glob("*.cpp") if not path.name.startswith("bind")]
    return sorted(files, key=lambda path: -path.stat().st_size)


def with_headers(path: Path) -> str:
    """Returns the text of a source and of all our headers that it includes."""
    text = path.read_text(encoding="utf-8")
    return text + "".join(with_headers(path.with_name(name)) for name in re.findall(r'^#include "(.+)"', text, re.M))


def build(arguments: list[str]) -> None:
    language = ["-std=c++17", "-g1", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
    command = [str(COMPILER), *language, f"-I{ROOT / 'csrc'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def run_program(program: Path, *arguments: str, symbols: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs the program; without `symbols` errors are reported sooner, but without source lines."""
    environment = {**os.environ, "ASAN_OPTIONS": f"symbolize={symbols:d}"}
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(params=["base", "avx2"])
def program(request: pytest.FixtureRequest, programs: dict[str, Path]) -> Path:
    if request.param not in programs:
        pytest.skip("this machine does not run AVX2")
    return programs[request.param]


@pytest.mark.timeout(600)
def test_no_kernel_leaves_its_buffers_or_does_what_is_undefined(programs: dict[str, Path]) -> None:
    with ThreadPoolExecutor() as pool:
        for run in pool.map(run_program, programs.values()):
            assert run.returncode == 0, f"{run.args}: {run.stdout} {run.stderr}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernel", [*choice.KERNELS, "scatter_rows adding"])
def test_a_kernel_that_leaves_its_buffer_is_noticed(kernel: str, program: Path) -> None:
    run = run_program(program, kernel, symbols=False)
    assert run.returncode not in (0, 2), f"{kernel} was given a buffer one entry short, and nothing was noticed"
    # A vector that begins inside of the buffer and ends outside is an unknown crash to gcc's sanitizer.
    assert re.search("ERROR: AddressSanitizer: (heap-buffer-overflow|unknown-crash)", run.stderr), run.stderr
