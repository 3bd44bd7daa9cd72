"""The native search has no undefined behaviour, checked by the address and UB sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.sanitizers.test_kernels import COMPILER, ROOT, SANITIZE, compiles


@pytest.mark.timeout(300)
def test_the_search_does_nothing_undefined(tmp_path: Path) -> None:
    if COMPILER is None or not compiles(tmp_path, *SANITIZE):
        pytest.skip("no C++ compiler with the libraries of the address and undefined behaviour sanitizers")
    folder = ROOT / "csrc" / "planner"
    sources = [str(path) for path in folder.glob("*.cpp") if path.name != "bind.cpp"]
    program = str(tmp_path / "search")
    flags = ["-std=c++17", "-g1", "-Og", "-Wall", "-Wextra", *SANITIZE, "-D_GLIBCXX_ASSERTIONS", f"-I{folder}"]
    driver = str(Path(__file__).with_name("search.cpp"))
    built = subprocess.run(
        [COMPILER, *flags, driver, *sources, "-o", program], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    run = subprocess.run([program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{run.stdout} {run.stderr}"
