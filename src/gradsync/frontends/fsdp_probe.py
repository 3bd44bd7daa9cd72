"""A self-test of what gradsync uses and replaces in torch: a small model in shards must train as torch's own does.

It runs at `attach`, on the mesh of the user's model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .fsdp_internals import TESTED_TORCH, Mesh, ParameterGroup, ShardedParameter, groups_of

Gradients = dict[str, list[Tensor]]  # local ones, by layer
Wrap = Callable[[nn.Module], Any]  # applies `fully_shard` or `replicate`, on the mesh of the model


def probe(wrap: Wrap, replicate_group: dist.ProcessGroup, device: torch.device) -> None:
    """Trains a small model twice: as torch does, and with gradients averaged between replicas in a hook. Collective.

    The mesh may name replicas, between which torch averages the first time. Else its gradients are averaged here.

    Raises:
        RuntimeError: if gradients differ in any bit or lie elsewhere than expected, torch still averages them itself,
            or another number of bytes is held after forward.
    """
    expected, held = _trained(wrap, replicate_group, device)
    seen: list[bool] = []
    reduced: Gradients = {}
    found, holds = _trained(
        wrap, replicate_group, device, lambda group: _replace(group, replicate_group, seen, reduced)
    )
    if holds != held:
        raise RuntimeError(_changed(f"a forward leaves {holds} bytes of whole parameters, and {held} were expected"))
    if replicate_group.size() > 1 and not any(seen):
        raise RuntimeError(_changed("gradients are averaged over replicas already when a hook sees them"))
    for where, gradients in (("in a small model", found), ("where a hook finds it", reduced)):
        for name, each in expected.items():
            for one, other in zip(each, gradients[name], strict=True):
                if not torch.equal(one, other):
                    apart = (one - other).abs().max().item()
                    raise RuntimeError(_changed(f"a gradient of layer {name!r} {where} differs by {apart:.3g}"))


def _changed(what: str) -> str:
    return (
        f"torch {torch.__version__} reduces gradients in another way than gradsync knows: {what}. gradsync was tested "
        f"with torch {' and '.join(TESTED_TORCH)}. If the mesh names replicas, shard on a mesh of the shards alone, "
        "and give attach() the replicate_group"
    )


def _trained(
    wrap: Wrap,
    replicate_group: dist.ProcessGroup,
    device: torch.device,
    replace: Callable[[ParameterGroup], None] | None = None,
) -> tuple[Gradients, list[int]]:
    """Returns a small model's local gradients, averaged between replicas, and the bytes of whole ones after a forward.

    `replace` is called with each group of parameters before the training, and lets gradients be averaged. The bytes are
    listed by parameter.
    """
    model = _model(device)
    for part in (model[0], model[1], model):
        wrap(part)
    groups = groups_of(model)
    if replace is not None:
        for group in groups:
            replace(group)
    # Replicas differ, and gradients are whole numbers after division, too, so that any order of sums will do.
    factor = 2 if _is_in_first_replica(groups[0].mesh, replicate_group, device) else 1
    size = groups[0].mesh.shards * replicate_group.size()
    inputs = (torch.arange(12.0, device=device) % 3 - 1).view(4, 3) * factor
    held: list[int] = []
    for _ in range(2):  # in the first forward FSDP finds its root
        model.zero_grad()
        output = model(inputs)
        held = [shard.held_bytes for group in groups for shard in group.parameters]
        (output.sum() * size * factor).backward()
    gradients = {g.name: [shard.parameter.grad._local_tensor for shard in g.parameters] for g in groups}
    if replace is None and groups[0].mesh.replicate_group is None:
        for gradient in itertools.chain(*gradients.values()):
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=replicate_group)
    return gradients, held


def _is_in_first_replica(mesh: Mesh, replicate_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether this rank's replica is the one with the lowest rank: ranks may number replicas differently by shard."""
    lowest = dist.get_rank() if mesh.shard_group is None else min(dist.get_process_group_ranks(mesh.shard_group))
    of_all = torch.tensor([lowest], device=device)
    dist.all_reduce(of_all, op=dist.ReduceOp.MIN, group=replicate_group)
    return int(of_all) == lowest


def _replace(group: ParameterGroup, replicate_group: dist.ProcessGroup, seen: list[bool], reduced: Gradients) -> None:
    """Takes out torch's exchange between replicas, if any, and averages the group's gradients in a hook.

    Appends to `seen` whether they differed between replicas before; `reduced` gets the gradients where gradsync finds
    them.
    """
    ready: list[ShardedParameter] = []

    def average(flat: Tensor) -> None:
        own = flat.clone()
        dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=replicate_group)
        seen.append(not torch.equal(own, flat))
        parts = flat.split([shard.padded_numel for shard in ready])
        found = {id(shard): part[: shard.local.numel()] for shard, part in zip(ready, parts, strict=True)}
        reduced[group.name] = [found[id(each)].view(each.local.shape).clone() for each in group.parameters]

    def before() -> None:
        ready[:] = group.reduced()

    if group.mesh.replicate_group is not None:
        group.take_out_all_reduce()
    group.connect(before, average, lambda: None, lambda: None)


def _model(device: torch.device) -> nn.Sequential:
    """Returns a model of ones, made without a draw from the user's random generators."""
    sizes = ((3, 5), (5, 3), (3, 2))
    model = nn.Sequential(*(nn.utils.skip_init(nn.Linear, *size, device=device) for size in sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    return model
