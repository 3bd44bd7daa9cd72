"""`Trace`: all that one rank saw of a case, as plain tensors and numbers that a judge can read without the library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.engine.bucket_run import BucketStatistics
from gradsync.state import from_bytes, to_bytes

Tensors = dict[str, Tensor]


@dataclass
class StepTrace:
    """One step of one rank.

    Attributes:
        own: this rank's gradients before the exchange, by parameter; none where there was no gradient.
        used: parameters whose gradients this rank's backwards of the step reached.
        got: the gradients after the exchange.
        ddp: the gradients after the exchange of torch's DDP, if it ran beside.
        state: what schemes keep, by the keys of `state_dict`.
        sent: the bytes of each bucket since the last change of plans: recorded, and predicted (None: not known).
        strides: those of dense gradients after the exchange.
        parameters: the SHA-256 of all parameters after the optimiser's step.
        finite: whether gradients were finite after the exchange; else the optimiser made no step.
    """

    own: Tensors = field(default_factory=dict)
    used: list[str] = field(default_factory=list)
    got: Tensors = field(default_factory=dict)
    ddp: Tensors | None = None
    state: Tensors = field(default_factory=dict)
    sent: dict[str, list[float | None]] = field(default_factory=dict)
    strides: dict[str, list[int]] = field(default_factory=dict)
    parameters: str = ""
    finite: bool = True


@dataclass
class Trace:
    """The steps of one rank, and the error that ended them, if any, with its class."""

    steps: list[StepTrace] = field(default_factory=list)
    error: str | None = None

    def to_bytes(self) -> bytes:
        """Returns the trace as safetensors, which hold no code. Sparse gradients become dicts of two tensors."""
        return to_bytes(_packed(asdict(self)))

    @classmethod
    def from_bytes(cls, content: bytes) -> Trace:
        """Returns the trace from which `to_bytes` made these bytes."""
        found = _unpacked(from_bytes(content))
        return cls([StepTrace(**step) for step in found["steps"]], found["error"])


SPARSE = ("indices", "values", "shape")


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor) and value.layout is torch.sparse_coo:
        parts = (value._indices().clone(), value._values().clone(), list(value.shape))
        return dict(zip(SPARSE, parts, strict=True))
    if isinstance(value, Tensor):
        return value.clone()  # which shares no memory with others
    if isinstance(value, dict):
        return {key: _packed(each) for key, each in value.items()}
    return [_packed(each) for each in value] if isinstance(value, list | tuple) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict) and tuple(value) == SPARSE:
        return torch.sparse_coo_tensor(value["indices"], value["values"], value["shape"], check_invariants=True)
    if isinstance(value, dict):
        return {key: _unpacked(each) for key, each in value.items()}
    return [_unpacked(each) for each in value] if isinstance(value, list) else value


def gradients_of(model: nn.Module) -> Tensors:
    """Returns copies of the model's gradients by parameter, in their layout, strides and dtype."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def bytes_of(statistics: Iterable[BucketStatistics]) -> dict[str, list[float | None]]:
    return {each.id: [each.sent_bytes, each.predicted_bytes] for each in statistics}


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of tensors' bits, whatever their memory formats."""
    content = hashlib.sha256()
    for tensor in tensors.values():
        content.update(bits_of(tensor))
    return content.hexdigest()


def bits_of(tensor: Tensor) -> bytes:
    """Returns a dense tensor's bytes in the order of indices; every NaN has the same."""
    dense = tensor.detach().to_dense()
    quiet = torch.where(dense.isnan(), torch.full_like(dense, torch.nan), dense)
    return quiet.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
