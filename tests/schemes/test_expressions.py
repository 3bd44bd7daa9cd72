"""Plans name schemes by expressions: trees of registered names and numbers, never import paths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from gradsync.comm import Group
from gradsync.compressors import expressions
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import Step
from gradsync.schemes import (
    AllReduce,
    BalancedParallelism,
    Route,
    Scheme,
    Shuffled,
    State,
    Traits,
    from_expression,
    register,
    registered,
    to_expression,
)
from gradsync.schemes.compressed import Compressed
from gradsync.tensors.bucket import Layout, TensorSpec
from gradsync.tensors.density import DensityProfile


@dataclass(frozen=True)
class EveryOther(Scheme[Tensor]):
    """A user's own scheme around another one: sends in every `period`-th round only."""

    inner: Scheme[Tensor]
    period: int = 2
    traits = Traits(Layout.FLAT)

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"EveryOther.period must be at least 1, got {self.period}")

    def stages(self, size: int) -> tuple[str, ...]:
        return self.inner.stages(size)

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        return await self.inner.synchronize(x, state, group, scale)

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        return () if step % self.period else self.inner.steps(specs, profiles, placement, step)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Schemes registered by a test are forgotten after it."""
    monkeypatch.setattr(expressions, "_registry", dict(expressions._registry))
    yield


# Those that must be told of a compressor, a route or a schedule are held to the same in their own tests.
BY_THEMSELVES = [
    kind()
    for kind in registered().values()
    if kind.__module__.startswith("gradsync.") and not issubclass(kind, Compressed | Route | Shuffled)
]


@pytest.mark.parametrize("scheme", BY_THEMSELVES, ids=lambda s: s.name)
def test_expressions_return_to_the_scheme_they_came_from(scheme: Scheme[Any]) -> None:
    assert from_expression(to_expression(scheme)) == scheme


def test_names_are_those_that_plans_on_disk_use() -> None:
    assert {"all_reduce", "agsparse", "balanced_parallelism"} <= set(registered())


@pytest.mark.usefixtures("registry")
def test_a_registered_scheme_of_the_user_is_named_in_snake_case_with_its_settings() -> None:
    register(EveryOther)
    scheme = EveryOther(AllReduce(), period=3)
    expression = to_expression(scheme)
    assert expression == {"every_other": {"inner": {"all_reduce": {}}, "period": 3}}
    assert from_expression(expression) == scheme
    assert from_expression({"every_other": {"inner": {"all_reduce": {}}}}).period == 2


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("all_reduce", r'a scheme is written \{"name": \{settings\}\}, got \'all_reduce\''),
        (None, "a scheme is written"),
        ({}, "a scheme is written"),
        ({"all_reduce": {}, "agsparse": {}}, "a scheme is written"),
        ({"rumour": {}}, "unknown scheme 'rumour'; there are agsparse, all_reduce, balanced_.*, every_other"),
        ({"all_reduce": {"chunks": 2}}, "scheme 'all_reduce' has no setting 'chunks'; it has none"),
        ({"every_other": {"inner": {"all_reduce": {}}, "rounds": 2}}, "no setting 'rounds'; it has inner, period"),
        ({"all_reduce": []}, "settings of scheme 'all_reduce' must be an object, got \\[\\]"),
        ({"all_reduce": None}, "must be an object, got None"),
        ({"every_other": {}}, "scheme 'every_other': .*missing .* 'inner'"),
        ({"every_other": {"inner": {"rumour": {}}}}, "unknown scheme 'rumour'"),
        ({"every_other": {"inner": 3}}, r"EveryOther\.inner must be a scheme .* got 3"),
        ({"every_other": {"inner": {"all_reduce": {}}, "period": 0}}, "period must be at least 1, got 0"),
    ],
)
def test_expressions_that_name_nothing_are_refused_with_what_there_is(expression: Any, message: str) -> None:
    register(EveryOther)
    with pytest.raises(ValueError, match=message):
        from_expression(expression)


@pytest.mark.usefixtures("registry")
def test_a_taken_name_is_refused() -> None:
    class Impostor(AllReduce):
        name = "all_reduce"

    with pytest.raises(ValueError, match=r"'all_reduce' is taken by gradsync\.schemes\.dense\.AllReduce"):
        register(Impostor)
    assert registered()["all_reduce"] is AllReduce
    assert register(AllReduce) is AllReduce, "the same class may register again"


@pytest.mark.usefixtures("registry")
def test_a_scheme_must_be_a_dataclass() -> None:
    class Plain(Scheme[Tensor]):
        pass

    with pytest.raises(ValueError, match=r"must be a \(frozen\) dataclass, Plain is not"):
        register(Plain)
    assert "plain" not in registered()


@pytest.mark.usefixtures("registry")
def test_a_scheme_that_is_not_registered_has_no_expression() -> None:
    @dataclass(frozen=True)
    class Louder(AllReduce):
        factor: float = 2.0

    with pytest.raises(ValueError, match="Louder is not registered"):
        to_expression(Louder())
    with pytest.raises(ValueError, match="EveryOther is not registered"):
        to_expression(EveryOther(AllReduce()))
    register(EveryOther)
    with pytest.raises(ValueError, match="Louder is not registered"):
        to_expression(EveryOther(Louder()))


def test_settings_with_several_numbers_survive_json() -> None:
    scheme = BalancedParallelism(capacity=(40, 40, 7), same_rows=(0, 0, 2))
    written = json.dumps(to_expression(scheme))
    assert json.loads(written) == to_expression(scheme)
    assert from_expression(json.loads(written)) == scheme
    assert scheme.stages(4) == ("push", "pull")
    assert from_expression({"balanced_parallelism": {}}).stages(4) == ("sizes", "push", "pull")


@pytest.mark.parametrize(
    ("capacity", "same_rows", "message"),
    [
        ([4, -1], [0, 1], r"capacity\.1 must be at least 0, got -1"),
        ([4, 1.5], [0, 1], r"capacity\.1 must be a whole number, got 1\.5"),
        ([True], [0], r"capacity\.0 must be a whole number, got True"),
        (7, [0], "capacity must be a list, got 7"),
        ([7], "0", "same_rows must be a list, got '0'"),
        ([4, 5], [0], "capacity has 2 tables, same_rows 1; give both for every table of the bucket, or neither"),
        ([4], [], "capacity has 1 tables, same_rows 0"),
        ([4, 5], [1, 1], r"the first table with the same rows, got 1 for table 0 of \[1, 1\]"),
        ([4, 5], [0, 2], r"the first table with the same rows, got 2 for table 1"),
        ([4, 5, 6], [0, 0, 1], r"the first table with the same rows, got 1 for table 2 of \[0, 0, 1\]"),
    ],
)
def test_a_capacity_that_makes_no_sense_is_refused(capacity: Any, same_rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_expression({"balanced_parallelism": {"capacity": capacity, "same_rows": same_rows}})
