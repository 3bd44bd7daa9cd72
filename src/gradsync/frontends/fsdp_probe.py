"""A self-test of what gradsync replaces in torch: a small model in shards must train as torch's own does.

It runs at `attach`, on the mesh of the user's model, where torch would average gradients between replicas itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .fsdp_internals import ParameterGroup, ShardedParameter, groups_of, names_of

Wrap = Callable[[nn.Module], Any]  # applies `fully_shard` or `replicate`, on the mesh of the model


def probe(wrap: Wrap, replicate_group: dist.ProcessGroup, device: torch.device) -> None:
    """Trains a small model twice: as torch does, and with torch's exchange between replicas replaced. Collective.

    Raises:
        RuntimeError: if gradients differ in any bit, memory is held after forward that torch frees, or parameters do
            not end as they do with torch.
    """
    expected, held = _trained(wrap, None, device)
    found, holds = _trained(wrap, replicate_group, device)
    if holds != held:
        raise RuntimeError(_changed(f"a forward leaves parameters as {holds}, and {held} was expected"))
    for name, gradient in expected.items():
        if not torch.equal(gradient, found[name]):
            apart = (gradient - found[name]).abs().max().item()
            raise RuntimeError(_changed(f"the gradient of {name!r} in a small model differs by {apart:.3g}"))


def _changed(what: str) -> str:
    return (
        f"torch {torch.__version__} keeps its exchange between replicas in another way than gradsync knows: {what}. "
        "Shard on a mesh of the shards alone, and give attach() the replicate_group"
    )


def _trained(
    wrap: Wrap, replicate_group: dist.ProcessGroup | None, device: torch.device
) -> tuple[dict[str, Tensor], list[tuple[str, int]]]:
    """Returns a small model's local gradients by name, and what each of its parameters was after forward, in bytes.

    With `replicate_group` torch's exchange between replicas is taken out, and a hook averages over that group.
    """
    model = _model(device)
    for part in (model[0], model[1], model):
        wrap(part)
    groups = groups_of(model)
    if replicate_group is not None:
        for group in groups:
            _replace(group, replicate_group)
    shards = {name: shard for name, (_, shard) in names_of(model, groups).items()}
    inputs = torch.arange(12.0, device=device).view(4, 3).sub_(5).mul_(1 + dist.get_rank())
    for _ in range(2):  # in the first forward FSDP finds its root
        output = model(inputs)
        held = [_held(group, shard) for group in groups for shard in group.parameters]
        output.square().sum().backward()
    return {name: _local_gradient(shard) for name, shard in shards.items()}, held


def _model(device: torch.device) -> nn.Sequential:
    """Returns a model whose values are the same on all ranks, without a draw from the user's generators."""
    layers = [nn.utils.skip_init(nn.Linear, 3, 5, device=device), nn.utils.skip_init(nn.Linear, 5, 3, device=device)]
    model = nn.Sequential(*layers, nn.LayerNorm(3, device=device))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(float(parameter.numel()), device=device).view_as(parameter).sin_())
    return model


def _replace(group: ParameterGroup, replicate_group: dist.ProcessGroup) -> None:
    """Averages the group's gradients over replicas in a hook; also checks that they lie where gradsync will look."""
    reduced: list[ShardedParameter] = []

    def average(flat: Tensor) -> None:
        lengths = [shard.padded_numel for shard in reduced]
        for shard, part in zip(reduced, flat.split(lengths), strict=True):
            mine = part[: shard.local.numel()]
            dist.all_reduce(mine, group=replicate_group)
            mine.div_(replicate_group.size())

    group.take_out_all_reduce()
    group.connect(lambda: reduced.__setitem__(slice(None), group.reduced()), average)


def _held(group: ParameterGroup, shard: ShardedParameter) -> tuple[str, int]:
    return group.name, shard.held_bytes


def _local_gradient(shard: ShardedParameter) -> Tensor:
    gradient: Tensor = shard.parameter.grad._local_tensor
    return gradient
