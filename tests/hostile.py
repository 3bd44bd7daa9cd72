"""Names that are made to be taken for something else: HTML, console markup, emoji codes, formats, and control codes."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from hypothesis import strategies as st

HTML = [
    "<script>alert(1)</script>",
    "</script>",
    '"><img src=x onerror=alert(1)>',
    "'><b onmouseover=x>",
    "<!--",
    "&lt;",
]
CONSOLE = ["[red]x[/red]", "[/]", "[/red]", "[bold", "[link=http://x]", "\\[", ":skull:"]
FORMATS = ["{0}", "{x}", "%s", "%{x}", "{{ 7*7 }}", "{% if %}"]
CODES = ["\x1b[31m", "\x1b]0;title\x07", "\x9b2J", "\u202e", "\u2028"]
FRAGMENTS = [*HTML, *CONSOLE, *FORMATS, *CODES, "a.weight", " "]
SAMPLES = [*CONSOLE[:2], ":skull:", "".join(HTML + CONSOLE + FORMATS), "".join(FRAGMENTS)]
NAMES = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=4).map(lambda parts: "n" + "".join(parts))
STEERING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]")  # codes that steer a terminal; not line breaks


def squeezed(text: str) -> str:
    """Returns the text without white space and the frames of panels and tables, which stand where lines are broken."""
    return re.sub(r"[\s\u2500-\u257f]", "", text)


def elements(page: str) -> list[tuple[str, ...]]:
    """Returns the tags of a page with the names of their attributes, in order, without the content of scripts."""

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, *(name for name, _ in attrs)))

        def handle_endtag(self, tag: str) -> None:
            found.append((f"/{tag}",))

    found: list[tuple[str, ...]] = []
    Tags().feed(page)
    return found
