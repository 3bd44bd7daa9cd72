"""The training job of one rank of a case: a small model under a frontend, struck or not, and started again."""

from __future__ import annotations

import gc
import hashlib
import inspect
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store

import gradsync
from gradsync.comm.shuffle import together
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.planner import AveragingPlanner, CompressingPlanner

from .cases import GRACE_S, Case, Fault, Frontend, Phase
from .strike import Striker

WIDTH, BATCH, INPUTS = 96, 8, 32
PAUSE_S = 0.03  # between steps, where the fault comes at some time during training
AGAIN_S, AGAIN_STEPS = 20.0, 3  # of the job that starts again: its timeout, and its steps
CONSENSUS = "consensus"
SETTLE_S = 0.3  # for threads to end

Say = Callable[..., None]


class Job:
    """One rank's job. `say(what, **more)` records an event; `later` is a store that outlives the job."""

    def __init__(self, case: Case, rank: int, say: Say, store: Store, later: Store) -> None:
        self.case, self.rank, self.say = case, rank, say
        self.store, self.later = store, later
        self.is_victim = rank == case.victim
        self.striker = Striker(case, is_victim=self.is_victim and not case.is_of_link, say=say)
        self._where, self._began = str(Phase.BEFORE), time.monotonic()
        self.net = _Watched()
        self.model: nn.Module = self.net
        self.handle: Any = None

    def run(self) -> None:
        """Trains until the end or an error, cleans up, and starts again where this rank can."""
        before = census()
        try:
            self._train()
        except BaseException as error:
            self.say(
                "error",
                type=type(error).__name__,
                ours=isinstance(error, gradsync.GroupError),
                ddps=_is_of_ddp(error),
                text=str(error)[:2000],
                where=self._where,
                step=self.striker.step,
                began=self._began,
            )
        self.striker.disarm()
        self._leave()
        if self.rank in self.case.again:
            try:
                self._start_again()
            except BaseException as error:
                self.say("again", ok=False, text=f"{type(error).__name__}: {error}"[:1000])
        self._leave()
        self.net = self.model = _Watched()
        gc.collect()
        time.sleep(SETTLE_S)
        self.say("end", before=before, after=census())

    # Before the fault.

    def _train(self) -> None:
        case, striker = self.case, self.striker
        torch.manual_seed(0)
        timeout = timedelta(seconds=case.timeout_s)
        dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=case.size, timeout=timeout)
        differs = self.is_victim and case.unlike == "model"
        self._build(_layers() + ([nn.Linear(10, 10)] if differs else []))
        self.say("ready")
        striker.at(Phase.BEFORE)
        if self.is_victim and case.fault is Fault.ABSENT:
            striker.came_about()
            time.sleep(case.timeout_s + 2 * GRACE_S)
            raise ValueError("this rank never attached (injected)")
        with self._doing(Phase.ATTACH):
            self._attach_under_fire()
        self.say("attached")
        if case.phase is Phase.ANY and not case.is_of_link:
            striker.later()
        fewer = self.is_victim and case.fault is Fault.FEWER
        for step in range(case.step if fewer else case.steps):
            self._take_step(step)
            self.say("step", step=step)
        if fewer:
            striker.came_about()
        elif case.frontend is Frontend.AVERAGES:
            with self._doing(CONSENSUS):
                self.handle.consensus()
        self.say("trained", digest=_digest(self.net))
        with self._doing(Phase.DETACH):
            striker.at(Phase.DETACH)
            self.handle.detach()
        self.say("detached")

    def _build(self, layers: list[nn.Module]) -> None:
        """Makes model and optimiser, and hooks for the faults of a forward, a backward, and an attach."""
        self.net = net = _Watched(*layers)
        net.looked = self.striker.looked
        net[2].register_forward_pre_hook(lambda *_: self.striker.at(Phase.FORWARD))
        next(net[2].parameters()).register_hook(lambda _: self.striker.at(Phase.BACKWARD))
        self._wrap()

    def _wrap(self) -> None:
        is_hook = self.case.frontend is Frontend.HOOK
        self.model = nn.parallel.DistributedDataParallel(self.net) if is_hook else self.net
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)  # plain: some plans refuse momentum

    def _attach_under_fire(self) -> None:
        """Attaches with the settings of the case, and lets the faults of an attach strike."""
        case, striker = self.case, self.striker
        settings: dict[str, Any] = {"plan": self._plan()}
        if self.is_victim and case.fault is Fault.UNLIKE:
            striker.came_about()
            if case.unlike == "plan":
                settings["plan"] = self._another_plan()
            elif case.unlike == "exclude":
                settings["exclude"] = ("0.*",)
        self.net.is_watched = case.phase is Phase.ATTACH
        if case.phase is Phase.ATTACH and case.fault in (Fault.KILL, Fault.STOP):
            striker.later()
        self._attach(case.timeout_s, **settings)
        if case.phase is Phase.ATTACH and case.frontend is Frontend.HOOK:
            self._backward(self._forward(0))  # which attaches
        self.net.is_watched = False

    def _attach(self, timeout_s: float, **settings: Any) -> None:
        match self.case.frontend:
            case Frontend.HOOK:
                self.handle = gradsync.DDPState(timeout_s=timeout_s, **settings)
                self.model.register_comm_hook(self.handle, gradsync.ddp_hook)  # type: ignore[operator]  # it is wrapped in DDP here
            case Frontend.DROP_IN:
                self.model = wrapped = gradsync.DistributedDataParallel(self.net, timeout=timeout_s, **settings)
                self.handle = wrapped.attachment
            case Frontend.AVERAGES:
                self.handle = gradsync.attach(self.net, self.optimizer, timeout=timeout_s, **settings)
            case Frontend.ATTACH:
                self.handle = gradsync.attach(self.net, timeout=timeout_s, **settings)

    def _plan(self) -> Any:
        match self.case.plan:
            case "exact":
                return None
            case "top_k":
                return CompressingPlanner(ErrorFeedback(TopK(0.05)))
            case "auto":
                return "auto"
            case name:
                return AveragingPlanner(survives=name.startswith("surviving"))

    def _another_plan(self) -> Any:
        if self.case.frontend is Frontend.AVERAGES:
            return AveragingPlanner(schedule=together(self.case.size), early=True)
        return CompressingPlanner(ErrorFeedback(TopK(0.01)))

    def _take_step(self, step: int) -> None:
        case, striker = self.case, self.striker
        striker.step = step
        with self._doing(Phase.FORWARD):
            loss = self._forward(step)
        with self._doing(Phase.BACKWARD):
            self._backward(loss)
        with self._doing(Phase.OPTIMIZER):
            striker.at(Phase.OPTIMIZER)
            self.optimizer.step()
        if step == case.step and case.phase in (Phase.STATE, Phase.LOAD):
            with self._doing(Phase.STATE):
                striker.at(Phase.STATE)
                state = self.handle.state_dict()
            with self._doing(Phase.LOAD):
                striker.at(Phase.LOAD)
                self.handle.load_state_dict(state)
        if case.phase is Phase.ANY:
            time.sleep(PAUSE_S)

    def _forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * max(step, 0) + self.rank)
        loss: torch.Tensor = self.model(torch.randn(BATCH, INPUTS, generator=generator)).square().mean()
        return loss

    def _backward(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()

    @contextmanager
    def _doing(self, where: str) -> Iterator[None]:
        """Notes what this rank is about, for the event of an error."""
        self._where, self._began = str(where), time.monotonic()
        yield

    # After it.

    def _leave(self) -> None:
        """Detaches and destroys the process group, as a script does before it starts again."""
        with suppress(Exception):
            if self.handle is not None:
                self.handle.detach()
        self.handle = None
        with suppress(Exception):
            if dist.is_initialized():
                dist.destroy_process_group()

    def _start_again(self) -> None:
        """Trains some steps with the others that are left, in a new process group, on the same model.

        A model that differed from the others' is made anew.
        """
        members = self.case.again
        self.model = self.net
        self.striker.step = -1
        gc.collect()  # DDP's Reducer, with its hooks on the parameters
        dist.init_process_group(
            "gloo",
            store=PrefixStore("again", self.later),
            rank=members.index(self.rank),
            world_size=len(members),
            timeout=timedelta(seconds=AGAIN_S),
        )
        torch.manual_seed(1)
        if self.case.unlike == "model":
            self._build(_layers())
        else:
            self._wrap()
        for parameter in self.net.parameters():
            parameter.grad = None
        plan = None if self.case.plan == "auto" else self._plan()  # whose measurement takes longer than all else
        self._attach(AGAIN_S, plan=plan)
        for _ in range(AGAIN_STEPS):
            self._backward(self._forward(0))
            self.optimizer.step()
        if self.case.frontend is Frontend.AVERAGES:
            self.handle.consensus()
        mine = torch.frombuffer(bytearray(_digest(self.net).encode()), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in members]
        dist.all_gather(parts, mine)
        digests = [bytes(part.tolist()).decode() for part in parts]
        self.say("again", ok=len(set(digests)) == 1, text=f"digests {', '.join(digests)}")


class _Watched(nn.Sequential):
    """Layers that tell when somebody looks at their parameters, which `attach` does."""

    looked: Callable[[], None] = staticmethod(lambda: None)
    is_watched = False

    def named_parameters(self, *arguments: Any, **settings: Any) -> Iterator[tuple[str, nn.Parameter]]:
        if self.is_watched:
            self.looked()
        return super().named_parameters(*arguments, **settings)


def _layers() -> list[nn.Module]:
    return [nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)]


def _is_of_ddp(error: BaseException) -> bool:
    """Whether a collective of DDP's own raised the error: its frame is the last one of Python."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_code.co_filename == inspect.getfile(nn.parallel.DistributedDataParallel)


def _digest(model: nn.Module) -> str:
    values = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(values)).hexdigest()[:12]


def census() -> dict[str, Any]:
    """Counts this process' threads of Python by name, its tasks in the kernel, and its open descriptors."""
    names = sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
    tasks, descriptors = (len(list(Path("/proc/self", each).iterdir())) for each in ("task", "fd"))
    return {"threads": names, "tasks": tasks, "descriptors": descriptors}
