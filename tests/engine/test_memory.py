"""Gradients live in the buckets' memory: a job needs no more than under DDP and one bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradsync.planner.default import BUCKET_BYTES

RANK = """
import json, resource, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import gradsync

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))  # 100 MB
if sys.argv[1] == "ddp":
    wrapped = DistributedDataParallel(model)
else:
    wrapped, _ = model, gradsync.attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(14):  # plans of other bucket sizes are on trial by then
    optimizer.zero_grad()
    wrapped(torch.randn(8, 1024)).square().mean().backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
dist.barrier()
dist.destroy_process_group()
"""


def peak_bytes(method: str, script: Path) -> int:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        method,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(json.loads(done.stdout.strip().splitlines()[-1]))


@pytest.mark.timeout(240)
def test_peak_memory_is_at_most_ddps_and_one_bucket(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK, encoding="utf-8")
    ours, theirs = peak_bytes("gradsync", script), peak_bytes("ddp", script)
    print(f"{ours / 1e6:.0f} MB, DDP {theirs / 1e6:.0f} MB")
    assert ours <= theirs + BUCKET_BYTES
