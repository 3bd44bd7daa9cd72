"""The Python snippets of README and docs run, and links and names in them exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "src" / "gradsync", ROOT / "lab" / "src" / "gradsync_lab")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README_MOST_LINES = 110


def snippets() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        found += [(f"{page.name}-{number}", block) for number, block in enumerate(blocks)]
    return found


@pytest.mark.parametrize(("name", "code"), snippets(), ids=[name for name, _ in snippets()])
def test_snippet_runs(name: str, code: str) -> None:
    exec(compile(code, name, "exec"), {"__name__": name.replace("-", "_").replace(".", "_")})


def test_links_inside_the_repository_lead_somewhere() -> None:
    dead = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                dead.append(f"{page.name}: {target}")
    assert not dead


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_MOST_LINES


def test_usual_changes_name_files_that_are_there_and_few() -> None:
    page = (ROOT / "docs" / "project" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page.partition("## Where do I change")[2], re.MULTILINE)[1:]
    assert len(rows) == 13
    for change, text in rows:
        named = re.findall(r"`([a-z_/]+(?:/|\.py))`", text)
        missing = [each for each in named if not any((top / each).exists() for top in (ROOT, *PACKAGES))]
        assert not missing and 1 <= len(named) <= 6, f"{change}: {named}, missing {missing}"
    words = " ".join(text for _, text in rows)
    for name in re.findall(r"`([a-z_]+)` (?:in|chooses)", words):
        assert any(f"def {name}(" in path.read_text() for top in PACKAGES for path in top.rglob("*.py")), name


def test_the_way_of_a_gradient_names_calls_that_are_there() -> None:
    page = (ROOT / "docs" / "project" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d \| `(\w+)\.(\w+)`.*?\]\(\.\./\.\./(\S+?\.py)\)", page, re.MULTILINE)
    assert len(rows) == 8
    for owner, call, path in rows:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {call}(" in source, f"{owner}.{call} is not in {path}"
        assert owner == "Scheme" or f"class {owner}" in source, f"{owner} is not in {path}"


def texts_of_the_library() -> str:
    """Returns all texts in the library's sources, each once; values in f-strings part a text into several."""
    found: set[str] = set()
    for path in sorted((ROOT / "src" / "gradsync").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.split(r"\{[^}]*\}|%[sd]|%\.\df", node.value))  # of `format` and of logging, too
    return "\n".join(found)


def test_texts_of_errors_in_troubleshooting_are_those_of_the_library() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    known = texts_of_the_library()
    for entry in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        quoted = re.findall(r"```text\n(.*?)```", entry, re.DOTALL)
        assert quoted or entry.startswith("No error"), f"{entry.splitlines()[0]} quotes no text"
        for text in quoted:
            parts = [part.strip() for part in re.split(r"\.\.\.|\n", text)]
            assert [part for part in parts if part not in known] == []
            assert max(map(len, parts)) > 15
