"""The provenance of measurements: the machine, the libraries, the commit."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

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


def engine_digest() -> str:
    """Returns a digest of the sources of the gradsync package that is imported, 12 hexadecimal digits.

    Two commits with the same digest run the same library.
    """
    import gradsync

    top, digest = Path(gradsync.__file__).parent, hashlib.sha256()
    for path in sorted(top.rglob("*.py")):
        digest.update(str(path.relative_to(top)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
