"""The imbalance of owner maps is Zen's, is measured on the maps' own output, and is within the promised bounds."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from gradsync import kernels
from gradsync.characterization.statistics import Estimate
from gradsync.cli import app
from gradsync.schemes.tables import single_groups
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.sparse import SparseRows
from gradsync_lab.bench.balance import (
    BASELINE,
    BalanceSpec,
    Gradient,
    computed,
    hashed,
    of_tables,
    pull_imbalance,
    push_imbalance,
    run_balance,
)
from gradsync_lab.bench.patterns import PATTERNS, UNIT
from gradsync_lab.bench.topk import load
from gradsync_lab.report.balance import balance_rows, balance_table
from gradsync_lab.report.record import Imbalance, Record, load_records, save_records
from lab.tests.bench.test_cli import unboxed

EVEN = Imbalance(push=Estimate(value=1.0), pull=Estimate(value=1.0))
TINY = ("bench", "balance", "--workload", "", "--elements", str(UNIT), "--ranks", "4", "--repeats", "2")


def table(rows: int, dim: int, *of_ranks: list[int]) -> Gradient:
    spec = TensorSpec((rows, dim), torch.float32)
    return Gradient((spec,), tuple((torch.tensor(touched),) for touched in of_ranks), single_groups((spec,)))


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Returns records over enough draws that 0.01 is more than three standard errors of the compared figures."""
    return run_balance(BalanceSpec((), elements=4 * UNIT, ranks=(8,), repeats=40), lambda event: None)


def test_imbalance_is_that_of_the_worst_rank_and_of_the_union() -> None:
    flat = table(8, 1, [0, 7], [1, 2, 4], [0, 1])
    assert push_imbalance(flat, "even_split", 2, 0) == 2.0  # the last rank has nothing for the second owner
    assert pull_imbalance(flat, "even_split", 2, 0) == 2 * 3 / 5  # 0, 1, 2 of 0, 1, 2, 4, 7
    assert push_imbalance(flat, "even_split", 4, 0) == 4.0
    assert push_imbalance(table(8, 1, []), "rotated_stripe", 2, 0) == 1.0


def test_the_baselines_owners_are_those_of_hierarchical_hashing() -> None:
    indices = torch.arange(0, 100_000, 3)
    found = kernels.hierarchical_hash(indices, 7, slots=2 * len(indices), serial=len(indices), seed=5)
    assert len(found.overflow) == 0
    assert list(hashed(indices, 100_000, 7, 5)) == [len(owned) for owned in found.owned]


def test_a_column_stripe_is_even_where_owners_divide_the_columns() -> None:
    rows = [0, 1, 2, 3, 9]
    for dim, n in [(64, 8), (64, 64), (12, 3)]:
        assert push_imbalance(table(10, dim, rows), "column_stripe", n, 0) == 1.0
        assert pull_imbalance(table(10, dim, rows), "column_stripe", n, 0) == 1.0
    assert push_imbalance(table(10, 16, rows), "column_stripe", 128, 0) == 8.0  # most owners have no column


def test_columns_that_all_owners_sum_are_pushed_to_each_and_pulled_from_none() -> None:
    indices, width = torch.tensor([3, 5, 8]), (16, 1)
    gradient = of_tables([tuple(SparseRows(indices, torch.ones(3, dim), 10) for dim in width)] * 2)
    assert len(gradient.groups) == 1  # of 17 columns, 2 for each of 8 owners, and one for all
    assert push_imbalance(gradient, "column_stripe", 8, 0) == 8 * 3 / 17
    assert pull_imbalance(gradient, "column_stripe", 8, 0) == 8 * 2 / 17


def test_rotated_stripes_are_as_even_as_the_papers_hash(records: list[Record]) -> None:
    of_flat = [r for r in records if r.subject == "rotated_stripe" and not r.params["gradient"].startswith("table")]
    assert len(of_flat) == 8
    for record in of_flat:
        assert record.balance is not None
        assert record.balance.excess.push.value <= 0.01, record.params


def test_every_table_of_a_run_is_even_by_columns(records: list[Record]) -> None:
    found = [r.balance.subject for r in records if r.subject == "column_stripe" and r.balance]
    assert found == [EVEN, EVEN]


def test_an_even_split_bears_columns_and_no_regions(records: list[Record]) -> None:
    found = {r.params["gradient"]: r.balance.subject for r in records if r.subject == "even_split" and r.balance}
    assert found["20 hot columns of 2048"] == EVEN
    assert found["dense first hundredth"].push.value == found["dense first hundredth"].pull.value == 8
    assert found["fused bucket"].push.value > 4 and found["Zipf rows of 16"].push.value > 4


def test_figures_follow_from_the_seed(records: list[Record]) -> None:
    def figures(seed: int) -> list[object]:
        found = run_balance(BalanceSpec((), elements=UNIT, ranks=(4,), repeats=2, seed=seed), lambda event: None)
        return [(record.params, record.balance, record.ratio, record.aa) for record in found]

    assert figures(1) == figures(1) != figures(2)


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_touch_a_hundredth_in_order(name: str) -> None:
    pattern, rows = PATTERNS[name], 4 * UNIT // PATTERNS[name].dim
    first, second = (pattern.draw(rows, torch.Generator().manual_seed(seed)) for seed in (1, 2))
    assert first.dtype == torch.int64 and 0 <= first[0] and first[-1] < rows
    assert (first.diff() > 0).all()
    assert torch.equal(first, second) == pattern.alike
    expected = 1 / 2048 if name.startswith("one") else 0.01
    assert 0.6 * expected < len(first) / rows < 1.6 * expected


def test_what_topk_leaves_is_shared_out_by_element() -> None:
    workload = load("topk", data="zipf", batch_size=2, dim=64, context=8, ratio=0.02, feedback_steps=0)
    first, second = islice(computed(workload, 2, 0), 2)
    assert first.is_flat and len(first.ranks) == 2
    assert first.density == pytest.approx(0.02, rel=0.01)
    assert not torch.equal(first.ranks[0][0], second.ranks[0][0])  # of another step
    assert 1 < push_imbalance(first, BASELINE, 2, 0) < 1.3


def test_a_workloads_tables_are_shared_out_together() -> None:
    spec = BalanceSpec(("deepfm",), {"data": "zipf", "batch_size": 64}, UNIT, (2,), 2)
    of_deepfm = [r for r in run_balance(spec, lambda event: None) if r.params["gradient"] == "deepfm"]
    assert [r.subject for r in of_deepfm] == ["even_split", "rotated_stripe", "column_stripe"]
    assert all(r.params["elements"] == (1 << 18) * 17 and r.options["batch_size"] == 64 for r in of_deepfm)
    stripe = of_deepfm[-1].balance
    assert stripe is not None and stripe.subject.push.value == pytest.approx(2 * 9 / 17)


def test_a_workload_of_dense_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="'dense160' has no sparse gradients"):
        run_balance(BalanceSpec(("dense160",), {"batch_size": 2}, UNIT, (2,), 2), lambda event: None)


def test_the_command_prints_records_that_load_again(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*TINY, "--json", "-"])
    assert done.exit_code == 0, done.output
    found = [Record.model_validate(row) for row in json.loads(done.stdout)]
    assert {r.params["gradient"] for r in found} == set(PATTERNS) and {r.metric for r in found} == {"imbalance"}
    save_records(found, tmp_path / "records.json")
    assert load_records(tmp_path / "records.json") == found


def test_the_table_has_a_row_for_each_gradient_and_number_of_ranks(records: list[Record]) -> None:
    rows = balance_rows(records)
    assert [row[:2] for row in rows] == [[name, "8"] for name in PATTERNS]
    dense = next(row for row in rows if row[0] == "dense first hundredth")
    assert dense[4].startswith("8.000 / 8.000 (+6.") and dense[5].startswith("1.00") and dense[6] == "-"
    console = Console(width=70, record=True)
    console.print(balance_table(records, compact=True))
    assert "rotated" in console.export_text()


@pytest.mark.parametrize(("bound", "code"), [("even_split<=100", 0), ("even_split<=1", 1)])
def test_a_bound_on_a_map_is_judged_by_push(bound: str, code: int) -> None:
    done = CliRunner().invoke(app, [*TINY, "--require", bound])
    assert done.exit_code == code, done.output
    assert "even_split <= " in unboxed(done.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--elements", "1000"), f"elements must be a multiple of {UNIT}, got 1000"),
        (("--ranks", "8;16"), "--ranks must look like 8,16, got '8;16'"),
        (("--ranks", "0"), "ranks must be positive numbers"),
        (("--workload", "deepfn"), "unknown workload 'deepfn'"),
        (("--require", "hash<=1"), "compares no 'hash' with a baseline"),
    ],
)
def test_wrong_settings_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, [*TINY, *arguments])
    assert done.exit_code == 2
    assert message in unboxed(done.output)
