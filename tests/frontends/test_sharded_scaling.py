"""Loss scaling of models in shards: residuals of all shards follow the scale, and an overflow in one changes none.

A shard alone sees the overflow: the gradient of a parameter of one element, which the first shard has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradsync
from gradsync.schemes import AllReduce, CompressedAllGather, CompressedTwoWay, HalfPrecision, MajorityVote, Scheme
from tests.frontends.test_sharded import COARSE, TIMEOUT_S, by_one_bucket, message
from tests.frontends.test_sharded_state import FEEDBACK, Mesh, Net, left_in_all, read, write
from tests.world import Ranks

pytestmark = pytest.mark.waiting

World = Callable[[int], Ranks]
SCHEMES: dict[str, Scheme[Any]] = {
    "exact": AllReduce(),
    "gathered": CompressedAllGather(FEEDBACK),
    "two-way": CompressedTwoWay(FEEDBACK),
    "chunks": COARSE,
    "bfloat16": HalfPrecision(values="bfloat16"),
}
FLOAT16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
BAD_STEP, STEPS = 3, 8


class Overflowing(Net):
    """A model of which one gradient can be made infinite, on rank 1 and by the reduction in its replica."""

    overflows = False

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale * 1.0
        if self.overflows and dist.get_rank() == 1:
            scale.register_hook(lambda gradient: gradient * torch.inf)
        result: Tensor = self.second(self.first(x).relu()) * scale
        return result


class Training:
    """A model in shards in training, by gradsync or (without a scheme) as HSDP, with or without a loss scale."""

    def __init__(
        self,
        scheme: Scheme[Any] | None,
        *,
        init_scale: float | None = 2.0**4,
        mesh: Mesh = (2, 2),
        policy: MixedPrecisionPolicy | None = None,
        by_hand: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.net: Any = Overflowing()
        whole = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
        for module in (self.net.first, self.net.second, self.net):
            on = whole["shard"] if by_hand else whole
            fully_shard(module, mesh=on, mp_policy=MixedPrecisionPolicy() if policy is None else policy)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        scaled = init_scale is not None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale or 1.0, growth_interval=2, enabled=scaled)
        if scheme is not None:
            self.handle = gradsync.attach(
                self.net,
                plan=by_one_bucket(scheme),
                timeout=TIMEOUT_S,
                grad_scaler=self.scaler if scaled else None,
                replicate_group=whole.get_group("replicate") if by_hand else None,
            )

    def step(self, number: int, *, overflows: bool = False) -> None:
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        self.optimizer.zero_grad()
        self.net.overflows = overflows
        self.scaler.scale(self.net(torch.randn(4, 6, generator=generator)).float().square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @property
    def weights(self) -> Tensor:
        return torch.cat([p.to_local().detach().reshape(-1) for p in self.net.parameters()])

    @property
    def left(self) -> dict[str, Tensor]:
        """Returns the residuals by element, in units of the gradient."""
        saved = self.handle.state_dict()
        return {key: values / saved.get("loss_scale", 1.0) for key, values in saved["state"].items() if "//" not in key}


def scaled_training_is_the_same(name: str, by_hand: bool) -> list[float]:
    """Compares bit by bit with training without scale and bad step; returns the scales."""
    plain = Training(SCHEMES[name], init_scale=None, by_hand=by_hand)
    for number in range(STEPS):
        plain.step(number)
    scaled = Training(SCHEMES[name], by_hand=by_hand)
    scales = []
    for number in range(STEPS):
        if number == BAD_STEP:
            weights, left = scaled.weights, scaled.left
            scaled.step(1000, overflows=True)
            assert torch.equal(scaled.weights, weights), "the step was not skipped"
            assert all(torch.equal(scaled.left[key], values) for key, values in left.items())
        scaled.step(number)
        scales.append(scaled.scaler.get_scale())
    assert torch.equal(scaled.weights, plain.weights)
    assert scaled.left.keys() == plain.left.keys()
    assert all(torch.equal(scaled.left[key], values) for key, values in plain.left.items())
    for each in (plain, scaled):
        each.handle.detach()
    return scales


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_scaled_training_is_the_same_to_the_bit(world: World, name: str, by_hand: bool) -> None:
    expected = [2.0**power for power in (4, 5, 5, 4, 5, 5, 6, 6)]
    assert world(4).run(scaled_training_is_the_same, name, by_hand) == [expected] * 4


def in_float16() -> tuple[float, bool]:
    """Trains in float16 with and without gradsync, with an overflow; returns the difference, and of the scales."""
    ours, theirs = (Training(scheme, init_scale=2.0**10, policy=FLOAT16) for scheme in (AllReduce(), None))
    for number in range(STEPS):
        for each in (ours, theirs):
            each.step(number, overflows=number == BAD_STEP)
    is_alike = ours.scaler.get_scale() == theirs.scaler.get_scale() < 2.0**14
    return float((ours.weights - theirs.weights).abs().max()), is_alike


def test_an_exact_plan_trains_in_float16_as_hsdp_does(world: World) -> None:
    assert world(4).run(in_float16) == [(0.0, True)] * 4


def beside_an_excluded_parameter() -> str:
    """Attaches on a mesh of shards only, with a parameter that no other replica sees; returns the error."""
    net: Any = Net()
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(net, mesh=whole["shard"])
    scaler, group = torch.amp.GradScaler("cpu"), whole.get_group("replicate")
    settings = {"grad_scaler": scaler, "replicate_group": group, "timeout": TIMEOUT_S}
    return message(lambda: gradsync.attach(net, exclude=["scale"], **settings))


def test_a_scaler_is_refused_where_replicas_may_see_other_overflows(world: World) -> None:
    for said in world(4).run(beside_an_excluded_parameter):
        assert "grad_scaler is not supported beside 'scale'" in said


def voting_in_shards() -> str:
    """Attaches a plan of votes beside a scaler; returns the error."""
    said = message(lambda: Training(MajorityVote()))
    Training(AllReduce()).handle.detach()
    return said


def test_votes_are_refused_beside_a_scaler(world: World) -> None:
    for said in world(4).run(voting_in_shards):
        assert "result does not follow the loss scale" in said


def saved_with_a_scale(folder: str) -> dict[str, Tensor]:
    """Saves residuals at a scale of 32 on four replicas; returns their sums."""
    training = Training(SCHEMES["gathered"], mesh=(4, 1))
    for number in range(3):
        training.step(number)
    assert training.handle.state_dict()["loss_scale"] == 32.0
    write(folder, training.net, training.handle)
    return left_in_all(training.net, training.handle)


def loaded_elsewhere(folder: str, left: dict[str, Tensor], init_scale: float | None) -> float | None:
    """Loads on two shards; returns the scale of the state then, after a comparison of the sums."""
    training = Training(SCHEMES["gathered"], mesh=(2, 2), init_scale=init_scale)
    read(folder, training.net, training.handle)
    found, factor = left_in_all(training.net, training.handle), 1.0 if init_scale else 1 / 32
    assert all(torch.allclose(found[name], values * factor, rtol=1e-6) for name, values in left.items())
    scale: float | None = training.handle.state_dict().get("loss_scale")
    training.step(4)
    assert training.handle.state_dict().get("loss_scale") == init_scale
    return scale


@pytest.mark.parametrize("init_scale", [8.0, None])
def test_state_is_loaded_on_other_shards_at_another_scale(
    world: World, init_scale: float | None, tmp_path: Path
) -> None:
    left = world(4).run(saved_with_a_scale, str(tmp_path))[0]
    found = world(4).run(loaded_elsewhere, str(tmp_path), left, init_scale)
    assert found == [32.0 if init_scale else None] * 4
