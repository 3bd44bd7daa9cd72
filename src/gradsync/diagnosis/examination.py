"""Examines an installation and its machine, tries kernels and two ranks, and reports what is slow or does not work."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .. import kernels
from ..comm.backends import GROUP_OF_BACKEND
from ..devices.inventory import Accelerator, accelerators, built_for, processor
from ..frontends.fsdp_internals import TESTED_TORCH

RUN_S = 120.0  # the longest that two ranks may take
END_S = 40.0  # for torchrun to end its ranks, which it gives 30 s
PACKAGES = ("gradsync", "gradsync-lab", "torch", "numpy", "triton")
OF_TORCHRUN = re.compile("RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_.*|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|PET_.*")
# Environment variables that change how ranks find each other, or how kernels run.
SETTINGS = re.compile(
    rf"(GLOO|NCCL|TORCH_(NCCL|GLOO|DISTRIBUTED)|OMP|TRITON)_.*|RES_OPTIONS|.*_VISIBLE_DEVICES|{OF_TORCHRUN.pattern}"
)
SLOW_NAME_S = 0.5  # for the name of an address: a name server answers in milliseconds
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

Verdict = Literal["ok", "note", "fault"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check of an installation.

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


def examined(*, ranks: bool, tell: Callable[[str], None] = lambda what: None) -> Report:
    """Examines this installation of gradsync and its machine, and returns the report.

    Args:
        ranks: whether to start two ranks that train a small model; it takes some seconds.
        tell: called with words for what is examined next, where that may take a while.
    """
    tell("kernels")
    findings = [_torch_found(), _native_kernels()]
    try:
        cards = accelerators()
    except Exception as error:  # of a driver, for a card that is busy or broken
        cards = []
        findings.append(Finding("fault", "accelerators", f"they cannot be listed: {type(error).__name__}: {error}"))
    findings += [_accelerator_missing()] if not cards and built_for() else []
    findings += [found for card in cards for found in (_backend_of(card), _kernels_on(card))]
    tell("names and addresses of this machine")
    findings += [*_interfaces(), _own_address(), *_slow_names()]
    if ranks:
        tell("two ranks train")
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
    if found.startswith(tuple(f"{release}." for release in TESTED_TORCH)):
        return Finding("ok", "torch", f"{found}, as in gradsync's tests")
    return Finding("note", "torch", f"{found}; gradsync was tested with {' and '.join(TESTED_TORCH)}")


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
    if kind not in dist.Backend.backend_capability.get(backend, [kind]):
        return Finding("fault", about, f"{backend} does not take tensors of {kind}: train on the CPU")
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
        except Exception as error:  # of a compiler, a driver
            return Finding("fault", about, f"{kind}: {name} failed: {type(error).__name__}: {error}")
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
    there, found = [name for _, name in socket.if_nameindex()], []
    for setting in INTERFACES:
        wanted = os.environ.get(setting, "")
        # NCCL takes names that begin with these, "=" asks it for whole names as gloo does, and "^" leaves some out.
        whole = setting.startswith("GLOO") or wanted.startswith("=")
        names = [] if wanted.startswith("^") else [name for name in wanted.lstrip("=").split(",") if name]
        if names and not any(name == each or (not whole and name.startswith(each)) for each in names for name in there):
            text = f"it names {wanted!r}; the interfaces of this machine are {', '.join(there)}"
            found.append(Finding("fault", setting, text))
    return found


def _own_address() -> Finding:
    """Looks up this machine's name, by whose address gloo's ranks are found where no interface is named."""
    about, name = "address", socket.gethostname()
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return Finding("ok", about, f"gloo connects by the interface {interface}")
    others = ", ".join(each for _, each in socket.if_nameindex() if each != "lo") or "none but lo here"
    advice = f"for ranks on several nodes set GLOO_SOCKET_IFNAME to the interface of their network ({others})"
    try:
        found = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return Finding("note", about, f"this machine's name, {name}, has none ({error}); {advice}")
    if found.startswith("127.") or found == "::1":
        return Finding(
            "note", about, f"{found} is that of this machine's name, {name}, and no other node can reach it; {advice}"
        )
    return Finding("ok", about, f"{found}, by this machine's name, {name}")


def _slow_names() -> list[Finding]:
    """Returns a note if a name server is slow to say which name an address of this machine has.

    A store of `torch.distributed` asks that for each client that connects, and serves no other one meanwhile. It asks
    for an IPv4 address in its IPv6 form, which /etc/hosts seldom holds.
    """
    addresses = {"127.0.0.1"}
    with suppress(OSError):
        addresses |= {str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    found = []
    for address in sorted(addresses):
        began_s, asked = time.perf_counter(), f"::ffff:{address}"
        with suppress(OSError):
            socket.getnameinfo((asked, 1, 0, 0), 0)
        if (took_s := time.perf_counter() - began_s) >= SLOW_NAME_S:
            text = (
                f"the look-up of the name of {asked} took {took_s:.1f} s: for so long the store of torch.distributed "
                "here stands still whenever a rank connects, and ranks may seem lost. Give it a name in "
                f"/etc/hosts ({asked} NAME), or set RES_OPTIONS='timeout:1 attempts:1'"
            )
            found.append(Finding("note", "names", text))
    return found


def _two_ranks(cards: list[Accelerator]) -> Finding:
    """Lets two ranks train as DDP does, on two accelerators by their backend, else by gloo."""
    backend, devices = "gloo", [str(card.device) for card in cards[:2]] or ["cpu"]
    if len(devices) == 2:
        backend = _backend(cards[0].device.type) or backend
    about = "two ranks"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1", "--nproc-per-node", "2"]
    command += ["-m", "gradsync.diagnosis.two_ranks", backend, *devices]
    lone = {name: value for name, value in os.environ.items() if not OF_TORCHRUN.fullmatch(name)}
    running = subprocess.Popen(command, env=lone, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, said = running.communicate(timeout=RUN_S)
    except subprocess.TimeoutExpired:
        running.terminate()  # torchrun ends its ranks, which a kill would leave
        with suppress(subprocess.TimeoutExpired):
            running.communicate(timeout=END_S)
        running.kill()
        return Finding("fault", about, f"they did not end within {RUN_S:.0f} s over {backend}; run {_shell(command)}")
    if running.returncode:
        return Finding("fault", about, f"{_last_error(said)}; for all of it run {_shell(command)}")
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
