"""Kernel times of earlier jobs on this machine, kept in files of the user's cache, so that later jobs measure nothing.

A file holds the fitted times of one list of kernels under the same circumstances: processor, cores, threads, ranks
beside each other, device, versions. Every file is checked when it is read; one that does not fit is ignored and
measured anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from .. import __version__
from ..comm import Group
from ..comm.links import Highest
from ..devices.inventory import name_of, processor
from ..inputs.files import naming, read_text
from ..kernels import active, native
from ..planner.pieces import Pieces
from ..plans.document import Document
from ..plans.profile import KernelEstimate

logger = logging.getLogger(__name__)

FOLDER = "GRADSYNC_CACHE_DIR"  # the environment variable that names another folder than the user's cache
MOST_BYTES = 1 << 20  # of a file: 30 kernels take about 10 KB
MOST_FILES = 64  # the oldest go
MOST_KERNELS = 1_000
SUFFIX = ".kernels.json"
DIGEST_BYTES = 6  # of a SHA-256; exact in float64

Word = Annotated[str, Field(max_length=1000)]
Costs = dict[str, KernelEstimate]  # by kernel


class KernelTimes(Document):
    """A file of kernel times: a job's measured costs by kernel, and its circumstances (processor, ...) by name."""

    noun: ClassVar[str] = "file of kernel times"
    by_lines: ClassVar[tuple[str, ...]] = ("kernels",)

    version: int = 2
    circumstances: dict[Word, Annotated[str, Field(max_length=100_000)]]
    kernels: dict[Word, KernelEstimate] = Field(min_length=1, max_length=MOST_KERNELS)


@dataclass(frozen=True)
class EarlierTimes:
    """The kernel times that earlier jobs on this machine have left in files, if they ran under the same circumstances.

    Args:
        circumstances: what times depend on, as (name, value) pairs: processor, cores, threads, device, versions.
        anew: whether to ignore the files, measure, and replace them.
    """

    circumstances: tuple[tuple[str, str], ...]
    anew: bool = False

    @classmethod
    def of(cls, group: Group, *, anew: bool = False) -> EarlierTimes:
        """Returns the earlier times that fit this process: its device, versions, threads, and ranks on its node.

        `group` tells the device and the ranks on the node. `anew`: whether to measure even so.
        """
        device, nodes = group.payload_device, group.placement.nodes
        circumstances = {
            "gradsync": __version__,
            "torch": torch.__version__,
            "kernels": f"{active()} {_native_digest()}",
            "processor": processor(),
            "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
            "threads": str(torch.get_num_threads()),
            "ranks": str(nodes.count(nodes[group.rank])),
            "device": device.type,
            "card": name_of(device),
        }
        return cls(tuple(circumstances.items()), anew)

    def with_threads(self, threads: int) -> EarlierTimes:
        """Returns the earlier times of kernels that ran on the CPU with this number of torch's threads.

        All other circumstances are those of this object.
        """
        changed = {**dict(self.circumstances), "threads": str(threads), "device": "cpu", "card": ""}
        return replace(self, circumstances=tuple(changed.items()))

    def or_measured(self, work: str, measured: Pieces[Costs], highest: Highest) -> Pieces[Costs]:
        """Returns an earlier job's costs of kernels if every rank has them; else measures, and keeps these in a file.

        It is a generator that measures a piece at each `next`, on all ranks at once. The costs in files of different
        machines differ.

        Args:
            work: names what is measured; equal names mean the same kernels.
            measured: measures the costs, a piece at each `next`.
            highest: returns the maximum of numbers over all ranks; collective.
        """
        found = None if self.anew else self.load(work)
        number = 0.0 if found is None else _number_of(found)
        missing, most, negated = highest([float(found is None), number, -number])
        yield
        if found is not None and not missing and most == -negated:
            logger.info("kernels are not measured: their times are those of an earlier job on this machine")
            return found
        costs = yield from measured
        self.keep(work, costs)
        return costs

    def load(self, work: str) -> Costs | None:
        """Returns the costs that an earlier job kept under the name `work`; None without a file that fits."""
        kept = self._circumstances_of(work)
        try:
            place = self._place_of(work)
            if not place.exists():
                return None
            with naming(place):
                times = KernelTimes.from_json(read_text(place, KernelTimes.noun, MOST_BYTES))
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: of a user without a home
            logger.info("kernel times of earlier jobs are ignored: %s", error)
            return None
        if times.circumstances != kept:
            logger.info("%s is ignored: it holds times of other circumstances", place)
            return None
        return dict(times.kernels)

    def keep(self, work: str, costs: Costs) -> None:
        """Writes the costs into a file for later jobs, under the name `work`; of too many files the oldest go.

        The file appears as a whole or not at all. Errors, as of a full disk, are only logged.
        """
        try:
            text = KernelTimes(circumstances=self._circumstances_of(work), kernels=costs).to_json()
            place = self._place_of(work)
            place.parent.mkdir(parents=True, exist_ok=True)
            if len(text.encode()) <= MOST_BYTES:
                _write(place, text)
            _drop_oldest(place.parent)
        except (OSError, RuntimeError, ValueError) as error:
            logger.info("kernel times are not kept for later jobs: %s", error)

    def _circumstances_of(self, work: str) -> dict[str, str]:
        return {**dict(self.circumstances), "work": work}

    def _place_of(self, work: str) -> Path:
        text = json.dumps(self._circumstances_of(work), sort_keys=True)
        return folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}{SUFFIX}"


def folder() -> Path:
    """Returns the folder with the files of kernel times: `GRADSYNC_CACHE_DIR`, else `gradsync` in the user's cache.

    The user's cache is `XDG_CACHE_HOME`, else `~/.cache`.

    Raises:
        RuntimeError: where neither is set and the user has no home.
    """
    if named := os.environ.get(FOLDER):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradsync"


def _write(place: Path, text: str) -> None:
    """Writes the file so that others see all of it or nothing."""
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=".", suffix=SUFFIX)
    beside = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


def _drop_oldest(directory: Path) -> None:
    """Deletes all but the `MOST_FILES` latest files of kernel times; another process may delete them meanwhile."""
    found = []
    for path in directory.glob(f"*{SUFFIX}"):
        try:
            found.append((path.stat().st_mtime, path))
        except FileNotFoundError:
            continue
    for _, path in sorted(found)[: max(len(found) - MOST_FILES, 0)]:
        path.unlink(missing_ok=True)


def _number_of(costs: Costs) -> float:
    """Returns a number that two files share exactly if they have costs of the same kernels."""
    names = json.dumps(sorted(costs))
    return float(int.from_bytes(hashlib.sha256(names.encode()).digest()[:DIGEST_BYTES], "big"))


@cache
def _native_digest() -> str:
    """Returns a digest of the native kernels' file; "" where they are not built."""
    try:
        built = native.load().__file__
    except ImportError:
        return ""
    return "" if built is None else hashlib.sha256(Path(built).read_bytes()).hexdigest()[:16]
