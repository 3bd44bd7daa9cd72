"""The site that `make docs` builds loads nothing from elsewhere, its links lead somewhere, and it fits a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = sorted(path for path in SITE.rglob("*.html") if path.name != "404.html")  # its addresses are a server's
BROWSER = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr --v=0 --dump-dom "
    "--virtual-time-budget=120000 --window-size=1400,900"
).split()
WIDTHS = (1280, 390)
DARK, LIGHT = 0, 1  # what a browser is told that the reader prefers
LEAST_CONTRAST = 4.5  # of prose and what is behind it: WCAG 2.1, level AA; the theme's numbers in code have 4.45
# Puts one page after the other into a frame, and notes how wide it is in a frame of each width, how light it is behind
# its text, and the least contrast of the two.
MEASURE = r"""<!doctype html><meta charset="utf-8"><body><script>
const found = [];
const numbers = color => color.match(/[\d.]+/g).map(Number);
function over([r, g, b, share = 1], behind) {
  return [r, g, b].map((value, i) => share * value + (1 - share) * behind[i]);
}
function luminance(color) {
  const [r, g, b] = color.map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function behind(element) {
  if (!element) return [255, 255, 255];
  const color = numbers(getComputedStyle(element).backgroundColor);
  return color[3] === 0 ? behind(element.parentElement) : over(color, behind(element.parentElement));
}
function shades(inside) {
  const texts = [...inside.querySelectorAll("article p, article li, article td")];
  const pairs = texts.filter(each => each.textContent.trim()).map(each => {
    const back = behind(each), [a, b] = [back, over(numbers(getComputedStyle(each).color), back)].map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
  return [luminance(behind(inside.querySelector("article"))), Math.min(...pairs)];
}
async function measure(page) {
  const frame = document.createElement("iframe");
  frame.style.width = WIDTHS[0] + "px"; frame.style.height = "800px"; frame.style.border = 0;
  frame.src = page;
  const loaded = new Promise(done => frame.onload = done);
  document.body.append(frame);
  await loaded;
  const inside = frame.contentDocument;
  for (const width of WIDTHS) {
    frame.style.width = width + "px";
    await new Promise(done => setTimeout(done, 100));
    const headings = inside.querySelectorAll("h1").length;
    found.push([page, width, inside.documentElement.scrollWidth, headings, ...shades(inside)]);
  }
  frame.remove();
}
(async () => {
  for (const page of PAGES) await measure(page);
  document.body.textContent = "MEASURED" + JSON.stringify(found) + "MEASURED";
})();
</script>"""


class Addresses(HTMLParser):
    """The identifiers of a page, what it links to, and what a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(given["href"])
        elif "src" in given:
            self.loaded.append(given["src"])


READ = {page: Addresses(page.read_text(encoding="utf-8")) for page in PAGES}


def target(page: Path, address: str) -> Path:
    path = unquote(urlsplit(address).path)
    found = (page.parent / path).resolve() if path else page
    return found / "index.html" if found.is_dir() else found


def test_the_site_is_there() -> None:
    assert len(PAGES) > 30, "build it first: make docs"


def test_pages_load_nothing_from_elsewhere() -> None:
    foreign = [
        f"{page.relative_to(SITE)}: {address}"
        for page, read in READ.items()
        for address in read.loaded
        if urlsplit(address).scheme not in ("", "data")
        or address.startswith("//")
        or not target(page, address).exists()
    ]
    assert not foreign
    for sheet in SITE.rglob("*.css"):
        assert "url(http" not in sheet.read_text(encoding="utf-8") and "@import" not in sheet.read_text(
            encoding="utf-8"
        )


def test_every_name_of_the_reference_is_rendered() -> None:
    for page in sorted((SITE.parents[1] / "docs" / "reference" / "api").glob("*.md")):
        names = re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert names and set(names) <= READ[SITE / "reference" / "api" / f"{page.stem}.html"].ids


def test_links_lead_somewhere() -> None:
    dead = []
    for page, read in READ.items():
        for address in read.links:
            parts = urlsplit(address)
            if parts.scheme:
                continue
            found = target(page, address)
            missing = not found.exists() or (
                parts.fragment and found in READ and unquote(parts.fragment) not in READ[found].ids
            )
            if missing:
                dead.append(f"{page.relative_to(SITE)}: {address}")
    assert not dead, "\n".join(dead)


class Pages(SimpleHTTPRequestHandler):
    """The site's files, and at /frames the page that measures all others."""

    def do_GET(self) -> None:
        if self.path != "/frames":
            return super().do_GET()
        pages = [f"/{page.relative_to(SITE)}" for page in PAGES]
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(MEASURE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS)).encode())
        return None

    def log_message(self, *_: object) -> None:
        """Writes nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("localhost", 0), partial(Pages, directory=SITE)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_pages_fit_the_window_and_are_legible(address: str, tmp_path: Path, scheme: int) -> None:
    assert BROWSER is not None
    flags = [f"--blink-settings=preferredColorScheme={scheme}", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *FLAGS, *flags, f"{address}/frames"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    measured = json.loads(done.stdout.split("MEASURED")[-2])
    assert len(measured) == len(PAGES) * len(WIDTHS)
    assert not [(page, width, wide) for page, width, wide, *_ in measured if wide > width]
    assert not [page for page, _, _, headings, *_ in measured if headings != 1]
    assert not [page for page, *_, light, _ in measured if (light < 0.2) != (scheme == DARK)]
    assert not [(page, contrast) for page, *_, contrast in measured if contrast < LEAST_CONTRAST]
    errors = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    assert not errors, errors[:5]
