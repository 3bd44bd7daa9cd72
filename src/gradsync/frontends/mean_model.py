"""Replaces parameters, buffers and optimiser state that differ between ranks by their mean over the ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim import Optimizer

from ..comm import Group, gather_bytes
from ..optim.early_steps import begin_state
from ..tensors.bucket import TensorSpec, matches

MESSAGE_BYTES = 25 << 20  # large enough for line rate, small beside the model
STEP = "step"  # the optimiser state that counts a parameter's steps
NOTHING, NUMBER, OTHER = "nothing", "number", "other"  # forms of state beside tensors that have a mean


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


@torch.no_grad()
def take_mean_state(
    group: Group, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], timeout_s: float
) -> list[str]:
    """Makes the optimiser's state of parameters alike on all ranks: equal gradients then keep equal ranks equal.

    Floating-point tensors become their mean over the group, computed in float32 or wider. Numbers, and tensors without
    dimensions, become those of a rank with the most steps. Collective.

    Args:
        group: the ranks.
        optimizer: the optimiser. Where it has no state of a parameter and another rank's has, state is created first,
            as by a step with a gradient of zero.
        parameters: its parameters, of any shape, by the same names on all ranks.
        timeout_s: seconds after which a rank that waits for the others raises.

    Returns:
        The names of parameters whose state stays each rank's own, the same names on all ranks: it has another form on
        some rank, or is of a kind without a mean, such as lists and sparse tensors.
    """

    def told(mine: Any) -> list[Any]:
        return [json.loads(part) for part in gather_bytes(group, json.dumps(mine).encode(), timeout_s)]

    names = sorted({n for theirs in told([n for n, p in parameters.items() if optimizer.state.get(p)]) for n in theirs})
    for name in names:
        if not optimizer.state.get(parameters[name]):
            begin_state(optimizer, parameters[name])
    states: dict[str, dict[str, Any]] = {name: optimizer.state.get(parameters[name], {}) for name in names}
    forms = {n: {key: _form(key, kept, parameters[n]) for key, kept in state.items()} for n, state in states.items()}
    numbers = {n: {key: _number(states[n][key]) for key in forms[n] if forms[n][key] == NUMBER} for n in names}
    everyone = told([forms, numbers])
    averaged, apart = [], []
    for name in names:
        if OTHER in forms[name].values() or any(theirs[name] != forms[name] for theirs, _ in everyone):
            apart.append(name)
            continue
        most_steps = max((theirs[name] for _, theirs in everyone), key=lambda theirs: theirs.get(STEP, 0))
        for key, number in most_steps.items():
            kept = states[name][key]
            states[name][key] = kept.fill_(number) if isinstance(kept, Tensor) else number
        averaged += [states[name][key] for key in sorted(forms[name]) if forms[name][key] not in (NOTHING, NUMBER)]
    _average(group, averaged, timeout_s)
    return apart


def statistics_of(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Returns the running mean and variance of a batch normalisation, (features,) each; None for other modules."""
    mean, variance = (getattr(module, name, None) for name in ("running_mean", "running_var"))
    return (mean, variance) if isinstance(mean, Tensor) and isinstance(variance, Tensor) else None


def _form(key: str, kept: object, parameter: Tensor) -> str:
    """Returns the form of one entry of an optimiser's state: a tensor's shape and dtype if it has a mean, or a word."""
    if kept is None:
        return NOTHING
    if isinstance(kept, int | float):
        return NUMBER
    if type(kept) is not Tensor or kept.is_complex() or kept.layout is not torch.strided:
        return OTHER
    if not kept.dim() and (parameter.dim() or key == STEP):
        return NUMBER
    has_mean = kept.is_floating_point() and kept.itemsize > 1 and kept.device == parameter.device
    return str(TensorSpec.of(kept)) if has_mean else OTHER


def _number(kept: Any) -> Any:
    return kept.item() if isinstance(kept, Tensor) else kept


def _average(group: Group, tensors: Sequence[Tensor], timeout_s: float) -> None:
    """Overwrites tensors with their mean over the group, in few messages, computed in float32 or wider."""
    wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors]
    for dtype in dict.fromkeys(wide):
        alike = [tensor for tensor, kind in zip(tensors, wide, strict=True) if kind is dtype]
        for piece in _pieces(alike, dtype.itemsize):
            flat = _flatten_dense_tensors([tensor.to(dtype) for tensor in piece])  # may be the parameter itself
            message = flat / group.size
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
