"""The searches meet the reference tables, which other code computed."""

from __future__ import annotations

import pytest

from gradsync_lab.papers.reference import (
    COUNTS,
    CUTS,
    SEARCHES,
    WAYS,
    curves_table,
    cuts_table,
    released_table,
    searches_table,
    ways_table,
)
from gradsync_lab.papers.tables import Figure, Table

TRACED = ("vgg16", "lstm")  # models whose stated figures use the same gaps as here


def stated(table: Table, columns: tuple[str, ...]) -> list[Figure]:
    return [figure for figure in table.figures if figure.column in columns and figure.published is not None]


def test_searches_without_cuts_are_as_stated() -> None:
    figures = stated(searches_table(TRACED), SEARCHES)
    assert len(figures) == 3 * 6 + 6 + 2 * 4
    assert [figure.value for figure in figures] == pytest.approx([f.published for f in figures], abs=0.0051)


def test_cuts_alone_are_as_stated() -> None:
    table = cuts_table(TRACED)
    figures = stated(table, CUTS)
    assert [figure.value for figure in figures] == pytest.approx([f.published for f in figures], abs=0.051)
    counts = stated(table, ("best has", "25 MiB has"))
    assert [figure.value for figure in counts] == [figure.published for figure in counts]


def test_cuts_and_options_together_are_as_stated_and_certified() -> None:
    table = ways_table(TRACED)
    figures = stated(table, WAYS)
    assert len(figures) == len(TRACED) * 3 * len(WAYS)
    assert [figure.value for figure in figures] == pytest.approx([f.published for f in figures], abs=0.0051)
    assert all(0 <= figure.value < 1 for figure in table.figures if figure.column == "gap at most")


def test_a_modelled_trace_comes_near_what_is_stated_for_the_measured_one() -> None:
    for figure in stated(cuts_table(("resnet101",)), CUTS):
        assert figure.value == pytest.approx(figure.published, rel=0.01), figure


def test_a_curve_has_its_least_where_the_best_cuts_are() -> None:
    best = {figure.row: figure.value for figure in cuts_table(TRACED).figures if figure.column == "best"}
    curves = curves_table(TRACED)
    for model, value in best.items():
        counted = [f.value for f in curves.figures if f.row == model and f.column in map(str, COUNTS)]
        assert min(counted) == pytest.approx(value)
        assert curves.figure(model, "layer-wise").value >= value


def test_the_released_search_finds_two_buckets_and_loses_what_more_would_gain() -> None:
    table = released_table(("vgg16", "bert-base"))
    for model, probes in (("vgg16", 8), ("bert-base", 13)):
        assert table.figure(model, "released").value == pytest.approx(table.figure(model, "best 2").value, rel=1e-3)
        assert table.figure(model, "probes").value == probes
        assert table.figure(model, "best").value <= table.figure(model, "as published, to 4").value
    assert table.figure("bert-base", "loses").value == pytest.approx(25.7, abs=0.1)
