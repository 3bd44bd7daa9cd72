"""Sets up a rank process that measures; `launch.run_ranks` starts it as `python -m MODULE SPEC OUT PARENT`."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .. import workloads
from ..cluster.keeper import die_with_parent

TOLD = "told"  # the event with the `text` that a workload says, as when it fetches data
DISTURBED = "disturbed"  # the event that says how many `turns` before it are repeated
COLLECTIVE_TIMEOUT = timedelta(minutes=3)  # of the harness: ranks wait for one that evaluates or has failed


def run_rank(measure: Callable[[str], Any], backend_of: Callable[[str], str] = lambda _: "gloo") -> None:
    """Joins the process group, calls `measure` with the text of file SPEC, writes its result as JSON to file OUT.

    `backend_of` returns the backend of the process group for that text.
    """
    spec_path, out_path, parent = sys.argv[1:]
    end_with(int(parent))
    spec = Path(spec_path).read_text(encoding="utf-8")
    dist.init_process_group(backend_of(spec), timeout=COLLECTIVE_TIMEOUT)
    with telling(lambda text: event(kind=TOLD, text=text)):
        result = measure(spec)
    Path(out_path).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def end_with(parent: int) -> None:
    """Makes this process end when the process `parent` ends, in whatever way; exits at once if `parent` is gone."""
    if sys.platform == "linux":
        die_with_parent()
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this rank, is gone")


@contextmanager
def in_time(what: str, patience_s: float) -> Iterator[None]:
    """Ends this process, with a message and stack trace, if the `with` block takes longer than `patience_s` seconds.

    Callbacks of torch's hooks, for example, wait without a timeout.
    """

    def give_up() -> None:
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.write(f"{what}: stuck, no end after {patience_s:.0f} s\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(patience_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def telling(tell: Callable[[str], None]) -> Iterator[None]:
    """Calls `tell` inside the block with what workloads log, which fetch and prepare data for seconds or minutes.

    Their warnings are logged as ever.
    """
    log = logging.getLogger(workloads.__name__)

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno < logging.WARNING:
                tell(record.getMessage())
            elif log.parent is not None:
                log.parent.callHandlers(record)

    handler, before = Telling(), (log.level, log.propagate)
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def event(**data: Any) -> None:
    """Reports progress to the parent process: rank 0 prints a line of JSON, other ranks nothing."""
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(data) + "\n")
        sys.stdout.flush()
