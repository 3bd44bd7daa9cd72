"""Parts of buffers, and messages that begin with their length, for receivers that know only a bound of it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

LENGTH_BYTES = 8
"""The bytes of the length at the start of a message."""


def split(buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Splits `buffer`, (elements,), into consecutive views, the first of shape (sizes[0],), and so on."""
    return list(torch.split(buffer, list(sizes)))


def with_lengths(messages: Sequence[Tensor], bounds: Sequence[int], peers: Iterable[int] | None = None) -> list[Tensor]:
    """Overwrites the first `LENGTH_BYTES` of each message with the message's length, and returns the messages.

    Args:
        messages: the messages to `peers`, each (bytes,) uint8.
        bounds: the most bytes of each message.
        peers: the destinations, for error messages; None: all members, in order.

    Raises:
        ValueError: for a message that has no room for its length, or is longer than its bound.
    """
    to = range(len(messages)) if peers is None else peers
    for peer, message, bound in zip(to, messages, bounds, strict=True):
        if not LENGTH_BYTES <= len(message) <= bound:
            raise ValueError(
                f"the message to member {peer} has {len(message)} bytes; expected {LENGTH_BYTES} (for its length) to "
                f"{bound}, the bound that all members know"
            )
    for message in messages:
        message[:LENGTH_BYTES].copy_(torch.tensor([len(message)]).view(torch.uint8), non_blocking=True)
    return list(messages)


def length_of(message: Tensor) -> int:
    """Returns the length in bytes that `with_lengths` wrote into a message, (bytes,) uint8."""
    return int.from_bytes(
        message[:LENGTH_BYTES].cpu().numpy().tobytes(), sys.byteorder
    )  # the host must know the length to cut the message


def cut_to_lengths(arrived: Sequence[Tensor], rank: int, own: Tensor) -> list[Tensor]:
    """Cuts the messages received in an `exchange` to the lengths that they begin with.

    Args:
        arrived: for each member the received buffer, (bound,) uint8, which may be longer than the message.
        rank: this member's index.
        own: the message of this member to itself, (bytes,) uint8, which was not sent.
    """
    return [own if peer == rank else part[: length_of(part)] for peer, part in enumerate(arrived)]


def swapped(outgoing: Mapping[int, Tensor], bound: int) -> dict[int, Tensor]:
    """Writes its length at the start of each message for `swap`; returns the messages by destination.

    Args:
        outgoing: the message for each destination, (bytes,) uint8.
        bound: the most bytes of a message.

    Raises:
        ValueError: for a message that has no room for its length, or is longer than `bound`.
    """
    messages = with_lengths(list(outgoing.values()), [bound] * len(outgoing), outgoing)
    return dict(zip(outgoing, messages, strict=True))


def cut_messages(arrived: Sequence[Tensor], origins: Collection[int]) -> dict[int, Tensor]:
    """Cuts the messages received in a `swap` to the lengths that they begin with, and returns them by origin.

    Args:
        arrived: for each member the received buffer, (bound,) uint8, which may be longer than the message.
        origins: the members that sent a message.
    """
    return {peer: arrived[peer][: length_of(arrived[peer])] for peer in origins}
