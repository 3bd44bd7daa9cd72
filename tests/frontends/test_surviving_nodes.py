"""A node of a torchrun job dies with its agent: the ranks on the other nodes continue together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.forked import free_port

pytestmark = pytest.mark.waiting

NODES, LOST, STEPS = 3, 2, 40
LIMIT_S = 100.0
PROGRAM = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
import gradsync
from gradsync.planner import AveragingPlanner

dist.init_process_group("gloo")
torch.manual_seed(0)
model, place = torch.nn.Linear(6, 4), Path(sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
handle = gradsync.attach(model, optimizer, AveragingPlanner(survives=True), timeout=6.0)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(int(sys.argv[2])):
    optimizer.zero_grad()
    model(torch.randn(16, 6, generator=generator)).square().mean().backward()
    optimizer.step()
    (place / f"step {step} of {dist.get_rank()}").touch()
    if step == 20 and dist.get_rank() == int(sys.argv[3]):
        time.sleep(1e6)  # it is to be lost, the others wait for it
handle.consensus()
text = str([p.tolist() for p in model.parameters()])
handle.detach()
(place / f"writing {dist.get_rank()}").write_text(text)
(place / f"writing {dist.get_rank()}").rename(place / f"model {dist.get_rank()}")
"""


@contextmanager
def agents(program: Path, place: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts one torchrun on each node; the first hosts the store."""
    port = free_port()
    started = []
    for node in range(NODES):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES), "--nproc-per-node", "1"),
            *("--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)),
            *(str(program), str(place), str(STEPS), str(LOST)),
        ]
        with (place / f"log {node}").open("wb") as log:
            started.append(
                subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                )
            )
    try:
        yield started
    finally:
        for agent in started:
            end_node(agent)


def end_node(agent: subprocess.Popen[bytes]) -> None:
    """Ends the agent and its workers, which would outlive it."""
    workers = children(agent.pid) if agent.poll() is None else []
    agent.kill()
    agent.wait()
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def children(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it is gone
            after_name = status.read_text().rpartition(")")[2].split()
            if int(after_name[1]) == parent:
                found.append(int(status.parent.name))
    return found


def wait_until(condition: Callable[[], bool], place: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        logs = "\n".join((place / f"log {node}").read_text()[-1500:] for node in range(NODES))
        assert time.monotonic() < deadline, logs
        time.sleep(0.1)


def test_the_others_go_on_where_a_node_and_its_agent_die(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with agents(program, tmp_path) as started:
        wait_until(lambda: all((tmp_path / f"step 10 of {rank}").exists() for rank in range(NODES)), tmp_path)
        end_node(started[LOST])
        wait_until(lambda: len(list(tmp_path.glob("model *"))) == NODES - 1, tmp_path)
    first, second = (path.read_text() for path in tmp_path.glob("model *"))
    assert first == second, "the same bits"
