"""Measures compressors: the time of encoding and decoding compared with a copy, and errors on real gradients.

One process, no network. Times are on normal data, for one tensor of each size, and for a bucket of many small tensors,
as networks of many layers have, which shows the cost per tensor. In every turn an array larger than any cache is copied
too; a ratio is the time over the copy's time for as many bytes. Errors are measured on the dense gradients of a
workload, all in one bucket, after some steps of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradsync.compressors import Absolute, Compressor, CompressorState, Contraction, Exact, Payload, Summand, Unbiased
from gradsync.compressors import names as compressors
from gradsync.tensors.bucket import FlatSpec, Segment

from ..report.record import CompressionError, FittedCost, Record, Spread, WireBytes
from ..workloads import Workload, load
from .kernels import COPY_BYTES, KernelsSpec, calls_a_sample, environment_of, sample_s, torch_threads
from .provenance import code

SIZES_BYTES = tuple(1 << power for power in (10, 13, 16, 19, 22, 25, 28))
QUICK_SIZES_BYTES = (1 << 10, 1 << 16, 1 << 22)
MANY, MANY_BYTES = 128, 1 << 20  # tensors of a bucket, and their size together
DECODED = 8  # payloads decoded at once, as from so many ranks
DRAWS = 16  # draws of a random compressor, for its mean error
SIGMAS, ROUNDING = 4.0, 1e-6  # how far a mean over draws may differ from the declared expectation
BASELINE = "copy"
DATA = "normal"  # distribution of the timed data
BITS_OF_LINE = 16  # bits per element of the all-reduce to beat

COMPRESS, COMPRESS_FEEDBACK, DECOMPRESS, DECOMPRESS_MANY = (
    "compress",
    "compress_with_feedback",
    "decompress",
    f"decompress_{DECODED}",
)


@dataclass(frozen=True)
class CompressSpec:
    """The settings of a run: compressors, tensor sizes and threads to time, and workloads for compression errors."""

    names: tuple[str, ...] = field(default_factory=compressors.usual_names)
    sizes_bytes: tuple[int, ...] = SIZES_BYTES
    many: int = MANY  # equal tensors of a bucket of MANY_BYTES, timed as well; 0: no such bucket
    threads: tuple[int, ...] = (1, 2)
    workloads: tuple[str, ...] = ("gpt", "lstm", "deepfm")
    options: dict[str, Any] = field(default_factory=dict)
    training_steps: int = 20  # before the gradient that errors are measured on
    repeats: int = 11
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.names:
            compressors.named(name)
        if not self.sizes_bytes or min(self.sizes_bytes) < 4:
            raise ValueError(f"sizes must be at least 4 bytes, got {list(self.sizes_bytes)}")
        if not 0 <= self.many <= MANY_BYTES // 4:
            raise ValueError(f"a bucket of {MANY_BYTES} bytes has 0 to {MANY_BYTES // 4} tensors, got {self.many}")
        if not self.threads or min(self.threads) < 1:
            raise ValueError(f"threads must be positive numbers, got {list(self.threads)}")
        if self.repeats < 2:
            raise ValueError(f"repeats must be at least 2, got {self.repeats}")
        if self.training_steps < 0:
            raise ValueError(f"training_steps must not be negative, got {self.training_steps}")

    @property
    def turns(self) -> int:
        """Returns the number of progress events of a run."""
        return len(self.names) * len(self.threads) * len(self.buckets) + len(self.workloads)

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """Returns the timed buckets as (bytes, number of tensors)."""
        return [(nbytes, 1) for nbytes in self.sizes_bytes] + ([(MANY_BYTES, self.many)] if self.many else [])


@dataclass(frozen=True)
class Operation:
    """An operation to time, such as encoding; it writes or reads `payloads` compressed tensors per call."""

    name: str
    run: Callable[[], object]
    payloads: int


def run_compress(spec: CompressSpec, on_event: Callable[[dict[str, Any]], None]) -> list[Record]:
    """Returns records of times by compressor, size, threads and operation, of fitted costs, and of errors by workload.

    Raises:
        ValueError: a workload is unknown.
        ImportError: the native kernels are not built.
    """
    about = {**code(), "environment": environment_of(KernelsSpec())}
    records = []
    source, target = (torch.ones(COPY_BYTES // 4) for _ in range(2))
    copy = partial(target.copy_, source)
    copy()  # touches the pages
    for name in spec.names:
        for threads in spec.threads:
            with torch_threads(threads):
                timed = []
                for nbytes, tensors in spec.buckets:
                    timed += times(name, nbytes, tensors, threads, copy, spec)
                    on_event({"compressor": name, "threads": threads, "bytes": nbytes, "tensors": tensors})
                records += [*timed, *costs(timed)]
    for workload in spec.workloads:
        flat, x, options = real_gradient(load(workload, **spec.options), spec.training_steps, spec.seed)
        found = [error_record(name, workload, flat, x, spec) for name in spec.names]
        records += [record.model_copy(update={"options": options}) for record in found]
        on_event({"workload": workload})
    return [record.model_copy(update=about) for record in records]


def encoded(compressor: Compressor[Any], x: Tensor, state: CompressorState) -> tuple[Any, CompressorState]:
    """Encodes `x` as in a group of one rank; returns the payload and the compressor's next state."""
    agreed = compressor.observe(x, state) if compressor.traits.agrees else None
    return compressor.compress(x, replace(state, agreed=agreed))


def equal_tensors(numel: int, tensors: int) -> FlatSpec:
    """Returns the layout of `tensors` tensors of equal length, `numel` elements together."""
    each = numel // tensors
    segments = tuple(Segment(f"layer {number}", 0, each) for number in range(tensors))
    return FlatSpec(segments, ((each,),) * tensors, torch.float32)


def operations(name: str, x: Tensor, flat: FlatSpec) -> list[Operation]:
    """Returns the operations of the named compressor to time on bucket `x`, which consists of the tensors in `flat`."""
    named = compressors.named(name)
    bare = named.bare
    payload, _ = encoded(bare, x, bare.init(flat))
    out = torch.zeros_like(x)
    made = [Operation(COMPRESS, partial(encoded, bare, x, bare.init(flat)), 1)]
    if (fed := named.with_feedback) is not None:
        _, after_one = encoded(fed, x, fed.init(flat))
        made.append(Operation(COMPRESS_FEEDBACK, partial(encoded, fed, x, after_one), 1))
    made.append(Operation(DECOMPRESS, partial(bare.sum_into, out, [payload]), 1))
    if not isinstance(payload, Summand):  # an all-reduce makes one of several summands
        streams = [encoded(bare, x, bare.init(flat, stream))[0] for stream in range(DECODED)]
        made.append(Operation(DECOMPRESS_MANY, partial(bare.sum_into, out, streams), DECODED))
    return made


def times(
    name: str, nbytes: int, tensors: int, threads: int, copy: Callable[[], object], spec: CompressSpec
) -> list[Record]:
    """Times one compressor: returns a record for each operation; all operations and the copy run in turns."""
    flat = equal_tensors(nbytes // 4, tensors)
    x = torch.randn(flat.numel, generator=torch.Generator().manual_seed(spec.seed))
    bare = compressors.named(name).bare
    wire = bare.nbytes(flat)
    timed = operations(name, x, flat)
    calls = [calls_a_sample(operation.run, "cpu") for operation in timed]
    turns = []
    for _ in range(spec.repeats):
        samples = [sample_s(each.run, count, "cpu") for each, count in zip(timed, calls, strict=True)]
        turns.append((samples, sample_s(copy, 1, "cpu")))
    copies = [copy_s / (2 * COPY_BYTES) for _, copy_s in turns]  # seconds per byte
    records = []
    for number, operation in enumerate(timed):
        moved = flat.nbytes + operation.payloads * wire
        mine = [samples[number] for samples, _ in turns]
        base = [byte_s * moved for byte_s in copies]
        params = {
            "operation": operation.name,
            "size_bytes": flat.nbytes,
            "tensors": tensors,
            "threads": threads,
            "data": DATA,
            "moved_bytes": moved,
            "copy_bytes_per_s": 1 / float(np.median(copies)),
            "payload": bare.traits.payload.__name__,
        }
        records.append(
            Record(
                case="compress",
                metric="kernel_s",
                subject=name,
                baseline=BASELINE,
                params={**params, "bound_ratio": Spread.of(mine).median / Spread.of(base).median},
                repeats=spec.repeats,
                subject_s=Spread.of(mine),
                baseline_s=Spread.of(base),
                ratio=Spread.of([a / b for a, b in zip(mine, base, strict=True)]),
                aa=Spread.of([a / b for a, b in zip(copies[1:], copies, strict=False)]),
                bound_s=Spread.of(base).median,
                payload_bytes=WireBytes(subject=wire, baseline=flat.nbytes),
                seeds=[spec.seed],
            )
        )
    return records


def costs(timed: Sequence[Record]) -> list[Record]:
    """Fits one compressor's costs per call and per byte, for plans, to its times on single tensors; returns records.

    Where the compressor trains with error feedback, compressing includes error feedback.
    """
    timed = [record for record in timed if record.params["tensors"] == 1]
    if len({record.params["size_bytes"] for record in timed}) < 2:
        return []
    named = compressors.named(timed[0].subject)
    encode = COMPRESS_FEEDBACK if named.trained != named.bare else COMPRESS
    records = []
    for kernel, members in ((COMPRESS, (encode,)), (DECOMPRESS, (DECOMPRESS, DECOMPRESS_MANY))):
        of_kernel = [record for record in timed if record.params["operation"] in members]
        samples = [(r.params["moved_bytes"], r.subject_s.median) for r in of_kernel if r.subject_s is not None]
        call_s, byte_s = fitted(samples)
        params = {"operation": kernel, "threads": timed[0].params["threads"], "data": DATA, "samples": len(samples)}
        cost = FittedCost(kernel=named.trained.kernel(kernel), call_s=call_s, byte_s=byte_s)
        records.append(record_without_times("cost", timed[0].subject, params, timed[0].seeds, cost=cost))
    return records


def fitted(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns seconds per call and per byte, both >= 0, fitted to (bytes, seconds) with least relative errors."""
    table = np.asarray(samples, dtype=np.float64)
    nbytes, seconds = table[:, 0], table[:, 1]
    (call_s, byte_s), *_ = np.linalg.lstsq(np.stack([1 / seconds, nbytes / seconds], axis=1), np.ones(len(table)))
    if call_s <= 0:
        return 0.0, float(np.median(seconds / nbytes))
    if byte_s <= 0:  # nothing but calls: the largest is an upper bound
        return float(np.median(seconds)), float(seconds[-1] / nbytes[-1])
    return float(call_s), float(byte_s)


def record_without_times(metric: Any, name: str, params: dict[str, Any], seeds: list[int], **figures: Any) -> Record:
    """Returns a record of a metric other than time, with these figures."""
    return Record(
        case="compress", metric=metric, subject=name, baseline=BASELINE, params=params, repeats=1, subject_s=None,
        baseline_s=None, ratio=None, aa=None, seeds=seeds, **figures,
    )  # fmt: skip


def real_gradient(workload: Workload, steps: int, seed: int) -> tuple[FlatSpec, Tensor, dict[str, Any]]:
    """Returns the dense gradients of one rank after `steps` steps of training: their layout, all of them concatenated,
    (numel,) float32, and the workload's options.
    """
    model = workload.model(sparse=True, seed=seed)
    optimizer = workload.optimizer(model)
    for number, batch in enumerate(islice(workload.batches(0, 1, seed), steps + 1)):
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        if number < steps:
            optimizer.step()
    found = {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.layout is torch.strided
    }
    segments = tuple(Segment(name, 0, gradient.numel()) for name, gradient in found.items())
    flat = FlatSpec(segments, tuple(tuple(g.shape) for g in found.values()), torch.float32)
    return flat, torch.cat([gradient.reshape(-1).float() for gradient in found.values()]), workload.options


def error_record(name: str, workload: str, flat: FlatSpec, x: Tensor, spec: CompressSpec) -> Record:
    """Returns the record of a compressor's error, without error feedback, on a workload's gradient `x`."""
    compressor = compressors.named(name).bare
    wire = compressor.nbytes(flat)
    params = {
        "workload": workload, "training_steps": spec.training_steps, "tensors": len(flat.segments),
        "elements": flat.numel, "break_even_ranks": break_even_ranks(compressor, flat),
    }  # fmt: skip
    return record_without_times(
        "error", name, params, [spec.seed], error=error_of(compressor, flat, x),
        payload_bytes=WireBytes(subject=wire, baseline=flat.nbytes),
    )  # fmt: skip


def break_even_ranks(compressor: Compressor[Any], flat: FlatSpec) -> float | None:
    """Returns the number of ranks below which an all-gather of payloads moves fewer bytes than a 16-bit all-reduce.

    None for payloads that an all-reduce sums: their bytes do not grow with the ranks.
    """
    if issubclass(compressor.traits.payload, Summand):
        return None
    return 2 * BITS_OF_LINE / (8 * compressor.nbytes(flat) / flat.numel)


def error_of(compressor: Compressor[Any], flat: FlatSpec, x: Tensor) -> CompressionError:
    """Returns a compressor's error |C(x) - x| / |x|, root mean square of draws, and whether its stated bound holds."""
    law, norm = compressor.law(flat), float(x.double().square().sum())
    # Draws differ by rank and step; a compressor without randomness makes the same error each time.
    states = [replace(compressor.init(flat), step=step) for step in range(DRAWS)]
    wrong = []
    for state in states:
        payload: Payload = encoded(compressor, x, state)[0]
        wrong.append(compressor.decompress(payload).double().sub_(x))
        if len(wrong) == 2 and torch.equal(*wrong):
            break
    squares = [float(each.square().sum()) / norm for each in wrong]
    measured = float(np.mean(squares))
    relative, slack = measured**0.5, ROUNDING + SIGMAS * float(np.std(squares)) / len(squares) ** 0.5
    match law:
        case Exact():
            return CompressionError(relative=relative, law="exact", declared=0.0, measured=relative, holds=not relative)
        case Unbiased(omega=omega):
            law_name, declared, holds = "unbiased", omega, measured <= omega + slack
        case Contraction(delta=delta):
            law_name, declared, measured, holds = "contraction", delta, 1 - measured, 1 - measured >= delta - slack
        case Absolute(tau=tau):
            measured = max(float(each.abs().max()) for each in wrong)
            law_name, declared, holds = "absolute", tau, measured <= tau * (1 + ROUNDING)
        case _:
            return CompressionError(relative=relative, law="biased")
    return CompressionError(relative=relative, law=law_name, declared=declared, measured=measured, holds=holds)
