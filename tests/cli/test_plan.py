"""`gradsync plan` makes a plan of a profile, `gradsync explain` gives its reasons; impossible options are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gradsync import Plan
from gradsync.cli import app
from gradsync.cli import plan as command
from gradsync.planner.search.candidates import Searched, searched
from gradsync.planner.search.job import Job
from gradsync.planner.search.ways import Constraints
from gradsync.schemes import LeafConstraints
from tests.profiles import SPECS, make_profile


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    make_profile().save(path)
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_plan_is_made_for_the_job_and_explained(profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    made = run("plan", profile, "--allow", "int8", "-o", out)
    assert made.exit_code == 0, made.output
    plan = Plan.load(out)
    plan.check(SPECS, 4)
    assert "within 2%" in made.output or "less than with DDP" in made.output
    assert "longer than the best plan" in made.output
    told = run("explain", out, "--profile", profile, "--allow", "int8")
    assert told.exit_code == 0, told.output
    assert told.stdout.splitlines()[0] in made.stdout and "ms a step" in told.output
    assert all(bucket.names[0] in told.output for bucket in plan.buckets)


def test_figures_and_reasons_are_there_as_json(profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    made = json.loads(run("plan", profile, "--allow", "int8", "-o", out, "--json", "-").stdout)
    told = json.loads(run("explain", out, "--profile", profile, "--allow", "int8", "--json", "-").stdout)
    assert made.pop("gap") >= 0 and made.keys() == told.keys()
    assert told["buckets"] == made["buckets"] and [b["id"] for b in told["buckets"]] == [
        bucket.id for bucket in Plan.load(out).buckets
    ]
    assert all(0 < made[name] for name in ("step_s", "backward_s")) and "ddp_bf16" in made["rivals"]
    assert made["verdict"] in run("explain", out, "--profile", profile, "--allow", "int8").output.replace("\n", " ")


def test_which_leaves_payloads_may_take_is_as_asked_for(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[LeafConstraints | None] = []

    def noting(job: Job, constraints: Constraints) -> Searched:
        seen.append(constraints.leaves)
        return searched(job, constraints)

    monkeypatch.setattr(command, "searched", noting)
    for words in (
        (),
        ("--without", "offload", "--flat-only"),
        ("--most-compressions", "2"),
        ("--without", "all_to_all"),
    ):
        made = run("plan", profile, "--allow", "int8", *words, "-o", tmp_path / "plan.json")
        assert made.exit_code == 0, made.output
    once = LeafConstraints(1, ("offload",), flat_only=True)
    assert seen == [None, once, LeafConstraints(2), LeafConstraints(1, ("all_to_all",))]
    told = run("explain", tmp_path / "plan.json", "--profile", profile, "--allow", "int8", "--without", "all_to_all")
    assert told.exit_code == 0 and "two_way" not in told.output


def test_what_ways_may_lose_and_hold_back_is_as_asked_for(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Constraints] = []

    def noting(job: Job, constraints: Constraints) -> Searched:
        seen.append(constraints)
        return searched(job, constraints)

    monkeypatch.setattr(command, "searched", noting)
    bounds = "--most-error", "0.05", "--most-delay", "1.5", "--most-delay-frozen", "9"
    for words in (
        ("plan", profile, "-o", tmp_path / "plan.json"),
        ("explain", tmp_path / "plan.json", "--profile", profile),
    ):
        done = run(*words, "--allow", "int8", *bounds)
        assert done.exit_code == 0, done.output
    assert {(each.most_error, each.most_delay, each.most_delay_frozen) for each in seen} == {(0.05, 1.5, 9.0)}


@pytest.mark.parametrize(("hiding", "model"), [(False, "model"), (True, "model with halved latencies")])
def test_which_model_a_gap_is_certified_by_is_said(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hiding: bool, model: str
) -> None:
    monkeypatch.setattr(command, "searched", lambda job, way: replace(searched(job, way), hiding=hiding))
    made = run("plan", profile, "-o", tmp_path / "plan.json")
    assert f"By the search's {model}, it takes at most" in " ".join(made.output.split())


def test_a_plan_may_be_for_another_cluster(profile: Path, tmp_path: Path) -> None:
    cluster, out = tmp_path / "cluster.toml", tmp_path / "plan.json"
    cluster.write_text('nodes = 8\nlink = { rate = "1gbit", latency = "50us" }\n')
    assert run("plan", profile, "--cluster", cluster, "-o", out).exit_code == 0
    Plan.load(out).check(SPECS, 8)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('nodes = 8\nlink = "1gbit"\nspeed = 3\n', "unknown key 'speed'"),
        ('nodes = 8\nlink = "-1gbit"\n', "be positive"),
    ],
)
def test_a_wrong_cluster_is_named(profile: Path, tmp_path: Path, toml: str, message: str) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(toml)
    told = run("plan", profile, "--cluster", cluster, "-o", tmp_path / "plan.json")
    assert told.exit_code == 2 and message in " ".join(told.output.replace("│", " ").split())


def test_what_cannot_be_is_refused_by_name(profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    for words, message in (
        (("plan", tmp_path / "none.json"), "there is no file"),
        (("plan", profile, "--allow", "int7"), "unknown compressor 'int7'"),
        (("plan", profile, "--exact", "ghost.*"), "'ghost.*', which no parameter"),
        (("plan", profile, "--allow", "int8", "--without", "ring"), "'ring'"),
    ):
        told = run(*words, "-o", out)
        assert told.exit_code == 2 and message in " ".join(told.output.replace("│", " ").split()), told.output
    assert not out.exists()


def test_a_plan_that_was_edited_to_something_illegal_is_refused(profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert run("plan", profile, "-o", out).exit_code == 0
    data = json.loads(out.read_text())
    del data["digest"]
    top_k = {"error_feedback": {"compressor": {"top_k": {"ratio": 0.01}}}}
    data["buckets"][0]["scheme"] = {"compressed_all_reduce": {"compressor": top_k}}
    out.write_text(json.dumps(data))
    told = run("explain", out, "--profile", profile)
    text = " ".join(told.output.replace("│", " ").split())
    assert told.exit_code == 2 and "buckets.0.scheme" in text and "no all-reduce can sum the payloads" in text
