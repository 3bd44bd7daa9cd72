"""Models in shards: gradients take as much memory as with HSDP, and those that a user holds stay as they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import gradsync
from gradsync.devices.streams import NoStreams
from gradsync.frontends.sharded import ShardedGradients
from gradsync.schemes import AllReduce, PowerSGD, Scheme
from tests.frontends.test_sharded import (
    COARSE,
    FEEDBACK,
    TIMEOUT_S,
    Case,
    batch,
    by_one_bucket,
    each_alone,
    meshes,
    sharded,
    shards_of,
)
from tests.world import Ranks

pytestmark = pytest.mark.waiting

World = Callable[[int], Ranks]
Storages = list[weakref.ref[torch.UntypedStorage]]
SCHEMES: dict[str, Scheme[Any]] = {
    "exact": AllReduce(),
    "top-k": FEEDBACK,
    "low rank": PowerSGD(1, min_compression=1.0),
    "chunks": COARSE,
}


def alive(storages: Storages) -> int:
    return sum(each() is not None for each in storages)


def gradients_of(net: nn.Module) -> list[Any]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def memory_of(gradients: list[Any]) -> Storages:
    """Returns the memory in which the gradients of this rank's shards lie, each piece once."""
    storages = {g._local_tensor.untyped_storage().data_ptr(): g._local_tensor for g in gradients}
    return [weakref.ref(local.untyped_storage()) for local in storages.values() if local.numel()]


def copies(name: str) -> tuple[list[int], int, int, int]:
    """Trains, and returns what there is of gradients in the last step.

    Namely how many tensors of FSDP are there when it reduces each module, and after backward; how many elements more
    than the gradients the memory has in which they lie; and how many pieces of this memory are there when they are not.
    """
    net: Any = sharded(meshes())
    handle = gradsync.attach(net, plan=by_one_bucket(SCHEMES[name]), timeout=TIMEOUT_S)
    generator, on_reduced = torch.Generator().manual_seed(dist.get_rank()), ShardedGradients._on_reduced
    flats: Storages = []
    found: list[int] = []

    def see(hooks: ShardedGradients, number: int, flat: Tensor) -> None:
        found.append(alive(flats))
        flats.append(weakref.ref(flat.untyped_storage()))
        on_reduced(hooks, number, flat)

    with patch.object(ShardedGradients, "_on_reduced", see):
        for net.step in range(4):
            net.zero_grad()
            net(batch(generator)).square().mean().backward()
    memory = memory_of(gradients_of(net))
    elements = sum(each().nbytes() for each in memory) // 4 - sum(g._local_tensor.numel() for g in gradients_of(net))
    flags = sum(run.bucket.num_flags for run in handle._engine.bucket_runs)
    net.zero_grad()
    return found, alive(flats), elements - flags, alive(memory)


@pytest.mark.parametrize("name", SCHEMES)
def test_there_is_one_copy_of_gradients_and_none_without_them(world: World, name: str) -> None:
    for found, left, elements, unused in world(4).run(copies, name):
        assert set(found) == {0}, "FSDP's tensors stay"
        assert left == elements == unused == 0


def read_elsewhere() -> tuple[bool, int]:
    """Returns whether each tensor of FSDP, made on another stream, was shared before it was read, and their number."""
    net: Any = sharded(meshes())
    gradsync.attach(net, timeout=TIMEOUT_S)
    order: list[int] = []

    def note(_: Any, tensor: Tensor, *unused: Any) -> Any:
        order.append(tensor.untyped_storage().data_ptr())

    def see(hooks: ShardedGradients, group: Any, flat: Tensor) -> Any:
        note(None, flat)
        return slices(hooks, group, flat)

    slices = ShardedGradients._slices
    with patch.object(NoStreams, "share", note), patch.object(ShardedGradients, "_slices", see):
        net(torch.ones(4, 6)).square().mean().backward()
    return order[::2] == order[1::2], len(order)


def test_fsdps_memory_is_not_taken_anew_before_it_was_read(world: World) -> None:
    assert world(4).run(read_elsewhere) == [(True, 6)] * 4


def filled() -> list[tuple[int, int]]:
    """Returns, at each module's turn in backward, the buckets that have memory, and those that have gradients."""
    net: Any = sharded(meshes())
    handle = gradsync.attach(net, plan=each_alone(AllReduce()), timeout=TIMEOUT_S)
    found, on_reduced = [], ShardedGradients._on_reduced

    def see(hooks: ShardedGradients, number: int, flat: Tensor) -> None:
        runs = list(handle._engine.bucket_runs)
        loaded = sum(not run.waiting for run in runs) if hooks._engine.in_step else 0
        found.append((sum("_memory" in vars(run.gradients) for run in runs), loaded))
        on_reduced(hooks, number, flat)

    with patch.object(ShardedGradients, "_on_reduced", see):
        for net.step in (1, 3):
            net.zero_grad()
            net(torch.ones(4, 6)).square().mean().backward()
    return found


def test_buckets_take_memory_with_their_first_gradient(world: World) -> None:
    for found in world(4).run(filled):
        assert found == [(0, 0), (2, 2), (5, 5)] * 2


def reduced_alone() -> tuple[int, float]:
    """Reduces within replicas only, then averages; returns how many gradients there are in between, as with HSDP."""
    nets: list[Any] = [sharded(meshes()) for _ in range(2)]
    gradsync.attach(nets[0], timeout=TIMEOUT_S)
    counts, x = [], batch(torch.Generator().manual_seed(dist.get_rank()))
    for net in nets:
        net.set_requires_all_reduce(False)
        for _ in range(2):
            net(x).square().mean().backward()
        counts.append(len(gradients_of(net)))
        net.set_requires_all_reduce(True)
        net(x).square().mean().backward()
    assert counts[0] == counts[1]
    return counts[0], distance(nets)


def distance(nets: list[Any]) -> float:
    """Returns the largest difference between the gradients of two models."""
    pairs = zip(*map(gradients_of, nets), strict=True)
    return max(float((one.to_local() - other.to_local()).abs().max()) for one, other in pairs if one.to_local().numel())


def test_what_is_not_averaged_yet_is_no_gradient(world: World) -> None:
    assert world(4).run(reduced_alone) == [(0, 0.0)] * 4


def held_for_long(name: str) -> list[bool]:
    """Returns whether gradients, of which someone holds the tensor or a view, have the values that they had."""
    net: Any = sharded(meshes())
    gradsync.attach(net, plan=by_one_bucket(SCHEMES[name]), timeout=TIMEOUT_S)
    generator = torch.Generator().manual_seed(dist.get_rank())
    held, copied = [], []
    for step in range(4):
        net.zero_grad()
        net.step = step
        net(batch(generator)).square().mean().backward()
        for gradient in gradients_of(net):
            held += [gradient.to_local(), gradient.to_local()[:1]]
            copied += [gradient.to_local().clone(), gradient.to_local()[:1].clone()]
    return [torch.equal(one, other) for one, other in zip(held, copied, strict=True)]


@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_that_someone_holds_keep_their_values(world: World, name: str) -> None:
    assert all(all(found) for found in world(4).run(held_for_long, name))


def never_zeroed(to_none: bool, dtype: torch.dtype) -> float:
    """Adds gradients up over steps, with some set to zero in place or to None in between."""
    case = Case(MixedPrecisionPolicy(reduce_dtype=dtype), clip=0.1)
    nets: list[Any] = [sharded(meshes(), case) for _ in range(2)]
    gradsync.attach(nets[0], plan=each_alone(AllReduce()), timeout=TIMEOUT_S)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(6):
        x = batch(generator)
        for net, optimizer in zip(nets, optimizers, strict=True):
            net.step = step
            net(x).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), case.clip)
            optimizer.step()
            if step == 3:
                net.first.zero_grad(set_to_none=to_none)
    return max(distance(nets), float((shards_of(nets[0]) - shards_of(nets[1])).abs().max()))


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_that_stay_are_added_to_as_with_hsdp(world: World, to_none: bool, dtype: torch.dtype) -> None:
    assert world(4).run(never_zeroed, to_none, dtype) == [0.0] * 4
