"""`gradsync doctor` tells a sound installation from what is slow, and from what does not work."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from gradsync import kernels
from gradsync.cli import app
from gradsync.devices import inventory
from gradsync.devices.inventory import Accelerator
from gradsync.diagnosis import examination
from gradsync.diagnosis.examination import Finding, examined

CARD = Accelerator(torch.device("cuda", 0), "Card 9000", 80 * 2**30)


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose name has an address, without settings."""
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    for setting in examination.INTERFACES:
        monkeypatch.delenv(setting, raising=False)


def finding(about: str) -> Finding:
    return next(found for found in examined(ranks=False).findings if found.about == about)


@pytest.mark.timeout(180)
def test_a_sound_installation_trains_and_passes() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(done.output)
    assert done.exit_code == 0 and {found["verdict"] for found in report["findings"]} == {"ok"}, done.output
    assert "trained by gradsync and by DDP on cpu over gloo, to the same bits" in report["findings"][-1]["text"]
    assert report["versions"]["torch"] == torch.__version__ and report["backends"] == {"cpu": "gloo"}


def test_the_report_has_a_line_for_each_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    done = CliRunner().invoke(app, ["doctor", "--no-ranks"])
    assert done.exit_code == 0 and "environment: " in done.output and "NCCL_DEBUG=INFO" in done.output
    for found in examined(ranks=False).findings:
        assert re.search(rf"^{found.verdict} +{found.about} +{re.escape(found.text)}$", done.output, re.MULTILINE)


def test_the_tested_release_of_torch_is_the_pinned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text()
    assert f"\ntorch=={examination.TESTED_TORCH}." in f"\n{pins}"
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert finding("torch") == Finding("note", "torch", "2.99.0; gradsync was tested with 2.13")


def test_missing_kernels_are_noted_and_wrong_ones_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("the native kernels are not built: install a compiler")

    with monkeypatch.context() as within:
        within.setattr(kernels.native, "load", missing)
        found = finding("kernels on the CPU")
        assert found.verdict == "note" and found.text.endswith("install a compiler")
    draws = iter(range(100))
    monkeypatch.setitem(examination.SAMPLES, "top_k", lambda device: torch.tensor(next(draws)))
    done = CliRunner().invoke(app, ["doctor", "--no-ranks"])
    assert done.exit_code == 1 and "fault kernels on the CPU" in done.output and "definitions in top_k" in done.output


def test_kernels_that_fail_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(examination.SAMPLES, "top_k", Mock(side_effect=RuntimeError("no kernel image")))
    found = finding("kernels on the CPU")
    assert found.verdict == "fault" and found.text.endswith("top_k failed: no kernel image")


def test_accelerators_are_listed_with_their_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "accelerators", lambda: [CARD])
    monkeypatch.setattr(examination, "_like_definitions", lambda about, device, kind: Finding("ok", about, kind))
    report = examined(ranks=False)
    assert report.devices == ["cuda:0 Card 9000, 80 GiB"] and report.backends == {"cpu": "gloo", "cuda": "nccl"}
    assert finding("backend for cuda:0").verdict == "fault", "this build of torch has no NCCL"
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: True)
    assert finding("backend for cuda:0").text == "nccl; gradsync waits for it on streams of the device"
    monkeypatch.setattr(examination, "accelerators", lambda: [Accelerator(torch.device("vulkan", 0), "", 0)])
    assert finding("backend for vulkan:0").text.startswith("torch has none for vulkan")
    assert finding("kernels on vulkan:0").verdict == "note"


def test_a_build_for_an_accelerator_that_finds_none_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "built_for", lambda: "cuda")
    assert finding("accelerator").verdict == "note"


def test_two_accelerators_exchange_by_their_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Mock(return_value=SimpleNamespace(returncode=0))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("WORLD_SIZE", "4")
    other = CARD._replace(device=torch.device("cuda", 1))
    for cards, devices in [
        ([], ["gloo", "cpu"]),
        ([CARD], ["gloo", "cuda:0"]),
        ([CARD, other], ["nccl", "cuda:0", "cuda:1"]),
    ]:
        assert examination._two_ranks(cards).verdict == "ok"
        command = run.call_args.args[0]
        assert command[command.index("gradsync.diagnosis.two_ranks") + 1 :] == devices
        assert "WORLD_SIZE" not in run.call_args.kwargs["env"], "the two ranks are a job of their own"


def test_ranks_that_fail_or_hang_are_a_fault_with_their_error(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "[rank1]:   File x\n[rank1]: RuntimeError: no route to host\ntorch...ChildFailedError: \n=====\n"
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=1, stderr=said))
    found = examination._two_ranks([])
    assert found.verdict == "fault" and found.text.startswith(
        "RuntimeError: no route to host; for all of it run python -m"
    )
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=subprocess.TimeoutExpired("python", 120.0)))
    assert examination._two_ranks([]).verdict == "fault"


def test_addresses_that_other_nodes_cannot_reach_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding("address").verdict == "ok"
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    found = finding("address")
    assert found.verdict == "note" and "set GLOO_SOCKET_IFNAME" in found.text
    monkeypatch.setattr(socket, "gethostbyname", Mock(side_effect=socket.gaierror("unknown")))
    assert finding("address").verdict == "note"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert finding("address").verdict == "ok"


@pytest.mark.parametrize(("value", "is_there"), [("lo", True), ("l", True), ("^docker", True), ("eth99", False)])
def test_interfaces_that_are_not_there_are_a_fault(value: str, is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    faults = [found for found in examined(ranks=False).findings if found.verdict == "fault"]
    assert [found.about for found in faults] == ([] if is_there else ["NCCL_SOCKET_IFNAME"])


def test_accelerators_come_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="Card 9000", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind: SimpleNamespace(get_device_properties=lambda i: properties)
    )
    assert inventory.accelerators() == [CARD]
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace())
    assert inventory.accelerators() == [CARD._replace(name="", nbytes=0)]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert inventory.accelerators() == [] and inventory.built_for() == "cuda"
