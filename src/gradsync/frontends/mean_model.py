"""Replaces parameters and buffers that differ between ranks by their mean over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ..comm import Group
from ..tensors.bucket import matches

MESSAGE_BYTES = 25 << 20  # large enough for line rate, small beside the model


def take_mean(
    group: Group,
    model: nn.Module | None,
    parameters: Sequence[Tensor],
    timeout_s: float,
    exclude: Sequence[str] = (),
) -> None:
    """Overwrites parameters and the model's buffers with their mean over the group, bit for bit alike. Collective.

    Variances of batch normalisation are pooled, as if of the samples of all ranks together. Counters and other integer
    buffers become the maximum over ranks; complex buffers stay.

    Args:
        group: the ranks.
        model: the model whose buffers are averaged; None if it was deleted: then only `parameters` are averaged.
        parameters: floating-point tensors of any shape.
        timeout_s: seconds after which a rank that waits for the others raises.
        exclude: names or shell patterns of buffers that are left alone.
    """
    modules = [] if model is None else list(model.modules())
    named = {} if model is None else dict(model.named_buffers())
    present = {id(buffer): buffer for name, buffer in named.items() if not matches(name, exclude)}
    found = [pair for m in modules if (pair := statistics_of(m)) is not None]
    statistics = [pair for pair in found if all(id(tensor) in present for tensor in pair)]
    pooled = {id(tensor) for pair in statistics for tensor in pair}
    buffers = [buffer for buffer in present.values() if id(buffer) not in pooled]
    counters = [buffer for buffer in buffers if not buffer.is_floating_point() and not buffer.is_complex()]
    means = [mean.double() for mean, _ in statistics]
    _average(group, [*parameters, *(buffer for buffer in buffers if buffer.is_floating_point())], timeout_s)
    _average(group, means, timeout_s)
    # Deviations from the mean over ranks, as squares of means far from zero would swallow variances.
    around = [v.double() + (m.double() - mean).square() for (m, v), mean in zip(statistics, means, strict=True)]
    _average(group, around, timeout_s)
    _take_largest(group, counters, timeout_s)
    for (mean, variance), of_all, around_it in zip(statistics, means, around, strict=True):
        mean.copy_(of_all)
        variance.copy_(around_it)


def statistics_of(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Returns the running mean and variance of a batch normalisation, (features,) each; None for other modules."""
    mean, variance = (getattr(module, name, None) for name in ("running_mean", "running_var"))
    return (mean, variance) if isinstance(mean, Tensor) and isinstance(variance, Tensor) else None


def _average(group: Group, tensors: Sequence[Tensor], timeout_s: float) -> None:
    """Overwrites tensors with their mean over the group, in few messages, computed in float32 or wider."""
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
    """Yields lists of consecutive tensors, of about MESSAGE_BYTES each, at `itemsize` bytes per element."""
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
