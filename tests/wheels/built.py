"""The files that `make wheels` has left in dist/, for tests that look at them or install them."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
PIP = [ROOT / ".venv-wheels" / "bin" / "pip", "--disable-pip-version-check"]
WHEELS = sorted(DIST.glob("*.whl"))
SDISTS = sorted(DIST.glob("*.tar.gz"))
NATIVE = [wheel for wheel in WHEELS if not wheel.stem.endswith("-py3-none-any")]
PURE = [wheel for wheel in WHEELS if wheel not in NATIVE]


def unpacked(wheel: Path, folder: Path) -> Path:
    """Returns the folder that the wheel's files are in."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def said_by(*command: str | Path, **more: object) -> str:
    """Returns what a command prints, both outputs; an assertion shows it if the command fails."""
    done = subprocess.run(  # type: ignore[call-overload]
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **more
    )
    assert done.returncode == 0, done.stdout
    said: str = done.stdout
    return said
