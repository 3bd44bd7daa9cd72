"""Capacities of messages with rows of tables: where a plan fixes them, ranks need not exchange sizes in a step.

A header, the numbers of a rank's rows, travels in front of the rows, in a message whose largest size all ranks know. A
rank whose rows do not fit sends the header only; all ranks see that, and exchange the rows once more, by the sizes in
the headers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ..comm import LENGTH_BYTES
from ..compressors.expressions import Nameable
from ..costs.steps import Pattern, Transfer
from ..inputs.settings import NonNegativeInt
from ..tensors.bucket import TensorSpec
from ..tensors.density import DensityProfile
from .formats import RowFormat, head_nbytes
from .tables import OwnRows, RowGroup, groups_of, origins

ROOM_MARGIN, ROOM_MARGIN_ROWS = 1.5, 16  # room for more rows than measured, as batches differ; costs memory, no traffic


@dataclass(frozen=True)
class RowCapacity(Nameable):
    """Settings by which a scheme for tables plans the room in its messages, so that no sizes are exchanged beforehand.

    Attributes:
        capacity: for each table the most distinct rows that a rank is expected to have; (): ranks exchange sizes first.
        same_rows: for each table the position of the first table that is expected to have the same rows.
    """

    capacity: tuple[NonNegativeInt, ...] = ()
    same_rows: tuple[NonNegativeInt, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
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

    def planned_for(self, profiles: Sequence[DensityProfile]) -> Self:
        """Returns the scheme with room in messages for as many rows as these tables' densities say, plus a margin.

        With no `profiles` (measured densities, one a table) it has none, and ranks exchange the sizes of messages.
        """
        capacity = tuple(with_margin(max(d.rows, d.most_rows), d.num_rows) for d in profiles)
        rows = [(d.pattern, d.num_rows) if d.pattern else position for position, d in enumerate(profiles)]
        return replace(self, capacity=capacity, same_rows=tuple(rows.index(known) for known in rows))

    def check(self, specs: tuple[TensorSpec, ...]) -> None:
        """Checks that the planned `capacity` is one for tables of these shapes.

        Raises:
            ValueError: the capacity was planned for other tables.
        """
        if self.capacity:
            self.planned_groups(specs)

    def planned_groups(self, specs: tuple[TensorSpec, ...]) -> tuple[RowGroup, ...]:
        """Returns the tables in groups that are planned to have the same rows, whose row indices a message holds once.

        `specs`: shape and dtype of each table.

        Raises:
            ValueError: if `specs` are other tables than those of the plan.
        """
        if len(self.same_rows) != len(specs):
            raise ValueError(
                f"the scheme is planned for {len(self.same_rows)} tables, the bucket has {len(specs)}; make a new plan"
            )
        members: dict[int, list[int]] = {}
        for position, first in enumerate(self.same_rows):
            if specs[first].num_rows != specs[position].num_rows:
                raise ValueError(
                    f"tables {first} and {position} of the bucket cannot have the same rows: they have "
                    f"{specs[first].num_rows} and {specs[position].num_rows}; make a new plan"
                )
            members.setdefault(first, []).append(position)
        return groups_of(members.values(), specs)

    def fits(self, header: Sequence[int]) -> bool:
        """Whether one rank's rows are as planned, so that its message had room for them.

        No table may have more than `capacity` rows, and tables planned with the same rows (`same_rows`) must have the
        same. `header` comes with the rank's message. For each table it has the number of rows, `ABSENT` for no
        gradient, or `SAME_AS` - t for the rows of an earlier table t.
        """
        origin = origins(header)
        rows = [max(header[first], 0) for first in origin]
        return all(
            rows[position] <= self.capacity[position]
            and (origin[position] == origin[first] or rows[position] == rows[first] == 0)
            for position, first in enumerate(self.same_rows)
        )

    def expects_to_fit(self, profiles: Sequence[DensityProfile]) -> bool:
        """Whether a rank's rows are expected to fit into the room planned for them; false if none is planned.

        `profiles`: the measured density of each table.
        """
        return bool(self.capacity) and all(
            profile.rows <= room and profile.may_have_rows_of(profiles[first])
            for profile, room, first in zip(profiles, self.capacity, self.same_rows, strict=True)
        )

    def has_room_for(self, profiles: Sequence[DensityProfile]) -> bool:
        """Whether the rows of tables as sparse as these profiles say are expected to fit the messages."""
        return self.expects_to_fit([busiest(profile) for profile in profiles])

    def transfers(
        self, stage: str, pattern: Pattern, part_bytes: tuple[float, ...], tables: int, *, at_once: bool
    ) -> list[Transfer]:
        """Returns the transfers by which rows are sent, for cost models: one with header and rows, or two.

        Rows travel behind the header if `at_once`. Else a first transfer carries headers (numbers of rows) if a
        capacity is set, or sizes; the second carries rows.

        Args:
            stage: the name of the transfer that is planned to carry rows; rows that do not fit travel in "repeat".
            pattern: the collective in which rows travel once all ranks know the sizes.
            part_bytes: for each rank the bytes of rows in one message.
            tables: the number of tables in the bucket.
            at_once: the rows are expected to fit, and travel behind the header.
        """
        n, head = len(part_bytes), float(head_nbytes(tables))
        if at_once:
            return [Transfer(stage, Pattern.ALL_TO_ALL, tuple(head + nbytes for nbytes in part_bytes))]
        if self.capacity:
            header = Transfer(stage, Pattern.ALL_TO_ALL, (head,) * n)
            return [header, Transfer("repeat", pattern, part_bytes)]
        sizes = Transfer("sizes", Pattern.ALL_GATHER, (8.0 * tables,) * n)
        return [sizes, Transfer(stage, pattern, part_bytes)]

    def largest_nbytes(self, format: RowFormat) -> int:
        """Returns the bytes of a message with the most rows of each table that are planned; equal on all ranks.

        `format` says which columns of each row travel in the message.
        """
        rows = [self.capacity[group.first] for group in format.groups]
        return head_nbytes(len(self.capacity)) + int(format.nbytes(rows))


def busiest(profile: DensityProfile) -> DensityProfile:
    """Returns the density `profile` with the most rows that any rank touches as its `rows`, in place of the mean."""
    return replace(profile, rows=max(profile.rows, profile.most_rows))


def with_margin(rows: float, num_rows: int) -> int:
    """Returns for how many rows a message should have room, if `rows` were measured: 1.5 times as many, plus 16.

    It is never more than `num_rows`, the rows of the table.
    """
    return min(math.ceil(ROOM_MARGIN * rows) + ROOM_MARGIN_ROWS, num_rows)


def write_header(message: Tensor, survey: OwnRows) -> None:
    """Writes this rank's number of rows in each table to `message`, (bytes,) uint8, behind its first 8 bytes.

    The process group writes the message's length to these 8. `survey` has the numbers (`OwnRows.header`).
    """
    message[LENGTH_BYTES : head_nbytes(len(survey.header))].copy_(survey.header.view(torch.uint8))


def opened(arrived: Sequence[Tensor], tables: int) -> tuple[list[list[int]], list[Tensor]]:
    """Splits received messages, each (bytes,) uint8, into headers and rows, and returns (headers, views of the rest).

    A header is `tables` numbers: for each table the sender's number of rows, `ABSENT`, or `SAME_AS` - t.
    """
    head = head_nbytes(tables)
    headers = torch.stack([message[LENGTH_BYTES:head] for message in arrived]).view(torch.int64)
    return headers.tolist(), [message[head:] for message in arrived]  # the host needs the numbers to cut messages
