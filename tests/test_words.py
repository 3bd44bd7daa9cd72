"""Docstrings and sentences of pages open with a subject or a verb; public docstrings have shapes and units."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOPS = ("src/gradsync", "lab/src/gradsync_lab", "lab/tests", "tests", "examples")
# Openings that leave out the subject, or whose noun stands in another sentence.
BAD_OPENINGS = frozenset(
    "What Of By Which Whose Who Where As From Those These That With For To At On It Its None Not There And Or But If"
    .split()
)  # fmt: skip


def docstrings(top: str) -> Iterator[tuple[str, str]]:
    """Yields (place, docstring) of all modules, classes and functions below `top`."""
    for path in sorted((ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if text := ast.get_docstring(node):
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def opening(text: str) -> str:
    """Returns the first word of a text, without the marks around it."""
    found = re.match(r"\W*(\w+)", text)
    return found[1] if found else ""


@pytest.mark.parametrize("top", TOPS)
def test_no_docstring_opens_without_a_subject(top: str) -> None:
    bad = [f"{place}: {text.splitlines()[0]}" for place, text in docstrings(top) if opening(text) in BAD_OPENINGS]
    assert not bad, "\n".join(bad)


def test_the_check_sees_openings() -> None:
    assert opening("`Of` the rest.") == "Of" and opening("Returns it.") not in BAD_OPENINGS
    assert len(list(docstrings("src/gradsync"))) > 1000


PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "lab/README.md", *sorted((ROOT / "docs").rglob("*.md")))
NO_PROSE = re.compile(r"^( *)```.*?^\1```|^<!--.*?-->|^ *[|#].*?$", re.DOTALL | re.MULTILINE)
PARTS = re.compile(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s", re.MULTILINE)  # between paragraphs and items of lists
BARE = re.compile(r"(?:^|(?<=[.!?])\s|(?<=[.!?][)\"*_`])\s)(\(?(?:What|Of|By(?! default)|Those|Where)\b[^.!?]*[.!?]?)")


def bare_openings(page: str) -> list[str]:
    """Returns the sentences of a page in Markdown that open with What, Of, By, Those or Where and ask nothing.

    Code, tables, headings and comments have no sentences; a link or a name in bold letters may open one.
    """
    found = []
    for block in PARTS.split(NO_PROSE.sub("\n\n", page)):
        found += [each for each in BARE.findall(" ".join(block.split())) if not each.endswith("?")]
    return found


def test_sentences_of_pages_open_with_a_subject() -> None:
    bad = []
    for page in PAGES:
        bad += [f"{page.relative_to(ROOT)}: {each}" for each in bare_openings(page.read_text(encoding="utf-8"))]
    assert not bad, "\n".join(bad)


def test_the_check_sees_bare_openings_in_prose_alone() -> None:
    bad = "It is one.\nWhat it\nloses is told. (Where it is?)\n\n- By then it is late.\n- `a` is. Of these, none.\n"
    assert [each.split()[0] for each in bare_openings(bad)] == ["What", "By", "Of"]
    good = "# What it is\n\n| Of | b. Of c |\n\n```\nWhere. By\n```\nBy default, what? **Where it goes** says so."
    assert not bare_openings(good)


# A shape such as (numel,) or (n, dim), or words that say as much.
SHAPE = re.compile(
    r"\([^()]*,[^()]*\)|0-D|1-D|2-D|\bflat\b|\bshapes?\b|\bscalar|like `|as `|dtype|numel|rows and|table"
)


def public_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields functions and methods whose names, and whose classes' names, do not begin with an underscore."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from public_functions(child)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            yield child


def handles_tensors(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the function takes or returns tensors as such, not tensors by name."""
    given = [each.annotation for each in (*function.args.args, *function.args.kwonlyargs)]
    return any(re.search(r"(?<!\[)\bTensor\b", ast.unparse(each)) for each in (*given, function.returns) if each)


def test_public_functions_of_tensors_say_shapes_or_dtypes() -> None:
    bare = []
    for path in sorted((ROOT / "src" / "gradsync").rglob("*.py")):
        for function in public_functions(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(function)
            if text and handles_tensors(function) and not function.name.startswith("check_") and not SHAPE.search(text):
                bare.append(f"{path.relative_to(ROOT)}:{function.lineno} {function.name}: {text.splitlines()[0]}")
    assert not bare, "\n".join(bare)
