"""The pictures of docs/concepts/ideas.md are what the code draws, and the page shows each with its figures in words."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "concepts" / "ideas.md"


def test_pictures_are_what_the_code_draws() -> None:
    pictures = runpy.run_path(str(DOCS / "pictures" / "ideas.py"))["PICTURES"]
    files = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "concepts" / "pictures").glob("*.svg")}
    assert files.keys() == pictures.keys()
    for name, draw in pictures.items():
        assert files[name] == draw().svg(), f"{name}: python docs/pictures/ideas.py draws all anew"


def test_the_page_shows_each_picture_and_says_its_figures() -> None:
    shown = dict(re.findall(r"!\[([^\]]+)\]\(pictures/([a-z-]+)\.svg\)", PAGE.read_text(encoding="utf-8")))
    assert sorted(shown.values()) == sorted(path.stem for path in (DOCS / "concepts" / "pictures").glob("*.svg"))
    for words, name in shown.items():
        drawn = (DOCS / "concepts" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        for figure in re.findall(r"\d+ [mk][sB]|\d\.\d\d", words):
            assert figure in drawn, f"{name}: the page says {figure}"
