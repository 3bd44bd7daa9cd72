"""The group class of each `torch.distributed` backend, by the backend's name."""

from __future__ import annotations

import torch.distributed as dist

from ..costs.cluster import Placement
from .gloo import GlooGroup
from .group import TorchGroup
from .nccl import NcclGroup

GROUP_OF_BACKEND: dict[str, type[TorchGroup]] = {"gloo": GlooGroup, "nccl": NcclGroup}


def torch_group(
    process_group: dist.ProcessGroup | None = None, *, timeout_s: float, placement: Placement | None = None
) -> TorchGroup:
    """Returns the group of a process group, of the class registered for the backend that serves every device.

    A backend that is not registered, or several ones for several devices, get a `TorchGroup`.

    Args:
        process_group: the members; None: all ranks.
        timeout_s: seconds that making the group may take, and that a failure is waited for.
        placement: the node of each member, the same on all of them; None: found out by host and by torchrun's agent.
    """
    backends = {entry.rpartition(":")[2] for entry in dist.get_backend_config(process_group).split(",")}
    kind = GROUP_OF_BACKEND.get(backends.pop(), TorchGroup) if len(backends) == 1 else TorchGroup
    return kind(process_group, timeout_s=timeout_s, placement=placement)
