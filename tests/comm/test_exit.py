"""How a process ends: with the user's own exit status, also after an exchange that failed half-way."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from gradsync.comm import GroupError
from gradsync.comm.gloo import GlooGroup

SIZE, PART = 3, 2_000_000
STATUS = 7


def rank_main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, SIZE), rank=rank, world_size=SIZE)
    group = GlooGroup(timeout_s=30, bytes_per_s=1e6)  # a rate so low that large exchanges go in rounds
    if rank == 1:
        time.sleep(0.5)
        group.announce_failure("an error in backward")
        time.sleep(1.0)
    else:
        exchange = group.all_to_all(torch.ones(PART * SIZE), [PART] * SIZE, [PART] * SIZE)
        try:
            exchange.wait(30)
        except GroupError:
            group.close()
            sys.exit(STATUS)
    os._exit(STATUS if rank == 1 else 0)


def test_a_failed_exchange_in_rounds_leaves_the_exit_status_alone(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(rank, str(tmp_path / "store"))) for rank in range(SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [STATUS] * SIZE
