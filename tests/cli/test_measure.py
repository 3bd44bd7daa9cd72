"""`gradsync measure` runs a script until its job is measured and writes a profile, or says why it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradsync.cli import app
from gradsync.compressors import ErrorFeedback, SharedTernGrad, TopK
from gradsync.plans.profile import Profile
from tests.forked import run_on_two_ranks
from tests.quick import quickly

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import gradsync

assert __name__ == "__main__" and sys.argv[1:] == ["--rate", "0.1"], sys.argv
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 1))
gradsync.attach(model)
for step in range(100):
    assert step < 7, "the script goes on"
    model.zero_grad()
    model(torch.tensor([dist.get_rank(), 7])).sum().backward()
"""
PROGRAM = """
import os
from gradsync.cli import main
from tests.quick import hurry

hurry()
os.chdir(os.environ.get("FOLDER_OF_RANK_" + os.environ["RANK"], "."))
try:
    main()
except SystemExit as ended:
    if ended.code:
        print("exit code", ended.code)
"""
SHORT = """
import torch
import torch.distributed as dist
import gradsync

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    model = torch.nn.Linear(4, 1)
    handle = gradsync.attach(model)
    for step in range(3):
        model(torch.ones(4)).sum().backward()
    handle.detach()
finally:
    dist.destroy_process_group()
"""


def said(script: Path, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(
        app, ["measure", "-o", str(script.with_name("profile.json")), *options, "--", str(script)]
    )
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.timeout(90)
def test_a_script_is_run_measured_and_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    program = tmp_path / "gradsync"
    program.write_text(PROGRAM, encoding="utf-8")
    out = tmp_path / "profile.json"
    options = ["--steps", "2", "--warmup", "2", "--compressor", "terngrad_shared", "-o", str(out)]
    arguments = [str(program), "measure", *options, "--", str(script), "--rate", "0.1"]
    first, second = run_on_two_ranks([sys.executable, *arguments], tmp_path, limit_s=60)
    assert "3 parameters, 2 ranks" in first and not second
    profile = Profile.load(out)
    assert (profile.world, profile.steps) == (2, 2)
    assert [p.name for p in profile.parameters] == ["0.weight", "1.weight", "1.bias"]
    compressors = ErrorFeedback(TopK(0.01)), SharedTernGrad(summands=2)
    assert {compressor.kernel("compress") for compressor in compressors} <= profile.kernels.keys()
    table = profile.parameters[0]
    assert table.sparse and table.rows is not None and table.rows.rows == 2


@pytest.fixture
def on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that measures SCRIPT on two ranks; only rank 0's folder has a folder `results`."""
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "gradsync").write_text(PROGRAM, encoding="utf-8")
    for rank, inner in enumerate(("results", "others")):
        (tmp_path / str(rank) / inner).mkdir(parents=True)
        monkeypatch.setenv(f"FOLDER_OF_RANK_{rank}", str(tmp_path / str(rank)))
    return [sys.executable, str(tmp_path / "gradsync"), "measure", "--steps", "2", "--warmup", "2"]


@pytest.mark.timeout(90)
def test_rank_0_alone_needs_the_folder_of_the_result(tmp_path: Path, on_two_ranks: list[str]) -> None:
    options = ["--json", "results/out.json", "--", str(tmp_path / "train.py"), "--rate", "0.1"]
    run_on_two_ranks([*on_two_ranks, *options], tmp_path, limit_s=60)
    assert Profile.from_json((tmp_path / "0" / "results" / "out.json").read_text(encoding="utf-8")).world == 2


@pytest.mark.timeout(90)
@pytest.mark.parametrize("option", ["--json", "--out"])
def test_a_file_that_rank_0_cannot_write_is_refused_on_all_ranks(
    tmp_path: Path, on_two_ranks: list[str], option: str
) -> None:
    options = [option, "others/out.json", "--", str(tmp_path / "train.py"), "--rate", "0.1"]
    ended = run_on_two_ranks([*on_two_ranks, *options], tmp_path, limit_s=60)
    assert [said.splitlines()[-1] for said in ended] == ["exit code 2", "exit code 1"]
    for rank in range(2):
        told = " ".join((tmp_path / f"{rank}.err").read_text(encoding="utf-8").replace("\u2502", " ").split())
        assert "others/out.json cannot be written: there is no folder others" in told
        assert "Traceback" not in told


def test_a_workload_is_measured_in_one_process_where_there_is_no_torchrun(tmp_path: Path) -> None:
    small = ["--option", "data=zipf", "--option", "vocabulary=500", "--option", "num_negatives=16"]
    out = tmp_path / "profile.json"
    options = ["--steps", "1", "--warmup", "2", "-o", str(out)]
    with quickly():
        done = CliRunner().invoke(app, ["measure", "--workload", "lstm", *small, *options])
    assert done.exit_code == 0, done.output
    profile = Profile.load(out)
    assert (profile.world, profile.links) == (1, ())
    table = next(p for p in profile.parameters if p.name == "words.weight")
    assert table.sparse and table.shape[0] == 500 and table.rows is not None


def test_a_script_without_gradsync_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass", encoding="utf-8")
    code, text = said(script)
    assert code == 1 and "does it call gradsync.attach" in text
    assert not (tmp_path / "profile.json").exists()


def test_a_script_that_ends_early_is_told_how_many_steps_it_takes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SHORT, encoding="utf-8")
    code, text = said(script, "--steps", "4", "--warmup", "6")
    assert code == 1 and "ended after 3 of the 15 steps that measuring takes" in text
    assert not (tmp_path / "profile.json").exists()


def test_a_script_that_is_not_there_and_settings_out_of_range_are_refused(tmp_path: Path) -> None:
    assert said(tmp_path / "train.py", "--warmup", "1")[0] == 2
    for arguments in ((), ("--workload", "lstm", "--", "train.py")):
        done = CliRunner().invoke(app, ["measure", *arguments])
        assert done.exit_code == 2 and "give one of --workload" in done.output
    assert CliRunner().invoke(app, ["measure", "--workload", "lstmm"]).exit_code == 2
    code, text = said(tmp_path / "train.py", "--compressor", "zip")
    assert code == 2 and "unknown compressor 'zip'" in text
