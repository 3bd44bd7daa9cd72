"""Keeps the processors of a virtual machine awake while something is measured on the machine.

A virtual processor with nothing to do goes back to its host, and from a busy host it comes back milliseconds late:
ranks that wait for each other, for links or for emulated computation are delayed each time. So one process per
processor runs a loop whenever nothing else wants to run (SCHED_IDLE), and the processor is never idle.

As a script, `awake.py PARENT` starts these processes. The script imports nothing of the package, which makes it start
fast.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LEAST_WEIGHT = "19"  # nice value of a whole session (sched(7), autogroups)
TURNS = 100_000  # iterations of the loop between two checks of the parent

CPU_INFO, CGROUPS, OWN_CGROUPS = Path("/proc/cpuinfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@contextmanager
def awake() -> Iterator[bool]:
    """Keeps this process' processors awake inside the block; yields whether it does.

    A loop of the least priority runs on each virtual processor. Real processors need none, as they wake by themselves;
    a container with a quota of processor time gets none, as the loops would use up the quota.
    """
    if not _is_virtual() or _is_rationed():
        yield False
        return
    argv = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    # Its own session: an autogroup that can be given the least weight without any other process in it.
    keeper = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield True
    finally:
        os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()


def _is_virtual() -> bool:
    """Whether /proc/cpuinfo shows a hypervisor; x86 only."""
    return CPU_INFO.exists() and "hypervisor" in CPU_INFO.read_text(encoding="utf-8")


def _is_rationed() -> bool:
    """Whether this process' control group, or one that contains it, has a quota of processor time."""
    if not OWN_CGROUPS.exists():
        return False
    for line in OWN_CGROUPS.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            root, name = CGROUPS, "cpu.max"
        elif "cpu" in controllers.split(","):
            root, name = CGROUPS / controllers, "cpu.cfs_quota_us"
        else:
            continue
        for group in (own := Path(path.lstrip("/")), *own.parents):
            file = root / group / name
            if file.exists() and file.read_text(encoding="utf-8").split()[0] not in ("max", "-1"):
                return True
    return False


def keep(parent: int) -> None:
    """Runs a loop on each of this process' processors until the process `parent` has ended."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):  # a kernel without autogroups
        Path("/proc/self/autogroup").write_text(LEAST_WEIGHT, encoding="utf-8")
    first, *others = sorted(os.sched_getaffinity(0))
    mine = first
    for processor in others:
        me = os.getpid()
        if os.fork() == 0:
            parent, mine = me, processor
            break
    os.sched_setaffinity(0, {mine})
    while os.getppid() == parent:
        for _ in range(TURNS):
            pass


if __name__ == "__main__":
    keep(int(sys.argv[1]))
