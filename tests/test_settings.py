"""Settings in plans are checked by type: a float is no whole number, nor is a bool, in any class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, make_dataclass, replace
from typing import Any

import pytest

from gradsync.compressors import Compressor, Sign, TopK, Warmup
from gradsync.compressors.expressions import Nameable, registered
from gradsync.schemes import CoarseGrained, MajorityVote, PowerSGD, Shuffled, ways
from tests.compressors.family import MEMBERS, SHARES
from tests.schemes.family import ALL_MEMBERS

NAN = float("nan")
WRONG: dict[str, tuple[Any, ...]] = {
    "int": (2.0, True, "2", None, NAN),
    "float": (True, "0.5", None, NAN, float("-inf")),
    "float | None": (True, "0.5", NAN),
    "bool": (1, "yes", None),
    "str": (3, None, "nonsense"),
}
NAMED: dict[type[Nameable], Nameable] = {
    type(named): named
    for named in (
        *(member.compressor for member in MEMBERS.values()),
        *(member.scheme for member in ALL_MEMBERS),
        *(way for compressor in (TopK(0.1), MEMBERS["bfloat16"].compressor) for way in ways(compressor)),
        MajorityVote(Sign()),
        PowerSGD(),
        CoarseGrained(),
        Shuffled((((0, 1),),)),
    )
}


def wrong_settings(named: Nameable) -> Iterator[tuple[str, Any]]:
    for setting in fields(named):  # type: ignore[arg-type]
        outside = (0, 0.0, -0.5, 1.01, 2, float("inf")) if setting.name in SHARES else ()
        for wrong in (*WRONG.get(str(setting.type), ()), *outside):
            yield setting.name, wrong


def test_every_registered_class_is_among_them() -> None:
    assert {*NAMED} == {c for c in registered(Nameable).values() if c.__module__.startswith("gradsync.")}


@pytest.mark.parametrize("named", NAMED.values(), ids=lambda named: named.name)
def test_a_setting_of_a_wrong_type_or_no_share_is_refused(named: Nameable) -> None:
    assert_wrong_settings_are_refused(named)


def assert_wrong_settings_are_refused(named: Nameable) -> None:
    for setting, wrong in wrong_settings(named):
        try:
            replace(named, **{setting: wrong})  # type: ignore[type-var]
        except ValueError as error:
            assert setting in str(error)
        else:
            pytest.fail(f"{setting}={wrong!r} is taken")


@pytest.mark.parametrize("starts", [(0.0, 2), (False, 2), (0, "2"), (0, 2.5)])
def test_stages_of_a_warm_up_begin_at_whole_steps(starts: Any) -> None:
    stages: tuple[Compressor[Any], ...] = (TopK(0.5), TopK(0.1))
    with pytest.raises(ValueError, match=r"Warmup\.starts must be"):
        Warmup(stages, starts)


def test_settings_are_held_to_types_that_are_no_texts_too() -> None:
    """Annotations are types where a module has no `from __future__ import annotations`."""
    mine = make_dataclass("Mine", [("levels", int)], bases=(Nameable,), frozen=True)
    mine.kind = "test"
    assert mine(levels=2).levels == 2
    for wrong in (2.5, True):
        with pytest.raises(ValueError, match=r"Mine\.levels must be a whole number"):
            mine(levels=wrong)
