"""Exchanges in rounds of messages: in round k a rank sends to the k-th rank after it and receives from the k-th before.

gloo's own all-to-all starts all messages at once. They share the senders' links and meet on the receivers', in an order
that leaves links idle: 60-75 % of the line rate on shaped links, where rounds reach 95 %.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import count

import torch.distributed as dist
from torch import Tensor

from .group import length_of
from .threads import JobThread

CHUNK_BYTES = 256 << 10  # of each message in a turn of rounds: ranks that drift apart meet again at the next turn
MAX_TAG = 1 << 30


class RoundsWork:
    """An exchange under way, with the interface of torch's own works."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: str | None = None  # the text only: an exception would keep the messages' memory alive

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the exchange has ended.

        Raises:
            RuntimeError: after `timeout`, or when a message failed.
        """
        if not self._ended.wait(timeout.total_seconds() if timeout is not None else None):
            raise RuntimeError("the exchange has not ended yet")
        if self._error is not None:
            raise RuntimeError(self._error)
        return True

    def end(self, error: Exception | None) -> None:
        self._error = None if error is None else str(error)
        self._ended.set()


class Rounds:
    """The exchanges of one group, one after the other, on a communicator and a thread that nobody else uses.

    torch can wait for a message, but cannot ask whether it has arrived; so a thread waits, and rounds go on while the
    communication thread is busy with something else.
    """

    def __init__(self, process_group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._process_group = process_group
        self._rank = rank
        self._size = size
        self._tags = count()
        self._thread = JobThread("gradsync rounds")

    def exchange(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], *, together: bool = False, bounded: bool = False
    ) -> RoundsWork:
        """Sends `outgoing[j]` to member j and fills `incoming[j]` with what member j sends here.

        Args:
            outgoing: contiguous uint8 tensors, one a member, alive and untouched until the work has ended; empty ones
                and the own one are skipped.
            incoming: room for the received messages, as `outgoing`.
            together: all messages start at once, without rounds.
            bounded: an incoming message may be shorter than its room; its first bytes tell the length.
        """
        work, tag = RoundsWork(), next(self._tags) % MAX_TAG

        def run() -> None:
            try:
                for turn in self._turns(outgoing, incoming, together, bounded, tag):
                    for message in turn:
                        message.wait()
                work.end(None)
            except Exception as error:  # raised again where the work is waited for
                work.end(error)

        self._thread.submit(run)
        return work

    def stop(self, patience_s: float) -> None:
        """Ends the thread; an exchange that hangs is left behind."""
        self._thread.stop(patience_s)

    def _turns(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], together: bool, bounded: bool, tag: int
    ) -> Iterator[list[dist.Work]]:
        """Starts messages that may be in flight together and yields them, to be waited for before the next."""
        distances, start, whole = range(1, self._size), 0, slice(None)
        if together:
            # A receiver tells a sender of its room behind its own messages to that rank: so receives start first.
            received = [m for k in distances for m in self._receive(k, incoming, whole, tag)]
            yield [*received, *(m for k in distances for m in self._send(k, outgoing, whole, tag))]
            return
        # Ranks may count different turns: a pair always meets in the turn and round of its next chunk.
        while start < max(t.numel() for t in [*outgoing, *incoming]):
            for k in distances:
                chunk = slice(start, start + CHUNK_BYTES)
                yield [*self._receive(k, incoming, chunk, tag), *self._send(k, outgoing, chunk, tag)]
            if bounded and start == 0:
                incoming = [part[: length_of(part)] if part.numel() else part for part in incoming]
            start += CHUNK_BYTES

    def _receive(self, distance: int, incoming: Sequence[Tensor], chunk: slice, tag: int) -> list[dist.Work]:
        """Starts to receive a chunk from the member `distance` places before; returns no work for an empty message."""
        origin = (self._rank - distance) % self._size
        part = incoming[origin][chunk]
        return [self._process_group.recv([part], origin, tag)] if part.numel() else []

    def _send(self, distance: int, outgoing: Sequence[Tensor], chunk: slice, tag: int) -> list[dist.Work]:
        """Starts to send a chunk to the member `distance` places on; returns no work for an empty message."""
        to = (self._rank + distance) % self._size
        part = outgoing[to][chunk]
        return [self._process_group.send([part], to, tag)] if part.numel() else []
