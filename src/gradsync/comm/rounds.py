"""All-to-all in rounds: in round k rank r sends one message to rank r + k and receives one from rank r - k.

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

from .framing import length_of
from .threads import JobThread

CHUNK_BYTES = 256 << 10  # of each message in a turn of rounds: ranks that drift apart meet again at the next turn
MAX_TAG = 1 << 30


class RoundsWork:
    """The handle of an all-to-all in rounds that is under way, with the interface of `torch.distributed.Work`."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: str | None = None  # the text only: an exception would keep the messages' memory alive

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the all-to-all has ended, and returns True.

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
    """A thread that runs one group's all-to-alls in rounds, one after the other, on a communicator of its own.

    In round k rank r sends to rank r + k and receives from rank r - k. torch can wait for a message, but cannot ask
    whether it has arrived. So a thread waits, and rounds proceed while the communication thread does something else.
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
        """Begins an all-to-all: sends `outgoing[j]` to member j, and fills `incoming[j]` with what member j sends here.

        Args:
            outgoing: contiguous uint8 tensors, (bytes,), one for each member, unchanged until the exchange has ended;
                empty ones and this member's own are not sent.
            incoming: contiguous uint8 tensors, one for each member, which the received messages are written into.
            together: all messages start at once, without rounds.
            bounded: whether messages may be shorter than their `incoming` tensors; they then begin with their length.
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
        """Stops the thread after its queued all-to-alls; returns after `patience_s` even if one hangs and runs on.

        It also drops the communicator, so that sockets close when that is destroyed, not when garbage is collected.
        """
        self._thread.stop(patience_s)
        del self._process_group

    def _turns(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], together: bool, bounded: bool, tag: int
    ) -> Iterator[list[dist.Work]]:
        """Starts the messages of one round after another, and yields their works, which the caller then waits for."""
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
        """Starts receiving a chunk from member rank - `distance`, and returns the work; none for an empty chunk."""
        origin = (self._rank - distance) % self._size
        part = incoming[origin][chunk]
        return [self._process_group.recv([part], origin, tag)] if part.numel() else []

    def _send(self, distance: int, outgoing: Sequence[Tensor], chunk: slice, tag: int) -> list[dist.Work]:
        """Starts sending a chunk to member rank + `distance`, and returns the work; none for an empty chunk."""
        to = (self._rank + distance) % self._size
        part = outgoing[to][chunk]
        return [self._process_group.send([part], to, tag)] if part.numel() else []
