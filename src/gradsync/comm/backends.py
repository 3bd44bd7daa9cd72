"""Chooses the subclass of `TorchGroup` by the backend that a process group has for a device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..costs.cluster import Placement
from .communicators import backend_for
from .distributed import TorchGroup
from .gloo import GlooGroup
from .stream_group import StreamGroup

CPU = torch.device("cpu")
GROUP_OF_BACKEND: dict[str, type[TorchGroup]] = {"gloo": GlooGroup}


def torch_group(
    process_group: dist.ProcessGroup | None = None,
    *,
    timeout_s: float,
    device: torch.device = CPU,
    placement: Placement | None = None,
    what: str = "a group of gradsync",
    on_calling_thread: bool = False,
    measures: bool = True,
) -> TorchGroup:
    """Returns a group with the members of a process group, for tensors on `device`.

    Its class is that of the backend in `GROUP_OF_BACKEND`; for others `StreamGroup`, on the CPU `TorchGroup`.

    Args:
        process_group: the members; None: all ranks.
        timeout_s: seconds to wait for the other members; the backend's own timeouts follow from it.
        device: the device of the tensors that the members will exchange.
        placement: the node of each member, the same on all members; None: found by host name and torchrun agent.
        what: what the members come together for, the same on all members, for error messages.
        on_calling_thread: whether only the thread that calls issues operations, see `TorchGroup`; the same on all
            members.
        measures: whether to measure the links now, by up to 5 MiB of each member; the same on all members.

    Raises:
        ValueError: if the process group has no backend for the device.
        GroupError: where another member does not come in time, came for something else, died or stopped.
    """
    other = TorchGroup if device.type == "cpu" else StreamGroup
    kind = GROUP_OF_BACKEND.get(backend_for(process_group, device), other)
    return kind(
        process_group,
        timeout_s=timeout_s,
        device=device,
        placement=placement,
        what=what,
        on_calling_thread=on_calling_thread,
        measures=measures,
    )
