"""Strategies and callback as in `gradsync.integrations.lightning`, for pytorch_lightning and lightning_fabric."""

from __future__ import annotations

from lightning_fabric.strategies import DDPStrategy as FabricDDPStrategy
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

from .lightning_parts import CallbackPart, FabricPart, TrainerPart
from .lightning_shards import ShardedTrainerPart


class GradsyncStrategy(TrainerPart, DDPStrategy):
    """The strategy `gradsync.integrations.lightning.GradsyncStrategy` for the package `pytorch_lightning`."""

    package = "pytorch-lightning"


class GradsyncShardedStrategy(ShardedTrainerPart, ModelParallelStrategy):
    """The strategy `gradsync.integrations.lightning.GradsyncShardedStrategy` for the package `pytorch_lightning`."""

    package = "pytorch-lightning"


class GradsyncFabricStrategy(FabricPart, FabricDDPStrategy):
    """The strategy `gradsync.integrations.lightning.GradsyncFabricStrategy` for the package `lightning_fabric`."""

    package = "pytorch-lightning"


class GradsyncCallback(CallbackPart, Callback):
    """The callback `gradsync.integrations.lightning.GradsyncCallback` for the package `pytorch_lightning`."""
