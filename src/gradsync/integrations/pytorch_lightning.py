"""Strategies and callback as in `gradsync.integrations.lightning`, for pytorch_lightning and lightning_fabric."""

from __future__ import annotations

from lightning_fabric.strategies import DDPStrategy as FabricDDPStrategy
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy

from .lightning_parts import CallbackPart, FabricPart, TrainerPart


class GradsyncStrategy(TrainerPart, DDPStrategy):
    """As `gradsync.integrations.lightning.GradsyncStrategy`."""

    package = "pytorch-lightning"


class GradsyncFabricStrategy(FabricPart, FabricDDPStrategy):
    """As `gradsync.integrations.lightning.GradsyncFabricStrategy`."""

    package = "pytorch-lightning"


class GradsyncCallback(CallbackPart, Callback):
    """As `gradsync.integrations.lightning.GradsyncCallback`."""
