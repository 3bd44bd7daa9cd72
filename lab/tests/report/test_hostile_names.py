"""Pages, plots, tables and commands of the lab show names and errors as they are, whatever is in them."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import plotly.offline
import pytest
from hypothesis import HealthCheck, given, settings
from rich.console import Console
from typer.testing import CliRunner

from gradsync.cli import app
from gradsync.cli.console import LiteralConsole, beside, console, printable
from gradsync_lab.bench.rank import TOLD
from gradsync_lab.cli import bench, demo, lab
from gradsync_lab.cli.progress import event_bar
from gradsync_lab.cluster import LabUnavailableError
from gradsync_lab.report.balance import balance_table
from gradsync_lab.report.compress import compress_tables, loss_table
from gradsync_lab.report.page import figures, verdict, write_page
from gradsync_lab.report.planning import planning_table
from gradsync_lab.report.record import Record, TrainingRun, load_records, save_records
from gradsync_lab.report.tables import judgements, records_table, training_table
from gradsync_lab.report.trace import write_trace
from tests.hostile import FRAGMENTS, NAMES, SAMPLES, STEERING, elements, squeezed
from tests.terminals import terminal_as_stderr

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
TABLES: dict[str, tuple[str, Callable[..., Any]]] = {
    "records": ("*_train_*.json", records_table),
    "balance": ("*_balance.json", balance_table),
    "compress": ("*_compress.json", compress_tables),
    "converge": ("*_converge_*.json", loss_table),
    "planning": ("*_plan.json", planning_table),
}
ids = pytest.mark.parametrize("name", SAMPLES, ids=range(len(SAMPLES)))


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (console, beside):
        monkeypatch.setattr(each, "_width", 4000)


@pytest.fixture
def no_plotly_js(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have a word in place of plotly.js, of which each would hold megabytes."""
    monkeypatch.setattr(plotly.offline, "get_plotlyjs", lambda: "plotly")


def shown(name: str) -> str:
    return squeezed(printable(name.replace("\x07", "")))


def renamed(data: Any, name: str) -> Any:
    """Returns JSON data whose free texts, and names of settings, end in `name`; words of a fixed set stay."""
    fixed = {"case", "metric", "law", "kernel", "operation"}
    if isinstance(data, dict):
        return {key: value if key in fixed else renamed(value, name) for key, value in data.items()}
    if isinstance(data, list):
        return [renamed(each, name) for each in data]
    return f"{data}{name}" if isinstance(data, str) else data


def records_like(pattern: str, name: str) -> list[Record]:
    """Returns the first kept records of a kind with `name` at the end of all their texts."""
    data = json.loads(min(RESULTS.glob(pattern)).read_text(encoding="utf-8"))[:6]
    return [Record.model_validate(each) for each in renamed(data, name)]


def run_with(name: str) -> TrainingRun:
    """Returns a training run with `name` in everything that a user, a file or another library may have named."""
    spans = [{"name": "backward", "stream": "compute", "start_s": 0.0, "end_s": 0.02}]
    spans += [{"name": "push", "stream": "link", "start_s": 0.01, "end_s": 0.03, "nbytes": 3e5}]
    row = {"names": ["a", "b"], "scheme": "all_reduce", "sent_bytes": 3e5, "communication_s": 0.1, "exposed_s": 0.0}
    ran = {"step_s": [0.1, 0.2], "losses": [0.7, 0.6], "backward_s": 0.02, "exposed_s": 0.01, "samples_per_step": 8}
    ours = {"name": "gradsync", "plan": ["a -> all reduce"], "buckets": [row], "timeline": spans, **ran}
    spread = {"median": 0.4, "p5": 0.3, "p95": 0.5}
    record = {
        **{"case": "train", "metric": "step_s", "subject": "gradsync", "baseline": "ddp", "params": {"workload": "w"}},
        **{"repeats": 5, "subject_s": spread, "baseline_s": spread, "ratio": spread, "aa": spread},
    }
    texts = dict.fromkeys(("workload", "description", "source", "link", "commit", "command"), "text")
    pairs = {f"key{name}": "value"}
    return TrainingRun.model_validate(
        renamed(
            {
                **{**texts, "nodes": 2, "notes": ["note"], "records": [record]},
                **{"options": pairs, "environment": pairs, "versions": pairs},
                "methods": [{"name": "ddp", **ran}, {"name": "broken", "failed": "OSError: x"}, ours],
            },
            name,
        )
    )


def strings(data: Any) -> Iterator[str]:
    """Yields all texts in JSON data, keys included."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict | list | tuple):
        for each in data:
            yield from strings(each)
        if isinstance(data, dict):
            yield from strings(list(data.values()))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
@given(name=NAMES)
def test_the_page_has_the_same_elements_whatever_the_names(name: str, tmp_path: Path, no_plotly_js: None) -> None:
    pages = []
    for each in ("a", name):
        write_page(run_with(each), tmp_path / "page.html")
        pages.append(elements((tmp_path / "page.html").read_text(encoding="utf-8")))
    assert pages[0] == pages[1] and ("script",) in pages[0] and len(pages[0]) > 100


def test_the_check_sees_elements_and_attributes() -> None:
    assert elements("<p>a</p>") != elements("<p>a<b></b></p>") != elements("<p onclick=x>a</p>")
    assert elements("<script>'</script>'</script>") != elements("<script>'a'</script>")


@settings(max_examples=15)
@given(name=NAMES)
def test_labels_of_plots_have_no_elements_but_line_breaks(name: str) -> None:
    for title, hint, plot in figures(run_with(name)):
        for text in strings(json.loads(plot.to_json())["data"]):
            assert "<" not in text.replace("<br>", "").replace("<extra>", "").replace("</extra>", ""), title
        assert "<" not in hint


@ids
def test_traces_keep_names_as_data(name: str, tmp_path: Path) -> None:
    run = run_with(name)
    write_trace(run, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {each["name"] for each in events if each["ph"] == "X"} == {t.name for t in run.methods[-1].timeline}


def printed(table: Any, made: type[Console]) -> str:
    """Returns what a console of a class shows of a table, squeezed."""
    wide = made()
    wide.width, wide.file = 4000, io.StringIO()
    wide.print(table)
    return squeezed(wide.file.getvalue())


@pytest.mark.parametrize("made", [LiteralConsole, Console])
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("name", [each for each in FRAGMENTS if each.isprintable() and each.strip()])
def test_tables_show_names_on_any_console(name: str, kind: str, made: type[Console]) -> None:
    pattern, table = TABLES[kind]
    text = printed(table(records_like(pattern, name)), made)
    usual = printed(table(records_like(pattern, "hostile")), made)
    assert text.count(squeezed(name)) >= usual.count("hostile") > 0


@pytest.mark.parametrize("made", [LiteralConsole, Console])
@pytest.mark.parametrize("name", SAMPLES[:-1], ids=range(len(SAMPLES) - 1))
def test_the_table_of_a_run_shows_names_on_any_console(name: str, made: type[Console]) -> None:
    text = printed(training_table(run_with(name)), made)
    assert text.count(squeezed(name)) >= 4


def said(*words: object, code: int = 0) -> str:
    """Returns what a command says, squeezed, once checked for its exit code and for codes that steer a terminal."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, f"{done.output}\n{done.exception!r}"
    assert not STEERING.search(done.output), repr(done.output)
    return squeezed(done.output)


@ids
def test_the_demo_says_names_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_plotly_js: None
) -> None:
    monkeypatch.setattr(demo, "run_training", lambda spec, on_event: run_with(name))
    folder = tmp_path / "[" / "]"
    run = run_with(name)
    names_gradsync = any(method.name == "gradsync" for method in run.methods)
    text = said("demo", "--quick", "--workload", name, "--link", name, "--out", folder, code=0 if names_gradsync else 1)
    for each in (
        f"text{name}; data: text{name}",
        f"Whatgradsync{name}did",
        f"a -> all reduce{name}",
        f"Note: note{name}",
        verdict(run),
    ):
        assert shown(each) in text
    assert squeezed(f"Report: {folder / 'report.html'}") in text
    assert TrainingRun.model_validate_json((folder / "results.json").read_bytes()) is not None


@ids
def test_benchmarks_say_names_as_they_are(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(name)
    monkeypatch.setattr(bench, "run_training", lambda spec, on_event: run)
    file = tmp_path / "[" / "]"
    file.parent.mkdir()
    text = said("bench", "train", "--json", file)
    assert shown(f"Note: note{name}") in text and squeezed(f"Records: {file}") in text
    assert load_records(file) == run.records
    subject = run.records[0].subject
    ((_, judged),) = judgements(run.records, [(subject, 0.9)])
    monkeypatch.setattr(bench, "bounds_of", lambda texts, subjects: [(subject, 0.9)])
    assert shown(judged) in said("bench", "train", "--json", file)


@ids
def test_records_of_others_are_refused_by_their_names(name: str, tmp_path: Path) -> None:
    save_records(run_with(name).records, tmp_path / "records.json")
    done = CliRunner().invoke(
        app, ["bench", "reach", str(tmp_path / "records.json"), "--loss", "1", "--baseline", name]
    )
    assert done.exit_code == 2 and not STEERING.search(done.output), done.output


@ids
def test_bars_show_titles_and_events_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = terminal_as_stderr(monkeypatch)
    with event_bar(name, 2, name) as on_event:
        on_event({"method": name})
        on_event({"kind": TOLD, "text": name})
    written = re.sub(r"\x1b\[(\?25[lh]|\d*[AKm]|\d\S{0,8}?m)|\r", "", seen.getvalue())  # rich's own codes
    start, text = re.split(STEERING, name)[0], squeezed(written)  # a bar may have no room for all of a name
    assert text.count(squeezed(start)) >= 2 and not STEERING.search(written), repr(written)


@ids
def test_a_lab_that_is_not_there_is_told_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(scenario: object) -> None:
        raise LabUnavailableError(name)

    monkeypatch.setattr(lab, "Lab", refuse)
    for words in (("run", "--", "true"), ("check",)):
        assert shown(f"No lab: {name}") in said("lab", *words, code=2)
