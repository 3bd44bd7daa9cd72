"""Measures the native CPU kernels, or the CUDA kernels, against torch operations on the same device.

One process, no network. Results must equal those of the kernel's definition in torch, which is also the torch code that
is timed; where the definition keeps to an order of sums or random draws, which costs time, faster torch code is timed
instead (`usual`). `bound_s` is the least number of bytes that a kernel must read and write, each input and output once,
over the rate of a copy larger than any cache, measured in the same turns. GPU times are between events on the GPU; they
include host time wherever the GPU waits for the host.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from types import ModuleType
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradsync.kernels import cpu, native, reference
from gradsync.kernels import device as on_device

from ..report.record import Record, Spread
from .provenance import code, machine
from .works import CASES, WORK, Work

COPY_BYTES = 256 << 20  # size of the copied array: larger than any cache
TORCH_S = 10.0  # time limit of a case's torch operations, which may be a hundred times slower
FEWEST_TURNS = 3  # turns of torch operations, even beyond TORCH_S
MIN_SAMPLE_S = 2e-3  # short calls are timed several at once


class KernelsSpec(BaseModel):
    """The settings of a run: kernels to measure (empty: all), device, threads, repeats and seed."""

    kernels: tuple[str, ...] = ()
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    repeats: int = 25
    seed: int = 0

    @property
    def cases(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns (kernel name, parameters of its inputs) of each case to measure.

        Raises:
            ValueError: a kernel is unknown, or has no version for the device.
        """
        known = [kernel for kernel in WORK if self.device == "cpu" or hasattr(self.subject, kernel)]
        unknown = set(self.kernels) - set(known)
        if unknown:
            raise ValueError(f"unknown kernel {min(unknown)!r}: there are {', '.join(known)}")
        return [(kernel, params) for kernel, params in CASES if kernel in (self.kernels or known)]

    @property
    def subject(self) -> ModuleType:
        """Returns the module of the measured kernels.

        Raises:
            ValueError: there is no CUDA device.
            ImportError: Triton is not installed.
        """
        if self.device == "cpu":
            return cpu
        if not torch.cuda.is_available():
            raise ValueError("device cuda needs a GPU that torch can use, and it sees none: take --device cpu")
        return on_device.load()


class Moved(TorchFunctionMode):
    """Makes tensors on the CPU and moves them to a device, so that their numbers are the same on all devices."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.to(self._device) if isinstance(made, Tensor) and made.is_cpu else made


def run_kernels(spec: KernelsSpec, on_event: Callable[[dict[str, Any]], None]) -> list[Record]:
    """Measures all cases and returns a record for each.

    Raises:
        ValueError: a kernel is unknown, or the device is missing.
        ImportError: the native kernels are not built, or for CUDA Triton is not installed.
    """
    cases, environment, records = spec.cases, environment_of(spec), []
    with torch_threads(spec.threads):
        source, target = (torch.ones(COPY_BYTES // 4, device=spec.device) for _ in range(2))
        copy = partial(target.copy_, source)
        sample_s(copy, 1, spec.device)  # touches the pages
        for kernel, params in cases:
            with Moved(spec.device):
                work = WORK[kernel](torch.Generator().manual_seed(spec.seed), **params)
            definition = (
                work if spec.device == "cpu" else WORK[kernel](torch.Generator().manual_seed(spec.seed), **params)
            )
            records.append(measured(kernel, params, work, copy, spec, environment, definition))
            on_event({"kernel": kernel, **params})
    return records


def environment_of(spec: KernelsSpec) -> dict[str, Any]:
    """Returns a description of the machine and of the kernels' implementation."""
    if spec.device == "cpu":
        return {**machine(), "native": native.load().__name__.rpartition(".")[2]}
    return {
        **machine(), "device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "triton": version("triton"),
    }  # fmt: skip


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measured(
    kernel: str,
    params: dict[str, Any],
    work: Work,
    copy: Callable[[], object],
    spec: KernelsSpec,
    environment: dict[str, Any],
    definition: Work | None = None,
) -> Record:
    """Times a kernel and torch in turns, and returns the record; if results differ, it has the failure and no times.

    Args:
        definition: the same work on the CPU, where torch sums in a fixed order; None: `work` itself.
    """
    params = {"kernel": kernel, **params, "threads": spec.threads}
    record = Record(
        case="kernels", metric="kernel_s", subject=kernel, baseline="torch", params=params, repeats=spec.repeats,
        subject_s=None, baseline_s=None, ratio=None, aa=None, seeds=[spec.seed],
        environment=environment, **code(),
    )  # fmt: skip
    if not agree(work, definition or work, spec.subject):
        return record.model_copy(update={"failed": "the kernel and its definition in torch differ"})
    turns = take_turns(work, copy, spec)
    bytes_per_s = 2 * COPY_BYTES / statistics.median(turns.copy)
    bound_s = work.nbytes / bytes_per_s
    about = {
        "torch": "usual" if work.usual else "definition", "torch_repeats": len(turns.torch),
        "bound_ratio": Spread.of(turns.kernel).median / bound_s, "copy_bytes_per_s": bytes_per_s,
    }  # fmt: skip
    figures = {
        "subject_s": Spread.of(turns.kernel),
        "baseline_s": Spread.of(turns.torch),
        "ratio": Spread.of([a / b for a, b in zip(turns.kernel_beside, turns.torch, strict=True)]),
        "aa": Spread.of([a / b for a, b in zip(turns.torch_again, turns.torch, strict=True)]),
        "bound_s": bound_s,
        "params": {**params, **about},
    }
    return record.model_copy(update=figures)


def agree(work: Work, definition: Work, subject: ModuleType) -> bool:
    """Whether the kernel and its definition write the same results."""
    results = []
    for module, done in ((reference, definition), (subject, work)):
        for out in done.outs:
            out.zero_()
        done.run(module)
        results.append([out.cpu().clone() for out in done.outs])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@dataclass(frozen=True)
class Turns:
    """Seconds per call: kernel and copy in each turn; torch twice, to show noise, in turns that fit in `TORCH_S`."""

    kernel: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    torch: list[float] = field(default_factory=list)
    torch_again: list[float] = field(default_factory=list)
    kernel_beside: list[float] = field(default_factory=list)  # in the same turns as torch


def take_turns(work: Work, copy: Callable[[], object], spec: KernelsSpec) -> Turns:
    kernel, torch_ops = partial(work.run, spec.subject), work.usual or partial(work.run, reference)
    torch_ops()  # warm
    kernel_calls, torch_calls = calls_a_sample(kernel, spec.device), calls_a_sample(torch_ops, spec.device)
    torch_turns = math.ceil(TORCH_S / (2 * torch_calls * sample_s(torch_ops, torch_calls, spec.device)))
    torch_turns = min(spec.repeats, max(torch_turns, FEWEST_TURNS))
    turns = Turns()
    for number in range(spec.repeats):
        turns.copy.append(sample_s(copy, 1, spec.device))
        turns.kernel.append(sample_s(kernel, kernel_calls, spec.device))
        if (number + 1) * torch_turns // spec.repeats > number * torch_turns // spec.repeats:
            turns.kernel_beside.append(turns.kernel[-1])
            turns.torch.append(sample_s(torch_ops, torch_calls, spec.device))
            turns.torch_again.append(sample_s(torch_ops, torch_calls, spec.device))
    return turns


def calls_a_sample(run: Callable[[], object], device: str) -> int:
    return math.ceil(MIN_SAMPLE_S / sample_s(run, 1, device))


def sample_s(run: Callable[[], object], calls: int, device: str) -> float:
    """Returns seconds per call over `calls` consecutive calls of `run`; on a GPU, between CUDA events."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / calls
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls
