"""Results of a run's ranks come back, and a failure is reported soon and by its cause."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradsync_lab.bench import launch, rank
from gradsync_lab.bench.launch import START_OVER, Loopback, RankCrashedError, cluster, once_more_after_crash, run_ranks
from gradsync_lab.cluster import Lab, LabUnavailableError, Scenario
from tests.waiting import runs, wait_until

REPORTS = """
import json, os, sys
spec = json.load(open(sys.argv[1]))
print(json.dumps({"rank": os.environ["RANK"]}), flush=True)
json.dump([spec["name"], os.environ["RANK"], os.environ["WORLD_SIZE"]], open(sys.argv[2], "w"))
"""

# Rank 0 waits for a rank that will never come, as a rendezvous does.
ONE_NEVER_COMES = """
import os, time
if os.environ["RANK"] == "1":
    raise RuntimeError("the cause")
print("{}", flush=True)
time.sleep(1000)
"""

ONE_FAILS_IN_A_STEP = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if os.environ["RANK"] == "1":
    raise RuntimeError("the cause")
dist.all_reduce(torch.ones(1 << 20))
dist.barrier()
"""

# The second rank fails because of the first, and well after it.
ONE_AFTER_THE_OTHER = """
import os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(1.5)
    sys.exit("lost rank 1")
sys.exit("the cause")
"""

FETCHES = """
import logging
from gradsync_lab.bench.rank import run_rank
def measure(spec):
    logging.getLogger("gradsync_lab.workloads.data").info("fetching %s", "a data set")
run_rank(measure)
"""

LEAVES_ITS_PID = """
import os, time
from pathlib import Path
from gradsync_lab.bench.rank import run_rank
def measure(folder):
    (Path(folder) / f"{os.environ['RANK']}.part").write_text(str(os.getpid()))
    (Path(folder) / f"{os.environ['RANK']}.part").rename(Path(folder) / f"{os.environ['RANK']}.pid")
    time.sleep(1000)
run_rank(measure)
"""

STARTER = """
import sys
from gradsync_lab.bench.launch import Loopback, run_ranks
run_ranks(Loopback(2), 2, "program_of_ranks", sys.argv[1], print)
"""


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that runs code as two ranks on loopback, and returns their results and events."""
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)

    def run(code: str) -> tuple[list[Any], list[Any]]:
        (tmp_path / "program_of_ranks.py").write_text(code, encoding="utf-8")
        events: list[Any] = []
        return run_ranks(Loopback(2), 2, "program_of_ranks", '{"name": "x"}', events.append), events

    return run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[Any]]:
    """Records the processes of the ranks."""
    processes: list[subprocess.Popen[Any]] = []
    spawn = Loopback.spawn

    def noting(self: Loopback, *arguments: Any, **popen: Any) -> subprocess.Popen[Any]:
        processes.append(spawn(self, *arguments, **popen))
        return processes[-1]

    monkeypatch.setattr(Loopback, "spawn", noting)
    return processes


def test_results_come_back_by_rank_and_events_from_rank_0(ranks: Any) -> None:
    results, events = ranks(REPORTS)
    assert results == [["x", "0", "2"], ["x", "1", "2"]]
    assert events == [{"rank": "0"}]


def test_what_workloads_of_rank_0_say_comes_as_an_event(ranks: Any) -> None:
    assert ranks(FETCHES)[1] == [{"kind": rank.TOLD, "text": "fetching a data set"}]


def test_a_rank_that_waits_for_a_failed_one_is_ended(
    ranks: Any, started: list[subprocess.Popen[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "END_GRACE_S", 0.5)
    with pytest.raises(RuntimeError, match=r"rank 1 ended with code 1:[\s\S]*the cause[\s\S]*rank 0 then .* code -9"):
        ranks(ONE_NEVER_COMES)
    assert [process.returncode for process in started] == [-9, 1]


def test_the_rank_that_failed_first_is_blamed_not_the_lowest(ranks: Any) -> None:
    with pytest.raises(RuntimeError, match=r"^rank 1 .* 1:\nthe cause\nrank 0 then ended with code 1: lost rank 1$"):
        ranks(ONE_AFTER_THE_OTHER)


def test_a_rank_that_fails_in_a_collective_is_reported_with_its_cause(ranks: Any) -> None:
    with pytest.raises(RuntimeError, match="RuntimeError: the cause"):
        ranks(ONE_FAILS_IN_A_STEP)


CRASHES = """
import json, os, signal, sys
from pathlib import Path
crashed = Path(__file__).with_name("crashed")
if os.environ["RANK"] == "1" and len(crashed.read_text() if crashed.exists() else "") < TIMES:
    crashed.open("a").write("x")
    os.kill(os.getpid(), signal.SIGSEGV)
json.dump(os.environ["RANK"], open(sys.argv[2], "w"))
"""


def test_a_run_that_crashes_once_begins_anew_and_says_so(ranks: Any) -> None:
    notes: list[str] = []
    events: list[Any] = []
    results, _ = once_more_after_crash(lambda: ranks(CRASHES.replace("TIMES", "1")), notes, events.append)
    assert results == ["0", "1"]
    assert events == [{"kind": START_OVER}]
    assert len(notes) == 1 and notes[0].startswith("began anew once: rank 1 ended with code -11;")


def test_a_run_that_crashes_twice_fails(ranks: Any) -> None:
    with pytest.raises(RankCrashedError, match="rank 1 ended with code -11"):
        once_more_after_crash(lambda: ranks(CRASHES.replace("TIMES", "2")), [], lambda _: None)


def test_a_run_that_fails_otherwise_is_not_repeated(ranks: Any) -> None:
    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        ranks(ONE_AFTER_THE_OTHER)

    with pytest.raises(RuntimeError, match="the cause"):
        once_more_after_crash(run, [], lambda _: None)
    assert len(calls) == 1


def test_an_interrupted_run_leaves_no_rank(ranks: Any, started: list[subprocess.Popen[Any]]) -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        ranks("import time\nprint('no json', flush=True)\ntime.sleep(1000)")
    assert [process.returncode for process in started] == [-9, -9]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot tie a process to its parent")
def test_ranks_die_with_a_run_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "program_of_ranks.py").write_text(LEAVES_ITS_PID, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path)], env={**os.environ, "PYTHONPATH": path})
    try:
        wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    finally:
        starter.kill()
        starter.wait()
    pids = [int(file.read_text(encoding="utf-8")) for file in tmp_path.glob("*.pid")]
    wait_until(lambda: not any(map(runs, pids)))


def test_a_rank_whose_run_is_gone_already_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "die_with_parent", lambda: None)
    rank.end_with(os.getppid())
    with pytest.raises(SystemExit, match="which started this rank, is gone"):
        rank.end_with(os.getppid() + 1)


def test_a_run_without_a_lab_says_that_it_was_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Lab) -> Lab:
        raise LabUnavailableError("no namespaces here")

    monkeypatch.setattr(Lab, "__enter__", refuse)
    notes: list[str] = []
    with cluster(Scenario(nodes=2), notes) as where:
        assert isinstance(where, Loopback)
        assert where.describe()["links"] == "loopback (not shaped)"
    assert notes == ["ran on loopback, not on shaped links: no namespaces here"]
