"""The training script of a soak, which torchrun starts: `python -m gradsync_lab.soak.train FOLDER PACE`.

It goes on from the last checkpoint that all ranks have written. PACE is the seconds of a step at least. Ranks strike
themselves where the supervisor orders it; signals and links strike from outside.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch does not declare them

import gradsync
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.plans.plan import Plan
from gradsync.schemes import AllReduce, CompressedAllGather
from gradsync.tensors.bucket import TensorSpec

from ..cluster.keeper import die_with_parent, go_inside
from ..faults.cases import Fault, Phase
from .settings import Folder, Settings, replaced

WIDTH, INPUTS, OUTPUTS, BATCH = 128, 32, 10, 8
KEPT = 2  # complete checkpoints that are kept
STATUS_S = 0.1  # between two notes of how far a rank is
SLOW_SHARE = 0.5  # of the timeout, for which a slow rank sleeps


class Training:
    """One rank of the job, from the last checkpoint to the last step."""

    def __init__(self, folder: Folder, pace_s: float) -> None:
        self.folder, self.pace_s = folder, pace_s
        self.settings = Settings.model_validate_json(folder.settings.read_text(encoding="utf-8"))
        self.rank, self.life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.order: dict[str, Any] = {}
        self._noted_s = 0.0
        torch.manual_seed(self.settings.seed)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)
        layers = [nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS)]
        self.model = nn.Sequential(*layers)
        self.model[2].register_forward_pre_hook(lambda *_: self.strike_at(Phase.FORWARD))
        next(self.model[2].parameters()).register_hook(lambda _: self.strike_at(Phase.BACKWARD))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.teacher = torch.randn(INPUTS, OUTPUTS)

    def say(self, what: str, **more: Any) -> None:
        event = {"t": time.monotonic(), "rank": self.rank, "life": self.life, "pid": os.getpid(), "what": what, **more}
        with self.folder.events(self.rank).open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def run(self) -> None:
        """Restores the last checkpoint, trains to the last step, and tells a digest of all that was trained."""
        settings = self.settings
        with suppress(FileNotFoundError):
            self.folder.order(self.rank).unlink()  # of an earlier life
        self._open_group()
        complete = self.folder.complete(settings.ranks)
        # Ranks of a job that begins look at the same files: none writes before all have attached.
        start = complete[-1] if complete else 0
        handle = gradsync.attach(self.model, plan=self._plan(), timeout=settings.timeout_s)
        if start:
            self._restore(start, handle)
        self.say("restored", step=start)
        for step in range(start, settings.steps):
            if step > start and step % settings.every == 0:
                self._save(step, handle)
                self.say("census", step=step, **census())
            began = time.monotonic()
            self._take_step(step)
            time.sleep(max(self.pace_s - (time.monotonic() - began), 0.0))
        self.say("final", digest=_digest([*self.model.parameters(), *self._momenta().values()]))
        handle.detach()
        dist.destroy_process_group()

    def _open_group(self) -> None:
        """Opens the process group at the agent's store, under a prefix of this life.

        The store outlives restarts, and torch 2.13 reads an earlier life's addresses in it: without a prefix, gloo
        connects to ports that are gone.
        """
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        own = PrefixStore(f"life {self.life}", store)
        dist.init_process_group("gloo", store=own, rank=self.rank, world_size=self.settings.ranks)

    def _plan(self) -> Plan:
        """Returns the plan: top-k with error feedback for all but the last layer, which stays exact."""
        specs = {name: TensorSpec.of(parameter) for name, parameter in self.model.named_parameters()}
        exact = [name for name in specs if name.startswith("4.")]
        lossy = [name for name in specs if name not in exact]
        buckets = [(lossy, CompressedAllGather(ErrorFeedback(TopK(0.05)))), (exact, AllReduce())]
        return Plan.make(specs, self.settings.ranks, buckets)

    def _take_step(self, step: int) -> None:
        self._note(step)
        self._read_order()
        generator = torch.Generator().manual_seed((self.settings.seed << 40) + step * self.settings.ranks + self.rank)
        inputs = torch.randn(BATCH, INPUTS, generator=generator)
        self.optimizer.zero_grad()
        (self.model(inputs) - torch.tanh(inputs @ self.teacher)).square().mean().backward()
        self.strike_at(Phase.OPTIMIZER)
        self.optimizer.step()

    def _note(self, step: int) -> None:
        now_s = time.monotonic()
        if now_s - self._noted_s >= STATUS_S or step == self.settings.steps - 1:
            self._noted_s = now_s
            status = {"pid": os.getpid(), "life": self.life, "step": step, "t": now_s}
            replaced(self.folder.status(self.rank), json.dumps(status))

    # Faults.

    def _read_order(self) -> None:
        path = self.folder.order(self.rank)
        if path.exists():
            self.order = json.loads(path.read_text(encoding="utf-8"))
            path.unlink()

    def strike_at(self, point: Phase) -> None:
        """Raises, or is slow, where the supervisor has ordered it.

        Raises:
            ValueError, MemoryError: the fault.
        """
        if self.order.get("point") != point:
            return
        fault, self.order = Fault(self.order["fault"]), {}
        self.say("struck", fault=fault)
        if fault is Fault.EXCEPTION:
            raise ValueError("a bad sample (injected)")
        if fault is Fault.MEMORY:
            raise MemoryError("out of memory (injected)")
        time.sleep(SLOW_SHARE * self.settings.timeout_s)

    # Checkpoints: one file a rank; a step counts once all ranks have written theirs.

    def _momenta(self) -> dict[str, torch.Tensor]:
        state = self.optimizer.state
        return {name: state[p]["momentum_buffer"] for name, p in self.model.named_parameters() if p in state}

    def _save(self, step: int, handle: gradsync.Attachment) -> None:
        path = self.folder.checkpoint(step, self.rank)
        part = path.with_name(path.name + ".part")
        content = {
            "step": step,
            "model": dict(self.model.state_dict()),
            "momenta": self._momenta(),
            "gradsync": handle.state_dict(),
        }
        gradsync.state.save_file(content, part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
        for old in self.folder.complete(self.settings.ranks)[:-KEPT]:
            self.folder.checkpoint(old, self.rank).unlink(missing_ok=True)

    def _restore(self, step: int, handle: gradsync.Attachment) -> None:
        content = gradsync.state.load_file(self.folder.checkpoint(step, self.rank))
        self.model.load_state_dict(content["model"])
        for name, parameter in self.model.named_parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = content["momenta"][name]
        handle.load_state_dict(content["gradsync"])


def census() -> dict[str, Any]:
    """Counts this process' memory in KiB, kernel tasks, descriptors, and the keys in the store: all, and gradsync's."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    counts = {
        name: len(list(Path("/proc/self", where).iterdir())) for name, where in (("tasks", "task"), ("fds", "fd"))
    }
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    keys = store.list_keys()
    ours = sum("gradsync" in key for key in keys)
    return {"rss_kib": pages * os.sysconf("SC_PAGE_SIZE") // 1024, **counts, "keys": len(keys), "own_keys": ours}


def _digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def main() -> None:
    folder, pace_s = Folder(Path(sys.argv[1])), float(sys.argv[2])
    die_with_parent()
    rank = int(os.environ["RANK"])
    if folder.doors.exists():
        doors = json.loads(folder.doors.read_text(encoding="utf-8"))
        go_inside(0, doors[rank])  # the agent is in the cluster's user namespace already, where it has one
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # not only the processors of the agent's node
    training = Training(folder, pace_s)
    try:
        training.run()
    except BaseException as error:
        training.say("error", type=type(error).__name__, text=str(error)[:1000])
        raise


if __name__ == "__main__":
    main()
