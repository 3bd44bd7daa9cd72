"""A soak of seconds with two faults: the same bits as without faults, and a record that goes on where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from gradsync_lab.faults.cases import Fault, Phase
from gradsync_lab.soak import supervise
from gradsync_lab.soak.settings import Folder, Settings, Strike
from gradsync_lab.soak.supervise import run_soak
from gradsync_lab.soak.verdict import verdict

SETTINGS = Settings(steps=160, step_s=0.02, every=20, ranks=2, faults=2, seed=0, links=False, timeout_s=20.0)
STRIKES = [
    Strike(number=0, step=45, fault=Fault.EXCEPTION, victim=1, point=Phase.BACKWARD),
    Strike(number=1, step=90, fault=Fault.KILL, victim=0, point=Phase.FORWARD),
]


@pytest.mark.timeout(240)
def test_a_soak_ends_with_the_bits_of_a_run_without_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "strikes", STRIKES)
    path = tmp_path / "soak.jsonl"
    lines = run_soak(SETTINGS, path, lambda _: None)
    found = verdict(lines, planned=2)
    assert found.same_bits and found.struck == 2 and found.restarts == 2 and found.as_it_should == 2, lines
    lives = [line for line in lines if line.kind == "life"]
    assert len(lives) == 3 and lives[0].step == 0 and lives[1].step >= 40 and lives[2].step >= 80, "from checkpoints"

    def never(*_: object, **__: object) -> None:
        raise AssertionError("there is nothing left to run")

    monkeypatch.setattr(supervise, "agent", never)
    assert run_soak(SETTINGS, path, lambda _: None) == lines
    with pytest.raises(ValueError, match="another value of settings"):
        run_soak(SETTINGS.model_copy(update={"seed": 1}), path, lambda _: None)
    # Cut behind the first fault: only what is missing is run, from the last checkpoint on.
    monkeypatch.undo()
    monkeypatch.setattr(Settings, "strikes", STRIKES)
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in text if '"kind":"final"' not in line))
    again = run_soak(SETTINGS, path, lambda _: None)
    assert again[-1].kind == "final" and again[-1].digest == lines[-1].digest
    assert verdict(again, planned=2).struck == 2


@pytest.mark.timeout(120)
def test_no_rank_runs_on_where_the_command_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "soak.jsonl"
    argv = ["soak", "--record", str(path), "--hours", "0.1", "--ranks", "2", "--no-loopback", "--faults", "0"]
    run = [sys.executable, "-c", "from gradsync.cli import main; main()"]
    command = subprocess.Popen([*run, *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    status = Folder(tmp_path / "soak.jsonl.d" / "clean").status(0)
    while not status.exists():
        assert command.poll() is None
        time.sleep(0.1)
    rank = json.loads(status.read_text())["pid"]
    command.send_signal(signal.SIGTERM)
    command.wait()
    with suppress(FileNotFoundError, ProcessLookupError):
        deadline = time.monotonic() + 60
        while Path(f"/proc/{rank}/stat").read_text().split()[2] != "Z":
            if time.monotonic() > deadline:
                os.kill(rank, signal.SIGKILL)
                pytest.fail(f"rank 0, process {rank}, runs on")
            time.sleep(0.1)
