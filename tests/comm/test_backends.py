"""Each backend gets the group class that is registered for it."""

from __future__ import annotations

from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from gradsync.comm import GlooGroup, LocalGroup, NcclGroup, TorchGroup, torch_group
from gradsync.comm.backends import GROUP_OF_BACKEND


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ("cpu:gloo,cuda:gloo", GlooGroup),
        ("cuda:nccl", NcclGroup),
        ("cpu:gloo,cuda:nccl", TorchGroup),
        ("xpu:xccl", TorchGroup),
    ],
)
def test_a_process_group_gets_the_class_of_the_one_backend_that_it_has(config: str, kind: type[TorchGroup]) -> None:
    classes = {each: Mock(name=each.__name__) for each in (GlooGroup, NcclGroup, TorchGroup)}
    registered = {name: classes[each] for name, each in GROUP_OF_BACKEND.items()}
    with (
        patch.object(dist, "get_backend_config", return_value=config),
        patch.dict(GROUP_OF_BACKEND, registered),
        patch("gradsync.comm.backends.TorchGroup", classes[TorchGroup]),
    ):
        assert torch_group(timeout_s=3.0) is classes[kind].return_value
    classes[kind].assert_called_once_with(None, timeout_s=3.0, placement=None, what="a group of gradsync")


def test_on_nccl_a_stream_waits_and_the_backend_ends_what_hangs() -> None:
    group, work = object.__new__(NcclGroup), Mock()
    group._wait(work, 0, 3.0)
    work.wait.assert_called_once_with()
    assert group._patience_s(3.0) == 3.0 < TorchGroup._patience_s(group, 3.0)
    with patch.object(torch.cuda, "current_device", return_value=1):
        assert group.device == torch.device("cuda", 1)
    assert LocalGroup.world(1)[0].device == torch.device("cpu")
