"""TorchRec: a data parallel wrapper for the parameters that DistributedModelParallel does not shard."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.types import ShardingEnv

from ..engine.plan_control import Planner
from ..frontends.data_parallel import DistributedDataParallel
from ..planner import AveragingPlanner
from ..plans.plan import Plan
from .frameworks import check_version

WRAPPED = (
    "GradsyncWrapper wraps the model in DistributedModelParallel itself, got one in {wrapper} already: give "
    "DistributedModelParallel the model itself, or leave out data_parallel_wrapper="
)
NO_GROUP = (
    "this ShardingEnv has no process group, as for inference: expected ShardingEnv.from_process_group(group) for "
    "training, or no GradsyncWrapper"
)
BUFFERS = {"broadcast_buffers", "forward_sync_buffers"}
NO_BUFFERS = (
    "GradsyncWrapper got {names}, but leaves buffers alone, as TorchRec's own wrapper does: sharded modules have other "
    "buffers on each rank"
)


class GradsyncWrapper(DataParallelWrapper):
    """Averages gradients of unsharded parameters by gradsync; TorchRec goes on to exchange its tables.

    `gradsync.attachment_of(model)` returns the attachment of the DistributedModelParallel. As with TorchRec's own
    wrapper, buffers are left alone, and parameters may be unused.

    Args:
        plan, arguments: those of `gradsync.DistributedDataParallel`, except for buffers.

    Raises:
        RuntimeError, ValueError: when DistributedModelParallel wraps the model, as `gradsync.attach`, and for a model
            that is wrapped already.

    Example:
        >>> model = DistributedModelParallel(model, data_parallel_wrapper=GradsyncWrapper())  # doctest: +SKIP
    """

    def __init__(
        self, *, plan: Plan | Planner | AveragingPlanner | Literal["auto"] | None = None, **arguments: Any
    ) -> None:
        check_version("torchrec")
        if given := sorted(arguments.keys() & BUFFERS):
            raise ValueError(NO_BUFFERS.format(names=", ".join(given)))
        self._arguments = {"plan": plan, "find_unused_parameters": True, **arguments}

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Puts `gradsync.DistributedDataParallel` around the model inside `dmp`, which calls this on all ranks.

        It averages gradients of the parameters that TorchRec does not shard; without any, the model stays as it is.

        Args:
            dmp: TorchRec's wrapper, whose inner model is replaced.
            env: has the process group.
            device: the model is moved there.
        """
        model = dmp._dmp_wrapped_module
        if isinstance(model, TorchDistributedDataParallel | FullyShardedDataParallel):
            package = type(model).__module__.partition(".")[0]
            raise ValueError(WRAPPED.format(wrapper=f"{package}'s {type(model).__name__}"))
        if env.process_group is None:
            raise RuntimeError(NO_GROUP)
        sharded = set(DistributedModelParallel._sharded_parameter_names(model))
        if not any(p.requires_grad for name, p in model.named_parameters() if name not in sharded):
            return
        TorchDistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # only this old name leaves buffers alone from the start
            dmp._dmp_wrapped_module = DistributedDataParallel(
                model.to(device),
                device_ids=None if device.type == "cpu" else [device],
                process_group=env.process_group,
                broadcast_buffers=False,
                **self._arguments,
            )
