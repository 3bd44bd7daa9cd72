"""Command-line options have the type that the workload declares, reach every rank, and are in the records."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from gradsync.cli import app
from gradsync_lab import workloads
from gradsync_lab.bench.options import parse_options
from gradsync_lab.bench.sync import SyncSpec
from gradsync_lab.bench.train import TrainSpec, run_training
from gradsync_lab.cli import bench
from gradsync_lab.report.record import Record, TrainingRun
from gradsync_lab.workloads import Dense160

SMALL_LSTM = ("data=zipf", "vocabulary=2000", "num_negatives=128", "negatives=shared", "batch_size=8", "dim=8")


@dataclass(frozen=True, kw_only=True)
class Typed(Dense160):
    """A workload with an option of each type."""

    name: ClassVar[str] = "typed"

    flag: bool = False
    word: str = "a"


@pytest.fixture(autouse=True)
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(workloads._WORKLOADS, "typed", Typed)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("flag=true", True),
        ("flag=0", False),
        ("batch_size=32", 32),
        ("learning_rate=1e-2", 0.01),
        ("learning_rate=2", 2.0),
        ("word=12", "12"),
        ("word=a=b", "a=b"),
        ("word=", ""),
        (" batch_size = 7 ", 7),
    ],
)
def test_a_value_has_the_type_that_the_workload_declares(text: str, value: object) -> None:
    (got,) = parse_options(["typed"], [text]).values()
    assert got == value and type(got) is type(value)
    spec = TrainSpec(workload="typed", options=parse_options(["typed"], [text]))
    (travelled,) = TrainSpec.model_validate_json(spec.model_dump_json()).options.values()
    assert travelled == value and type(travelled) is type(value)


OF_TYPED = r"\. Options of typed: batch_size \(int, 768\), learning_rate \(float, 0.01\), flag \(bool, False\), word "


@pytest.mark.parametrize(
    ("names", "texts", "message"),
    [
        (["typed"], ["flag"], r"an option must look like NAME=VALUE, got 'flag'" + OF_TYPED),
        (["typed"], ["=3"], r"an option must look like NAME=VALUE, got '=3'" + OF_TYPED),
        (["typed"], ["word=a", "word=b"], "option 'word' is given twice" + OF_TYPED),
        (["typed"], ["wrod=a"], "workload 'typed' has no option 'wrod'" + OF_TYPED),
        (["typed"], ["batch_size=many"], "option 'batch_size' of 'typed' must be int, got 'many'" + OF_TYPED),
        (["typed"], ["batch_size=1.5"], "option 'batch_size' of 'typed' must be int, got '1.5'" + OF_TYPED),
        (["typed"], ["flag=maybe"], "option 'flag' of 'typed' must be bool, got 'maybe'" + OF_TYPED),
        (["typed"], ["batch_size=0"], "batch_size must be at least 1, got 0" + OF_TYPED),
        (["typed"], ["learning_rate=inf"], "learning_rate must be positive and finite, got inf" + OF_TYPED),
        (["lstm"], ["negatives=mine"], "negatives must be own or shared, got 'mine'. Options of lstm: .*negatives"),
        (["typed", "lstm"], ["unroll=3"], "workload 'typed' has no option 'unroll'.*; of lstm: .*unroll .int, 20"),
        (["typed", "lstm"], ["hidden=3"], "workload 'typed' has no option 'hidden'"),
        (["tiped"], [], "unknown workload 'tiped'; expected one of deepfm, lstm"),
    ],
)
def test_what_is_wrong_is_said_with_the_options_there_are(names: list[str], texts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_options(names, texts)


def test_an_option_that_all_workloads_have_is_given_to_each() -> None:
    assert parse_options(["deepfm", "lstm"], ["dim=8", "data=zipf"]) == {"dim": 8, "data": "zipf"}


@pytest.mark.parametrize("command", ["train", "sync"])
def test_options_of_the_command_line_are_in_the_specification(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[Any] = []

    def noting(spec: Any, on_event: object) -> Any:
        specs.append(spec)
        raise RuntimeError("nothing needs to run")

    monkeypatch.setattr(bench, "run_training", noting)
    monkeypatch.setattr(bench, "run_sync", noting)
    asked = ["--option", "negatives=shared", "--option", "dim=32"]
    CliRunner().invoke(app, ["bench", command, "--workload", "lstm", *asked])
    assert specs[0].options == {"negatives": "shared", "dim": 32}


def test_the_row_length_is_the_option_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["bench", "train", "--option", "dim=8", "--row-length", "8"])
    assert done.exit_code == 2 and "'dim' is given twice" in " ".join(done.output.split())
    specs: list[TrainSpec] = []
    monkeypatch.setattr(bench, "run_training", lambda spec, on_event: specs.append(spec))
    CliRunner().invoke(app, ["bench", "train", "--row-length", "8"])
    assert specs[0].options == {"dim": 8}


@pytest.mark.parametrize("command", ["train", "sync"])
def test_the_help_names_the_options_of_every_workload(command: str) -> None:
    done = CliRunner().invoke(app, ["bench", command, "--help"], env={"COLUMNS": "1600"})
    for name in workloads.names():
        if name != "typed":
            options = ", ".join(workloads.declared_options(workloads.kind_of(name)))
            assert re.search(rf"{name}: {options}\.", " ".join(done.output.split())), name


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.timeout(100)
def test_a_training_run_has_the_options_and_the_perplexity_of_both_methods() -> None:
    options = parse_options(["lstm"], SMALL_LSTM)
    spec = TrainSpec(
        workload="lstm", options=options, methods=("ddp_sparse_default", "agsparse"), nodes=2, repeats=2, block_steps=2,
        warmup_steps=1, loopback=True,
    )  # fmt: skip
    run = run_training(spec, lambda event: None)
    assert [m.failed for m in run.methods] == [None, None]
    assert "128 shared negatives" in run.description
    (record,) = run.records
    assert record.options == run.options
    assert {**record.options, "data": "zipf"} == {**record.options, **options}
    assert (record.options["unroll"], record.options["source"]) == (20, "zipf"), "defaults too"
    assert (record.params["negatives"], record.params["vocabulary"]) == ("shared", 2000)
    for final in (record.loss, record.baseline_loss):
        assert final is not None and final["perplexity"] == pytest.approx(2.718281828 ** final["loss"])
        assert 100 < final["perplexity"] < 3000
    assert record.loss == pytest.approx(record.baseline_loss, rel=1e-4), "the same mean, so the same words are likely"


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.timeout(100)
def test_an_exchange_has_the_options_in_the_records_of_its_workload(tmp_path: Any) -> None:
    file = tmp_path / "records.json"
    asked = [word for text in SMALL_LSTM for word in ("--option", text)]
    command = ["bench", "sync", "--workload", "lstm", "--nodes", "2", "--quick", "--loopback", "--json", str(file)]
    done = CliRunner().invoke(app, [*command, *asked])
    assert done.exit_code == 0, done.output
    records = [Record.model_validate(row) for row in json.loads(file.read_text(encoding="utf-8"))]
    of_lstm = [record for record in records if record.params.get("workload") == "lstm"]
    assert of_lstm and len(of_lstm) < len(records)
    for record in records:
        known = record in of_lstm
        assert record.options.get("negatives") == record.params.get("negatives") == ("shared" if known else None)
        assert record.options.get("hidden") == (256 if known else None)
    rows = [density for record in of_lstm for density in record.params["density"]]
    assert 0 < min(rows) < max(rows) < 0.2, "2000 words"


def test_records_and_runs_from_before_options_are_read() -> None:
    old = {"case": "train", "metric": "step_s", "subject": "a", "baseline": "b", "params": {"dim": 8}, "repeats": 5}
    record = Record.model_validate({**old, "subject_s": None, "baseline_s": None, "ratio": None, "aa": None})
    assert record.options == {} and record.baseline_loss is None
    run = {"workload": "w", "description": "d", "source": "s", "nodes": 2, "link": "l", "methods": [], "records": []}
    assert TrainingRun.model_validate(run).options == {}
    assert SyncSpec.model_validate({"workloads": ["deepfm"]}).options == {}
