"""Texts that members exchange through the store: safe where some may be at an operation of the group instead."""

from __future__ import annotations

import time

from .group import GroupError, TorchGroup

POLL_S = 0.02  # how long a member waits before it looks again, at first
MOST_POLL_S = 0.5


def gather_aside(group: TorchGroup, text: str, timeout_s: float) -> list[str]:
    """Every member's text, by member, without an operation of the communicator.

    A member that does not come, but issues the group's next operation, is found within `NOTICE_S` seconds: it is seen
    to wait there for this one.

    Raises:
        GroupError: when a member does not come.
    """
    board, rank, operation = group.board, group.members[group.rank], group.issued
    before = board.append_text(operation, rank, text)
    began_s, poll_s = time.monotonic(), POLL_S
    while True:
        texts = board.texts()
        missing = [member for member in group.members if member not in texts]
        if not missing:
            if before and group.rank == 0:  # all members have read those, or they were not here
                board.delete(before)
            return [texts[member] for member in group.members]
        if failure := board.failure():
            raise GroupError(failure)
        elsewhere = set(board.waiting_since(operation)) | set(board.left_before(operation))
        if gone := [member for member in missing if member in elsewhere]:
            raise GroupError(f"rank {gone[0]} went on without it")
        if time.monotonic() - began_s > timeout_s:
            raise GroupError(f"rank {missing[0]} did not answer within {timeout_s:.0f} s")
        time.sleep(poll_s)
        poll_s = min(1.5 * poll_s, MOST_POLL_S)
