"""A reduce-scatter in 16 or 8 bits: torch's own within the error of rounding, summed in float32, with fewer bytes."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import gradsync
from gradsync.compressors import BlockInt, Cast, Compressor, ErrorFeedback, Float8, TopK
from gradsync.frontends.reduce_scatter import CompressedReduceScatter
from gradsync.schemes import AllReduce
from tests.frontends.test_sharded import by_one_bucket
from tests.world import Ranks

pytestmark = pytest.mark.waiting

World = Callable[[int], Ranks]
# The share of a gradient's largest magnitude by which means over two ranks may be off.
CLOSE: tuple[tuple[Compressor[Any], float], ...] = (
    (Cast("bfloat16"), 2**-8),
    (BlockInt(8), 1 / 254),
    (Float8(), 2**-3),
)


def in_shards(mesh: tuple[int, int], compressor: Compressor[Any] | None, **settings: Any) -> Any:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(6, 37), nn.ReLU(), nn.Linear(37, 5))
    on = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=on, **settings)
    if compressor is not None:
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(CompressedReduceScatter(compressor))
    return net


def gradients(net: nn.Module, factor: float = 1.0) -> list[Tensor]:
    """Returns the whole gradients of one backward."""
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    (factor * net(data).square().mean()).backward()
    return [p.grad.full_tensor().float() for p in net.parameters()]  # type: ignore[union-attr]


@contextmanager
def counted(sent: list[int]) -> Iterator[None]:
    """Appends the bytes that each reduce-scatter sends to other ranks; other messages have lists of sizes."""
    torchs = dist.all_to_all_single

    def count(output: Tensor, input: Tensor, *sizes: Any, group: Any, **others: Any) -> Any:
        if not sizes:
            sent.append(input.nbytes * (group.size() - 1) // group.size())
        return torchs(output, input, *sizes, group=group, **others)

    with patch.object(dist, "all_to_all_single", count):
        yield


def errors(mesh: tuple[int, int], compressor: Compressor[Any], attaches: bool, settings: dict[str, Any]) -> list[Any]:
    """Returns each gradient's largest error as a share of its largest magnitude, and the bytes sent."""
    exact = gradients(in_shards(mesh, None, **settings))
    net, sent = in_shards(mesh, compressor, **settings), list[int]()
    if attaches:
        gradsync.attach(net, plan=by_one_bucket(AllReduce()), timeout=20)
    with counted(sent):
        found = gradients(net)
    return [max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True)), sum(sent)]


@pytest.mark.parametrize(("compressor", "most"), CLOSE, ids=str)
@pytest.mark.parametrize(("mesh", "attaches"), [((1, 2), False), ((2, 2), False), ((2, 2), True)], ids=str)
def test_gradients_are_torchs_within_the_error_of_rounding(
    world: World, mesh: tuple[int, int], attaches: bool, compressor: Compressor[Any], most: float
) -> None:
    results = world(mesh[0] * mesh[1]).run(errors, mesh, compressor, attaches, {})
    for error, sent in results:
        assert 0 < error <= 2 * most  # an element's error is a share of its block's magnitude on one rank
        elements = sum(2 * -(-rows // 2) * row // 2 for rows, row in ((37, 6), (37, 1), (5, 37), (5, 1)))
        assert elements <= sent <= elements * (2 if isinstance(compressor, Cast) else 1) + 64


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_of_reduced_gradients_work_alike(world: World, reduce_dtype: torch.dtype) -> None:
    policy = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype)}
    for error, _ in world(2).run(errors, (1, 2), BlockInt(8), False, policy):
        assert error <= 0.02


def small_parts_of_a_sum() -> Tensor:
    """Reduces 256, 1, 1 and 1, whose sum in bfloat16 would stay 256."""
    values = torch.full((8,), 256.0 if dist.get_rank() == 0 else 1.0)
    total = torch.empty(2)
    group = dist.group.WORLD
    assert group is not None
    CompressedReduceScatter(Cast("bfloat16"))(total, values, group, dist.ReduceOp.SUM)
    return total


def test_sums_are_in_float32(world: World) -> None:
    assert all(total.tolist() == [259.0, 259.0] for total in world(4).run(small_parts_of_a_sum))


def not_finite(compressor: Compressor[Any]) -> list[bool]:
    net = in_shards((1, 2), compressor)
    return [bool(each.isfinite().all()) for each in gradients(net, float("nan") if dist.get_rank() else 1.0)]


@pytest.mark.parametrize("compressor", [compressor for compressor, _ in CLOSE], ids=str)
def test_gradients_that_are_not_finite_stay_so(world: World, compressor: Compressor[Any]) -> None:
    assert not any(finite for found in world(2).run(not_finite, compressor) for finite in found)


def drawn(steps: int) -> list[float]:
    """Returns the mean of stochastically rounded sums, in each step of one value between two levels."""
    reduce = CompressedReduceScatter(BlockInt(8, stochastic=True))
    values = torch.cat([torch.full((999,), 0.5), torch.tensor([127.0])]).repeat(2)
    group = dist.group.WORLD
    assert group is not None
    found = []
    for _ in range(steps):
        total = torch.empty(1000)
        reduce(total, values, group, dist.ReduceOp.AVG)
        found.append(float(total[-256:-1].mean()))
    return found


def test_random_rounding_differs_from_step_to_step(world: World) -> None:
    for found in world(2).run(drawn, 4):
        assert len(set(found)) > 1 and all(0.3 < mean < 0.7 for mean in found)


def test_what_needs_a_residual_is_refused() -> None:
    with pytest.raises(TypeError, match="expected one of Cast, BlockInt, Float8, got .*TopK.*keeps no residual"):
        CompressedReduceScatter(ErrorFeedback(TopK(0.1)))


def custom_factor() -> str:
    net = in_shards((1, 2), BlockInt(8))
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(3.0)
    with pytest.raises(ValueError) as raised:
        gradients(net)
    return str(raised.value)


def test_other_operations_are_refused_on_every_rank(world: World) -> None:
    for text in world(2).run(custom_factor):
        assert "leave out set_gradient_divide_factor()" in text


def test_the_docstring_names_what_there_is() -> None:
    names = re.findall(r"gradsync(?:\.\w+)+", str(CompressedReduceScatter.__doc__))
    assert len(names) == 2 and all(pkgutil.resolve_name(name) for name in names)
