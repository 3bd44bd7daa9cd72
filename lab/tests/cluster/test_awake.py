"""Processes that keep processors awake: on which machines they run, at what priority, how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradsync_lab.cluster import awake as module
from gradsync_lab.cluster.awake import awake
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux's priorities")

PARENT = """
import sys, time
from pathlib import Path
from gradsync_lab.cluster import awake as module
module.CPU_INFO = Path(sys.argv[1])
with module.awake() as is_awake:
    print(is_awake, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Returns a function that fakes a machine with these CPU flags, control groups, and quota in group /a of each
    version.
    """

    def pretend(flags: str, own_groups: str = "", quota: str = "max") -> None:
        for folder, name in (("a", "cpu.max"), ("cpu,cpuacct/a", "cpu.cfs_quota_us")):
            (tmp_path / "groups" / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / "groups" / folder / name).write_text(f"{quota}\n")
        (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags}\n")
        (tmp_path / "own").write_text(own_groups)
        monkeypatch.setattr(module, "CPU_INFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(module, "CGROUPS", tmp_path / "groups")
        monkeypatch.setattr(module, "OWN_CGROUPS", tmp_path / "own")

    return pretend


def keepers_of(parent: int) -> list[int]:
    """Returns the processes that keep processors awake for `parent`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            argv = file.read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        if [b"-I", b"-S", os.fsencode(module.__file__), str(parent).encode()] == argv[1:5]:
            found.append(int(file.parent.name))
    return found


def processors_of(pid: int) -> list[int]:
    try:
        return sorted(os.sched_getaffinity(pid))
    except ProcessLookupError:  # it ended meanwhile
        return []


def test_every_processor_has_a_process_that_runs_when_nothing_else_does(machine: Callable[..., None]) -> None:
    machine("hypervisor")
    processors = [[processor] for processor in processors_of(0)]
    with awake() as is_awake:
        assert is_awake

        wait_until(lambda: sorted(map(processors_of, keepers_of(os.getpid()))) == processors)
        assert {os.sched_getscheduler(pid) for pid in keepers_of(os.getpid())} == {os.SCHED_IDLE}
        sessions = {os.getsid(pid) for pid in keepers_of(os.getpid())}
        assert len(sessions) == 1 and os.getsid(0) not in sessions
    wait_until(lambda: not keepers_of(os.getpid()))


def test_they_end_with_a_process_that_is_killed(machine: Callable[..., None], tmp_path: Path) -> None:
    machine("hypervisor")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "cpuinfo")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    is_awake = parent.stdout.readline()
    if is_awake == "True\n":  # not where tests run with a quota
        wait_until(lambda: len(keepers_of(parent.pid)) == len(os.sched_getaffinity(0)))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not keepers_of(parent.pid))


@pytest.mark.parametrize(
    ("flags", "own_groups", "quota", "expected"),
    [
        ("", "", "max", False),
        ("hypervisor", "", "max", True),
        ("hypervisor", "0::/a/b\n", "max 100000", True),
        ("hypervisor", "0::/a/b\n", "150000 100000", False),
        ("hypervisor", "0::/elsewhere\n", "150000 100000", True),
        ("hypervisor", "4:memory:/a\n3:cpu,cpuacct:/a\n", "-1", True),
        ("hypervisor", "4:memory:/a\n3:cpu,cpuacct:/a\n", "150000", False),
        ("hypervisor", "4:memory:/a\n", "150000", True),
    ],
    ids=["real", "virtual", "no quota", "quota", "another group's", "no quota, v1", "quota, v1", "not of processors"],
)
def test_where_it_would_do_harm_or_no_good_it_does_nothing(
    flags: str, own_groups: str, quota: str, expected: bool, machine: Callable[..., None]
) -> None:
    machine(flags, own_groups, quota)
    with awake() as is_awake:
        assert is_awake is expected
        wait_until(lambda: bool(keepers_of(os.getpid())) is expected)
    wait_until(lambda: not keepers_of(os.getpid()))  # a killed process of its priority takes a while to be gone
