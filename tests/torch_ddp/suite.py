"""One rank of torch's own DDP tests, from torch's `distributed_test.py`, on CPU, with a class to be tested.

Imported in the process that ranks are forked from, with the environment that `ranks.py` sets: torch's module reads it
when it is imported. Tests that ask for GPUs run on the CPU: devices are replaced where tensors are made and moved, and
`device_ids` are left out. Nothing of DDP is replaced.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

import gradsync

TIMEOUT_S = 20.0  # of gradsync, for ranks that wait for each other
# Whether a test is of DDP, and whether it is of a part that our class does not have, by its source.
OF_DDP = re.compile(r"DistributedDataParallel|\bDDP\b|ddp")
OF_INTERNALS = re.compile(r"comm_hook|buffer_hook|\.reducer\b|\.logger\b|logging_data|verify_ddp_error_logged")


def _ignored(*args: Any, **kwargs: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces a decorator that skips tests where there are too few GPUs."""
    return lambda test: test


common_distributed.skip_if_lt_x_gpu = _ignored
common_distributed.require_n_gpus_for_nccl_backend = _ignored
common_distributed.skip_if_no_gpu = lambda test: test

from torch.testing._internal.distributed import distributed_test  # noqa: E402


class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All tests of torch's module."""

    skip_return_code_checks: list[Any] = []
    special_return_code_checks: dict[Any, Any] = {}


class CPUStream(torch.Stream):
    """A stream of the CPU, also where torch was built for CUDA and finds no driver."""

    def __new__(cls, *args: Any, **options: Any) -> CPUStream:
        return super().__new__(cls, device="cpu")


class PlainDDP(DistributedDataParallel):
    """torch's own DDP, on the CPU."""

    def __init__(
        self, module: nn.Module, device_ids: Any = None, output_device: Any = None, *rest: Any, **options: Any
    ):
        super().__init__(module, None, None, *rest, **options)


class HookedDDP(PlainDDP):
    """torch's own DDP with gradsync as its communication hook."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_comm_hook(gradsync.DDPState(timeout_s=TIMEOUT_S), gradsync.ddp_hook)


class DropIn(gradsync.DistributedDataParallel):
    """gradsync's class, on the CPU."""

    def __init__(
        self, module: nn.Module, device_ids: Any = None, output_device: Any = None, *rest: Any, **options: Any
    ):
        super().__init__(module, None, None, *rest, timeout=TIMEOUT_S, **options)


WAYS: dict[str, type[DistributedDataParallel]] = {"plain": PlainDDP, "drop-in": DropIn, "hook": HookedDDP}


def names() -> list[str]:
    """Returns the names of torch's tests that concern DDP."""
    return [name for name in sorted(dir(Suite)) if name.startswith("test_") and OF_DDP.search(name + source(name))]


def source(name: str) -> str:
    """Returns a test's source, with that of the helpers it calls."""
    texts: dict[str, str] = {}
    waiting = [name]
    while waiting:
        each = waiting.pop()
        if each in texts or not hasattr(Suite, each):
            continue
        texts[each] = inspect.getsource(inspect.unwrap(getattr(Suite, each)))
        waiting += re.findall(r"self\.(_(?:test|run|verify)\w*)\(", texts[each])
    return "\n".join(texts.values())


def run(way: str, name: str, rank: int, folder: str, pipe: Connection) -> None:
    """Runs one test as one rank and ends the process, as torch's own ranks do: its exit code says how it went."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), TEMP_DIR=folder)
    with Path(folder, f"{rank}.out").open("w", buffering=1) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        code = 1
        try:
            _on_cpu(WAYS[way])
            with _OnCpu():
                Suite._run(rank, name, f"{folder}/store", pipe)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
            for skip in common_distributed.TEST_SKIPS.values():
                if skip.exit_code == code:
                    Path(folder, f"{rank}.skip").write_text(skip.message)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _on_cpu(ddp: type[DistributedDataParallel]) -> None:
    """Gives torch's test module the class to test, and CPUs in place of GPUs."""
    torch.set_num_threads(1)
    nn.parallel.DistributedDataParallel = ddp
    distributed_test.DistributedDataParallel = ddp
    distributed_test.init_multigpu_helper = lambda size, backend: {rank: [rank] for rank in range(size)}
    move = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return move(module, *map(_cpu_for, args), **{key: _cpu_for(value) for key, value in kwargs.items()})

    nn.Module.to = to
    nn.Module.cuda = lambda module, device=None: module
    for place, function in [
        (torch.cuda, "set_device"),
        (torch.cuda, "synchronize"),
        (torch.accelerator, "set_device_index"),
    ]:
        setattr(place, function, lambda *args, **kwargs: None)
    torch.cuda.current_device = lambda: 0
    torch.Stream = CPUStream


def _cpu_for(value: Any) -> Any:
    """Returns the CPU in place of a CUDA device; any other value unchanged."""
    is_cuda = (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.startswith("cuda")
    )
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return torch.device("cpu") if is_cuda or is_number else value


class _OnCpu(TorchFunctionMode):
    """A mode that makes and moves tensors on the CPU, whatever GPU was asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        called = getattr(func, "__name__", "")
        if called == "cuda":
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _cpu_for(kwargs["device"])
        if called == "to":
            args = (args[0], *map(_cpu_for, args[1:]))
        return func(*args, **kwargs)
