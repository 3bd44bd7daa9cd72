"""Records of `bench compress`, fitted costs, and tables are right, and errors equal those computed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from gradsync.cli import app
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.costs.cost_model import KernelCost
from gradsync.tensors.bucket import FlatSpec
from gradsync_lab.bench import compress
from gradsync_lab.bench.compress import (
    COMPRESS,
    MANY_BYTES,
    CompressSpec,
    break_even_ranks,
    equal_tensors,
    error_of,
    fitted,
    run_compress,
)
from gradsync_lab.report.compress import compress_tables, error_rows, size_in_words, size_of, time_rows
from gradsync_lab.report.record import Record, load_records, save_records
from lab.tests.bench.test_cli import unboxed

SIZES = (1 << 10, 1 << 14)


@pytest.fixture(scope="module", autouse=True)
def small_copy() -> Iterator[None]:
    """Makes the copy small, as its speed does not matter here."""
    with patch.object(compress, "COPY_BYTES", 1 << 16):
        yield


@pytest.fixture(scope="module")
def records() -> list[Record]:
    lstm = {"data": "zipf", "vocabulary": 2000, "num_negatives": 128, "batch_size": 8, "dim": 8, "hidden": 32}
    spec = CompressSpec(("topk0.1",), SIZES, 64, (1,), ("lstm",), lstm, training_steps=1, repeats=2)
    return run_compress(spec, lambda event: None)


def test_a_run_times_every_operation_at_every_size(records: list[Record]) -> None:
    timed = [r for r in records if r.metric == "kernel_s"]
    found = {(r.params["operation"], r.params["size_bytes"], r.params["tensors"]) for r in timed}
    operations = ("compress", "compress_with_feedback", "decompress", "decompress_8")
    buckets = [*((size, 1) for size in SIZES), (MANY_BYTES, 64)]
    assert found == {(operation, *bucket) for operation in operations for bucket in buckets}
    assert len(found) == len(timed)
    for r in timed:
        wire = TopK(0.1).nbytes(equal_tensors(r.params["size_bytes"] // 4, r.params["tensors"]))
        assert r.payload_bytes is not None and r.payload_bytes.subject == wire
        payloads = 8 if r.params["operation"] == "decompress_8" else 1
        assert r.params["moved_bytes"] == r.params["size_bytes"] + payloads * wire
        assert r.subject_s is not None and r.subject_s.median > 0 and r.environment["cores"] > 0


def test_costs_are_those_that_plans_look_up(records: list[Record]) -> None:
    costs = {r.params["operation"]: r.cost for r in records if r.cost is not None}
    assert {cost.kernel for cost in costs.values()} == {
        ErrorFeedback(TopK(0.1)).kernel(operation) for operation in ("compress", "decompress")
    }
    for cost in costs.values():
        assert cost.call_s > 0 or cost.byte_s > 0
        KernelCost(cost.call_s, cost.byte_s)


def test_a_fit_finds_call_and_byte() -> None:
    samples = [(n, 5e-6 + n * 2e-10) for n in (1e3, 1e5, 1e7, 1e8)]
    assert fitted(samples) == pytest.approx((5e-6, 2e-10))
    assert fitted([(n, n * 1e-9) for n in (1e3, 1e6)]) == pytest.approx((0.0, 1e-9), abs=1e-12)
    call_s, byte_s = fitted([(1e3, 2e-5), (1e6, 1e-5)])  # noise: no time is negative
    assert call_s >= 0 and byte_s >= 0


def test_errors_are_held_against_the_declared_law(records: list[Record]) -> None:
    x = torch.tensor([4.0, 3.0, 0.0, 0.0])
    error = error_of(TopK(0.25), FlatSpec.of(x), x)
    assert (error.law, error.declared, error.holds) == ("contraction", 0.25, True)
    assert error.relative == pytest.approx(3 / 5) and error.measured == pytest.approx(16 / 25)
    (real,) = [r for r in records if r.error is not None]
    assert real.error is not None and real.error.holds and real.params["workload"] == "lstm"
    assert 0 < real.error.relative < 0.9**0.5 and real.options["batch_size"] == 8


def test_an_error_beyond_the_law_is_marked(records: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    from gradsync.compressors import Contraction

    monkeypatch.setattr(TopK, "law", lambda self, spec: Contraction(0.9))
    x = torch.ones(100)
    broken = error_of(TopK(0.1), FlatSpec.of(x), x)
    assert broken.holds is False
    (real,) = [r for r in records if r.error is not None]
    _, ((_, *cells),) = error_rows([real.model_copy(update={"error": broken})])
    assert cells[0].endswith("(0.9) !")


def test_break_even_is_that_of_bits_an_element() -> None:
    flat = FlatSpec.of(torch.empty(1 << 20, device="meta"))
    bits = 8 * TopK(0.01).nbytes(flat) / flat.numel
    assert break_even_ranks(TopK(0.01), flat) == pytest.approx(32 / bits)


def test_records_survive_and_become_tables(records: list[Record], tmp_path: Path) -> None:
    save_records(records, tmp_path / "r.json")
    assert load_records(tmp_path / "r.json") == records
    headings, rows = time_rows(records)
    assert [row[2] for row in rows] == ["1 KB", "16 KB", "1 MB, 64 tensors"] and all(
        len(row) == len(headings) for row in rows
    )
    with (console := Console(width=200)).capture() as shown:
        console.print(compress_tables(records), compress_tables(records, compact=True))
    assert "topk0.1" in shown.get() and "error, lstm" in shown.get()


@pytest.mark.parametrize("text", ["1KB", "64 kb", "256MB", "12B"])
def test_sizes_are_read_as_they_are_written(text: str) -> None:
    assert size_of(size_in_words(size_of(text))) == size_of(text)
    assert size_of("64KB") == 1 << 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--compressors", "topq"), "unknown compressor 'topq'; there are bf16, "),
        (("--sizes", "1mile"), "a size must look like 64KB"),
        (("--threads", "none"), "--threads must look like"),
        (("--workload", "gptt"), "unknown workload 'gptt'"),
    ],
)
def test_wrong_options_of_compress_end_with_a_message(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "compress", *arguments])
    assert done.exit_code == 2 and message in unboxed(done.stderr)


def test_the_command_prints_records() -> None:
    arguments = ("--compressors", "topk0.1", "--sizes", "1KB,4KB", "--threads", "1", "--workload", "", "--quick")
    done = CliRunner().invoke(app, ["bench", "compress", *arguments, "--json", "-"])
    assert done.exit_code == 0, done.stderr
    made = json.loads(done.stdout)
    assert {r["subject"] for r in made} == {"topk0.1"} and COMPRESS in {r["params"]["operation"] for r in made}
