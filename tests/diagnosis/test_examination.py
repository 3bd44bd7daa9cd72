"""`gradsync doctor` tells a sound installation from what is slow, and from what does not work."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from importlib.metadata import version
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


def names_have(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *name, **kind: [(2, 1, 6, "", (address, 0))])


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose name has an address, without settings, and a torch for the CPU."""
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    names_have("10.0.0.7", monkeypatch)
    monkeypatch.setattr(socket, "getnameinfo", lambda address, flags: ("box", "1"))
    monkeypatch.setattr(examination, "accelerators", lambda: [])
    monkeypatch.setattr(examination, "built_for", lambda: "")
    for setting in examination.INTERFACES:
        monkeypatch.delenv(setting, raising=False)


def finding(about: str) -> Finding:
    return next(found for found in examined(ranks=False).findings if found.about == about)


@pytest.mark.timeout(180)
def test_a_sound_installation_trains_and_passes() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json", "-"])
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and {found["verdict"] for found in report["findings"]} == {"ok"}, done.output
    assert "trained by gradsync and by DDP on cpu over gloo, to the same bits" in report["findings"][-1]["text"]
    installed = version("torch")  # which may lack the build, as in 2.13.0+cu130
    assert report["versions"]["torch"] == installed and report["backends"] == {"cpu": "gloo"}


def test_the_report_has_a_line_for_each_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    done = CliRunner().invoke(app, ["doctor", "--no-ranks"])
    assert done.exit_code == 0 and "environment: " in done.output and "NCCL_DEBUG=INFO" in done.output
    for found in examined(ranks=False).findings:
        assert re.search(rf"^{found.verdict} +{found.about} +{re.escape(found.text)}$", done.output, re.MULTILINE)


def test_the_newest_tested_release_of_torch_is_the_pinned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text()
    assert f"\ntorch=={examination.TESTED_TORCH[-1]}." in f"\n{pins}"
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert finding("torch") == Finding("note", "torch", "2.99.0; gradsync was tested with 2.11 and 2.13")


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
    error = subprocess.CalledProcessError(1, "gcc")
    monkeypatch.setitem(examination.SAMPLES, "top_k", Mock(side_effect=error))
    found = finding("kernels on the CPU")
    assert found.verdict == "fault" and f"top_k failed: CalledProcessError: {error}" in found.text


def test_a_driver_that_fails_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "accelerators", Mock(side_effect=RuntimeError("device busy")))
    assert finding("accelerators").text == "they cannot be listed: RuntimeError: device busy"


def test_accelerators_are_listed_with_their_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "accelerators", lambda: [CARD])
    monkeypatch.setattr(examination, "_like_definitions", lambda about, device, kind: Finding("ok", about, kind))
    report = examined(ranks=False)
    assert report.devices == ["cuda:0 Card 9000, 80 GiB"] and report.backends == {"cpu": "gloo", "cuda": "nccl"}
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: backend == "gloo")
    assert finding("backend for cuda:0").verdict == "fault", "this build of torch has no NCCL"
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: True)
    assert finding("backend for cuda:0").text == "nccl; gradsync waits for it on streams of the device"
    monkeypatch.setattr(examination, "accelerators", lambda: [Accelerator(torch.device("vulkan", 0), "", 0)])
    assert finding("backend for vulkan:0").text.startswith("torch has none for vulkan")
    assert finding("kernels on vulkan:0").verdict == "note"


def test_a_build_for_an_accelerator_that_finds_none_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "built_for", lambda: "cuda")
    assert finding("accelerator").verdict == "note"


class Torchrun:
    """Stands in for `subprocess.Popen`: a torchrun that ends with a code, or hangs until it is terminated."""

    returncode, said, hangs = 0, "", False
    calls: list[tuple[list[str], dict[str, str]]] = []
    signals: list[str] = []

    def __init__(self, command: list[str], env: dict[str, str], **settings: object) -> None:
        self.calls.append((command, env))

    def communicate(self, timeout: float) -> tuple[None, str]:
        if self.hangs and "terminate" not in self.signals:
            raise subprocess.TimeoutExpired("torchrun", timeout)
        return None, self.said

    def terminate(self) -> None:
        self.signals.append("terminate")

    def kill(self) -> None:
        self.signals.append("kill")


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> type[Torchrun]:
    class Own(Torchrun):
        calls, signals = [], []

    monkeypatch.setattr(subprocess, "Popen", Own)
    return Own


def test_two_accelerators_exchange_by_their_backend(torchrun: type[Torchrun], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "PET_NNODES", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "4")
    other = CARD._replace(device=torch.device("cuda", 1))
    for cards, devices in [
        ([], ["gloo", "cpu"]),
        ([CARD], ["gloo", "cuda:0"]),
        ([CARD, other], ["nccl", "cuda:0", "cuda:1"]),
    ]:
        assert examination._two_ranks(cards).verdict == "ok"
        command, env = torchrun.calls[-1]
        assert command[command.index("gradsync.diagnosis.two_ranks") + 1 :] == devices
        assert not {"WORLD_SIZE", "PET_NNODES", "TORCHELASTIC_RUN_ID"} & env.keys(), "a job of its own"


def test_ranks_that_fail_are_a_fault_with_their_error(torchrun: type[Torchrun]) -> None:
    torchrun.returncode = 1
    torchrun.said = "[rank1]:   File x\n[rank1]: RuntimeError: no route to host\ntorch...ChildFailedError: \n=====\n"
    found = examination._two_ranks([])
    assert found.verdict == "fault"
    assert found.text.startswith("RuntimeError: no route to host; for all of it run python -m")


def test_ranks_that_hang_are_ended_by_torchrun(torchrun: type[Torchrun]) -> None:
    torchrun.hangs = True
    found = examination._two_ranks([])
    assert found.verdict == "fault" and "did not end within 120 s" in found.text
    assert torchrun.signals == ["terminate", "kill"]


def test_addresses_that_other_nodes_cannot_reach_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding("address").verdict == "ok"
    for address in ("127.0.1.1", "::1"):
        names_have(address, monkeypatch)
        found = finding("address")
        assert found.verdict == "note" and "set GLOO_SOCKET_IFNAME" in found.text
    names_have("fd00::7", monkeypatch)
    assert finding("address").verdict == "ok"
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=socket.gaierror("unknown")))
    assert finding("address").verdict == "note"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert finding("address").verdict == "ok"


def test_a_slow_name_server_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of ranks serves nobody while it asks for the name of a rank that connects."""
    asked, clock = [], [0.0]

    def name(address: tuple[str, int, int, int], flags: int) -> tuple[str, str]:
        asked.append(address[0])
        clock[0] += 5.0 if "10.0.0.7" in address[0] else 0.001
        raise socket.gaierror("no answer")

    monkeypatch.setattr(socket, "getnameinfo", name)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    found = [each for each in examined(ranks=False).findings if each.about == "names"]
    assert asked == ["::ffff:10.0.0.7", "::ffff:127.0.0.1"]
    assert [(each.verdict, "::ffff:10.0.0.7 took 5.0 s" in each.text) for each in found] == [("note", True)]


@pytest.mark.parametrize(
    ("setting", "value", "is_there"),
    [
        ("NCCL_SOCKET_IFNAME", "lo", True),
        ("NCCL_SOCKET_IFNAME", "l", True),
        ("NCCL_SOCKET_IFNAME", "=l", False),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
        ("NCCL_SOCKET_IFNAME", "eth99", False),
        ("GLOO_SOCKET_IFNAME", "lo", True),
        ("GLOO_SOCKET_IFNAME", "l", False),
    ],
)
def test_interfaces_that_are_not_there_are_a_fault(
    setting: str, value: str, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting, value)
    faults = [found for found in examined(ranks=False).findings if found.verdict == "fault"]
    assert [found.about for found in faults] == ([] if is_there else [setting])


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
