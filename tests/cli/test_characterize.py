"""`gradsync characterize` on a workload, on a recording and on a script gives the library's figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gradsync.characterization.figures import Characterization, characterize_footprints
from gradsync.characterization.footprint import Footprint, Shape
from gradsync.characterization.recording import load_recording, save_recording
from gradsync.cli import app
from tests.forked import run_on_two_ranks

SMALL = ["--workload", "lstm", "--option", "data=zipf", "--option", "vocabulary=500", "--option", "num_negatives=16"]
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
    assert step < 3, "the script goes on"
    model.zero_grad()
    model(torch.tensor([dist.get_rank(), 7])).sum().backward()
"""


def save(folder: Path) -> None:
    for rank in range(2):
        gradient = torch.zeros(16)
        gradient[[rank, 5]] = 1.0
        save_recording(folder, [{"<w>": Footprint.of(gradient, Shape((16,)))}], rank=rank, ranks=2)


def test_a_workload_is_characterized_in_one_process() -> None:
    done = CliRunner().invoke(app, ["characterize", *SMALL, "--ranks", "3", "--steps", "2", "--json", "-"])
    assert done.exit_code == 0, done.output
    found = Characterization.from_json(done.stdout)
    assert (found.ranks, found.steps, found.sampled) == (3, 2, False)
    words = found.tensors["words.weight"]
    assert words.sparse and words.rows is not None and list(words.rows.union_density) == [1, 2, 3]
    assert words.rows.union_density[1].value < words.rows.union_density[2].value < words.rows.union_density[3].value
    assert found.profile("words.weight").num_rows == 500


def test_the_same_seed_gives_the_same_figures() -> None:
    a, b, c = (
        CliRunner()
        .invoke(app, ["characterize", *SMALL, "--ranks", "2", "--steps", "1", "--seed", seed, "--json", "-"])
        .stdout
        for seed in ("0", "0", "1")
    )
    assert json.loads(a) == json.loads(b) != json.loads(c)


def test_a_recording_is_shown_as_table_json_and_plots(tmp_path: Path) -> None:
    save(tmp_path / "in")
    files = ["--json", str(tmp_path / "found.json"), "--plot", str(tmp_path / "page.html")]
    done = CliRunner().invoke(app, ["characterize", "--recorded", str(tmp_path / "in"), "--partitions", "3", *files])
    assert done.exit_code == 0, done.output
    assert "<w>" in done.output and "12.50" in done.output and "18.75" in done.output and "1.50" in done.output
    found = Characterization.from_json((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found == characterize_footprints(load_recording(tmp_path / "in"), partitions=3)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<h2>") == 3 and '"name":"&lt;w&gt;"' in page
    assert 'src="http' not in page


@pytest.mark.timeout(90)
def test_a_script_is_run_recorded_and_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "rank5.npz").write_text("of an earlier run of more ranks")
    program = tmp_path / "gradsync"
    program.write_text("from gradsync.cli import main; main()", encoding="utf-8")
    options = ["--steps", "3", "--out", str(tmp_path), "--json", str(tmp_path / "found.json")]
    arguments = [str(program), "characterize", *options, "--", str(script), "--rate", "0.1"]
    printed = run_on_two_ranks([sys.executable, *arguments], tmp_path, limit_s=60)
    assert "".join(printed).count("Sparsity of gradients") == 1
    said = [(tmp_path / f"{rank}.err").read_text(encoding="utf-8") for rank in range(2)]
    assert [text.count(f"recording the gradients of {script} in 3 steps\n") for text in said] == [1, 0]
    found = Characterization.from_json((tmp_path / "found.json").read_text(encoding="utf-8"))
    rows = found.tensors["0.weight"].rows
    assert found.steps == 3 and rows is not None
    assert (rows.density.mean, rows.union_density[2].value) == pytest.approx((0.2, 0.3))


def test_a_script_without_gradsync_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass", encoding="utf-8")
    done = CliRunner().invoke(app, ["characterize", "--out", str(tmp_path), "--", str(script)])
    assert done.exit_code == 1 and "does it call gradsync.attach" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of --workload"),
        (("--workload", "deepfm", "--recorded", "here"), "give one of --workload"),
        (("--workload", "deepfmm"), "unknown workload"),
        (("--workload", "deepfm", "--option", "dims=3"), "has no option"),
        (("--recorded", "nowhere"), "no recording in nowhere"),
        (("--workload", "deepfm", "--plot", "a.png"), "must name an .html file"),
    ],
)
def test_wrong_options_end_with_a_message(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["characterize", *arguments])
    text = " ".join(done.output.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())
    assert done.exit_code == 2 and message in text, text


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_rank_0_alone_needs_the_folders_that_it_writes_to(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {}
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        done = CliRunner().invoke(app, ["characterize", option, "nowhere/file.html", "--", "nothing.py"])
        assert done.exit_code == 2
        told[rank] = " ".join(done.output.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())
    assert "nowhere/file.html cannot be written: there is no folder nowhere" in told["0"]
    assert "there is no script 'nothing.py'" in told["1"] and "nowhere" not in told["1"]
