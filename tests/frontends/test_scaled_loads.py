"""Gradients that are scaled while the bucket is filled: the same bits as where the scheme scales the whole bucket."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync import Plan
from gradsync.comm import Group, LocalGroup
from gradsync.compressors import RESIDUAL
from gradsync.costs.steps import transfers
from gradsync.engine.bucket_run import BucketRun
from gradsync.schemes import AllReduce, HalfPrecision, ReduceScatter, Scheme, State, Traits
from gradsync.schemes.base import register
from gradsync.tensors.bucket import Bucket, Layout, Segment, TensorSpec
from gradsync.tensors.density import ParameterProfile
from tests.frontends.models import Branches, MixedPrecision
from tests.world import Ranks

World = Callable[[int], Ranks]


@register
@dataclass(frozen=True)
class ScalesItself(AllReduce):
    """An all-reduce that gets gradients as they are."""

    traits = Traits(Layout.FLAT)


class Remembers(AllReduce):
    """An all-reduce with state."""

    def init(self, bucket: Bucket, group: Group) -> State:
        return {RESIDUAL: torch.zeros(bucket.numel)}


@pytest.mark.parametrize(
    ("scheme", "factor"),
    [
        pytest.param(AllReduce(), 1 / 3, id="all-reduce"),
        pytest.param(HalfPrecision(), 1.0, id="rounds scaled gradients"),
        pytest.param(ReduceScatter(), 1.0, id="scales the sum"),
        pytest.param(Remembers(), 1.0, id="state"),
    ],
)
def test_gradients_are_scaled_early_only_for_schemes_that_begin_with_that(
    scheme: Scheme[Tensor], factor: float
) -> None:
    run = run_of(scheme)
    run.begin()
    assert run.gradients.factor == factor


def test_scaling_is_no_part_of_the_exchange_that_is_predicted_where_the_engine_scales() -> None:
    profile = ParameterProfile("w", TensorSpec((4,), torch.float32), sparse=False)
    steps = run_of(AllReduce()).expected_steps({"w": profile}, 0)
    assert steps is not None and transfers(steps) == steps


def test_gradients_are_not_scaled_early_where_a_residual_is_added_to_them() -> None:
    run = run_of(AllReduce())
    run.carried_residual = torch.ones(4)
    run.begin()
    assert run.gradients.factor == 1.0


def run_of(scheme: Scheme[Tensor]) -> BucketRun:
    spec = TensorSpec((4,), torch.float32)
    bucket = Bucket("0", (Segment("w", 0, 4),), (spec,), Layout.FLAT)
    return BucketRun.make(bucket, scheme, {"w": torch.empty(4)}, torch.device("cpu"), LocalGroup.world(3)[0])


class Large(nn.Module):
    """A weight of 160 KB, which autograd's own memory holds until it is copied, between small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 200), nn.Linear(200, 200), nn.Linear(200, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def plan_of(model: nn.Module, scheme: AllReduce, *, cut: bool) -> Plan:
    """Returns a plan with a bucket for each dtype; `cut`: the first parameter lies in two buckets."""
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    parts = {dtype: [(n, 0, s.numel) for n, s in specs.items() if s.dtype is dtype] for dtype in DTYPES}
    buckets = [each for each in parts.values() if each]
    if cut:
        (name, _, numel), *others = buckets[0]
        buckets[0] = [(name, 0, 5), *others]
        buckets.append([(name, 5, numel)])
    return Plan.make(specs, dist.get_world_size(), [(bucket, scheme) for bucket in buckets])


DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def gradients_by(scheme: AllReduce, make: Callable[[], nn.Module], *, cut: bool, keep: bool) -> list[Tensor | None]:
    """Returns copies of all gradients after each of some steps: usual ones, behind local ones, with unused branches."""
    torch.manual_seed(0)
    model, rank = make(), dist.get_rank()
    handle = gradsync.attach(model, plan=plan_of(model, scheme, cut=cut), timeout=20)
    found: list[Tensor | None] = []

    def backward(step: int) -> None:
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(5, 6, generator=generator)
        taken = [(0, 1), (0,), (rank % 2,)][step % 3]
        output = model(x, taken) if isinstance(model, Branches) else model(x)
        output.square().sum().backward()

    for step in range(9):
        model.zero_grad(set_to_none=not keep)
        if step % 4 == 3:
            with handle.no_sync():
                backward(step + 100)
        backward(step)
        found += [copy.deepcopy(p.grad) for p in model.parameters()]
    handle.detach()
    return found


def differences(make: Callable[[], nn.Module], cut: bool, keep: bool) -> list[int]:
    expected, found = (gradients_by(scheme, make, cut=cut, keep=keep) for scheme in (ScalesItself(), AllReduce()))
    return [
        place
        for place, (theirs, ours) in enumerate(zip(expected, found, strict=True))
        if not (ours is None if theirs is None else ours is not None and torch.equal(theirs, ours))
    ]


@pytest.mark.parametrize("keep", [False, True], ids=["new gradients", "kept gradients"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("make", [Large, MixedPrecision, Branches])
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_have_the_same_bits(
    world: World, size: int, make: Callable[[], nn.Module], cut: bool, keep: bool
) -> None:
    assert world(size).run(differences, make, cut, keep) == [[]] * size
