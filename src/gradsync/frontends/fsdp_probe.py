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
        RuntimeError: if gradients differ in any bit, torch still averages them itself, or another number of bytes is
            held after forward.
    """
    seen: list[bool] = []
    expected, held = _trained(wrap, device)
    found, holds = _trained(wrap, device, lambda group: _replace(group, replicate_group, seen))
    if holds != held:
        raise RuntimeError(_changed(f"a forward leaves {holds} bytes of whole parameters, and {held} were expected"))
    if replicate_group.size() > 1 and not any(seen):
        raise RuntimeError(_changed("gradients are averaged over replicas already when a hook sees them"))
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
    wrap: Wrap, device: torch.device, replace: Callable[[ParameterGroup], None] | None = None
) -> tuple[dict[str, Tensor], list[int]]:
    """Returns a small model's local gradients by name, and the bytes that each parameter has in whole after a forward.

    `replace` is called with each group of parameters before the model is trained.
    """
    model = _model(device)
    for part in (model[0], model[1], model):
        wrap(part)
    groups = groups_of(model)
    if replace is not None:
        for group in groups:
            replace(group)
    shards = {name: shard for name, (_, shard) in names_of(model, groups).items()}
    inputs = torch.arange(12.0, device=device).view(4, 3).sub_(5).mul_(1 + dist.get_rank())
    for _ in range(2):  # in the first forward FSDP finds its root
        output = model(inputs)
        held = [shard.held_bytes for group in groups for shard in group.parameters]
        output.square().sum().backward()
    return {name: shard.parameter.grad._local_tensor for name, shard in shards.items()}, held


def _model(device: torch.device) -> nn.Sequential:
    """Returns a model whose values are the same on all ranks, without a draw from the user's generators."""
    layers = [nn.utils.skip_init(nn.Linear, 3, 5, device=device), nn.utils.skip_init(nn.Linear, 5, 3, device=device)]
    model = nn.Sequential(*layers, nn.LayerNorm(3, device=device))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(float(parameter.numel()), device=device).view_as(parameter).sin_())
    return model


def _replace(group: ParameterGroup, replicate_group: dist.ProcessGroup, seen: list[bool]) -> None:
    """Averages the group's gradients over replicas in a hook, where gradsync will look for them; takes out torch's.

    Appends to `seen` whether the gradients differed between replicas before.
    """
    reduced: list[ShardedParameter] = []

    def average(flat: Tensor) -> None:
        lengths = [shard.padded_numel for shard in reduced]
        for shard, part in zip(reduced, flat.split(lengths), strict=True):
            mine = part[: shard.local.numel()]
            own = mine.clone()
            dist.all_reduce(mine, group=replicate_group)
            mine.div_(replicate_group.size())
            if len(own):
                seen.append(not torch.equal(own, mine))

    group.take_out_all_reduce()
    group.connect(lambda: reduced.__setitem__(slice(None), group.reduced()), average)
