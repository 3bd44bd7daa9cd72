"""Programs of ranks in the lab's tests: small scripts that import torch only where needed."""

from __future__ import annotations

import sys

from gradsync_lab.cluster import counters

# The module alone: the package would load torch.
COUNTERS = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("counters", {counters.__file__!r})
counters = importlib.util.module_from_spec(spec)
spec.loader.exec_module(counters)
interface_bytes = counters.interface_bytes
"""

ENVIRONMENT = """
import os
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT OMP_NUM_THREADS".split()
print(*(os.environ[name] for name in names))
"""

# Each line: a collective, the bytes in this rank's ledger, the bytes that its link counted, the result's error.
COLLECTIVES = """
import torch, torch.distributed as dist
from gradsync.comm import Ledger, RecordingGroup, torch_group
from gradsync_lab.cluster.counters import interface_bytes
dist.init_process_group("gloo")
ledger = Ledger()
group = RecordingGroup(torch_group(timeout_s=60.0), ledger)
n, rank = group.size, group.rank
x = torch.full((1 << 20,), float(rank + 1))
sizes = [(r + 1) << 18 for r in range(n)]
even = [x.numel() // n] * n
collectives = {
    "all_reduce": lambda: [group.all_reduce(x.clone()).wait(60.0)],
    "all_gather": lambda: group.all_gather(x[: sizes[rank]], sizes).wait(60.0),
    "all_to_all": lambda: group.all_to_all(x, even, even).wait(60.0),
}
for name, collective in collectives.items():
    collective()  # connects
    dist.barrier()
    sent, said = interface_bytes()[0], ledger.sent_bytes
    parts = collective()
    dist.barrier()  # sent bytes may still queue in the shaper when a rank has received all it needs
    sent, said = interface_bytes()[0] - sent, ledger.sent_bytes - said
    expected = [n * (n + 1) / 2] if name == "all_reduce" else [float(r + 1) for r in range(n)]
    right = all(bool((part == value).all()) for part, value in zip(parts, expected, strict=True))
    print(name, int(said), sent, right, flush=True)
dist.barrier()
group.close()
dist.destroy_process_group()
"""

# For each schedule: averages for one cycle, says `ready`, waits for a line, averages for CYCLES more, says `done`.
AVERAGES = """
import os, sys, torch, torch.distributed as dist
import gradsync
from gradsync.comm import shuffle
from gradsync.planner import AveragingPlanner
dist.init_process_group("gloo")
for text in os.environ["SCHEDULES"].split(";"):
    schedule = eval(text, vars(shuffle))
    model = torch.nn.Linear(1024, 512, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gradsync.attach(model, optimizer, AveragingPlanner(schedule=schedule), timeout=60)
    for cycle in range(1 + int(os.environ["CYCLES"])):
        for _ in schedule.rounds:
            optimizer.zero_grad()
            model(torch.ones(1, 1024)).sum().backward()
            optimizer.step()
        handle.wait()
        if not cycle:
            dist.barrier()
            print("ready", flush=True)
            sys.stdin.readline()
    dist.barrier()
    print("done", flush=True)
    sys.stdin.readline()
    handle.detach()
dist.destroy_process_group()
"""

# Twice: rounds, a consensus, and in how many rounds of its cycle the last rank is alone; a line is waited for between.
REMAPPED = """
import sys, torch, torch.distributed as dist
import gradsync
from gradsync.planner import AveragingPlanner
from gradsync.planner.averaging.plan import schedule_of
from gradsync.planner.averaging.regroup import FIGURES, LEAST_ROUNDS
dist.init_process_group("gloo")
model = torch.nn.Linear(512, 512, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
handle = gradsync.attach(model, optimizer, AveragingPlanner(most_local_steps=1), timeout=60)
last = dist.get_world_size() - 1
for _ in range(2):
    cycle = len(schedule_of(handle.plan).rounds)
    for _ in range(FIGURES * (LEAST_ROUNDS + cycle)):
        optimizer.zero_grad()
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
    handle.consensus()
    rounds = schedule_of(handle.plan).rounds
    print(sum(len(each.group_of(last)) == 1 for each in rounds) / len(rounds), flush=True)
    sys.stdin.readline()
handle.detach()
dist.destroy_process_group()
"""

# Rank 1 answers every byte. Rank 0 sends one, says `lost` for each 0.2 s without an answer, `ok` when it comes.
PING = """
import os, socket, time
if os.environ["RANK"] == "1":
    with socket.create_server(("", 6000)) as server, server.accept()[0] as stream:
        while data := stream.recv(1):
            stream.sendall(data)
while True:
    try:
        stream = socket.create_connection(("10.77.0.2", 6000))
        break
    except ConnectionRefusedError:
        time.sleep(0.02)
stream.settimeout(0.2)
while True:
    stream.sendall(b"!")
    while True:
        try:
            stream.recv(1)
            break
        except TimeoutError:
            print("lost", flush=True)
    print("ok", flush=True)
    time.sleep(0.01)
"""

# Sends PAYLOAD bytes from rank 0 to rank 1; both print (sent, received) of their interface.
TRANSFER = f"""
{COUNTERS}
import os, socket, time
size, sent = int(os.environ["PAYLOAD"]), interface_bytes()
if os.environ["RANK"] == "1":
    with socket.create_server(("", 6000)) as server, server.accept()[0] as stream:
        while data := stream.recv(1 << 20):
            pass
else:
    while True:
        try:
            stream = socket.create_connection(("10.77.0.2", 6000))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    stream.sendall(bytes(size))
    stream.shutdown(socket.SHUT_WR)
    stream.recv(1)
now = interface_bytes()
print(now[0] - sent[0], now[1] - sent[1])
"""

# Waits for traffic to come in over its link, says so, waits until none came for half a second, says so.
LISTEN = f"""
{COUNTERS}
import time
base = interface_bytes()[1]
while interface_bytes()[1] < base + 200_000:
    time.sleep(0.01)
print("traffic", flush=True)
before = -1
while (now := interface_bytes()[1]) > before + 2000:
    before = now
    time.sleep(0.5)
print("quiet", flush=True)
"""

CONGESTION_CONTROL = """
import os, socket
other = "10.77.0.2" if os.environ["RANK"] == "0" else "10.77.0.1"
with socket.socket() as stream:
    stream.setblocking(False)
    stream.connect_ex((other, 9))
    print(stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]
