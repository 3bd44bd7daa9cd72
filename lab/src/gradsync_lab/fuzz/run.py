"""Fuzzing for some seconds: cases of one seed after the other, in threads and in processes at the same time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .case import Case
from .draw import drawn
from .record import Batch, Failure, append, batches_of, header, next_seed, read
from .shrink import shrunk
from .workers import HUNG, Workers

BATCH = 48  # cases that are run between two lines of the record
SCRIPT = '''"""Replays a case of `gradsync fuzz`, made smaller. It failed with: {problem}"""

from gradsync_lab.fuzz.replay import replay

if __name__ == "__main__":  # processes of ranks load this file, too
    replay("""{case}""")
'''


@dataclass(frozen=True)
class Failed:
    """A case that failed, with its problems."""

    case: Case
    problems: list[str]

    @property
    def hung(self) -> bool:
        return any(problem.startswith(HUNG) for problem in self.problems)


def way_of(case: Case) -> str:
    """Returns how the ranks of a case run, in words: "threads", or "processes" with the frontend."""
    return "threads" if case.world == "threads" else f"processes, {case.frontend}"


class Fuzzing:
    """Standing processes, and the record of what they ran.

    `first`: the first seed, unless the record has later ones.
    """

    def __init__(self, record: Path, scripts: Path, first: int = 0) -> None:
        self._record, self._scripts = record, scripts
        self._threads, self._processes = Workers(1), Workers()
        self._header = header()
        lines = read(record)
        self.next = max(first, next_seed(lines))
        self.batches = batches_of(lines, self._header.engine)
        self.failures: list[Failure] = []

    def run(self, seconds: float, tell: Callable[[Batch], None] = lambda batch: None) -> None:
        """Runs batches until `seconds` are over, and finishes the last one; writes each into the record."""
        append(self._record, self._header)
        began_s = time.monotonic()
        while time.monotonic() - began_s < seconds:
            batch = self.batch(BATCH)
            self.batches.append(batch)
            tell(batch)

    def batch(self, count: int) -> Batch:
        """Runs the next `count` seeds; returns the batch, written into the record with its failures."""
        began_s, first = time.monotonic(), self.next
        cases = [drawn(seed) for seed in range(first, first + count)]
        of_processes = sorted((case for case in cases if case.world == "processes"), key=lambda case: case.size)
        of_threads = [case for case in cases if case.world == "threads"]
        with ThreadPoolExecutor(2) as pool:
            runs = [
                pool.submit(lambda: list(_failing(self._threads, of_threads))),
                pool.submit(lambda: list(_failing(self._processes, of_processes))),
            ]
            failed = [each for run in runs for each in run.result()]
        self.next = first + count
        batch = Batch(
            first=first,
            next=self.next,
            cases=_counted(cases),
            mismatches=_counted([each.case for each in failed if not each.hung]),
            hangs=_counted([each.case for each in failed if each.hung]),
            seconds=round(time.monotonic() - began_s, 2),
        )
        append(self._record, batch)
        for each in failed:
            self._keep(each)
        return batch

    def _keep(self, failed: Failed) -> None:
        """Writes a failure into the record, and the script that replays it, shrunk."""
        workers = self._threads if failed.case.world == "threads" else self._processes
        case = failed.case
        if not failed.hung:  # each run of one that hangs would take a minute
            case = shrunk(case, workers.judged, failed.problems[0])
        script = self._scripts / f"fuzz-{case.seed}.py"
        self._scripts.mkdir(parents=True, exist_ok=True)
        script.write_text(script_of(case, failed.problems[0]), encoding="utf-8")
        failure = Failure(problems=failed.problems, case=failed.case.to_json(), script=script.name)
        append(self._record, failure)
        self.failures.append(failure)

    def close(self) -> None:
        """Ends the processes."""
        self._threads.close()
        self._processes.close()


def script_of(case: Case, problem: str) -> str:
    """Returns the text of a Python script that replays the case, and fails as long as the case does."""
    words = problem.partition("\n")[0].replace("\\", "/").replace('"', "'")
    return SCRIPT.format(problem=words[:60], case=case.to_json().replace("\\", "\\\\"))


def _failing(workers: Workers, cases: list[Case]) -> Iterator[Failed]:
    for case in cases:
        if found := workers.judged(case):
            yield Failed(case, found)


def _counted(cases: list[Case]) -> dict[str, int]:
    return dict(sorted(Counter(map(way_of, cases)).items()))
