"""The Python snippets of README and docs run, and links and names in them exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from gradsync.cli import COMMANDS
from gradsync.frontends.fsdp_internals import TESTED_TORCH

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


def fragments() -> list[tuple[str, str]]:
    """Returns the code blocks marked `py`: parts of a user's script, which names things that are not on the page."""
    return [
        (page.name, block)
        for page in PAGES
        for block in re.findall(r"```py\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    ]


def names_of_gradsync(code: str) -> set[str]:
    """Returns the dotted names of gradsync's that a piece of code imports or uses."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "gradsync":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("gradsync."):
            found |= set(re.findall(r"^gradsync(?:\.\w+)+", ast.unparse(node)))
    return found


def is_there(name: str) -> bool:
    """Returns whether a module of the library defines or exports the name; frameworks' adapters are not imported."""
    place, parts = ROOT / "src", name.split(".")
    while parts and ((place / parts[0]).is_dir() or (place / f"{parts[0]}.py").is_file()):
        place /= parts.pop(0)
    files = [place / "__init__.py", place / "__init__.pyi"] if place.is_dir() else [place.with_suffix(".py")]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    return not parts or re.search(rf"\b{parts[0]}\b", source) is not None


def test_parts_of_scripts_are_python_and_name_what_there_is() -> None:
    missing = [(page, name) for page, code in fragments() for name in names_of_gradsync(code) if not is_there(name)]
    assert not missing and len(fragments()) >= 10


def test_links_inside_the_repository_lead_somewhere() -> None:
    dead = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                dead.append(f"{page.name}: {target}")
    assert not dead


def test_readme_is_short_and_shows_a_picture() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= README_MOST_LINES
    pictures = re.findall(r'<img src="([^"]+)"', text)
    assert pictures and all((ROOT / picture).is_file() for picture in pictures)


@pytest.mark.parametrize(
    "words", ["belongs to gradsync-lab", "`No lab:`", "there is no file", "there is no script", "cannot be written",
              "synchronised no gradients", "steps that measuring takes"],
)  # fmt: skip
def test_errors_of_the_first_hour_are_in_troubleshooting(words: str) -> None:
    assert words in (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert words.strip("`") in texts_of_the_packages()


@pytest.mark.parametrize(
    "words", ["must be a torch.nn.Module", "during backward; call", "not a member of process_group", "must name it",
              "differ between the ranks", "communicator='shared' needs", "there is nothing to attach", "device_ids and",
              "needs a gradsync.DDPState", "is shared with", "a GradScaler decides", "no optimiser step has",
              "came to the model", "was frozen when", "training graph has changed", "inside join() each",
              "while it was averaged with", "were given the same state", "is no file that", "expected that of one job"],
)  # fmt: skip
def test_errors_of_common_mistakes_are_in_troubleshooting(words: str) -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = "".join(re.findall(r"```text\n(.*?)```", page, re.DOTALL))
    assert words in quoted and words in texts_of_the_packages()


def test_commands_of_a_page_write_no_file_twice() -> None:
    """A later plan would take the place of the one that the text behind the commands loads."""
    for page in PAGES:
        for block in re.findall(r"^```\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            written = re.findall(r" -o (\S+)", block)
            assert len(written) == len(set(written)), f"{page.name}: {written}"


def test_pages_say_alike_which_interpreters_and_releases_of_torch_were_tried() -> None:
    readme, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md"))
    table = page.partition("### What ran where")[2]
    ran = re.findall(r"^\| CPython ([\d., ]+) \| ([\d.]+|none) \|", table, re.MULTILINE)
    tested = {(torch, python) for python, torch in ran if torch != "none"}
    assert tested == set(re.findall(r"(2\.\d+) on (?:Python )?(3\.\d+)", readme))
    assert {torch for torch, _ in tested} == set(TESTED_TORCH)
    others = re.search(r"^OTHERS = (\(.+\))$", (ROOT / "tests/wheels/test_installed.py").read_text(), re.MULTILINE)
    assert others and set(ast.literal_eval(others[1])) == {
        each for python, torch in ran if torch == "none" for each in python.split(", ")
    }


def test_the_page_of_the_lab_names_its_commands() -> None:
    named = re.findall(r"`(?:gradsync )?(\w+)`", (ROOT / "lab" / "README.md").read_text(encoding="utf-8"))
    assert {name for name, command in COMMANDS.items() if command.place is None} <= set(named)


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


@cache
def texts_of_the_packages() -> str:
    """Returns all texts in the sources of library and lab, each once; values in f-strings part a text into several."""
    found: set[str] = set()
    for path in sorted(path for top in PACKAGES for path in top.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.split(r"\{[^}]*\}|%[sd]|%\.\df", node.value))  # of `format` and of logging, too
    return "\n".join(found)


def test_texts_of_errors_in_troubleshooting_are_those_of_the_packages() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    known = texts_of_the_packages()
    for entry in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        quoted = re.findall(r"```text\n(.*?)```", entry, re.DOTALL)
        assert quoted or entry.startswith("No error"), f"{entry.splitlines()[0]} quotes no text"
        for text in quoted:
            parts = [part.strip() for part in re.split(r"\.\.\.|\n", text)]
            assert [part for part in parts if part not in known] == []
            assert max(map(len, parts)) > 15
