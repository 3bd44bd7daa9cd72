"""Models in shards in users' own loops: later settings, errors that are caught, pipelines, modules called twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import gradsync
from gradsync.frontends import sharded
from gradsync.schemes import AllReduce, CompressedAllGather, Scheme
from tests.frontends.test_sharded import FEEDBACK, TIMEOUT_S, by_one_bucket, meshes, message, replicas_are_equal
from tests.world import Ranks

pytestmark = pytest.mark.waiting

World = Callable[[int], Ranks]


def batch(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def two_layers(mesh: DeviceMesh) -> Any:
    """Returns a model in shards, the same in every call."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5))
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=mesh)
    return net


def backward(net: nn.Module, step: int) -> None:
    net(batch(step)).square().mean().backward()


def gradients(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.to_local().reshape(-1) for p in net.parameters()])


def after_a_setting(kind: str) -> str:
    net = two_layers(meshes())
    gradsync.attach(net, timeout=TIMEOUT_S)
    backward(net, 0)
    if kind == "hook":
        net[0].set_all_reduce_hook(lambda flat: None)
    elif kind == "factor":
        net[0].set_gradient_divide_factor(2.0)
    else:
        net[0].set_force_sum_reduction_for_comms(True)
    return message(lambda: backward(net, 1))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("hook", "it has an all-reduce hook of its own"),
        ("factor", "a custom gradient divide factor is set"),
        ("sums", "set_force_sum_reduction_for_comms(True) is not supported yet"),
    ],
)
def test_a_setting_made_after_attach_that_would_change_gradients_is_refused(
    world: World, kind: str, expected: str
) -> None:
    for text in world(4).run(after_a_setting, kind):
        assert text.startswith(f"RuntimeError: '0': {expected}"), text


def restarted(attaches: bool) -> Tensor:
    """Returns gradients of microbatches that are begun anew after an error in the second forward."""
    net = two_layers(meshes())
    if attaches:
        gradsync.attach(net, timeout=TIMEOUT_S)
    backward(net, 0)
    net.zero_grad()
    net.set_requires_all_reduce(False)
    backward(net, 1)
    with pytest.raises(RuntimeError):
        net(torch.ones(4, 5))
    net.reset_iter_state()
    backward(net, 1)
    net.set_requires_all_reduce(True)
    backward(net, 2)
    return gradients(net)


def is_equal(run: Callable[[bool], Tensor]) -> bool:
    return torch.equal(run(True), run(False))


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch has no reset_iter_state")
def test_sums_of_earlier_backwards_are_forgotten_when_fsdp_forgets_them(world: World) -> None:
    assert all(world(4).run(is_equal, restarted))


def attached_amid_sums() -> str:
    net = two_layers(meshes())
    net.set_requires_all_reduce(False)
    backward(net, 0)
    return message(lambda: gradsync.attach(net, timeout=TIMEOUT_S))


def test_attach_is_refused_while_sums_wait_to_be_exchanged(world: World) -> None:
    for text in world(4).run(attached_amid_sums):
        assert text.startswith("ValueError: '0': gradients of an earlier backward wait for one that exchanges them")


def warning_of_detach() -> list[str]:
    net = two_layers(meshes())
    handle = gradsync.attach(net, timeout=TIMEOUT_S)
    backward(net, 0)
    net.set_requires_all_reduce(False)
    backward(net, 1)
    with patch.object(sharded.logger, "warning") as warned:
        handle.detach()
    return [call.args[0] for call in warned.call_args_list]


def test_detach_says_that_sums_are_lost(world: World) -> None:
    for said in world(4).run(warning_of_detach):
        assert [text for text in said if "while sums of gradients waited" in text]


def reduced_by_a_schedule(attaches: bool) -> Tensor:
    """Trains as stages of `torch.distributed.pipelining` do, which reduce gradients behind several backwards."""
    net = two_layers(meshes())
    if attaches:
        gradsync.attach(net, timeout=TIMEOUT_S)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        net.set_is_last_backward(False)
        net.set_reshard_after_backward(False)
        net.set_requires_gradient_sync(False)
        for number in range(2):
            backward(net, 2 * step + number)
        net.set_is_last_backward(True)
        net.set_reshard_after_backward(True)
        net.set_requires_gradient_sync(True)
        state = net._get_fsdp_state()
        for each in state._state_ctx.all_states:
            if (group := each._fsdp_param_group) is not None:
                group.post_backward()
        state._root_post_backward_final_callback()
        optimizer.step()
        optimizer.zero_grad()
    backward(net, 7)
    return torch.cat([gradients(net), *(p.to_local().detach().reshape(-1) for p in net.parameters())])


def test_a_pipelines_stage_trains_as_with_hsdp(world: World) -> None:
    assert all(world(4).run(is_equal, reduced_by_a_schedule))


class Block(nn.Module):
    """A module with parameters for each of two kinds of calls, and shared ones."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, kind: str) -> Tensor:
        made: Tensor = getattr(self, kind)(self.shared(x).relu())
        return made


class Calls(nn.Module):
    """Calls one block twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(6, 6), Block()

    def forward(self, x: Tensor) -> Tensor:
        left: Tensor = self.block(self.first(x), "left")
        return left * self.block(self.first(2 * x), "right")


def called_twice(attaches: bool) -> Tensor:
    torch.manual_seed(0)
    net, mesh = Calls(), meshes()
    fully_shard(net.block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    if attaches:
        gradsync.attach(net, timeout=TIMEOUT_S)
    backward(net, 0)
    backward(net, 1)
    return gradients(net)


def test_a_module_may_run_twice_with_other_parameters(world: World) -> None:
    assert all(world(4).run(is_equal, called_twice))


class Failing(nn.Module):
    """Two layers, whose backward raises where `fails`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.ones(5))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if self.fails:
            x.register_hook(fail)
        made: Tensor = self.second(x) * self.scale
        return made


def fail(gradient: Tensor) -> None:
    raise ValueError("a bad batch")


def after_a_backward_that_raised(scheme: Scheme[Any]) -> tuple[str, str, bool, bool]:
    """Returns what a forward and `attach` say, whether training goes on by their advice, and replicas stay equal."""
    torch.manual_seed(0)
    net, mesh = Failing(), meshes()
    for module in (net.first, net.second, net):
        fully_shard(module, mesh=mesh)
    handle = gradsync.attach(net, plan=by_one_bucket(scheme), timeout=TIMEOUT_S)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    backward(net, 0)
    net.fails = True
    with pytest.raises(ValueError, match="a bad batch"):
        backward(net, 1)
    net.fails = False
    forward = message(lambda: net(batch(2)))
    handle.detach()
    attach = message(lambda: gradsync.attach(net, timeout=TIMEOUT_S))
    net.reset_iter_state()
    gradsync.attach(net, plan=by_one_bucket(scheme), timeout=TIMEOUT_S)
    before = torch.cat([p.to_local().detach().clone().reshape(-1) for p in net.parameters()])
    for step in range(2, 5):
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()
    after = torch.cat([p.to_local().detach().reshape(-1) for p in net.parameters()])
    return forward, attach, not torch.equal(before, after), replicas_are_equal(after, mesh)


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch has no reset_iter_state")
@pytest.mark.parametrize("scheme", [AllReduce(), FEEDBACK], ids=["exact", "top-k"])
def test_nothing_goes_on_in_silence_after_a_backward_that_raised(
    world: World, scheme: AllReduce | CompressedAllGather
) -> None:
    for forward, attach, moved, equal in world(4).run(after_a_backward_that_raised, scheme):
        assert forward.startswith(
            "RuntimeError: gradient synchronisation stopped earlier: backward ended with an error"
        )
        assert attach.startswith("RuntimeError: a forward or backward of the model has begun and not ended")
        assert moved and equal


def added_later(kind: str) -> str:
    """Trains on a mesh of shards alone, and then replaces the last layer."""
    mesh = meshes()
    net = two_layers(mesh["shard"])
    gradsync.attach(net, replicate_group=mesh.get_group("replicate"), timeout=TIMEOUT_S)
    for step in range(3):
        backward(net, step)
    torch.manual_seed(1)
    if kind == "freed before":
        del net[2]
        net.append(fully_shard(nn.Linear(7, 5), mesh=mesh["shard"]))
    elif kind == "in shards":
        net[2] = fully_shard(nn.Linear(7, 5), mesh=mesh["shard"])
    else:
        net[2] = nn.Linear(7, 5)
    return message(lambda: backward(net, 3))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("in shards", "fully_shard() was applied to a further module after attach(), '2'"),
        ("freed before", "fully_shard() was applied to a further module after attach(), '2'"),
        ("whole", "the parameter '2.weight' came to the model after gradsync was attached"),
    ],
)
def test_a_module_that_came_after_the_first_step_is_refused(world: World, kind: str, expected: str) -> None:
    for text in world(4).run(added_later, kind):
        assert text.startswith(f"RuntimeError: {expected}"), text


def trains_on_without_a_module() -> bool:
    mesh = meshes()
    net = two_layers(mesh)
    gradsync.attach(net, timeout=TIMEOUT_S)
    backward(net, 0)
    del net[1]
    net.zero_grad()
    backward(net, 1)
    return replicas_are_equal(gradients(net), mesh)


def test_a_module_may_be_removed(world: World) -> None:
    assert all(world(4).run(trains_on_without_a_module))
