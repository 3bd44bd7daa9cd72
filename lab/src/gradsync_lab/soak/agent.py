"""The agent of a soak: torchrun, with its ranks on loopback or in the nodes of an emulated cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from ..cluster import Lab, Scenario
from ..cluster.cluster import MASTER_PORT, end, free_port
from ..cluster.keeper import die_with_parent
from ..faults.cases import LINK_RATE
from .settings import Folder, Settings

SHUTDOWN_S = 5  # after which the agent kills a stopped rank
SPARE_RESTARTS = 50  # beyond one for each fault
END_S = 15.0
# torchrun's store serves no rank while it asks a name server for the name of a rank that connects.
QUICK_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}


class Agent:
    """A running torchrun, with the cluster of its ranks; `lab` is None on loopback."""

    def __init__(self, process: subprocess.Popen[Any], lab: Lab | None) -> None:
        self.process, self.lab = process, lab

    def census(self) -> dict[str, int]:
        """Counts the agent's memory in KiB, kernel tasks and descriptors; empty once it has ended."""
        top = Path("/proc") / str(self.process.pid)
        try:
            pages = int((top / "statm").read_text(encoding="ascii").split()[1])
            counts = {name: len(list((top / where).iterdir())) for name, where in (("tasks", "task"), ("fds", "fd"))}
        except (OSError, IndexError):
            return {}
        return {"rss_kib": pages * os.sysconf("SC_PAGE_SIZE") // 1024, **counts}


@contextmanager
def agent(folder: Folder, settings: Settings, *, pace_s: float, links: bool) -> Iterator[Agent]:
    """Starts the job under torchrun, and ends it, with all of its ranks, at the end of the block.

    Args:
        pace_s: seconds of a step at least.
        links: whether ranks run in nodes of an emulated cluster, the agent in one of its own.

    Raises:
        LabUnavailableError: where no cluster can be emulated, but shall.
    """
    folder.settings.write_text(settings.model_dump_json(), encoding="utf-8")
    folder.doors.unlink(missing_ok=True)
    with (folder.path / "output.txt").open("ab") as output:
        popen: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        if links:
            with Lab(Scenario(nodes=settings.ranks + 1, link=LINK_RATE)) as lab:
                doors = [lab.door(node)[1] for node in range(settings.ranks)]
                folder.doors.write_text(json.dumps(doors), encoding="utf-8")
                argv = _argv(folder, settings, pace_s, lab.addresses[-1], MASTER_PORT)
                yield Agent(lab.spawn(settings.ranks, argv, {"OMP_NUM_THREADS": "1"}, **popen), lab)
            return
        environment = {**os.environ, **QUICK_NAMES, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        argv = _argv(folder, settings, pace_s, "127.0.0.1", free_port())
        # torchrun ends its ranks at SIGTERM, which it gets also where this process is killed.
        popen["preexec_fn"] = partial(die_with_parent, signal.SIGTERM)  # a system call alone, so threads do no harm
        process = subprocess.Popen(argv, env=environment, start_new_session=True, **popen)
        try:
            yield Agent(process, None)
        finally:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)  # it ends its ranks
            end(process, patience_s=END_S)


def _argv(folder: Folder, settings: Settings, pace_s: float, host: str, port: int) -> list[str]:
    from torch.distributed.launcher.api import LaunchConfig

    restarts = settings.faults + SPARE_RESTARTS
    is_known = any(each.name == "shutdown_timeout" for each in fields(LaunchConfig))  # torch 2.11 gives ranks 30 s
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={settings.ranks}"),
        *(f"--max-restarts={restarts}", "--monitor-interval=0.5"),
        *([f"--shutdown-timeout={SHUTDOWN_S}"] if is_known else []),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}", "--rdzv-id=soak", f"--local-addr={host}"),
        "--rdzv-conf=is_host=true",  # torch does not know the addresses of a node as this machine's
        *("-m", "gradsync_lab.soak.train", str(folder.path), str(pace_s)),
    ]
