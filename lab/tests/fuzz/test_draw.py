"""Cases are drawn from a seed, are possible, and meet every registered scheme and compressor."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch

from gradsync.compressors import Compressor
from gradsync.schemes import Scheme, to_expression
from gradsync.tensors.bucket import Bucket, Layout, Segment, TensorSpec
from gradsync_lab.fuzz import settings
from gradsync_lab.fuzz.case import Case
from gradsync_lab.fuzz.draw import drawn
from gradsync_lab.fuzz.settings import Place, drawn_scheme, families
from gradsync_lab.fuzz.shrink import is_possible

SEEDS = range(60)


def names_in(value: Any) -> Iterator[str]:
    """Yields the names of schemes and compressors in an expression, at any depth."""
    known = {name for family in families().values() for name in family}
    if isinstance(value, dict):
        for key, each in value.items():
            if key in known and isinstance(each, dict):
                yield key
            yield from names_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from names_in(each)


def place(rng: Random) -> Place:
    size = rng.randint(1, 5)
    specs = tuple(TensorSpec((8, dim), torch.float32) for dim in (4, 3))
    segments = tuple(Segment(f"p{number}", 0, spec.numel) for number, spec in enumerate(specs))
    layout = rng.choice(list(Layout))
    return Place(Bucket("0", segments, specs, layout), size, rng.choice([n for n in (1, 2) if size % n == 0]))


def test_a_seed_always_gives_the_same_case_and_json_keeps_it() -> None:
    for seed in SEEDS:
        case = drawn(seed)
        assert drawn(seed) == case == Case.from_json(case.to_json())
        assert case.seed == seed


def test_cases_are_what_attach_promises_to_take() -> None:
    assert all(is_possible(drawn(seed)) for seed in SEEDS)


def test_cases_differ_in_everything() -> None:
    cases = [drawn(seed) for seed in range(400)]
    for name in Case.model_fields:
        assert len({repr(getattr(case, name)) for case in cases}) > 1, name
    parts = [part for case in cases for part in case.parts]
    for name in type(parts[0]).model_fields:
        assert len({getattr(part, name) for part in parts}) > 1, name
    assert {case.frontend for case in cases} == {"engine", "attach", "ddp_hook", "class"}
    assert {case.size for case in cases if case.world == "processes"} == {1, 2, 3, 4, 5}


def test_every_registered_scheme_and_compressor_is_drawn() -> None:
    met: set[str] = set()
    expected = {name for family in (Scheme, Compressor) for name in families()[family]}
    for seed in range(4000):
        rng = Random(seed)
        where = place(rng)
        scheme = drawn_scheme(rng, where, mixes=where.bucket.layout is Layout.FLAT and seed % 10 == 0)
        met.update(names_in(to_expression(scheme)))
        if met == expected:
            return
    raise AssertionError(f"never drawn: {sorted(expected - met)}")


def test_a_setting_that_no_rule_draws_says_so() -> None:
    with pytest.raises(TypeError, match="no rule draws a setting of the type <class 'complex'>"):
        settings._value(complex, Random(0), place(Random(0)), 1)
