"""The contract of schemes: what each promises on ranks as threads, as tests of whatever members a module has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from gradsync.comm import LocalGroup
from gradsync.costs.steps import Transfer, transfers
from gradsync.costs.transport import DEFAULT_TRANSPORT
from gradsync.tensors.bucket import Bucket, Layout, Segment
from gradsync.tensors.index_formats import ALIGNMENT_BYTES
from gradsync.tensors.sparse import SparseRows
from tests.schemes.family import (
    CASES,
    Member,
    assert_is_scaled_sum,
    bits,
    copy_of,
    make_inputs,
    mean_of,
    profiles_of,
    run,
    specs_of,
)

REPEAT = "repeat"  # a round beyond the planned stages, where some rank's rows did not fit
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def name_of(member: Member) -> str:
    return member.name


def runs(members: list[Member], *, sizes: tuple[int, ...] | None = None, dtypes: bool = False) -> Any:
    """One test a member, which calls the function with (member, case, size), and with `dtypes` dtype, for each case.

    That is a part of all that these members may meet. Each case meets about three ranks in float32 and, with `dtypes`,
    in one of the other dtypes, and one larger and one smaller group, or one of the two. Which ones goes round with
    cases and members: every member meets every dtype and size, but a case that few members meet may miss some.
    """

    def of_member(promise: Callable[..., None]) -> Callable[[Member], None]:
        @pytest.mark.parametrize("member", members, ids=name_of)
        def test(member: Member) -> None:
            for turn, case in enumerate(member.cases, members.index(member)):
                for size, dtype in _met(member, turn, sizes or member.sizes, dtypes):
                    try:
                        promise(member, case, size, *([dtype] if dtypes else []))
                    except BaseException as error:
                        error.add_note(f"in the run {case}, {size} ranks, {dtype}")
                        raise

        test.__name__, test.__doc__ = promise.__name__, promise.__doc__
        return test

    return of_member


def _met(member: Member, turn: int, sizes: tuple[int, ...], dtypes: bool) -> list[tuple[int, torch.dtype]]:
    first, *wider = member.types
    usual = min(sizes, key=lambda n: abs(n - 3))
    smaller, larger = [n for n in sizes if n < usual], [n for n in sizes if n > usual]
    others = [group[turn // 2 % len(group)] for group in (smaller, larger) if group]
    if len(sizes) == 3 and len(others) == 2:
        others = [others[turn % 2]]
    met = [(usual, first), *([(usual, wider[turn % len(wider)])] if dtypes else [])]
    return met + [(size, first) for size in others]


def predicted(member: Member, inputs: list[Any]) -> list[Transfer]:
    placement = member.placement(len(inputs))
    return transfers(member.planned(inputs).steps(specs_of(inputs[0]), profiles_of(inputs), placement))


def sent_by_all(transfer: Transfer) -> float:
    """Returns the bytes that all ranks send in a transfer."""
    return sum(map(transfer.sent_bytes, range(transfer.size)))


def received_bytes(transfer: Transfer, member: int) -> float:
    """Returns the bytes that one rank receives in a transfer, on the transport that is the default."""
    return sum(nbytes for _, to, nbytes in transfer.carried_by(DEFAULT_TRANSPORT).messages() if to == member)


def slack_bytes(member: Member, inputs: list[Any]) -> float:
    """Returns the bytes by which recorded and predicted totals may differ: padding of sections, and dealing.

    A rank sends size - 1 messages in a stage, each with as many sections a tensor as the member says. Of elements that
    are dealt to owners 1/size stay where they are, within four standard deviations; the others send value and position.
    """
    size, specs = len(inputs), specs_of(inputs[0])
    if member.spread > 0:
        return member.spread * sum(sent_by_all(t) for t in predicted(member, inputs))
    padding = ALIGNMENT_BYTES * member.sections * len(specs) * size * (size - 1)
    if not member.dealt:
        return padding
    deviation = math.sqrt(sum(int(x.count_nonzero()) for x in inputs) * (size - 1)) / size
    return padding + 4 * deviation * (specs[0].itemsize + torch.int32.itemsize)


def largest_group(member: Member) -> int:
    """Returns the larger or the smaller of two group sizes: nodes with several ranks need the larger one."""
    return 8 if member.nested else 4


def contract(members: Sequence[Member], others: Sequence[Member] = ()) -> dict[str, Callable[..., None]]:
    """Returns the tests of what every scheme promises, by name, for a module to add to its own.

    `others` meet fewer numbers of ranks, and no random flat buckets.
    """
    everyone = [*members, *others]

    @runs(everyone, dtypes=True)
    def test_every_rank_gets_the_same_bits_of_the_scaled_sum(
        member: Member, case: str, size: int, dtype: torch.dtype
    ) -> None:
        inputs = make_inputs(member.scheme, case, size, dtype)
        outcome = mean_of(member, case, size, dtype)
        assert_is_scaled_sum(member, outcome.results, inputs, 1 / size)
        assert all(bits(result) == bits(outcome.results[0]) for result in outcome.results)
        assert all(specs_of(result) == specs_of(inputs[0]) for result in outcome.results)

    @runs([m for m in everyone if not m.nested], sizes=(3,))
    def test_runs_repeat_to_the_bit(member: Member, case: str, size: int) -> None:
        again = run(member, make_inputs(member.scheme, case, size, torch.float32), 1 / size)
        assert [bits(x) for x in again.results] == [bits(x) for x in mean_of(member, case, size, torch.float32).results]

    @runs([m for m in everyone if not m.nested])
    def test_scheme_awaits_once_a_stage_and_issues_what_its_steps_say(member: Member, case: str, size: int) -> None:
        inputs = make_inputs(member.scheme, case, size, torch.float32)
        outcome = mean_of(member, case, size, torch.float32)
        expected = predicted(member, inputs)
        assert outcome.awaits == [len(expected)] * size
        stages = [transfer.stage for transfer in expected if transfer.stage != REPEAT]
        assert tuple(stages) in {member.planned(inputs).stages(size), member.instead or None}
        assert len(stages) == len(expected) or member.title == "without room"
        for ledger in outcome.ledgers:
            assert [entry.pattern for entry in ledger.entries] == [transfer.pattern for transfer in expected]

    @runs(everyone, dtypes=True)
    def test_recorded_bytes_are_those_of_the_steps(member: Member, case: str, size: int, dtype: torch.dtype) -> None:
        """Checks bytes exactly on every rank if data does not matter, else over all ranks within `slack_bytes`."""
        inputs = make_inputs(member.scheme, case, size, dtype)
        outcome = mean_of(member, case, size, dtype)
        expected = predicted(member, inputs)
        sent = [ledger.sent_bytes for ledger in outcome.ledgers]
        if member.sections == 0 or tuple(transfer.stage for transfer in expected) == member.instead:
            assert sent == [sum(transfer.sent_bytes(rank) for transfer in expected) for rank in range(size)]
        assert abs(sum(sent) - sum(map(sent_by_all, expected))) <= slack_bytes(member, inputs)

    @runs(everyone, sizes=(3,))
    def test_what_a_step_starts_from_is_left_as_it_was(member: Member, case: str, size: int) -> None:
        inputs = make_inputs(member.scheme, case, size, torch.float32)
        segments = tuple(Segment(f"p{i}", 0, spec.numel) for i, spec in enumerate(specs_of(inputs[0])))
        bucket = Bucket("0", segments, specs_of(inputs[0]), member.scheme.traits.layout)
        first = [{"kept": torch.arange(3.0), **member.scheme.init(bucket, group)} for group in LocalGroup.world(size)]
        before = [
            ({k: v.clone() for k, v in state.items()}, copy_of(x)) for state, x in zip(first, inputs, strict=True)
        ]
        run(member, inputs, 1 / size, first)
        for state, x, (state_before, x_before) in zip(first, inputs, before, strict=True):
            assert state.keys() == state_before.keys()
            assert all(torch.equal(state[k], state_before[k]) for k in state)
            assert bits(x) == bits(x_before)

    @pytest.mark.parametrize("member", everyone, ids=name_of)
    def test_a_float16_sum_may_pass_the_range_that_its_mean_is_in(member: Member) -> None:
        size = largest_group(member)
        value = torch.full((4, 8), torch.finfo(torch.float16).max / 2, dtype=torch.float16)
        assert torch.isinf(size * value).all()
        flat = member.scheme.traits.layout is Layout.FLAT
        inputs = [value.flatten() if flat else (SparseRows(torch.arange(4), value, 4),) for _ in range(size)]
        for result in run(member, inputs, 1 / size).results:
            assert torch.equal((result if flat else result[0].values).flatten(), value.flatten())

    @pytest.mark.parametrize(
        ("member", "size"),
        [
            pytest.param(m, size, id=f"{name_of(m)}-{size}")
            for number, m in enumerate(everyone)
            for size in ((1, 2, 3, 8) if m in members else (3 + number % 2,) if not m.nested else (4,))
        ],
    )
    def test_values_that_are_not_finite_travel(member: Member, size: int) -> None:
        inputs = make_inputs(member.scheme, CASES[member.scheme.traits.layout][-1], size, torch.float32)
        last = inputs[-1] if member.scheme.traits.layout is Layout.FLAT else inputs[-1][0].values.view(-1)
        last[0], last[1] = float("nan"), float("inf")
        place = 0 if member.scheme.traits.layout is Layout.FLAT else int(inputs[-1][0].indices[0])
        for result in run(member, inputs, 1 / size).results:
            if member.scheme.traits.layout is Layout.FLAT:
                got = result
            else:
                got = result[0].values[result[0].indices.tolist().index(place)]
            assert torch.isnan(got[0])
            assert torch.isposinf(got[1])
            assert torch.isfinite(got[2:]).all()

    @pytest.mark.parametrize("member", [m for m in members if m.scheme.traits.layout is Layout.FLAT], ids=name_of)
    @given(
        size=st.integers(1, 4),
        numel=st.integers(0, 300),
        density=st.sampled_from([0.0, 0.02, 0.2, 1.0]),
        dtype=st.sampled_from(DTYPES),
        scale=st.sampled_from([1.0, 0.25, 1 / 3, -2.0, 0.0]),
        seed=st.integers(0, 2**32),
    )
    @settings(max_examples=60, deadline=None)
    def test_any_flat_bucket_gives_the_scaled_sum(
        member: Member, size: int, numel: int, density: float, dtype: torch.dtype, scale: float, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        dense, chosen = (draw(size, numel, generator=generator) for draw in (torch.randn, torch.rand))
        inputs = list(dense.to(dtype) * (chosen < density))  # the others are zeros of both signs
        outcome = run(member, inputs, scale)
        assert_is_scaled_sum(member, outcome.results, inputs, scale)
        assert all(bits(result) == bits(outcome.results[0]) for result in outcome.results)

    return {name: test for name, test in locals().items() if name.startswith("test_")}
