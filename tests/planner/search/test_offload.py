"""Compression beside a simulated card: the search offloads it where copies cost less than the card's time."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from gradsync.compressors import BlockInt, ErrorFeedback
from gradsync.costs.cluster import Placement
from gradsync.costs.cost_model import CostModel, HostCost, KernelCost
from gradsync.costs.steps import OFFLOAD, Compute
from gradsync.planner.default.network import Network
from gradsync.planner.search.candidates import searched
from gradsync.planner.search.job import Job
from gradsync.planner.search.predict import predict
from gradsync.planner.search.ways import Constraints
from gradsync.schemes import Route, ways
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.density import ParameterProfile

FEEDBACK = ErrorFeedback(BlockInt(8))
PLACEMENT = Placement.one_per_node(4)
COUNT, NUMEL, READY_S = 8, 1 << 22, 4e-3  # gradients of 16 MB, one every 4 ms
LINK = CostModel(1e-5, 5e9)
ROUTE = Route(("compress@offload", "all_gather", "decompress@offload"), FEEDBACK)


def kernels(byte_s: float) -> dict[str, KernelCost]:
    """Returns the same cost for all kernels that the compressor's schemes and routes use."""
    spec = TensorSpec((1024,), torch.float32)
    steps = [step for scheme in (*ways(FEEDBACK), ROUTE) for step in scheme.steps((spec,), (), PLACEMENT)]
    names = {step.kernel for step in steps if isinstance(step, Compute)}
    return {name: KernelCost(5e-6, byte_s) for name in (*names, "scale", "sum_ranges", "join_ranges", "add_payloads")}


def on_card(card_byte_s: float, copy_byte_s: float) -> Job:
    """Returns a job on a simulated card, whose host compresses at 10 GB/s."""
    copies = KernelCost(1e-5, copy_byte_s)
    cost = replace(LINK, kernels=kernels(card_byte_s), host=HostCost(copies, copies, kernels(1e-10)))
    profiles = tuple(
        ParameterProfile(f"p{n}", TensorSpec((NUMEL // 64, 64), torch.float32), sparse=False, position=n)
        for n in range(COUNT)
    )
    ready_s = {p.name: READY_S * (p.position + 1) for p in profiles}
    return Job(profiles, ready_s, READY_S * COUNT, Network(cost, PLACEMENT))


def offloads(job: Job) -> bool:
    plan = searched(job, Constraints(lossy=(FEEDBACK,), always=True)).plan
    return any(bucket.scheme.traits.offloads for bucket in plan.buckets)


@pytest.mark.parametrize(
    ("card_byte_s", "copy_byte_s", "expected"),
    [
        (1e-12, 1e-9, False),  # a quick card, slow copies
        (2e-9, 4e-11, True),  # a slow card
        (2e-9, 1e-6, False),  # a slow card, copies far slower still
    ],
)
def test_work_is_offloaded_where_the_card_s_time_is_dearer(
    card_byte_s: float, copy_byte_s: float, expected: bool
) -> None:
    assert offloads(on_card(card_byte_s, copy_byte_s)) is expected


def test_offloaded_work_takes_its_copies_and_the_host_s_kernels() -> None:
    host = HostCost(KernelCost(1.0, 0.1), KernelCost(2.0, 0.01), {"k": KernelCost(0.0, 1.0)})
    cost = replace(LINK, kernels={"k": KernelCost(0.0, 1e-3), "only here": KernelCost(0.0, 1.0)}, host=host)
    here = Compute("k", 50.0)
    assert cost.seconds(here) == pytest.approx(0.05)
    assert cost.seconds(replace(here, device=OFFLOAD, fetched_bytes=40.0, sent_bytes=10.0)) == pytest.approx(
        50.0 + (1 + 4) + (2 + 0.1)
    )
    assert cost.unmeasured([Compute("only here", 1.0, OFFLOAD, fetched_bytes=1.0)]) == ["only here"]
    assert CostModel.of(asdict(cost)) == cost


def test_the_host_s_work_and_backward_on_the_card_do_not_slow_each_other_down() -> None:
    job = on_card(2e-9, 4e-11)
    plan = searched(job, Constraints(lossy=(FEEDBACK,), always=True)).plan
    slowed = replace(job, slowdown=replace(job.slowdown, backward_by_kernel=3.0, kernel_by_backward=3.0))
    lasting = []
    for each in (job, slowed):
        lasting.append(sorted(task.duration_s for task in predict(plan, each).tasks if task.stream == OFFLOAD))
    assert lasting[0] and lasting[0] == pytest.approx(lasting[1])


def test_a_route_copies_what_it_reads_and_writes() -> None:
    spec = TensorSpec((1024,), torch.float32)
    compress, decompress = (step for step in ROUTE.steps((spec,), (), PLACEMENT) if isinstance(step, Compute))
    payload = compress.sent_bytes
    assert compress.fetched_bytes == decompress.sent_bytes == 4096
    assert 1024 <= payload < 1300 and decompress.fetched_bytes == PLACEMENT.size * payload
    on_compute = Route(("compress@compute", "all_gather", "decompress@compute"), FEEDBACK)
    copied = [s for s in on_compute.steps((spec,), (), PLACEMENT) if isinstance(s, Compute)]
    assert not any(step.fetched_bytes or step.sent_bytes for step in copied)
