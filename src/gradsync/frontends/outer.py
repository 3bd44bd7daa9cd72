"""`OuterOptimizer`: ranks train alone for many steps, then exchange what has changed, as in DiLoCo.

After Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023), and Reddi et al.,
"Adaptive Federated Optimization" (2021). The change of a parameter since the last exchange, with its sign turned, is
taken for its gradient, so every scheme, compressor and planner for gradients serves here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..tensors.bucket import matches, trainable_parameters
from .agreement import exclusions, parameters_of
from .arguments import DEFAULT_TIMEOUT_S, Arguments, require_module
from .attach import attach, attachment_of

SYNCHRONISED = (
    "DistributedDataParallel averages the model's gradients in every step already: expected a model that each rank "
    "trains alone. Give OuterOptimizer the model itself, and leave DistributedDataParallel out"
)
OTHER_PARAMETERS = (
    "the model's trainable parameters have changed since OuterOptimizer was made: {names}; make a new one"
)
DETACHED = "outer.attachment was detached, so step() would exchange nothing; make a new OuterOptimizer"


class OuterOptimizer:
    """Averages over all ranks how a model has changed since the last call, and steps from there by an optimiser.

    Each rank trains the model alone, by an inner optimiser, for as many steps as it likes. `step()`, on all ranks,
    averages the pseudo-gradients (the parameters at the last `step()` minus those of now), lets the outer optimiser
    step from the parameters at the last `step()`, and puts the result into all ranks' models. Buffers, such as
    statistics of batch normalisation, and the inner optimiser's state stay each rank's own. It takes the memory of two
    further copies of the trainable parameters, and what the outer optimiser takes.

    Args:
        model: the model; rank 0's trainable parameters are broadcast. It is used as it is: not in DDP, not attached.
        optimizer: makes the outer optimiser of parameters, such as
            `functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)`, DiLoCo's.
        exclude: names or shell patterns of parameters that stay each rank's own.
        settings: other arguments of `gradsync.attach`: `plan`, `process_group`, `timeout` and so on. Parameters have
            the model's names there; plans that average parameters are refused.

    Attributes:
        attachment: the result of `gradsync.attach`, for `statistics()`, `explain()` and `detach()`.
        optimizer: the outer optimiser, such as for a scheduler of its learning rate.

    Raises:
        TypeError: for a model that is none.
        ValueError: for a model in DDP, and as of `gradsync.attach`.
        RuntimeError: for a model that gradsync is attached to, that is in shards (FSDP), or inside of DDP; and as of
            `gradsync.attach`.

    Example:
        >>> outer = gradsync.OuterOptimizer(model, functools.partial(torch.optim.SGD, lr=0.7))  # doctest: +SKIP
        >>> for step, batch in enumerate(loader):                                           # doctest: +SKIP
        ...     train(model, inner_optimizer, batch)
        ...     if step % 100 == 99:
        ...         outer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        *,
        exclude: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        require_module(model)
        given = Arguments.read(settings.get("timeout", DEFAULT_TIMEOUT_S), exclude=exclude)
        if given.refusal:
            raise ValueError(given.refusal)
        if isinstance(model, DistributedDataParallel):
            raise ValueError(SYNCHRONISED)
        self._model, self._exclude = model, exclusions(model, given.exclude, has_buffers=False)
        self._start = _Start(parameters_of(model, self._exclude))
        self.optimizer = optimizer(self._start.parameters())
        self.attachment = attach(self._start, **settings)
        self._put_back()

    @torch.no_grad()
    def step(self) -> None:
        """Averages the pseudo-gradients over all ranks, and lets the outer optimiser step; call it on all ranks.

        Pseudo-gradients are the parameters at the last call minus those of now.

        Raises:
            GroupError: where a rank is lost, or does not come within the timeout.
            RuntimeError: where parameters have come or gone, were frozen or unfrozen; and after `attachment.detach()`.
        """
        if attachment_of(self._start) is not self.attachment:
            raise RuntimeError(DETACHED)
        now, start = self._trained(), dict(self._start.named_parameters())
        if changed := sorted(now.keys() ^ start.keys()):
            self.attachment._engine.peers.fail(why := OTHER_PARAMETERS.format(names=", ".join(changed)))
            raise RuntimeError(why)
        with torch.enable_grad():
            self._start()  # at whose hook a step of the exchange begins
        changes = [start[name] - now[name].detach() for name in start]
        torch.autograd.backward(list(start.values()), changes)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._put_back()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state, which the same rank loads with `load_state_dict`.

        It has the parameters as the last `step()` left them, the outer optimiser's state, and that of gradsync.
        """
        states = {"optimizer": self.optimizer.state_dict(), "gradsync": self.attachment.state_dict()}
        return {"start": self._start.state_dict(), **states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict()` returned on this rank; call it on all ranks.

        The model's own state must be loaded apart from it.

        Raises:
            KeyError: where a part is missing.
            RuntimeError, ValueError: where a part does not fit the model, the optimiser or the plan.
        """
        try:
            start, optimizer, of_gradsync = (state[part] for part in ("start", "optimizer", "gradsync"))
            self.attachment.load_state_dict(of_gradsync)
            self._start.load_state_dict(start)
            self.optimizer.load_state_dict(optimizer)
        except Exception as error:
            self.attachment._engine.peers.fail(error)
            raise

    def _trained(self) -> dict[str, nn.Parameter]:
        named = trainable_parameters(self._model)
        return {name: p for name, p in named.items() if not matches(name, self._exclude)}

    @torch.no_grad()
    def _put_back(self) -> None:
        now = self._trained()
        for name, parameter in self._start.named_parameters():
            now[name].copy_(parameter)


class _Start(nn.Module):
    """Copies of parameters under the same names, whose forward computes nothing."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(parameter.detach().clone()))

    def forward(self) -> Tensor | None:
        return None
