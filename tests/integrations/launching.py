"""Runs scripts on ranks: under torchrun, or under its agent with ranks that are forks (`Agent`).

Examples also run as they are without gradsync, by the diffs in the docs.
"""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tests.world import PRELOADED

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLES = ROOT / "examples" / "frameworks"
LIMIT_S = 300.0
# On a busy machine a thread of gloo may let go of the tensors of a script's last collective while Python ends: torch
# aborts then (its issue 190489; see docs/concepts/reliability.md).
ABORT = "terminate called without an active exception"
MOST_CHANGED_LINES = 3
MOST_LINES = 80  # of an example


def torchrun(
    script: Path, *arguments: str, ranks: int = 2, restarts: int = 0, env: Mapping[str, str] | None = None
) -> str:
    """Returns what the ranks of a script printed under torchrun; runs it again where a rank ended as by `ABORT`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), str(script), *arguments]
    for _ in range(2):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if ABORT not in done.stderr:
            break
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


class Agent:
    """Torchrun's agent, `agent.py`, whose ranks are forks of a process with torch, gradsync and `modules` loaded.

    It starts at the first launch, and serves until that of another one: its process keeps what it has loaded.
    """

    _running: ClassVar[Agent | None] = None

    def __init__(self, *modules: str) -> None:
        self._command = [sys.executable, str(HERE / "agent.py"), *PRELOADED, *modules]
        self._server: subprocess.Popen[str] | None = None

    def launched(self, script: Path, *arguments: str, ranks: int = 2) -> str:
        """Returns what the ranks of a script printed, rank 0's last."""
        if Agent._running is not self:
            if Agent._running is not None:
                Agent._running.end()
            Agent._running = self
            self._server = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._server is not None and self._server.stdin is not None and self._server.stdout is not None
        launch = {"script": str(script), "arguments": arguments, "ranks": ranks}
        print(json.dumps(launch), file=self._server.stdin, flush=True)
        if not select.select([self._server.stdout], [], [], LIMIT_S)[0]:
            self.end()
            raise AssertionError(f"{script.name} was still running after {LIMIT_S:g} s, and was ended")
        done = json.loads(self._server.stdout.readline())
        assert not done["failed"], done["stdout"][-2000:] + done["stderr"][-6000:]
        printed: str = done["stdout"]
        return printed

    def found(self, script: str, scenario: str, *arguments: str, ranks: int = 2) -> list[dict[str, Any]]:
        """Returns what each rank of a script beside this file found in one of its scenarios."""
        by_rank: list[dict[str, Any]] = found_in(self.launched(HERE / script, scenario, *arguments, ranks=ranks))
        return by_rank

    def end(self) -> None:
        """Ends the server, and the ranks that it started."""
        if self._server is not None:
            self._server.terminate()
            self._server.communicate()
        self._server = Agent._running = None


def last_line(printed: str) -> str:
    return printed.splitlines()[-1]


def found_in(printed: str) -> Any:
    """Returns what stands after FOUND, in JSON."""
    return json.loads(next(line for line in printed.splitlines() if line.startswith("FOUND ")).removeprefix("FOUND "))


def without_gradsync(example: Path, page: Path, folder: Path) -> Path:
    """Writes the example as it is without gradsync into `folder`, by the first diff of the page, backwards."""
    text = example.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    diff = re.search(r"```diff\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert diff, "the page shows the lines to change"
    assert len(re.findall(r"^\+", diff[1], re.MULTILINE)) <= MOST_CHANGED_LINES
    for hunk in re.split(r"^ .*\n", diff[1], flags=re.MULTILINE):
        lines = hunk.splitlines()
        added = "".join(f"{line[1:]}\n" for line in lines if line.startswith("+"))
        removed = "".join(f"{line[1:]}\n" for line in lines if line.startswith("-"))
        assert not lines or text.count(added) == 1, f"the example has the page's lines {added!r}"
        text = text.replace(added, removed) if added else text
    script = folder / "without_gradsync.py"
    script.write_text(text, encoding="utf-8")
    return script


def parameters(line: str) -> str:
    """Returns the digest of parameters in an example's last line."""
    return line.rpartition(" ")[2]


def loss(line: str) -> float:
    """Returns the held-out loss in an example's last line."""
    return float(re.findall(r"loss ([0-9.]+)", line)[0])
