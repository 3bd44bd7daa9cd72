"""Majority vote: the sign that most ranks have, the same on all, whichever way the bits take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsync.compressors import ScaledSign, Sign, Signum
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import transfers
from gradsync.schemes import MajorityVote, from_expression, to_expression
from tests.schemes.test_compressed import NUMEL, bucket, inputs_of, run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("via", ["all_gather", "two_way"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_ranks_get_the_sign_that_most_have(size: int, via: Any, dtype: torch.dtype) -> None:
    inputs, scheme = inputs_of(size, dtype), MajorityVote(via=via)
    expected = sum(x[:NUMEL].sign().float() for x in inputs).sign()
    assert (expected == 0).any() == (size % 2 == 0), "votes can be equal where ranks are even"
    if via == "two_way":
        expected[expected == 0] = 1
    outcome, _ = run(scheme, inputs)  # times 1 / size, which a vote is not
    for result in outcome.results:
        assert torch.equal(result[:NUMEL].float(), expected)
        assert (result[NUMEL:] > 0).tolist()[:5] == [True, size > 1, True, True, True], "flags arrive"


@pytest.mark.parametrize("via", ["all_gather", "two_way"])
def test_bytes_are_as_predicted(via: Any) -> None:
    scheme, placement = MajorityVote(via=via), Placement.one_per_node(3)
    outcome, _ = run(scheme, inputs_of(3))
    expected = transfers(scheme.steps(bucket().specs, (), placement))
    assert [t.stage for t in expected] == list(scheme.stages(3))
    for rank, ledger in enumerate(outcome.ledgers):
        got = [(entry.pattern, entry.sent_bytes) for entry in ledger.entries]
        assert got == [(t.pattern, pytest.approx(t.sent_bytes(rank))) for t in expected]


@pytest.mark.parametrize("via", ["all_gather", "two_way"])
def test_momenta_are_kept_from_step_to_step(via: Any) -> None:
    """A vote against all before it does not turn a momentum at once."""
    scheme, states = MajorityVote(Signum(0.9), via), None
    inputs = inputs_of(3)
    first, states = run(scheme, inputs, states)
    first_votes = first.results[0][:NUMEL].clone()
    turned = [torch.cat([-0.5 * x[:NUMEL], x[NUMEL:]]) for x in inputs_of(3)]
    second, _ = run(scheme, turned, states)
    assert torch.equal(second.results[0][:NUMEL], first_votes)
    assert torch.equal(run(scheme, turned)[0].results[0][:NUMEL], -first_votes)


def test_only_votes_can_be_counted() -> None:
    with pytest.raises(ValueError, match="must be a compressor of type Sign .*, got ScaledSign"):
        MajorityVote(ScaledSign())
    with pytest.raises(ValueError, match="via must be 'all_gather' or 'two_way', got 'ring'"):
        MajorityVote(via="ring")
    scheme = MajorityVote(Signum(0.5), "two_way")
    assert from_expression(to_expression(scheme)) == scheme
    assert MajorityVote().compressor == Sign()
