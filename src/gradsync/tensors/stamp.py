"""A mark of a tensor that changes when the tensor is written to, also through `.data`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..devices import streams
from ..kernels import digest


class Stamp(NamedTuple):
    """A mark that is taken of a tensor, by which later writes to it are detected.

    It has the tensor's version and address and, if asked for, a digest of its elements. Writes through `.data`, or by
    way of NumPy, do not change the version: only the digest shows them.
    """

    version: int
    address: int | None  # None: the tensor may move
    values: Tensor | None  # the digest, (1,) int64 on the tensor's device; None without one

    @classmethod
    def of(cls, tensor: Tensor, has_values: bool = True, *, moves: bool = False) -> Stamp:
        """Takes the stamp of a tensor of any shape and layout; the host does not wait for the tensor's device.

        Args:
            tensor: the tensor whose later writes are to be found.
            has_values: whether the whole tensor is read for a digest.
            moves: whether the tensor may get other memory with the same elements, which is no write.
        """
        held = tensor._values() if tensor.layout is torch.sparse_coo else tensor
        return cls(tensor._version, None if moves else held.data_ptr(), _digest(held) if has_values else None)

    def differs(self, tensor: Tensor) -> Tensor:
        """Returns whether `tensor` was written to since its stamp was taken, (1,) bool on its device.

        The host does not wait for the device.
        """
        now = Stamp.of(tensor, self.values is not None, moves=self.address is None)
        if self.values is None or now.values is None or now[:2] != self[:2]:
            return torch.full((1,), now[:2] != self[:2], device=tensor.device)
        return now.values != self.values


class _Asked(NamedTuple):
    """A question whether a tensor was written to, whose answer is under way."""

    name: str
    answer: streams.HostCopy
    stamp: Stamp  # whose digest another stream than its own may still read


class Writes:
    """Finds tensors that were written to since their stamps were taken, without a wait for an accelerator.

    `look` asks about one tensor; `found` and `found_before` tell what accelerators have answered in the meantime.
    """

    def __init__(self) -> None:
        self._asked: list[_Asked] = []
        self._before: list[_Asked] = []  # before the last `found_before`

    def look(self, name: str, stamp: Stamp, tensor: Tensor) -> Tensor | bool:
        """Returns whether `tensor`, called `name`, was written to since its stamp was taken.

        Where an accelerator has yet to answer, it is a (1,) bool on the tensor's device, and `found` or `found_before`
        tell later.
        """
        written = stamp.differs(tensor)
        answer = streams.streams_of(tensor.device).to_host(written)
        if answer.has_arrived:
            return any(answer.tolist())
        self._asked.append(_Asked(name, answer, stamp))
        return written

    def found(self) -> str | None:
        """Returns the name of a tensor that was written to, by all answers that were under way; None if there is none.

        It waits for these answers, and forgets them.
        """
        asked, self._before, self._asked = [*self._before, *self._asked], [], []
        return _first_written(asked)

    def found_before(self) -> str | None:
        """Returns the name of a tensor that was written to, or None, by answers asked for before the last call of this.

        If it is called once a step, these are of the step before and have mostly come, so the host need not wait. Later
        answers wait for the next call.
        """
        before, self._before, self._asked = self._before, self._asked, []
        return _first_written(before)


def _first_written(asked: list[_Asked]) -> str | None:
    return next((each.name for each in asked if any(each.answer.tolist())), None)


def _digest(tensor: Tensor) -> Tensor:
    """Returns a 64-bit hash of all elements in the order in which they lie in memory, (1,) int64."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor).copy_(tensor)
    out = torch.empty(1, dtype=torch.int64, device=tensor.device)
    digest([dense.as_strided((dense.numel(),), (1,))], out)
    return out
