"""The part of a strategy for Lightning's Trainer that serves models in shards (`fully_shard` in `configure_model()`).

It comes before Lightning's ModelParallelStrategy among the bases of a strategy. That strategy leaves it to the user's
`configure_model()` to put the model into shards, and so, with a mesh of (replicas, shards), what is a replica.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from weakref import ref

from torch import nn

from ..engine.guard import VERIFY_EVERY
from ..engine.plan_control import Planner
from ..frontends.attach import attach
from ..frontends.fsdp_internals import is_root_in_shards
from ..plans.plan import Plan
from .frameworks import check_version
from .lightning_parts import KEY, MISSING, NO_STATE, LogsPlans, OfTrainer, load, settings_of, why_apart

logger = logging.getLogger(__name__)

NO_SHARDS = (
    "{strategy}: configure_model() of {module} left no module in shards: apply fully_shard() to parts of the model and "
    "then to the whole, on a mesh of (replicas, shards), or use GradsyncStrategy for a model that is whole on each rank"
)
SEVERAL_ROOTS = (
    "{strategy}: configure_model() of {module} left {names} in shards, and nothing around them: apply fully_shard() to "
    "one module around them at the end, such as the model as a whole, or the LightningModule itself"
)
OUTSIDE = (
    "{strategy}: {name!r} is a parameter of {module} outside of {root!r}, the module in shards, so nothing averages "
    "its gradient: apply fully_shard() to a module around both, such as the LightningModule itself"
)
ENDED = "training has ended, and gradsync is detached"


class ShardedTrainerPart(OfTrainer, LogsPlans):
    """The part of `GradsyncShardedStrategy` beside Lightning's ModelParallelStrategy."""

    package = "lightning"  # on PyPI
    _has_ended = False

    def __init__(
        self,
        *,
        plan: Plan | Planner | Literal["auto"] | None = None,
        exclude: Sequence[str] = (),
        timeout: timedelta | float | None = None,
        verify_every: int = VERIFY_EVERY,
        verify_tolerance: float | None = None,
        **kwargs: Any,
    ) -> None:
        verification = {"verify_every": verify_every, "verify_tolerance": verify_tolerance}
        self._settings = settings_of({"plan": plan, "exclude": exclude, **verification}, timeout, kwargs)
        super().__init__(**kwargs)
        check_version(self.package)
        self._untold = []

    def setup(self, trainer: Any) -> None:
        """Sets the model up as Lightning does, then attaches gradsync, if the Trainer is to fit it.

        Raises:
            ValueError: where `configure_model()` put no module into shards, several without one around them, or only
                some parameters.
        """
        super().setup(trainer)
        if trainer.state.fn == "fit":
            self._attachment = attach(self._root(), **self._settings)
            self._untold.append(ref(self._attachment))
            self._has_ended = False

    def teardown(self) -> None:
        """Detaches gradsync from the model on this rank."""
        if self._attachment is not None:
            self._attachment.detach()
            self._has_ended = True
        super().teardown()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves the checkpoint, with every rank's state of gradsync; Lightning calls it on all ranks.

        A folder, for distributed checkpoints, gets a folder "gradsync" with a file for each rank. A checkpoint of
        weights only is saved as it is, and one that is saved after the training, which says so.
        """
        ours = "optimizer_states" in checkpoint and self._attachment is not None  # not one of weights only
        why = "" if not ours else ENDED if self._has_ended else why_apart(self.lightning_module.trainer)
        if why and self.is_global_zero:
            logger.error("a checkpoint is written without the state of gradsync, as %s", why)
        if ours and not self._save_distributed_checkpoint:
            checkpoint[KEY] = {MISSING: why} if why else self.attachment.checkpoint(gather=True).state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        folder = Path(self.broadcast(filepath)) / KEY
        if ours and not why and self._save_distributed_checkpoint:
            self.attachment.checkpoint().save(folder)
        elif self.is_global_zero and folder.is_dir():  # of a checkpoint that this one replaces
            shutil.rmtree(folder)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint as Lightning does, and each rank's state of gradsync, on the same mesh or another one."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if self._attachment is None or self._has_ended:
            return checkpoint
        path = Path(self.broadcast(checkpoint_path))
        if not path.is_dir():
            load(self._attachment, checkpoint.get(KEY))
        elif not self._attachment.checkpoint().load(path / KEY, missing_ok=True) and self.is_global_zero:
            logger.warning(NO_STATE, f"it has no folder {KEY!r}")
        return checkpoint

    def _root(self) -> nn.Module:
        """Returns the one module in shards that is in no other one."""
        whole = self.lightning_module
        words = {"strategy": type(self).__name__, "module": type(whole).__name__}
        roots: dict[str, nn.Module] = {}
        for name, module in whole.named_modules():
            if is_root_in_shards(module) and not any(_is_in(name, root) for root in roots):
                roots[name] = module
        if not roots:
            raise ValueError(NO_SHARDS.format(**words))
        if len(roots) > 1:
            raise ValueError(SEVERAL_ROOTS.format(**words, names=", ".join(map(repr, roots))))
        ((root, module),) = roots.items()
        for name, parameter in whole.named_parameters():
            if parameter.requires_grad and not _is_in(name, root):
                raise ValueError(OUTSIDE.format(**words, name=name, root=root))
        return module


def _is_in(name: str, module: str) -> bool:
    """Whether the module or parameter `name` is in `module`; both are names in one model, "" for the whole."""
    return module in ("", name) or name.startswith(f"{module}.")
