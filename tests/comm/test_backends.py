"""A process group gets the group class of the backend that it has for the device."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from gradsync.comm import GlooGroup, LocalGroup, StreamGroup, TorchGroup, backend_for, torch_group
from gradsync.comm.backends import GROUP_OF_BACKEND
from tests.world import World

CPU, CARD = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("config", "device", "kind", "backend"),
    [
        ("cpu:gloo,cuda:gloo", CPU, GlooGroup, "gloo"),
        ("cpu:gloo,cuda:gloo", CARD, GlooGroup, "gloo"),
        ("cuda:nccl", CARD, StreamGroup, "nccl"),
        ("cpu:gloo,cuda:nccl", CPU, GlooGroup, "gloo"),
        ("cpu:gloo,cuda:nccl", CARD, StreamGroup, "nccl"),
        ("xpu:xccl", torch.device("xpu", 0), StreamGroup, "xccl"),
        ("cpu:mpi", CPU, TorchGroup, "mpi"),
    ],
)
def test_the_backend_of_the_device_decides(
    config: str, device: torch.device, kind: type[TorchGroup], backend: str
) -> None:
    """Also where `init_process_group` got no backend, so that there are several, and `get_backend` names none."""
    classes = {each: Mock(name=each.__name__) for each in (GlooGroup, StreamGroup, TorchGroup)}
    with ExitStack() as within:
        within.enter_context(patch.object(dist, "get_backend_config", return_value=config))
        for each, mock in classes.items():
            within.enter_context(patch(f"gradsync.comm.backends.{each.__name__}", mock))
        within.enter_context(patch.dict(GROUP_OF_BACKEND, {"gloo": classes[GlooGroup]}))
        assert torch_group(timeout_s=3.0, device=device) is classes[kind].return_value
        assert backend_for(None, device) == backend
    classes[kind].assert_called_once_with(
        None,
        timeout_s=3.0,
        device=device,
        placement=None,
        what="a group of gradsync",
        on_calling_thread=False,
        measures=True,
    )


@pytest.mark.parametrize("config", ["cpu:gloo", "cpu:gloo,cuda:nccl"])
def test_a_device_without_a_backend_is_refused(config: str) -> None:
    with (
        patch.object(dist, "get_backend_config", return_value=config),
        pytest.raises(ValueError, match=f"are on xpu:0, .* its backends are {config}; .* or with one for 'xpu'"),
    ):
        torch_group(timeout_s=3.0, device=torch.device("xpu", 0))


def unnamed() -> tuple[str, str]:
    """Initialises torch.distributed without a backend, as most scripts do, and sums by a group of it."""
    rank, size, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group(store=dist.PrefixStore("unnamed", store), rank=rank, world_size=size)
    group = torch_group(timeout_s=20)
    total = group.all_reduce(torch.ones(3)).wait(20.0)
    assert total.tolist() == [2.0] * 3
    group.close()
    return type(group).__name__, dist.get_backend()


def test_so_it_does_without_a_backend_s_name() -> None:
    with World(2) as world:  # whose default process group is another one afterwards
        assert world.run(unnamed) == [("GlooGroup", "undefined")] * 2


def test_a_device_of_streams_is_that_of_control_tensors() -> None:
    group = object.__new__(StreamGroup)
    group._device = CARD
    assert group.device == CARD
    assert LocalGroup.world(1)[0].device == CPU
