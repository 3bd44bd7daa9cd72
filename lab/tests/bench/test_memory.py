"""The peak memory counts tensors that are alive together, without those that existed before."""

from __future__ import annotations

import torch

from gradsync_lab.bench.memory import peak_bytes


def test_what_lives_together_counts_together() -> None:
    given = torch.zeros(1000)

    def one_after_the_other() -> None:
        for _ in range(3):
            torch.zeros(256).add_(1)

    def together() -> None:
        first, second = torch.zeros(256), torch.ones(256)
        first.view(2, 128).add_(second.view(2, 128))

    def of_what_is_given() -> None:
        given.view(10, 100)[1:].add_(1)

    assert peak_bytes(one_after_the_other, [given]) == 1024
    assert peak_bytes(together, [given]) == 2048
    assert peak_bytes(of_what_is_given, [given]) == 0


def test_memory_that_is_given_back_does_not_count() -> None:
    def resized() -> None:
        kept = torch.zeros(256)
        kept.untyped_storage().resize_(0)
        torch.zeros(128)
        kept.untyped_storage().resize_(512)
        kept[:128].add_(torch.ones(128))

    assert peak_bytes(resized, []) == 1024
