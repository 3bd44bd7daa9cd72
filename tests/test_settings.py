"""Settings in plans are checked by type: a float is no whole number, nor is a bool, in any class."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, make_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import pytest

from gradsync.compressors import Compressor, Sign, TopK, Warmup
from gradsync.compressors.expressions import Nameable, registered
from gradsync.schemes import (
    AllReduce,
    CoarseGrained,
    CompressedAllGather,
    MajorityVote,
    PowerSGD,
    Scheme,
    Shuffled,
    ways,
)
from tests.compressors.family import MEMBERS, SHARES
from tests.schemes.family import ALL_MEMBERS

NAN = float("nan")
ROOT = Path(__file__).parents[1]
WRONG: dict[Any, tuple[Any, ...]] = {
    int: (2.0, True, "2", None, NAN),
    int | None: (2.0, True, "2", NAN),
    float: (True, "0.5", None, NAN, float("-inf")),
    float | None: (True, "0.5", NAN),
    bool: (1, "yes", None),
    str: (3, None, "nonsense"),
    Literal: (3, None, True, "nonsense"),
    Compressor: (3, None, "top_k", AllReduce()),
    Scheme: (3, None, "all_reduce", Sign()),
    tuple: (3, None, "word", (object(),)),
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
    annotations = get_type_hints(type(named))
    for setting in fields(named):
        outside = (0, 0.0, -0.5, 1.01, 2, float("inf")) if setting.name in SHARES else ()
        annotated = annotations[setting.name]
        for wrong in (*WRONG.get(get_origin(annotated), WRONG.get(annotated, ())), *outside):
            yield setting.name, wrong


def test_every_registered_class_is_among_them() -> None:
    assert {*NAMED} == {c for c in registered(Nameable).values() if c.__module__.startswith("gradsync.")}


@pytest.mark.parametrize("named", NAMED.values(), ids=lambda named: named.name)
def test_a_setting_of_a_wrong_type_or_no_share_is_refused(named: Nameable) -> None:
    assert_wrong_settings_are_refused(named)


def assert_wrong_settings_are_refused(named: Nameable) -> None:
    for setting, wrong in wrong_settings(named):
        try:
            replace(named, **{setting: wrong})
        except ValueError as error:
            assert setting in str(error)
        else:
            pytest.fail(f"{setting}={wrong!r} is taken")


@pytest.mark.parametrize("starts", [(0.0, 2), (False, 2), (0, "2"), (0, 2.5)])
def test_stages_of_a_warm_up_begin_at_whole_steps(starts: Any) -> None:
    stages: tuple[Compressor[Any], ...] = (TopK(0.5), TopK(0.1))
    with pytest.raises(ValueError, match=r"Warmup\.starts\.[01] must be a whole number"):
        Warmup(stages, starts)


def test_settings_are_held_to_types_that_are_no_texts_too() -> None:
    """Annotations are types where a module has no `from __future__ import annotations`."""
    mine = make_dataclass("Mine", [("levels", int)], bases=(Nameable,), frozen=True)
    mine.kind = "test"
    assert mine(levels=2).levels == 2
    for wrong in (2.5, True):
        with pytest.raises(ValueError, match=r"Mine\.levels must be a whole number"):
            mine(levels=wrong)


def test_settings_may_be_lists_and_expressions_as_json_has_them() -> None:
    read = Warmup([{"top_k": {"ratio": 0.5}}, TopK(1)], [0, 2])
    assert read == Warmup((TopK(0.5), TopK(1)), (0, 2)) and hash(read)
    assert repr(read.compressors[1]) == "TopK(ratio=1, values='same')", "whole numbers stay what digests tell them by"


def test_errors_in_what_a_setting_is_made_of_name_the_way_to_it() -> None:
    wrong: Any = {"error_feedback": {"compressor": {"top_k": {"ratio": 2}}}}
    with pytest.raises(ValueError) as caught:
        CompressedAllGather(wrong)
    way = "CompressedAllGather.compressor: ErrorFeedback.compressor: "
    assert str(caught.value) == f"{way}TopK.ratio must be in (0, 1], got 2"


def test_annotations_that_mean_nothing_at_run_time_are_told() -> None:
    lost = make_dataclass("Lost", [("levels", "Nowhere")], bases=(Nameable,), frozen=True)
    with pytest.raises(ValueError, match=r"annotations of Lost must be importable at run time: .*'Nowhere'"):
        lost(levels=2)


def test_validators_are_made_when_a_class_is_first_used() -> None:
    before = "import sys, gradsync.compressors as c, gradsync.inputs.settings as s; print('pydantic' in sys.modules); "
    after = "c.TopK(0.5); c.TopK(0.1); print(s._adapter.cache_info().currsize)"
    told = subprocess.run([sys.executable, "-c", before + after], check=True, capture_output=True, text=True)
    assert told.stdout.split() == ["False", "1"]


def test_members_are_imported_when_a_name_is_looked_up_or_taken() -> None:
    code = """if True:
        import sys
        from dataclasses import dataclass
        from gradsync import attach, Plan
        from gradsync.schemes.base import Scheme, from_expression, register

        @dataclass(frozen=True)
        class Mine(Scheme):
            name = "natural"

        print({"gradsync.schemes.powersgd", "gradsync.compressors.quantize"} & {*sys.modules})
        for call in (lambda: from_expression({"qsgd": {}}), lambda: register(Mine)):
            try:
                call()
            except ValueError as error:
                print(error)
        print(from_expression({"powersgd": {"rank": 2}}).rank)
    """
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.splitlines() == [
        "set()",
        "'qsgd' is a compressor, expected a scheme",
        "the scheme name 'natural' is taken by gradsync.compressors.quantize.Natural",
        "2",
    ]


@pytest.mark.parametrize("package", ["compressors", "schemes"])
def test_every_module_that_registers_a_class_is_imported_where_a_name_is_looked_up(package: str) -> None:
    folder = ROOT / "src" / "gradsync" / package
    stub = (folder / "__init__.pyi").read_text(encoding="utf-8")
    registering = [p.stem for p in folder.glob("*.py") if "\n@register\n" in p.read_text(encoding="utf-8")]
    assert len(registering) > 5 and all(f"from .{module} import" in stub for module in registering)


class Mode(Enum):
    """A setting of a user's own type."""

    FAST = "fast"


@pytest.mark.parametrize(
    ("annotation", "given", "written"),
    [
        (list[int], [1, 2], [1, 2]),
        (tuple[int, ...], [1, 2], (1, 2)),
        (Mode, "fast", Mode.FAST),
        (Mode | None, "fast", Mode.FAST),
        (dict[str, float], {"a": 1}, {"a": 1}),
    ],
    ids=str,
)
def test_settings_of_any_type_are_read_as_json_has_them(annotation: Any, given: Any, written: Any) -> None:
    mine = make_dataclass("Mine", [("setting", annotation)], bases=(Nameable,), frozen=True)
    read = mine(setting=given).setting
    assert (read, type(read)) == (written, type(written))
    assert repr(read) == repr(written), "whole numbers stay what digests tell them by"


def test_an_error_inside_of_a_union_names_no_branch_of_it() -> None:
    mine = make_dataclass("Mine", [("inner", TopK | int)], bases=(Nameable,), frozen=True)
    with pytest.raises(ValueError, match=r"^Mine\.inner: TopK\.ratio must be in"):
        mine(inner={"top_k": {"ratio": 2}})
