"""Parts of buffers and messages that begin with their length: what is shared, and what is copied."""

from __future__ import annotations

import pytest
import torch

from gradsync.comm import LENGTH_BYTES
from gradsync.comm.framing import cut_messages, cut_to_lengths, end_to_end, lengths_of, split, with_lengths


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_parts_that_lie_end_to_end_are_sent_from_where_they_are(dtype: torch.dtype) -> None:
    buffer = torch.arange(20).to(dtype)
    parts = split(buffer[3:], [4, 0, 6, 7])
    for left_out in ([], [1], [0, 1], [3]):
        kept = [part[:0] if place in left_out else part for place, part in enumerate(parts)]
        whole = end_to_end(kept)
        assert torch.equal(whole, torch.cat(kept))
        assert whole.data_ptr() == next(part for part in kept if part.numel()).data_ptr()


def test_other_parts_are_copied() -> None:
    buffer = torch.arange(20)
    a, b, c = split(buffer, [4, 6, 10])
    for parts in ([a, c], [b, a], [a, a], [a, b.clone()], [a, torch.arange(3)]):
        whole = end_to_end(parts)
        assert torch.equal(whole, torch.cat(parts))
        assert whole.data_ptr() != parts[0].data_ptr()
    assert end_to_end([a[:0], b[:0]]).numel() == 0


def test_lengths_are_read_from_messages_that_came_in_larger_room() -> None:
    sent = [torch.full((LENGTH_BYTES + body,), body, dtype=torch.uint8) for body in (0, 5, 5, 200)]
    with_lengths(sent, [300] * 4)
    arrived = [torch.cat([message, torch.zeros(9, dtype=torch.uint8)]) for message in sent]
    assert lengths_of(arrived) == [len(message) for message in sent]
    assert lengths_of([]) == []
    own = torch.zeros(1, dtype=torch.uint8)
    for rank in range(4):
        cut = cut_to_lengths(arrived, rank, own)
        assert cut[rank] is own
        assert all(torch.equal(cut[peer], sent[peer]) for peer in range(4) if peer != rank)
    swapped = cut_messages(arrived, [3, 1])
    assert {peer: len(message) for peer, message in swapped.items()} == {3: len(sent[3]), 1: len(sent[1])}
