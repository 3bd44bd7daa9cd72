"""Pages and pictures say what the records say that they name; a template that names no record is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradsync_lab.report.figures import FIGURES, RESULTS, TEMPLATES, written
from gradsync_lab.report.record import Record, Spread, WireBytes, save_records

ROOT = Path(__file__).parents[3]


def test_the_figures_of_all_pages_are_those_of_their_records() -> None:
    """Write them anew by `gradsync bench figures`."""
    pages = written(ROOT)
    assert pages
    for page, text in pages.items():
        assert (ROOT / page).read_text(encoding="utf-8") == text, f"{page}: gradsync bench figures writes it"


def record(subject: str, ratio: float, **params: object) -> Record:
    return Record(
        case="train", metric="step_s", subject=subject, baseline="ddp", params=params, repeats=2,
        subject_s=Spread(median=0.0744, p5=0.07, p95=0.08), baseline_s=Spread(median=0.0051, p5=0.005, p95=0.006),
        ratio=Spread(median=ratio, p5=0.9, p95=1.2), aa=Spread(median=1.0, p5=0.974, p95=1.016),
        wire_bytes=WireBytes(subject=2.0e6, baseline=27.716e6),
    )  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Returns a folder with records, a page, and no templates."""
    for folder in (TEMPLATES, RESULTS):
        (tmp_path / folder).mkdir(parents=True)
    runs = [
        record("gradsync", 1.0549, steps=[3, 4, 5], baseline_steps=[4, 5, 6]),
        record("gradsync", 0.25, scenario="slow-node"),
        record("gradsync", 0.5, phase="pick"),
        record("twice", 0.5),
        record("twice", 0.6),
        record("cells", 0.7, workload="lstm", link="1gbit"),
        record("cells", 0.8, workload="lstm", link="200mbit"),
    ]
    save_records(runs, tmp_path / RESULTS / "run.json")
    (tmp_path / "page.md").write_text("Before.\n<!-- figures: part begin -->old<!-- figures: part end -->\nAfter.\n")
    return tmp_path


def with_template(root: Path, body: str, head: str = "page: page.md\nrun: run") -> str:
    (root / TEMPLATES / "part.md").write_text(f"{head}\n\n{body}\n")
    return written(root)[Path("page.md")]


def test_placeholders_become_figures_that_are_rounded_once(root: Path) -> None:
    shown = {figure: f"{{run gradsync {figure}}}" for figure in FIGURES}
    text = with_template(root, "; ".join(f"{name} {place}" for name, place in shown.items()))
    assert text == (
        "Before.\n<!-- figures: part begin -->\nratio 1.05 [0.90-1.20]; median 1.05; aa 0.97-1.02; ms 74; "
        "baseline_ms 5.1; mb 2.00; baseline_mb 27.7; steps 0.80\n<!-- figures: part end -->\nAfter.\n"
    )


def test_a_placeholder_may_name_baseline_scenario_workload_and_link(root: Path) -> None:
    assert "it is 0.25." in with_template(root, "it is {run gradsync/ddp@slow-node median}.")
    assert "it is 0.80." in with_template(root, "it is {run cells@lstm,200mbit median}.")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("{run gradsync/other ratio}", "names 0 records"),
        ("{other gradsync ratio}", "names 0 records"),
        ("{run twice ratio}", "names 2 records"),
        ("{run cells@lstm ratio}", "names 2 records"),
        ("{run gradsync seconds}", "one of the figures"),
        ("{run gradsync@slow-node steps}", "has no such figure"),
    ],
)
def test_a_placeholder_that_names_no_figure_is_refused(root: Path, place: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        with_template(root, place)


def test_a_page_without_the_part_is_refused(root: Path) -> None:
    (root / "page.md").write_text("nothing\n")
    with pytest.raises(ValueError, match="has no part for part"):
        with_template(root, "text")


def test_a_file_that_is_no_template_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="the first 'page: PAGE.md'"):
        with_template(root, "text", head="run: run")


def with_picture(root: Path, body: str) -> str:
    (root / TEMPLATES / "bars.md").write_text(f"page: bars.svg\nrun: run\n\n{body}\n")
    return written(root)[Path("bars.svg")]


def test_a_picture_has_bars_as_long_as_the_medians_of_its_records(root: Path) -> None:
    drawn = with_picture(root, "Steps\nDDP: {run gradsync baseline_s}\ngradsync, new: {run gradsync subject_s}\nof two")
    assert "<title>Steps</title>" in drawn and all(f">{words}</text>" in drawn for words in ("5 ms", "74 ms", "of two"))
    base, mine = (float(width) for width in re.findall(r'<rect x="170" .*?width="([\d.]+)"', drawn))
    assert mine / base == pytest.approx(0.0744 / 0.0051, rel=0.01)
    ends = [float(x) - 170 for x in re.findall(r'<polyline points="([\d.]+),[\d.]+ \1,', drawn)]
    assert [each / mine for each in ends[2:4]] == pytest.approx([0.07 / 0.0744, 0.08 / 0.0744], rel=0.01)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("Steps\nDDP: {run gradsync ms}", "one of the figures subject_s, baseline_s"),
        ("Steps\nDDP: {run other subject_s}", "names 0 records"),
        ("Steps\nDDP: 5 ms", "for each bar"),
    ],
)
def test_a_picture_without_the_times_of_records_is_refused(root: Path, body: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        with_picture(root, body)
