"""The compressor protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

from torch import Tensor

from ..bucket import TensorSpec

State = Mapping[str, Tensor]  # what a compressor remembers -> one element for each element of the tensor

P = TypeVar("P")  # what travels


class Compressor(ABC, Generic[P]):
    """How a flat tensor of one rank becomes a payload, and a payload a tensor again.

    A frozen dataclass of settings. State is passed in and the next state comes back: nothing is kept here, and nothing
    passed in is overwritten, so that a step can be taken back.
    """

    def init(self, spec: TensorSpec) -> State:
        """The state before the first step; most compressors have none."""
        return {}

    @abstractmethod
    def compress(self, x: Tensor, state: State) -> tuple[P, State]:
        """The payload of `x`, (numel,) floating, and the next state."""

    @abstractmethod
    def decompress(self, payload: P) -> Tensor:
        """A tensor of the shape and dtype of what was compressed."""

    @abstractmethod
    def nbytes(self, spec: TensorSpec) -> int:
        """The size of the payload of a tensor of `spec`."""

    def remainder(self, x: Tensor, payload: P) -> Tensor:
        """What the payload leaves of `x`, whose dtype may be a wider one; overwrites `x`."""
        return x.sub_(self.decompress(payload))
