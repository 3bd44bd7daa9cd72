"""What a plan fixes of tables before a step: with room for so many rows, no sizes need to be exchanged.

A rank's header travels with its rows, in a message of which the receiver knows the largest size. A rank whose rows do
not fit sends its header only; all ranks see that, and repeat the exchange by the sizes that all of them know by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..bucket import TensorSpec
from ..comm import LENGTH_BYTES
from ..density import DensityProfile
from .formats import Spans, head_nbytes, message_nbytes
from .tables import RowGroup, Survey, planned_groups
from .tables import fits as header_fits


@dataclass(frozen=True)
class RowCapacity:
    """The settings of schemes that can go without sizes; () for both: they are exchanged."""

    capacity: tuple[int, ...] = ()  # for each table the most distinct rows expected of a rank
    same_rows: tuple[int, ...] = ()  # for each table the first one expected to have the same rows, perhaps itself

    def __post_init__(self) -> None:
        name = type(self).__name__
        for setting in ("capacity", "same_rows"):
            object.__setattr__(self, setting, _whole_numbers(f"{name}.{setting}", getattr(self, setting)))
        if len(self.capacity) != len(self.same_rows):
            raise ValueError(
                f"{name}.capacity has {len(self.capacity)} tables, same_rows {len(self.same_rows)}; "
                "give both for every table of the bucket, or neither"
            )
        for table, first in enumerate(self.same_rows):
            if first > table or self.same_rows[first] != first:
                raise ValueError(
                    f"{name}.same_rows must hold the position of the first table with the same rows, got "
                    f"{first} for table {table} of {list(self.same_rows)}"
                )

    def planned_groups(self, specs: tuple[TensorSpec, ...]) -> tuple[RowGroup, ...]:
        """The groups of tables that messages are laid out by."""
        return planned_groups(specs, self.same_rows)

    def fits(self, header: Sequence[int]) -> bool:
        """Whether the rows of a rank with this header have room."""
        return header_fits(header, self.capacity, self.same_rows)

    def expects_to_fit(self, profiles: Sequence[DensityProfile]) -> bool:
        """Whether the rows of ranks like these have room."""
        return bool(self.capacity) and all(
            profile.rows <= room and profile.may_have_rows_of(profiles[first])
            for profile, room, first in zip(profiles, self.capacity, self.same_rows, strict=True)
        )

    def largest_nbytes(self, groups: Sequence[RowGroup], spans: Sequence[Spans]) -> int:
        """The size of a full message with these columns of each group, the same on every rank."""
        rows = [self.capacity[group.first] for group in groups]
        return head_nbytes(len(self.capacity)) + int(message_nbytes(groups, rows, spans))


def write_header(message: Tensor, survey: Survey) -> None:
    """The header's place is behind that of the message's length."""
    message[LENGTH_BYTES : head_nbytes(len(survey.header))].copy_(survey.header.view(torch.uint8))


def opened(arrived: Sequence[Tensor], tables: int) -> tuple[list[list[int]], list[Tensor]]:
    """The headers and bodies of the messages of all ranks."""
    head = head_nbytes(tables)
    headers = torch.stack([message[LENGTH_BYTES:head] for message in arrived]).view(torch.int64)
    return headers.tolist(), [message[head:] for message in arrived]  # the host must know what came


def _whole_numbers(setting: str, given: Sequence[int]) -> tuple[int, ...]:
    """JSON gives lists."""
    if not isinstance(given, list | tuple) or not all(type(number) is int and number >= 0 for number in given):
        raise ValueError(f"{setting} must be whole numbers from 0 on, got {given!r}")
    return tuple(given)
