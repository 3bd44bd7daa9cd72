"""The program of one rank that times gradient exchanges; `sync.py` starts it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm import LENGTH_BYTES, Group, Ledger, RecordingGroup, TorchGroup, drive, torch_group
from gradsync.comm.links import Exchange, highest_over, latencies
from gradsync.costs.cluster import Link, Placement
from gradsync.costs.cost_model import CostModel, node_link_bytes
from gradsync.costs.steps import Compute, Pattern, Transfer, transfers
from gradsync.costs.transport import DEFAULT_TRANSPORT, DIRECT_BYTES
from gradsync.planner.pieces import at_once
from gradsync.schemes import (
    BLOCKS_OF_256,
    DOUBLING_OF_ELEMENTS,
    DOUBLING_OF_ROWS,
    PARAMETER_SERVER_OF_ELEMENTS,
    PARAMETER_SERVER_OF_ROWS,
    AGSparse,
    AllReduce,
    BalancedElements,
    BalancedParallelism,
    ReduceScatter,
    Scheme,
    SparseReduceScatter,
    hash_lists,
    select,
)
from gradsync.tensors.bucket import Layout, TensorSpec
from gradsync.tensors.density import DensityProfile, profile_rows, profile_tables
from gradsync.tensors.sparse import SparseRows
from gradsync.tuning.kernels import kernel_costs

from ..cluster.counters import interface_bytes
from ..rivals.candidates import candidates
from ..rivals.regions import OkTopkLike
from ..rivals.zen_hash import ZenHash
from ..workloads import Workload
from . import topk
from .memory import peak_bytes
from .methods import SPARSE_SCHEMES
from .rank import event, run_rank
from .sync import DENSE_SIZES_BYTES, FIT_SIZES_BYTES, SyncSpec
from .topk import TopKWorkload

TIMEOUT_S = 120.0
REHEARSED = (  # schemes that together use every kernel
    BalancedParallelism(),
    AGSparse(),
    DOUBLING_OF_ROWS,
    PARAMETER_SERVER_OF_ROWS,
    AllReduce(),
    ReduceScatter(),
    SparseReduceScatter(),
    BalancedElements(),
    DOUBLING_OF_ELEMENTS,
    PARAMETER_SERVER_OF_ELEMENTS,
    ZenHash(),
    OkTopkLike(),
)
COPY_BYTES = 128 << 20
HEAD_START_S = 0.03  # time for the broadcast of the start to reach all ranks
ELEMENT_SCHEMES: dict[str, Scheme[Any]] = {s.name: s for s in (BalancedElements(), AllReduce())}


@dataclass(frozen=True)
class Contender:
    """An exchange to time: the function `run`, and `prepare`, which is called before each run and not timed."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Timing:
    """The wall-clock and processor seconds of one exchange on this rank."""

    seconds: float
    cpu_s: float  # of all threads


def timed(exchange: Contender) -> Timing:
    """Times an exchange from a common start of all ranks to its end on this rank.

    Ranks leave a barrier milliseconds apart, so all wait for an agreed instant on the clock of the machine, which they
    share.
    """
    exchange.prepare()
    dist.barrier()
    start_s = torch.tensor([time.perf_counter() + HEAD_START_S], dtype=torch.float64)
    dist.broadcast(start_s, src=0)
    time.sleep(max(float(start_s) - time.perf_counter(), 0.0))
    cpu_s = time.process_time()
    exchange.run()
    return Timing(time.perf_counter() - float(start_s), time.process_time() - cpu_s)


def take_turns(exchanges: dict[str, Contender], spec: SyncSpec) -> tuple[dict[str, list[Timing]], dict[str, float]]:
    """Times exchanges in turns, in alternating order; returns the times of all repeats and mean sent bytes, by name."""
    names = list(exchanges)
    for name in names:
        for _ in range(spec.warmup):
            timed(exchanges[name])
    sent_bytes = dict.fromkeys(names, 0)
    times: dict[str, list[Timing]] = {name: [] for name in names}
    for repeat in range(spec.repeats):
        for name in names if repeat % 2 == 0 else names[::-1]:
            before = interface_bytes()[0]
            times[name].append(timed(exchanges[name]))
            dist.barrier()  # a shaped link counts a packet when it leaves, which is after the collective returned
            sent_bytes[name] += interface_bytes()[0] - before
    return times, {name: total / spec.repeats for name, total in sent_bytes.items()}


def timed_all_reduces(group: TorchGroup, spec: SyncSpec) -> list[tuple[int, float, float]]:
    """Times all-reduces of several sizes: returns (rounds, bytes on the busiest link, median seconds) of each."""
    steps = [Transfer("", Pattern.ALL_REDUCE, (float(nbytes),) * spec.world_size) for nbytes in FIT_SIZES_BYTES]
    return [(bound_rounds(s), link_bytes(s, group), median_s(group, int(s.part_bytes[0]), spec)) for s in steps]


def stage_s(group: TorchGroup, spec: SyncSpec, small: tuple[int, float, float]) -> float:
    """Returns the fixed cost in seconds of a transfer, without the latency of its rounds of messages.

    The estimate uses the time of a transfer with a single message each way, and `small`: (rounds, bytes, seconds) of a
    small all-reduce.
    """
    rounds, _, all_s = small
    message = Exchange.of(group, Pattern.MESSAGES, LENGTH_BYTES, (spec.world_size // 2,))
    swap = Contender(lambda: message.issue().wait(TIMEOUT_S))
    return latencies(all_s, statistics.median(seconds_of(swap, spec)) if rounds > 1 else 0.0, rounds)[1]


def link_bytes(transfer: Transfer, group: TorchGroup) -> float:
    """Returns the bytes of a transfer on the busiest link direction; ranks on one node share the node's link."""
    on_one_node = group.placement.num_nodes == 1
    return (
        transfer.busiest_bytes
        if on_one_node
        else node_link_bytes(transfer.carried_by(group.transport), group.placement)
    )


def bound_rounds(transfer: Transfer) -> int:
    """Returns the number of message rounds whose latency adds to a transfer's time: all if it is small, else 1.

    A large transfer may hide all but one of its latencies behind its bytes. The fit of link costs and the lower bound
    on an exchange's time must count alike: else the fitted rate is too high, or the bound too low.
    """
    traffic = transfer.carried_by(DEFAULT_TRANSPORT)
    return 1 if traffic.is_forwarded or traffic.busiest_bytes > DIRECT_BYTES else traffic.rounds


def median_s(group: TorchGroup, nbytes: int, spec: SyncSpec) -> float:
    """Returns the median seconds of an all-reduce of `nbytes` bytes."""
    buffer = torch.zeros(nbytes // 4)

    reduce = Contender(lambda: group.all_reduce(buffer).wait(TIMEOUT_S))
    return statistics.median(seconds_of(reduce, spec))


def seconds_of(exchange: Contender, spec: SyncSpec) -> list[float]:
    """Runs an exchange repeatedly and returns the seconds of each repeat after the warm-up."""
    return [timed(exchange).seconds for _ in range(spec.warmup + spec.repeats)][spec.warmup :]


def memory_bytes_per_s(spec: SyncSpec) -> float:
    """Returns bytes read and written per second by a copy larger than any cache, while the other ranks copy too."""
    source = torch.ones(COPY_BYTES // 4)
    copy = Contender(partial(torch.empty_like(source).copy_, source))
    return 2 * COPY_BYTES / statistics.median(seconds_of(copy, spec))


def scheme_exchange(
    scheme: Scheme[Any], group: TorchGroup, x: Callable[[], Any], prepare: Callable[[], object] = lambda: None
) -> tuple[Contender, Ledger]:
    """Returns an exchange that runs the scheme on `x()`, and the ledger to which each run appends its sent bytes."""
    ledger = Ledger()
    recording = RecordingGroup(group, ledger)
    scale = 1.0 / group.size
    run = Contender(lambda: drive(scheme.synchronize(x(), {}, recording, scale), timeout_s=TIMEOUT_S), prepare)
    return run, ledger


def ddp_sparse_exchange(gradients: Sequence[Tensor]) -> Contender:
    """Returns an exchange that all-reduces copies of the sparse gradients as DDP does: issues all, then waits."""
    copies: list[Tensor] = []

    def prepare() -> None:
        copies[:] = [gradient.clone() for gradient in gradients]

    def run() -> None:
        for work in [dist.all_reduce(copy, async_op=True) for copy in copies]:
            work.wait()

    return Contender(run, prepare)


def step_costs(
    scheme: Scheme[Any], specs: tuple[TensorSpec, ...], profiles: Any, placement: Placement, cost: CostModel
) -> dict[str, Any]:
    """Returns what a scheme's time is estimated from: its "transfers" as (message rounds, rounds counted by the lower
    bound on time, most bytes of a rank), and its "computations" as (kernel, calls, bytes).

    Where several ranks share a node: the estimate itself, as "predicted_s", and no lower bound.
    """
    steps = scheme.steps(specs, profiles, placement)
    if placement.num_nodes < placement.size:
        return {"predicted_s": cost.total_s(steps, placement)}
    return {
        "transfers": [(t.rounds, bound_rounds(t), t.busiest_bytes) for t in transfers(steps)],
        "computations": [(step.kernel, step.calls, step.nbytes) for step in steps if isinstance(step, Compute)],
    }


def measure(
    params: dict[str, Any],
    baselines: dict[str, Contender],
    schemes: dict[str, tuple[Contender, Ledger]],
    costs: dict[str, dict[str, Any]],
    spec: SyncSpec,
    selected: str | None = None,
) -> dict[str, Any]:
    """Times baselines and schemes in turns on one input, the first baseline twice for A/A; returns plain data.

    Args:
        selected: name of the scheme that gradsync selects; None: not all schemes are timed, so none was selected.
    """
    first = next(iter(baselines))
    exchanges = {**baselines, **{name: run for name, (run, _) in schemes.items()}, "again": baselines[first]}
    times, wire_bytes = take_turns(exchanges, spec)
    runs = spec.warmup + spec.repeats
    payload = {name: ledger.sent_bytes / runs for name, (_, ledger) in schemes.items()}
    event(kind="case", **{k: v for k, v in params.items() if isinstance(v, str | int)})
    return {
        "params": params,
        "baseline": first,
        "times": {name: [timing.seconds for timing in repeats] for name, repeats in times.items()},
        "cpu_s": {name: statistics.median(timing.cpu_s for timing in repeats) for name, repeats in times.items()},
        "wire_bytes": wire_bytes,
        "payload_bytes": payload,
        "costs": costs,
        "selected": selected,
    }


def dense_case(nbytes: int, group: TorchGroup, spec: SyncSpec, cost: CostModel) -> dict[str, Any]:
    """Times gradsync's all-reduce and torch's on a dense tensor of `nbytes` bytes; returns plain data."""
    x = torch.zeros(nbytes // 4)
    scheme = AllReduce()
    return measure(
        {"size_bytes": nbytes, "dtype": "float32"},
        {"ddp": Contender(lambda: dist.all_reduce(x))},
        {scheme.name: scheme_exchange(scheme, group, lambda: x)},
        {scheme.name: step_costs(scheme, (TensorSpec.of(x),), (), group.placement, cost)},
        spec,
    )


@dataclass(frozen=True)
class Gradients:
    """The gradients of one real training step on this rank, and DDP's exchanges of them as baselines."""

    layout: Layout
    x: Callable[[], Any]
    specs: tuple[TensorSpec, ...]
    profiles: tuple[DensityProfile, ...]  # of all ranks, exact
    baselines: dict[str, Contender]
    given: tuple[Tensor, ...]  # tensors that exist before the exchange, which do not count as its memory
    prepare: Callable[[], object] = lambda: None  # before each exchange


def workload_case(name: str, group: TorchGroup, spec: SyncSpec, cost: CostModel) -> dict[str, Any]:
    """Times schemes and DDP's collectives on the gradients of a workload's first step; returns plain data."""
    workload = topk.load(name, **spec.options)
    found = gradients_of_step(workload, workload.model(sparse=True, seed=spec.seed), group, spec.seed)
    planned, selected = schemes_of(found.layout, found.specs, found.profiles, group.placement, spec, cost)
    params = {
        "workload": name,
        **spec.options,
        "density": [p.density for p in found.profiles],
        "union_rows": union_rows(found.profiles, group.size),
    }
    exchanges = {title: scheme_exchange(s, group, found.x, found.prepare) for title, s in planned.items()}
    case = measure(
        params,
        found.baselines,
        exchanges,
        {title: step_costs(s, found.specs, found.profiles, group.placement, cost) for title, s in planned.items()},
        spec,
        selected,
    )
    memory = {title: exchange_bytes(exchange, found.given) for title, (exchange, _) in exchanges.items()}
    return {**case, "options": workload.options, "memory_bytes": memory}


def gradients_of_step(workload: Workload, model: nn.Module, group: TorchGroup, seed: int) -> Gradients:
    """Returns a first step's sparse gradients as tables; if there are none, all gradients as one flat tensor."""
    batches = workload.batches(group.rank, group.size, seed)
    if isinstance(workload, TopKWorkload):
        return elements_of_step(workload.sparsified(model, batches), group)
    workload.loss(model, next(batches)).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if sparse := [gradient for gradient in gradients if gradient.layout is torch.sparse_coo]:
        return rows_of_step(sparse, group)
    return elements_of_step(torch.cat([gradient.flatten() for gradient in gradients]), group)


def exchange_bytes(exchange: Contender, given: Sequence[Tensor]) -> int:
    """Returns the peak memory of one exchange: with the index lists that its scheme caches, without `given` tensors."""
    exchange.prepare()
    dist.barrier()
    hash_lists.forget()
    return peak_bytes(exchange.run, given)


def rows_of_step(gradients: list[Tensor], group: TorchGroup) -> Gradients:
    """Returns sparse gradients as tables, with two baselines: DDP sums them sparse or dense."""
    tables = tuple(SparseRows.from_torch(g) for g in gradients)
    dense = [g.to_dense() for g in gradients]
    return Gradients(
        Layout.ROWS,
        lambda: tables,
        tuple(TensorSpec.of(g) for g in gradients),
        measured_profiles(tables, group),
        {
            "ddp_sparse": ddp_sparse_exchange(gradients),
            "ddp": Contender(lambda: [dist.all_reduce(g) for g in dense]),
        },
        tuple(part for table in tables for part in (table.indices, table.values)),
    )


def elements_of_step(gradient: Tensor, group: Group) -> Gradients:
    """Returns all gradients as one flat tensor, with two baselines: DDP sums all of it, in 32 or 16 bits."""
    bucket = torch.empty_like(gradient)  # exchanges overwrite it

    def bf16() -> None:
        half = bucket.to(torch.bfloat16)
        dist.all_reduce(half)
        bucket.copy_(half)

    def prepare() -> None:
        bucket.copy_(gradient)

    return Gradients(
        Layout.FLAT,
        lambda: bucket,
        (TensorSpec.of(bucket),),
        (measured_elements(gradient, group),),
        {"ddp": Contender(lambda: dist.all_reduce(bucket), prepare), "ddp_bf16": Contender(bf16, prepare)},
        (bucket,),
        prepare,
    )


def schemes_of(
    layout: Layout,
    specs: tuple[TensorSpec, ...],
    profiles: tuple[DensityProfile, ...],
    placement: Placement,
    spec: SyncSpec,
    cost: CostModel,
) -> tuple[dict[str, Scheme[Any]], str | None]:
    """Returns the schemes to time, by name, and the name of the one that gradsync selects, if all are timed."""
    if spec.schemes == "planned":
        planned = ELEMENT_SCHEMES if layout is Layout.FLAT else SPARSE_SCHEMES
        return {name: s.planned_for(profiles) for name, s in planned.items()}, None
    everything = candidates(layout, profiles, placement)
    selection = select(everything, specs, profiles, placement, cost)
    named = {scheme.title: scheme for scheme in everything}
    assert len(named) == len(everything), "titles tell schemes apart"
    return named, selection.chosen.scheme.title


def measured_profiles(tables: tuple[SparseRows, ...], group: TorchGroup) -> tuple[DensityProfile, ...]:
    """Returns the exact density profile of each table in this step, from the indices of all ranks. Collective."""
    return profile_tables([(table.num_rows, from_all_ranks(table.indices, group)) for table in tables])


def measured_elements(x: Tensor, group: Group) -> DensityProfile:
    """Returns the exact density profile of a flat tensor, by element and by block, over all ranks. Collective."""
    indices = from_all_ranks(x.nonzero().flatten(), group)
    length = BLOCKS_OF_256.block
    blocks = profile_rows([rank // length for rank in indices], -(-x.numel() // length))
    return replace(profile_rows(indices, x.numel()), blocks={length: blocks})


def from_all_ranks(indices: Tensor, group: Group) -> list[Tensor]:
    sizes = group.all_gather(torch.tensor([len(indices)])).wait(TIMEOUT_S)
    return group.all_gather(indices.contiguous(), [int(size) for size in sizes]).wait(TIMEOUT_S)


def union_rows(profiles: tuple[DensityProfile, ...], size: int) -> list[float]:
    return [p.union_rows(size) for p in profiles]


def agreed_cost(fit: Sequence[tuple[int, float, float]], stage: float, memory: float, group: TorchGroup) -> CostModel:
    """Returns the cost model of the slowest rank's measurements, the same on all ranks, so that all select alike."""
    slowest_s = torch.tensor([*(seconds for _, _, seconds in fit), stage, -memory], dtype=torch.float64)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    *seconds, stage, negated = slowest_s.tolist()
    samples = [(rounds, nbytes, s) for (rounds, nbytes, _), s in zip(fit, seconds, strict=True)]
    intra, node = None, group.within_node()
    if group.placement.is_hierarchy and node.bytes_per_s is not None and node.alpha_s is not None:
        intra = Link(node.bytes_per_s, node.alpha_s)
    kernels = at_once(kernel_costs(REHEARSED, highest_over(group, TIMEOUT_S)))
    known = {"kernels": kernels, "intra": intra, "stage_s": stage, "transport": group.transport}
    return CostModel.fit(samples, memory_bytes_per_s=-negated, **known)


def exchange(text: str) -> dict[str, Any]:
    """Runs all cases of the settings in `text`, JSON, and returns this rank's measurements."""
    spec = SyncSpec.model_validate_json(text)
    group = torch_group(timeout_s=TIMEOUT_S)
    fit = timed_all_reduces(group, spec)
    cost = agreed_cost(fit, stage_s(group, spec, fit[0]), memory_bytes_per_s(spec), group)
    event(kind="fit")
    cases = [dense_case(nbytes, group, spec, cost) for nbytes in DENSE_SIZES_BYTES]
    cases += [workload_case(name, group, spec, cost) for name in spec.workloads]
    return {"cost": asdict(cost), "cases": cases}


if __name__ == "__main__":
    run_rank(exchange)
