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
    lengths = [message.numel() for message in messages]  # len() of a tensor runs Python code
    for peer, length, bound in zip(to, lengths, bounds, strict=True):
        if not LENGTH_BYTES <= length <= bound:
            raise ValueError(
                f"the message to member {peer} has {length} bytes; expected {LENGTH_BYTES} (for its length) to "
                f"{bound}, the bound that all members know"
            )
    written: dict[int, Tensor] = {}
    alike = {id(message): (message, length) for message, length in zip(messages, lengths, strict=True)}
    for message, length in alike.values():  # each once: one may go to several members
        if length not in written:
            written[length] = torch.tensor([length]).view(torch.uint8)
        message[:LENGTH_BYTES].copy_(written[length], non_blocking=True)
    return list(messages)


def end_to_end(parts: Sequence[Tensor]) -> Tensor:
    """Returns the parts, contiguous and of one dtype, as one flat tensor: a view if they lie so in memory, else a copy.

    `parts`: at least one, each (elements,).
    """
    filled = [part for part in parts if part.numel()]
    if not filled:
        return parts[0]
    memory, end = filled[0].untyped_storage().data_ptr(), filled[0].data_ptr()
    for part in filled:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != memory:
            return torch.cat(filled)
        end += part.nbytes
    return filled[0].as_strided((sum(part.numel() for part in filled),), (1,))


def length_of(message: Tensor) -> int:
    """Returns the length in bytes that `with_lengths` wrote into a message, (bytes,) uint8."""
    return int.from_bytes(
        message[:LENGTH_BYTES].cpu().numpy().tobytes(), sys.byteorder
    )  # the host must know the length to cut the message


def lengths_of(messages: Sequence[Tensor]) -> list[int]:
    """Returns the lengths in bytes that `with_lengths` wrote into messages, each (bytes,) uint8, in one read."""
    if not messages:
        return []
    lengths = torch.stack([message[:LENGTH_BYTES] for message in messages]).view(torch.int64)
    found: list[int] = lengths.flatten().tolist()
    return found  # the host must know the lengths to cut the messages


def cut_to_lengths(arrived: Sequence[Tensor], rank: int, own: Tensor) -> list[Tensor]:
    """Cuts the messages received in an `exchange` to the lengths that they begin with.

    Args:
        arrived: for each member the received buffer, (bound,) uint8, which may be longer than the message.
        rank: this member's index.
        own: the message of this member to itself, (bytes,) uint8, which was not sent.
    """
    others = [part for peer, part in enumerate(arrived) if peer != rank]
    found = [part[:length] for part, length in zip(others, lengths_of(others), strict=True)]
    return [*found[:rank], own, *found[rank:]]


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
    lengths = lengths_of([arrived[peer] for peer in origins])
    return {peer: arrived[peer][:length] for peer, length in zip(origins, lengths, strict=True)}
