"""Strategies for Lightning's Trainer and Fabric, and a callback that logs (package `lightning`).

With the package `pytorch_lightning`, use `gradsync.integrations.pytorch_lightning`.
"""

from __future__ import annotations

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from .lightning_parts import CallbackPart, FabricPart, TrainerPart
from .lightning_shards import ShardedTrainerPart


class GradsyncStrategy(TrainerPart, DDPStrategy):
    """The Trainer's DDP strategy with gradients averaged by gradsync, on CPU and GPU.

    Accumulation, clipping, precision, several optimisers and manual optimisation are as with DDPStrategy. Checkpoints
    also have every rank's residuals (what compression left out) and the plan that trials chose, and
    `trainer.fit(ckpt_path=...)` loads them.

    Args:
        plan, exclude, verify_every, verify_tolerance, communicator: as in `gradsync.attach`.
        timeout: seconds (or a timedelta) after which a rank that waits for the others raises, in gradsync and in the
            process group; None: the default of each.
        kwargs: other arguments of Lightning's DDPStrategy and of DistributedDataParallel, such as
            `find_unused_parameters`.

    Raises:
        ValueError: for arguments of communication hooks.
        TypeError: for unknown arguments, such as those of a strategy that shards.

    Example:
        >>> trainer = Trainer(strategy=GradsyncStrategy(plan="auto"))  # doctest: +SKIP
    """


class GradsyncShardedStrategy(ShardedTrainerPart, ModelParallelStrategy):
    """The Trainer's strategy for models in shards (FSDP2), with gradients averaged between replicas by gradsync.

    The module's `configure_model()` puts the model into shards by `fully_shard`, on a mesh of (replicas, shards) of all
    ranks; see docs/tutorials/fsdp.md. Checkpoints that are saved during the training also have every rank's residuals,
    and `trainer.fit(ckpt_path=...)` loads them, on the same mesh or on another one.

    Args:
        plan, exclude, verify_every, verify_tolerance: as in `gradsync.attach`; plans of gradients.
        timeout: seconds (or a timedelta) after which a rank that waits for the others raises, in gradsync and in the
            process group; None: the default of each.
        kwargs: arguments of Lightning's ModelParallelStrategy: `data_parallel_size`, `tensor_parallel_size`,
            `save_distributed_checkpoint`, `process_group_backend`.

    Example:
        >>> trainer = Trainer(strategy=GradsyncShardedStrategy(plan="auto"))  # doctest: +SKIP
    """


class GradsyncFabricStrategy(FabricPart, FabricDDPStrategy):
    """Fabric's DDP strategy with gradients averaged by gradsync, on CPU and GPU.

    `fabric.save` and `fabric.load` also keep every rank's residuals (what compression left out) and the plan that
    trials chose, for each model that is a value of their `state`.

    Args:
        plan, exclude, timeout, verify_every, verify_tolerance, communicator, kwargs: as in `GradsyncStrategy`.

    Raises:
        ValueError, TypeError: as `GradsyncStrategy`.

    Example:
        >>> fabric = Fabric(strategy=GradsyncFabricStrategy(plan="auto"))  # doctest: +SKIP
    """


class GradsyncCallback(CallbackPart, Callback):
    """Logs gradsync's metrics of rank 0 to the Trainer's loggers, where the Trainer logs its own.

    They are bytes and times per step, changes of the plan, and comparisons of the ranks' parameters.

    Example:
        >>> Trainer(strategy=GradsyncStrategy(), callbacks=[GradsyncCallback()])  # doctest: +SKIP
    """
