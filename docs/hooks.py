"""Hooks of MkDocs: pages of the repository outside of `docs/`, and links to its other files.

Pages link to each other and to files by their places in the repository, so that they can be read there too. The site
has three pages from outside of `docs/`, and a copy of each file that a page links to, below `repository/`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Pages of the repository that are pages of the site as well, by their paths in the repository.
PLACES = {
    "README.md": "index.md",
    "benchmarks/README.md": "results.md",
    "CHANGELOG.md": "project/changes.md",
    "CONTRIBUTING.md": "project/contributing.md",
}
ORIGINS = {place: path for path, place in PLACES.items() if path != "README.md"}
LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )([^)#\s:]+)(#[^)\s]*)?(?=\)|$)", re.MULTILINE)
FENCED = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)


def place_of(path: str) -> str:
    """Returns where the site has the file at this path in the repository."""
    if path in PLACES:
        return PLACES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".json") else f"repository/{path}.txt"  # a browser shows both


def with_links(text: str, page: str) -> tuple[str, set[str]]:
    """Returns a page's text with the links of the site, and the files outside of `docs/` that it links to.

    Args:
        text: Markdown, whose links are relative to the page's place in the repository.
        page: the page's place in the site.
    """
    folder = posixpath.dirname(ORIGINS.get(page, f"docs/{page}"))
    files: set[str] = set()

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        place = place_of(path)
        if place.startswith("repository/"):
            files.add(path)
        return f"{match[1]}{posixpath.relpath(place, posixpath.dirname(page) or '.')}{match[3] or ''}"

    written, begin = [], 0
    for fence in FENCED.finditer(text):
        written += [LINK.sub(link, text[begin : fence.start()]), fence[0]]
        begin = fence.end()
    return "".join([*written, LINK.sub(link, text[begin:])]), files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from outside of `docs/`, and the files that pages link to."""
    for place, path in ORIGINS.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text(encoding="utf-8")))
    linked = set().union(*(with_links(file.content_string, file.src_uri)[1] for file in files.documentation_pages()))
    for path in sorted(linked):
        if (ROOT / path).is_file():
            files.append(File.generated(config, place_of(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the page's text with the links of the site."""
    return with_links(markdown, page.file.src_uri)[0]
