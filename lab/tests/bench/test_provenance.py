"""Every record says by one digest which sources of the library it measured."""

from __future__ import annotations

import re
from pathlib import Path

import gradsync_lab.faults.record as faults
import gradsync_lab.fuzz.record as fuzz
from gradsync_lab.bench.provenance import code, digest_of_sources, engine_digest
from gradsync_lab.report.record import Record, TrainingRun


def write(root: Path, **contents: str) -> None:
    for name, content in contents.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def checkout(root: Path, **contents: str) -> Path:
    """Returns the package of a checkout, with native sources and a built module, which differs by compiler."""
    usual = {"src__gradsync__a_dot_py": "a = 1", "csrc__a_dot_cpp": "int a;", "src__gradsync__a_dot_so": "built"}
    write(root, **(usual | contents))
    return root / "src" / "gradsync"


def test_a_digest_is_of_python_and_native_sources_and_not_of_builds_or_places(tmp_path: Path) -> None:
    one = digest_of_sources(checkout(tmp_path / "one"))
    assert re.fullmatch("[0-9a-f]{12}", one)
    assert digest_of_sources(checkout(tmp_path / "two", src__gradsync__a_dot_so="another compiler")) == one
    others = [
        digest_of_sources(checkout(tmp_path / "python", src__gradsync__a_dot_py="a = 2")),
        digest_of_sources(checkout(tmp_path / "native", csrc__a_dot_cpp="int b;")),
        digest_of_sources(checkout(tmp_path / "more", src__gradsync__b_dot_py="")),
    ]
    assert len({one, *others}) == 4


def test_a_digest_of_an_install_is_of_the_built_modules(tmp_path: Path) -> None:
    found = []
    for place, built in (("one", "built"), ("two", "built"), ("three", "otherwise")):
        write(tmp_path / place / "lib", gradsync__a_dot_py="a = 1", gradsync__a_dot_so=built)
        found.append(digest_of_sources(tmp_path / place / "lib" / "gradsync"))
    assert found[0] == found[1] != found[2]


def test_records_of_bench_faults_soak_and_fuzz_have_the_same_fields_of_it() -> None:
    headers = faults.Header.here("faults"), faults.Header.here("soak"), fuzz.header()
    assert {header.engine for header in headers} == {engine_digest()} == {code()["engine"]}
    assert set(code()) <= Record.model_fields.keys() & TrainingRun.model_fields.keys()
