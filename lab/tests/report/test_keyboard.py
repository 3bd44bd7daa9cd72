"""The keyboard alone reaches all of a page: Tab goes through it in its order, and Enter opens what is folded."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gradsync_lab.report.page import figures, write_page, write_records_page
from gradsync_lab.report.record import PlanRan
from lab.tests.report.test_report import BROWSER, training_run

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed: the page was not opened"),
    pytest.mark.timeout(120),
]
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --remote-debugging-pipe"
KEYS = {"Tab": {"windowsVirtualKeyCode": 9}, "Enter": {"windowsVirtualKeyCode": 13, "text": "\r"}}
FOCUSED = """(() => {
  const there = document.activeElement, label = document.getElementById(there.getAttribute("aria-labelledby"));
  const outline = getComputedStyle(there).outlineStyle;
  return [there.localName, (label || there).textContent.trim(), outline, there.parentElement.open ?? null];
})()"""


class Tab:
    """A tab of a browser, which the test drives as a person does, over the pipes of its debugging protocol."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._number = to, back, 0
        self._session: dict[str, str] = {}
        self._read = b""

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command, and returns its result once the browser has answered."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            part = os.read(self._back, 1 << 16)
            assert part, "the browser has ended"
            self._read += part
        first, _, self._read = self._read.partition(b"\0")
        answer: dict[str, Any] = json.loads(first)
        return answer

    def open(self, page: Path) -> None:
        """Loads a page, to the end."""
        target = self.ask("Target.createTarget", url=page.as_uri())["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.ask("Emulation.setFocusEmulationEnabled", enabled=True)
        while self.value("[location.href, document.readyState]") != [page.as_uri(), "complete"]:
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """Returns the value of an expression in JavaScript."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def press(self, key: str) -> tuple[str, str, str, bool | None]:
        """Presses a key, and returns the element that has the focus: its name, its text or label, its outline's style,
        and whether the `details` around it are open.
        """
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, **KEYS[key])
        name, text, outline, is_open = self.value(FOCUSED)
        return name, text, outline, is_open


@contextmanager
def opened(page: Path, profile: Path) -> Iterator[Tab]:
    """Opens a page in a browser of its own, which ends with the block."""
    assert BROWSER is not None
    (theirs, to), (back, answers) = os.pipe(), os.pipe()
    # The browser reads commands from descriptor 3, and writes answers to 4.
    command = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{answers}', "bash", BROWSER, *FLAGS.split()]
    command.append(f"--user-data-dir={profile}")
    with subprocess.Popen(command, pass_fds=(theirs, answers), stderr=subprocess.DEVNULL) as browser:
        for end in (theirs, answers):
            os.close(end)
        try:
            tab = Tab(to, back)
            tab.open(page)
            yield tab
        finally:
            browser.terminate()
            for end in (to, back):
                os.close(end)


def test_tab_goes_through_the_plots_of_a_run_in_their_order(tmp_path: Path) -> None:
    run = training_run()
    write_page(run, tmp_path / "report.html")
    titles = [title for title, _, _ in figures(run)]
    with opened(tmp_path / "report.html", tmp_path / "profile") as tab:
        assert [tab.press("Tab") for _ in titles] == [("figure", title, "solid", None) for title in titles]
        assert tab.press("Tab")[0] == "body", "nothing else takes the focus"


def test_enter_opens_and_closes_the_plan_of_a_record(tmp_path: Path) -> None:
    plan = PlanRan(digest=None, words=["factors.weight -> balanced parallelism"])
    write_records_page([training_run().records[0].model_copy(update={"plan": plan})], tmp_path / "report.html")
    with opened(tmp_path / "report.html", tmp_path / "profile") as tab:
        assert tab.press("Tab") == ("figure", "Ratios", "solid", None)
        summary = "summary", "What gradsync did with each gradient", "solid"
        assert tab.press("Tab") == (*summary, False)
        assert [tab.press("Enter")[-1] for _ in range(2)] == [True, False]
