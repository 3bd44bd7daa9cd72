"""The provenance of measurements: the machine, the libraries, the commit, the library's sources."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gradsync
from gradsync.devices.inventory import processor


def machine() -> dict[str, Any]:
    """Returns a description of this machine: cores, CPU model and OS kernel; without names or paths."""
    return {"cores": os.cpu_count(), "cpu": processor(), "kernel": platform.release()}


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in ("gradsync", "torch", "numpy")}


def commit() -> str | None:
    """Returns the git commit of the checkout that this module is in; None outside of a checkout."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def code() -> dict[str, Any]:
    """Returns what ran, by the names of a record's fields: `versions`, `commit` and `engine`, the digest of sources."""
    return {"versions": versions(), "commit": commit(), "engine": engine_digest()}


@cache
def engine_digest() -> str:
    """Returns a digest of the sources of the gradsync package that is imported, 12 hexadecimal digits of a SHA-256.

    It covers the package's Python files and the native sources of the checkout; of an install, which has no native
    sources, the built modules. Two commits with the same digest run the same library.
    """
    return digest_of_sources(Path(gradsync.__file__).parent)


def digest_of_sources(package: Path) -> str:
    """Returns the digest of a package folder, `src/gradsync` of a checkout or an installed one; see `engine_digest`."""
    native = package.parents[1] / "csrc"
    parts = [(package, {".py"}), (native, {".cpp", ".hpp"}) if native.is_dir() else (package, {".so", ".pyd"})]
    digest = hashlib.sha256()
    for root, suffixes in parts:
        for path in sorted(path for path in root.rglob("*") if path.suffix in suffixes):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]
