"""Chooses the subclass of `TorchGroup` for a `torch.distributed` backend, by the backend's name."""

from __future__ import annotations

import torch.distributed as dist

from ..costs.cluster import Placement
from .distributed import TorchGroup
from .gloo import GlooGroup
from .nccl import NcclGroup

GROUP_OF_BACKEND: dict[str, type[TorchGroup]] = {"gloo": GlooGroup, "nccl": NcclGroup}


def torch_group(
    process_group: dist.ProcessGroup | None = None,
    *,
    timeout_s: float,
    placement: Placement | None = None,
    what: str = "a group of gradsync",
) -> TorchGroup:
    """Returns a group with the members of a process group; its class is that of the backend in `GROUP_OF_BACKEND`.

    For an unknown backend, or different backends for different devices, it is `TorchGroup`.

    Args:
        process_group: the members; None: all ranks.
        timeout_s: seconds to wait for the other members; the backend's own timeouts follow from it.
        placement: the node of each member, the same on all members; None: found by host name and torchrun agent.
        what: what the members come together for, the same on all members, for error messages.

    Raises:
        GroupError: where another member does not come in time, came for something else, died or stopped.
    """
    backends = {entry.rpartition(":")[2] for entry in dist.get_backend_config(process_group).split(",")}
    kind = GROUP_OF_BACKEND.get(backends.pop(), TorchGroup) if len(backends) == 1 else TorchGroup
    return kind(process_group, timeout_s=timeout_s, placement=placement, what=what)
