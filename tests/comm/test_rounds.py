"""The order in which messages are started, which decides whether links are used in both directions at once."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.comm.rounds import Rounds


class Arrived:
    def wait(self) -> None:
        pass


class Written:
    """A process group whose messages arrive at once; what was started in which order."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int, int]] = []

    def recv(self, parts: list[Tensor], peer: int, tag: int) -> Arrived:
        self.started.append(("recv", peer, parts[0].numel()))
        return Arrived()

    def send(self, parts: list[Tensor], peer: int, tag: int) -> Arrived:
        self.started.append(("send", peer, parts[0].numel()))
        return Arrived()


def started(*, together: bool) -> list[tuple[str, int, int]]:
    """Returns what rank 1 of 4 starts when it swaps messages with rank 0 and sends one to rank 2."""
    written: Any = Written()
    rounds = Rounds(cast(dist.ProcessGroup, written), 1, 4)
    empty = torch.empty(0, dtype=torch.uint8)
    outgoing = [torch.zeros(5, dtype=torch.uint8), empty, torch.zeros(7, dtype=torch.uint8), empty]
    incoming = [torch.zeros(6, dtype=torch.uint8), empty, empty, empty]
    rounds.exchange(outgoing, incoming, together=together).wait()
    rounds.stop(5.0)
    found: list[tuple[str, int, int]] = written.started
    return found


@pytest.mark.parametrize("together", [True, False])
def test_every_message_is_started_once_and_empty_ones_never(together: bool) -> None:
    assert sorted(started(together=together)) == [("recv", 0, 6), ("send", 0, 5), ("send", 2, 7)]


def test_room_is_made_before_anything_is_sent_that_it_would_be_told_behind() -> None:
    kinds = [kind for kind, _, _ in started(together=True)]
    assert kinds == sorted(kinds)  # recv, then send
