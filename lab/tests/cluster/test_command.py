"""`gradsync lab` has the promised options, exit codes and output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradsync_lab.cli.lab import HIGHEST_SHARE, LOWEST_SHARE, app, exit_code
from gradsync_lab.cluster import Lab, LabUnavailableError, LinkRate


@pytest.mark.parametrize(
    ("codes", "first_failed", "expected"),
    [
        ([0, 0], None, 0),
        ([1, 3], 1, 3),
        ([-9, -11, 2], 1, 128 + 11),
        ([-9, -9], None, 124),
    ],
    ids=["all well", "not the lowest rank", "by signal", "time was up"],
)
def test_exit_code_is_of_the_rank_that_failed_first(codes: list[int], first_failed: int | None, expected: int) -> None:
    assert exit_code(codes, first_failed) == expected


@pytest.mark.usefixtures("namespaces")
def test_run_passes_scenario_and_command_on(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "2", "--link", "100mbit", "--slow", "1=50mbit", "--background", "0->1=1mbit"]
    script = ["sh", "-c", "echo $RANK of $WORLD_SIZE, $1; [ $RANK != 3 ] || exit 7", "sh", "--nodes"]
    done = CliRunner().invoke(app, ["run", *options, "--procs-per-node", "2", "--", *script])
    assert done.exit_code == 7, done.output
    assert "[3] 3 of 4, --nodes" in done.output


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--slow", "9=1mbit"], "no node 9"),
        (["--background", "0>1=1mbit"], "FROM->TO=RATE"),
        (["--link", "fast"], "link rate must look like"),
        (["--trunk", "1gbit"], "go together"),
    ],
)
def test_wrong_option_ends_with_its_message(option: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["run", "--nodes", "2", *option, "--", "true"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(("share", "expected"), [(0.95, 0), (0.80, 1), (1.10, 1)], ids=["good", "slow", "not shaped"])
def test_check_judges_every_link_and_writes_the_figures(
    share: float, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = [LinkRate(0, 1, 125e5, 0.95 * 125e5, 5e-5), LinkRate(1, 0, 125e5, share * 125e5, 5e-5)]
    monkeypatch.setattr(Lab, "check", lambda self, seconds: rates)
    file = tmp_path / "links.json"
    done = CliRunner().invoke(app, ["check", "--nodes", "2", "--link", "100mbit", "--json", str(file)])
    assert done.exit_code == expected, done.output
    written = json.loads(file.read_text())
    assert [link["measured_bytes_per_s"] for link in written["links"]] == [0.95 * 125e5, share * 125e5]
    assert written["environment"]["links"]["link"] == "100mbit"


@pytest.mark.usefixtures("namespaces")
def test_check_finds_the_rates_of_good_links_and_of_a_slow_node(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    options = ["--nodes", "3", "--link", "200mbit", "--slow", "2=50mbit", "--seconds", "1.5", "--json", str(file)]
    for _ in range(3):  # other work can make a link of a busy machine look slow, but never fast
        done = CliRunner().invoke(app, ["check", *options])
        links = json.loads(file.read_text())["links"]
        shares = [link["measured_bytes_per_s"] / link["configured_bytes_per_s"] for link in links]
        assert done.exit_code == (0 if all(LOWEST_SHARE <= share <= HIGHEST_SHARE for share in shares) else 1)
        assert [link["configured_bytes_per_s"] for link in links] == [25e6, 6.25e6, 6.25e6]
        assert max(shares) <= HIGHEST_SHARE, done.output
        if min(shares) > 0.5:
            return
    pytest.fail(f"links carry less than half of what they should:\n{done.output}")


@pytest.mark.usefixtures("namespaces")
def test_a_program_that_is_not_there_ends_run_as_a_shell_would() -> None:
    done = CliRunner().invoke(app, ["run", "--nodes", "1", "--", "nosuchprogram"])
    assert done.exit_code == 127 and "[0] nosuchprogram: No such file or directory" in done.output


def test_impossible_lab_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Lab) -> Lab:
        raise LabUnavailableError("no namespaces here")

    monkeypatch.setattr(Lab, "__enter__", refuse)
    for command in (["run", "--", "true"], ["check"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2
        assert "No lab: no namespaces here" in done.output
