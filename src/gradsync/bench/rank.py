"""What every rank does around its measurement; started as `python -m MODULE SPEC OUT PARENT` by `launch.run_ranks`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..lab.keeper import die_with_parent

DISTURBED = "disturbed"  # an event: so many `turns` before it are taken again
COLLECTIVE_TIMEOUT = timedelta(minutes=3)  # the harness' own: ranks wait for one that evaluates, or that is lost


def run_rank(measure: Callable[[str], Any]) -> None:
    """Joins the other ranks, calls `measure` with the specification's text, leaves what it returns as JSON in OUT."""
    spec_path, out_path, parent = sys.argv[1:]
    end_with(int(parent))
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    result = measure(Path(spec_path).read_text(encoding="utf-8"))
    Path(out_path).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def end_with(parent: int) -> None:
    """From now on this process dies with the one that started it, however that ends; at once if it is gone already."""
    if sys.platform == "linux":
        die_with_parent()
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this rank, is gone")


def event(**data: Any) -> None:
    """Tells the parent how far the run is."""
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(data) + "\n")
        sys.stdout.flush()
