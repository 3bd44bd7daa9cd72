"""The front-end for plans of parameters: `optimizer.step()` returns with parameters averaged over this round's groups.

Each rank steps by its own gradients; then parameters travel as the plan says, by `Shuffled` with others in each round
(DS-Sync). So the ranks' models differ a little: `consensus` makes them one, for evaluation, checkpoints, and the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim import Optimizer

from .comm import Group
from .engine import Engine
from .hooks import OptimizerStep, after_optimizer_steps

MESSAGE_BYTES = 25 << 20  # of a consensus: large enough for line rate, small beside the model


class Averaging:
    """Runs an engine on parameters after each step of their optimiser."""

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], engine: Engine, optimizer: Optimizer
    ) -> None:
        self._model = weakref.ref(model)
        self._parameters = dict(parameters)
        self._engine = engine
        self._sync = True
        self._rounds = 0  # ranks that count differently are out of step
        self._handle = after_optimizer_steps(self, Averaging._after_optimizer_step, optimizer)

    def remove(self) -> None:
        """Takes the hook off; parameters stay as they are, and differ between the ranks."""
        self._handle.remove()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps inside are each rank's own; the next one outside averages what came of them."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @torch.no_grad()
    def consensus(self) -> None:
        """All ranks have the mean of their parameters, the same bits, and of what normalisation saw. Collective.

        Variances are pooled: of the samples of all ranks together. Counters, and other buffers of whole numbers, are
        the largest of any rank's.
        """
        model = self._model()
        statistics = [] if model is None else [found for m in model.modules() if (found := _statistics(m)) is not None]
        variances = {id(variance) for _, variance in statistics}
        buffers = [] if model is None else [buffer for buffer in model.buffers() if id(buffer) not in variances]
        averaged = [*self._parameters.values(), *(buffer for buffer in buffers if buffer.is_floating_point())]
        counters = [buffer for buffer in buffers if not buffer.is_floating_point() and not buffer.is_complex()]
        squares = [variance.double() + mean.double().square() for mean, variance in statistics]
        timeout_s = self._engine.timeout_s

        def agree(group: Group) -> None:
            _average(group, averaged, timeout_s)
            _average(group, squares, timeout_s)
            _take_largest(group, counters, timeout_s)

        self._engine.call("consensus", agree)
        for (mean, variance), square in zip(statistics, squares, strict=True):
            variance.copy_(square - mean.double().square())

    @torch.no_grad()
    def _after_optimizer_step(self, step: OptimizerStep) -> None:
        if not self._sync:
            return
        engine = self._engine
        engine.begin(rounds=self._rounds)
        for name, parameter in self._parameters.items():
            engine.load(name, parameter.detach())
        engine.finish()
        for name, parameter in self._parameters.items():
            parameter.copy_(engine.unload(name, None, sparse=False))
        self._rounds += 1


def _statistics(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Running means and variances, as normalisation over batches keeps them."""
    mean, variance = (getattr(module, name, None) for name in ("running_mean", "running_var"))
    return (mean, variance) if isinstance(mean, Tensor) and isinstance(variance, Tensor) else None


def _average(group: Group, tensors: Sequence[Tensor], timeout_s: float) -> None:
    """In few messages, in float32 at least."""
    wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors]
    for dtype in dict.fromkeys(wide):
        alike = [tensor for tensor, kind in zip(tensors, wide, strict=True) if kind is dtype]
        for piece in _pieces(alike, dtype.itemsize):
            message = _flatten_dense_tensors([tensor.to(dtype) for tensor in piece]).div_(group.size)
            group.all_reduce(message).wait(timeout_s)
            torch._foreach_copy_(piece, list(_unflatten_dense_tensors(message, piece)))


def _take_largest(group: Group, tensors: Sequence[Tensor], timeout_s: float) -> None:
    if not tensors:
        return
    mine = _flatten_dense_tensors([tensor.to(torch.int64) for tensor in tensors])
    largest = torch.stack(list(group.all_gather(mine).wait(timeout_s))).amax(dim=0)
    torch._foreach_copy_(list(tensors), list(_unflatten_dense_tensors(largest, tensors)))


def _pieces(tensors: Sequence[Tensor], itemsize: int) -> Iterator[list[Tensor]]:
    """In order, of about so many bytes each."""
    piece: list[Tensor] = []
    filled_bytes = 0
    for tensor in tensors:
        piece.append(tensor)
        filled_bytes += tensor.numel() * itemsize
        if filled_bytes >= MESSAGE_BYTES:
            yield piece
            piece, filled_bytes = [], 0
    if piece:
        yield piece
