"""What people read shows what was measured, opens without a network, and says so when gradsync failed or was slower."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from gradsync.report.page import verdict, write_page
from gradsync.report.record import (
    BucketRow,
    MethodRun,
    Record,
    Spread,
    TimelineTask,
    TrainingRun,
    WireBytes,
    load_records,
    save_records,
)
from gradsync.report.tables import records_table, training_table
from gradsync.report.trace import write_trace

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr --v=0 --virtual-time-budget=8000 --dump-dom"
).split()


def method(name: str, step_ms: float, **more: object) -> MethodRun:
    times = [step_ms / 1e3 * (1 + 0.01 * (i % 3)) for i in range(12)]
    losses = [0.7 / (1 + 0.1 * i) for i in range(15)]
    final = {"loss": 0.31, "auc": 0.78}
    settings = {
        "samples_per_step": 4096,
        "interface_bytes_per_step": step_ms * 1e5,
        "backward_s": 0.02,
        "exposed_s": 0.01,
    }
    return MethodRun.model_validate(
        {"name": name, "step_s": times, "losses": losses, "final": final, **settings, **more}
    )


def training_run(gradsync_ms: float = 40.0, link: str = "1gbit") -> TrainingRun:
    ours = method(
        "gradsync",
        gradsync_ms,
        plan=["factors.weight (2.6% dense) -> balanced parallelism", "a <b> & c -> all reduce"],
        buckets=[
            BucketRow(
                names=["mlp.0.weight", "mlp.0.bias"],
                scheme="all_reduce",
                sent_bytes=3e5,
                predicted_bytes=3e5,
                communication_s=0.01,
                exposed_s=0.004,
            ),
            BucketRow(
                names=["factors.weight"],
                scheme="balanced_parallelism",
                sent_bytes=9e5,
                predicted_bytes=None,
                communication_s=0.02,
                exposed_s=0.01,
            ),
        ],
        timeline=[
            TimelineTask(name="backward", stream="compute", start_s=0.0, end_s=0.02),
            TimelineTask(name="0:all_reduce", stream="link", start_s=0.01, end_s=0.03, nbytes=3e5),
        ],
    )
    ratio = gradsync_ms / 100
    record = Record(
        case="train",
        metric="step_s",
        subject="gradsync",
        baseline="ddp_default",
        params={"workload": "deepfm"},
        repeats=5,
        subject_s=Spread.of([gradsync_ms / 1e3]),
        baseline_s=Spread.of([0.1]),
        ratio=Spread(median=ratio, p5=ratio * 0.9, p95=ratio * 1.1),
        aa=Spread(median=1.0, p5=0.97, p95=1.03),
        wire_bytes=WireBytes(subject=2e6, baseline=1e7),
    )
    broken = MethodRun(name="ddp_broken", failed="TypeError: BF16 [needs] CUDA")
    failed_record = record.model_copy(
        update={"subject": "ddp_broken", "ratio": None, "subject_s": None, "failed": "TypeError"}
    )
    return TrainingRun(
        workload="deepfm",
        description="DeepFM <small> & fast",
        source="nycflights13",
        nodes=4,
        link=link,
        methods=[method("ddp_default", 100.0), method("ddp_sparse", 60.0), broken, ours],
        records=[record, failed_record],
        environment={"cores": 2},
        versions={"torch": "2.13.0"},
        notes=["a note with <tags>"],
    )


def printed(table: object) -> str:
    console = Console(width=220, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def open_in_browser(page: Path, profile: Path) -> tuple[str, list[str]]:
    """(rendered page, console messages)."""
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def test_training_table_has_a_row_for_every_method_failed_ones_too() -> None:
    text = printed(training_table(training_run()))
    for expected in ("ddp_default", "ddp_sparse", "gradsync", "0.400 [0.360-0.440]", "median [p5-p95]", "0.970-1.030"):
        assert expected in text
    assert "failed: TypeError: BF16 [needs] CUDA" in text


def test_records_table_shows_ratio_noise_and_failures() -> None:
    text = printed(records_table(training_run().records))
    assert "0.400 [0.360-0.440]" in text and "1.000 [0.970-1.030]" in text and "failed: TypeError" in text


def test_verdict_comes_from_the_figures() -> None:
    assert verdict(training_run(40.0)).startswith("gradsync is faster than ddp_default: 0.400")
    assert "0.20 of its bytes" in verdict(training_run())
    assert verdict(training_run(130.0)).startswith("gradsync is slower than ddp_default: 1.300")
    assert "loopback" in verdict(training_run(link="loopback (not shaped)"))


def test_page_escapes_names_and_loads_nothing(tmp_path: Path) -> None:
    write_page(training_run(), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    outside_of_scripts = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "a &lt;b&gt; &amp; c" in outside_of_scripts and "DeepFM &lt;small&gt;" in outside_of_scripts
    assert not re.findall(r'(?:src|href)="(?!data:)[^"]*"', outside_of_scripts)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed: the page was not opened")
def test_page_renders_in_a_browser_without_console_messages(tmp_path: Path) -> None:
    write_page(training_run(), tmp_path / "report.html")
    rendered, messages = open_in_browser(tmp_path / "report.html", tmp_path / "profile")
    assert not messages
    assert rendered.count('class="main-svg"') >= 6, "every plot was drawn"


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed: the page was not opened")
def test_the_browser_check_sees_errors(tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text("<script>throw new Error('seen')</script>", encoding="utf-8")
    _, messages = open_in_browser(tmp_path / "bad.html", tmp_path / "profile")
    assert any("seen" in message for message in messages)


def test_page_without_timeline_buckets_or_baseline(tmp_path: Path) -> None:
    run = training_run()
    bare = run.model_copy(update={"methods": run.methods[:2], "records": []})
    write_page(bare, tmp_path / "report.html")
    assert "did not include gradsync" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_trace_has_a_process_a_method_and_a_thread_a_stream(tmp_path: Path) -> None:
    write_trace(training_run(), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"gradsync", "compute", "link"}
    (link,) = [event for event in events if event.get("name") == "0:all_reduce"]
    assert (link["ph"], link["ts"], round(link["dur"])) == ("X", 10_000.0, 20_000)


def test_records_survive_the_file(tmp_path: Path) -> None:
    records = training_run().records
    save_records(records, tmp_path / "records.json")
    assert load_records(tmp_path / "records.json") == records


def test_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        Spread.of([])
