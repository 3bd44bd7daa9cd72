"""Examines an installation and its machine, tries kernels and two ranks, and reports what is slow or does not work."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .. import kernels
from ..comm.backends import GROUP_OF_BACKEND
from ..devices.inventory import Accelerator, accelerators, built_for, processor

TESTED_TORCH = "2.13"  # the release of torch that gradsync's tests ran with
RUN_S = 120.0  # the longest that two ranks may take
PACKAGES = ("gradsync", "gradsync-lab", "torch", "numpy", "triton")
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Environment variables that change how ranks find each other, or how kernels run.
SETTINGS = re.compile(
    "(GLOO|NCCL|TORCH_(NCCL|GLOO|DISTRIBUTED)|OMP|TRITON)_.*|.*_VISIBLE_DEVICES|" + "|".join(OF_TORCHRUN)
)
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

Verdict = Literal["ok", "note", "fault"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        verdict: "ok"; "note" for what may be slow, or may fail on several nodes; "fault" for what does not work.
        about: what was checked.
        text: what was found, and for a note or a fault what to do.
    """

    verdict: Verdict
    about: str
    text: str


@dataclass(frozen=True)
class Report:
    """The report on an installation.

    Attributes:
        versions: versions by package; None where it is not installed.
        machine: the system, processor and number of cores.
        devices: the accelerators, in words.
        backends: the backend that `init_process_group()` takes for each type of device here.
        settings: environment variables that matter, by name.
        findings: the outcomes of all checks.
    """

    versions: dict[str, str | None]
    machine: str
    devices: list[str]
    backends: dict[str, str]
    settings: dict[str, str]
    findings: list[Finding]


def examined(*, ranks: bool) -> Report:
    """Examines this installation, and returns the report; `ranks`: whether two ranks are started."""
    cards = accelerators()
    findings = [_torch_found(), _native_kernels()]
    findings += [_accelerator_missing()] if not cards and built_for() else []
    findings += [found for card in cards for found in (_backend_of(card), _kernels_on(card))]
    findings += [*_interfaces(), _own_address()]
    if ranks:
        findings.append(_two_ranks(cards))
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return Report(
        versions={name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
        machine=f"{system}, {processor()}, {os.cpu_count()} cores",
        devices=[_in_words(card) for card in cards],
        backends={kind: _backend(kind) or "none" for kind in _kinds(cards)},
        settings={name: os.environ[name] for name in sorted(os.environ) if SETTINGS.fullmatch(name)},
        findings=findings,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _kinds(cards: list[Accelerator]) -> list[str]:
    return list(dict.fromkeys(["cpu", *(card.device.type for card in cards)]))


def _backend(kind: str) -> str | None:
    """Returns the backend that `init_process_group()` takes for devices of a type; None if it has none."""
    return dist.Backend.default_device_backend_map.get(kind)


def _in_words(card: Accelerator) -> str:
    memory = f", {card.nbytes / 2**30:.0f} GiB" if card.nbytes else ""
    return f"{card.device} {card.name}{memory}"


def _torch_found() -> Finding:
    found = torch.__version__
    if found.startswith(f"{TESTED_TORCH}."):
        return Finding("ok", "torch", f"{found}, as in gradsync's tests")
    return Finding("note", "torch", f"{found}; gradsync was tested with {TESTED_TORCH}")


def _native_kernels() -> Finding:
    about = "kernels on the CPU"
    try:
        build = kernels.native.load().__name__.rpartition("_")[2]
    except ImportError as error:
        return Finding("note", about, f"in torch operations, several times slower: {error}")
    return _like_definitions(about, torch.device("cpu"), f"native, built for {build}")


def _accelerator_missing() -> Finding:
    kind = built_for()
    return Finding(
        "note",
        "accelerator",
        f"torch was built for {kind}, and finds no device: is the driver installed, and is the device visible to this "
        f"process ({kind.upper()}_VISIBLE_DEVICES, the container's settings)?",
    )


def _backend_of(card: Accelerator) -> Finding:
    about, kind = f"backend for {card.device}", card.device.type
    backend = _backend(kind)
    if backend is None:
        return Finding("fault", about, f"torch has none for {kind}: gradsync cannot synchronise gradients there")
    if not dist.is_backend_available(backend):
        return Finding("fault", about, f"{backend} is not in this build of torch: install one for {kind}")
    way = "waits for it on the host" if backend in GROUP_OF_BACKEND else "waits for it on streams of the device"
    return Finding("ok", about, f"{backend}; gradsync {way}")


def _kernels_on(card: Accelerator) -> Finding:
    about = f"kernels on {card.device}"
    if card.device.type != "cuda":
        return Finding("note", about, "in torch operations: gradsync has kernels for the CPU and for CUDA")
    try:
        kernels.device.load()
    except ImportError as error:
        return Finding("note", about, f"in torch operations, several times slower: {error}")
    return _like_definitions(about, card.device, "Triton")


def _like_definitions(about: str, device: torch.device, kind: str) -> Finding:
    """Runs some kernels as the device would, and by their definitions in torch, and compares the bits."""
    unlike = []
    for name, run in SAMPLES.items():
        try:
            with kernels.use("reference"):
                expected = run(device)
            found = run(device)
        except RuntimeError as error:
            return Finding("fault", about, f"{kind}: {name} failed: {error}")
        if not torch.equal(found, expected):
            unlike.append(name)
    if unlike:
        return Finding(
            "fault",
            about,
            f"{kind}: other bits than their definitions in {', '.join(unlike)}; gradsync.kernels.use('reference') does "
            "without them; please report it",
        )
    return Finding("ok", about, f"{kind}; the same bits as the definitions of {', '.join(SAMPLES)}")


def _numbers(device: torch.device, count: int) -> Tensor:
    draws = torch.Generator().manual_seed(0)
    return torch.randn(count, generator=draws).to(device)


def _sum_parts(device: torch.device) -> Tensor:
    parts = [part.to(torch.bfloat16) for part in _numbers(device, 3 * 1001).split(1001)]
    out = torch.empty(1001, dtype=torch.bfloat16, device=device)
    kernels.sum_parts(parts, out, scale=1 / 3)
    return out


def _top_k(device: torch.device) -> Tensor:
    indices = torch.empty(97, dtype=torch.int32, device=device)
    values = torch.empty(97, device=device)
    kernels.top_k(_numbers(device, 4099), indices, values)
    return torch.cat([indices, values.view(torch.int32)])


def _bitmap(device: torch.device) -> Tensor:
    indices = torch.arange(0, 5000, 7, dtype=torch.int32, device=device)
    words = torch.empty(-(-5000 // 64), dtype=torch.int64, device=device)
    kernels.encode_bitmap(indices, 5000, words)
    return words


SAMPLES: dict[str, Callable[[torch.device], Tensor]] = {
    "sum_parts": _sum_parts,
    "top_k": _top_k,
    "encode_bitmap": _bitmap,
}


def _interfaces() -> list[Finding]:
    """Returns the faults of settings that name network interfaces which this machine lacks."""
    there = [name for _, name in socket.if_nameindex()]
    found = []
    for setting in INTERFACES:
        wanted = os.environ.get(setting, "")
        # NCCL takes several, and names that begin with these; "^" leaves some out and "=" asks for the whole name.
        starts = [] if wanted.startswith("^") else [name for name in wanted.lstrip("=").split(",") if name]
        if starts and not any(name.startswith(start) for start in starts for name in there):
            found.append(
                Finding("fault", setting, f"it names {wanted!r}; the interfaces of this machine are {', '.join(there)}")
            )
    return found


def _own_address() -> Finding:
    """Looks up this machine's name, by whose address gloo's ranks are found where no interface is named."""
    about, name = "address", socket.gethostname()
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return Finding("ok", about, f"gloo connects by the interface {interface}")
    others = ", ".join(each for _, each in socket.if_nameindex() if each != "lo") or "none but lo here"
    advice = f"for ranks on several nodes set GLOO_SOCKET_IFNAME to the interface of their network ({others})"
    try:
        found = socket.gethostbyname(name)
    except OSError as error:
        return Finding("note", about, f"this machine's name, {name}, has none ({error}); {advice}")
    if found.startswith("127."):
        return Finding(
            "note", about, f"{found} is that of this machine's name, {name}, and no other node can reach it; {advice}"
        )
    return Finding("ok", about, f"{found}, by this machine's name, {name}")


def _two_ranks(cards: list[Accelerator]) -> Finding:
    """Lets two ranks train as DDP does, on two accelerators by their backend, else by gloo."""
    backend, devices = "gloo", [str(card.device) for card in cards[:2]] or ["cpu"]
    if len(devices) == 2:
        backend = _backend(cards[0].device.type) or backend
    about = "two ranks"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "gradsync.diagnosis.two_ranks", backend, *devices]
    lone = {name: value for name, value in os.environ.items() if name not in OF_TORCHRUN}
    try:
        done = subprocess.run(command, check=False, env=lone, capture_output=True, text=True, timeout=RUN_S)
    except subprocess.TimeoutExpired:
        return Finding("fault", about, f"they did not end within {RUN_S:.0f} s over {backend}; run {_shell(command)}")
    if done.returncode:
        return Finding("fault", about, f"{_last_error(done.stderr)}; for all of it run {_shell(command)}")
    return Finding(
        "ok", about, f"trained by gradsync and by DDP on {' and '.join(devices)} over {backend}, to the same bits"
    )


def _shell(command: list[str]) -> str:
    return " ".join(["python", *command[1:]])


def _last_error(said: str) -> str:
    """Returns the last line of a rank's traceback in the output of torchrun; else its last line."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line).strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    own = [line for line in errors if "ChildFailedError" not in line]
    return (own or errors or lines or ["they failed without a word"])[-1]
