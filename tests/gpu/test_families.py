"""Each scheme and compressor, on tensors of a card, does what its contract says of tensors of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import torch
from torch import Tensor

from gradsync.comm import LocalGroup
from gradsync.compressors import Compressor, CompressorState, ErrorFeedback
from gradsync.compressors.feedback import RESIDUAL
from gradsync.tensors.bucket import FlatSpec
from tests.compressors import family as compressor_family
from tests.schemes import family
from tests.schemes.contract import name_of

SIZES = {True: (4,), False: (3,)}  # by whether nodes have several ranks
TYPES = (torch.float32, torch.bfloat16)
MOST_OFF, FEW_OFF = 0.005, 2  # elements that may differ: a share of those that either device sends, or so many


@pytest.fixture
def threads_of_a_card(card: str) -> Iterator[None]:
    """Makes ranks that are threads keep their control tensors on the card, as a group of a card does."""
    with patch.object(LocalGroup, "device", PropertyMock(return_value=torch.device(card))):
        yield


def moved(x: Any, device: str) -> Any:
    """Returns a rank's flat bucket or tables on another device."""
    if isinstance(x, Tensor):
        return x.to(device)
    return tuple(replace(t, indices=t.indices.to(device), values=t.values.to(device)) for t in x)


@pytest.mark.usefixtures("threads_of_a_card")
@pytest.mark.parametrize("member", family.ALL_MEMBERS, ids=name_of)
def test_every_rank_gets_the_same_bits_of_the_mean(member: family.Member, card: str) -> None:
    for case in member.cases:
        for size in [n for n in SIZES[member.nested] if n in member.sizes] or member.sizes[:1]:
            for dtype in [each for each in TYPES if each in member.types]:
                inputs = family.make_inputs(member.scheme, case, size, dtype)
                there = [moved(x, card) for x in inputs]
                try:
                    found = family.run_scheme(member.planned(inputs), there, 1 / size, placement=member.placement(size))
                    results = [moved(x, "cpu") for x in found.results]
                    family.assert_is_scaled_sum(member, results, inputs, 1 / size)
                    assert all(family.bits(result) == family.bits(results[0]) for result in results)
                    on_cpu = family.mean_of(member, case, size, dtype)
                    assert [x.sent_bytes for x in found.ledgers] == [x.sent_bytes for x in on_cpu.ledgers]
                except BaseException as error:
                    error.add_note(f"in the run {case}, {size} ranks, {dtype}")
                    raise


compressors = pytest.mark.parametrize("member", compressor_family.MEMBERS.values(), ids=compressor_family.MEMBERS)


def first_state(compressor: Compressor, spec: FlatSpec, device: str) -> CompressorState:
    """Returns the state before the first step, on a device, where the engine keeps it."""
    state = compressor.init(spec)
    elements = {name: kept.to(device) for name, kept in state.elements.items()}
    tensors = {name: tuple(part.to(device) for part in kept) for name, kept in state.tensors.items()}
    return replace(state, elements=elements, tensors=tensors)


@compressors
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_compressors_send_as_many_bytes_of_the_same_values(
    member: compressor_family.Member, dtype: torch.dtype, card: str
) -> None:
    compressor, spec = member.compressor, compressor_family.spec_of(dtype)
    states = [first_state(compressor, spec, device) for device in (card, "cpu")]
    for step in range(3):
        x, back = compressor_family.gradient(spec.numel, dtype, seed=step), []
        for number, device in enumerate((card, "cpu")):
            payload, states[number] = compressor_family.compressed(compressor, x.to(device), states[number])
            assert payload.data.device.type == torch.device(device).type
            assert payload.nbytes == compressor.nbytes(spec, step)
            back.append(compressor.decompress(payload).cpu().double())
        off = (back[0] - back[1]).abs() > 1e-2 * back[1].abs() + 1e-6
        sent = (back[0] != 0) | (back[1] != 0)  # of most compressors, a small part
        assert int(off.sum()) <= max(MOST_OFF * int(sent.sum()), FEW_OFF), "but for ties and last bits"


@compressors
def test_what_is_not_sent_is_kept_on_the_card(member: compressor_family.Member, card: str) -> None:
    spec, compressor = compressor_family.spec_of(torch.float32), member.compressor
    if why := compressor_family.no_feedback(compressor, spec):
        pytest.skip(f"error feedback refuses it: {why}")
    compressor = compressor if RESIDUAL in compressor.init(spec).elements else ErrorFeedback(compressor)
    state = first_state(compressor, spec, card)
    x = compressor_family.gradient(spec.numel, torch.float32).to(card)
    payload, state = compressor_family.compressed(compressor, x, state)
    kept = state.elements[RESIDUAL]
    assert kept.device.type == torch.device(card).type
    off = float((compressor.decompress(payload) + kept - x).abs().max())
    assert member.adds_momentum or off <= max(member.tolerance, 1e-6) * float(x.abs().max())
