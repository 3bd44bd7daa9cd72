"""The guard without ranks: digests of parameters, settings and messages. With ranks: tests/frontends/test_guard.py."""

from __future__ import annotations

import math

import pytest
import torch

from gradsync.engine import guard
from gradsync.engine.guard import Divergence, Verification, digests_of
from tests.frontends.models import Convolutions


def test_digests_are_of_elements_by_their_index() -> None:
    model = Convolutions()
    plain = digests_of(p.contiguous() for p in model.parameters()).tolist()
    model = model.to(memory_format=torch.channels_last)
    assert any(not p.is_contiguous() for p in model.parameters())
    assert digests_of(model.parameters()).tolist() == plain
    assert len(set(plain)) == len(plain)


def test_parameters_that_change_places_count() -> None:
    pair = [torch.randn(4, 4), torch.randn(4, 4)]
    joined = [int(guard._joined(digests_of(each))) for each in (pair, pair[::-1])]
    assert joined[0] != joined[1]
    assert int(guard._joined(digests_of([]))) not in joined


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_default_tolerance_is_some_units_in_the_last_place_at_least(dtype: torch.dtype) -> None:
    allowed = Verification().allowed(dtype)
    assert allowed >= 1e-3 and allowed >= 4 * torch.finfo(dtype).eps
    assert Verification(tolerance=0).allowed(dtype) == 0
    assert allowed <= 0.04, "a rank's own batches show as more"


def test_how_far_elements_are_apart_is_seen_at_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_AT_ONCE", 100)
    own = torch.randn(1050, generator=torch.Generator().manual_seed(0))
    for place in (0, 99, 100, 1049):
        theirs = own.clone()
        theirs[place] = 50.0
        assert guard._difference(own, theirs) == pytest.approx((50 - float(own[place]), 50))
        theirs[place] = math.inf
        assert guard._difference(own, theirs)[0] == math.inf
        theirs[place] = math.nan
        difference, magnitude = guard._difference(own, theirs)
        assert difference == math.inf and magnitude == float(own.abs().max())
        assert guard._difference(theirs, theirs.clone())[0] == 0


def test_many_ranks_are_named_in_few_words() -> None:
    sides = tuple((rank,) for rank in range(40))
    text = str(Divergence("weight", sides, 7, "bias", 0.5, 0.001))
    assert "'weight' differs between rank 0 and rank 1 and" in text and "and rank 7 and others (7 parameters" in text
    assert "largest relative difference of 'bias' is 0.5, more than verify_tolerance=0.001" in text
    text = str(Divergence("weight", (tuple(range(39)), (39,)), 1, "weight", 1e-6, 0.001))
    assert "between ranks 0, 1, 2, 3, 4, 5, 6, 7, ... and rank 39; the largest relative difference is 1e-06" in text
    assert "within verify_tolerance=0.001" in text
