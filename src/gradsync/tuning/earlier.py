"""Kernel times of earlier jobs on this machine, kept in files of the user's cache, so that later jobs measure nothing.

A file holds the times of one list of kernels under the same circumstances: processor, cores, threads, ranks beside each
other, device, versions. Every file is checked when it is read; one that does not fit is ignored and measured anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from .. import __version__
from ..comm import Group
from ..comm.links import Highest
from ..costs.steps import Compute
from ..devices.inventory import name_of, processor
from ..inputs.files import naming, read_text
from ..kernels import active, native
from ..plans.document import Document
from ..plans.profile import MOST_COUNT, Bytes, Data, Seconds
from .pieces import Pieces
from .rehearsal import Sample

logger = logging.getLogger(__name__)

FOLDER = "GRADSYNC_CACHE_DIR"  # the environment variable that names another folder than the user's cache
MOST_BYTES = 1 << 20  # of a file: 300 samples take about 60 KB
MOST_FILES = 64  # the oldest go
MOST_SAMPLES = 10_000
SUFFIX = ".kernels.json"
DIGEST_BYTES = 6  # of a SHA-256; exact in float64

Word = Annotated[str, Field(max_length=1000)]


class Computed(Data):
    """A `Compute` step with the same fields, as pydantic model to be written as JSON."""

    kernel: Word
    nbytes: Bytes
    device: Word
    calls: float = Field(gt=0, le=MOST_COUNT)
    awaited: bool
    fetched_bytes: Bytes
    sent_bytes: Bytes


class Timed(Data):
    """The computations of one rank between two awaits of a rehearsal, and their seconds."""

    computed: tuple[Computed, ...] = Field(min_length=1, max_length=100)
    seconds: Seconds


class KernelTimes(Document):
    """The samples of one rehearsal of kernels, and the circumstances, by name, under which they were measured."""

    noun: ClassVar[str] = "file of kernel times"
    by_lines: ClassVar[tuple[str, ...]] = ("samples",)

    version: int = 1
    circumstances: dict[Word, Annotated[str, Field(max_length=100_000)]]
    samples: tuple[Timed, ...] = Field(min_length=1, max_length=MOST_SAMPLES)


@dataclass(frozen=True)
class EarlierTimes:
    """The kernel times that jobs have measured under these circumstances, given as (name, value) pairs.

    `anew`: they are not looked up, but measured and kept.
    """

    circumstances: tuple[tuple[str, str], ...]
    anew: bool = False

    @classmethod
    def of(cls, group: Group, *, anew: bool = False) -> EarlierTimes:
        """Returns the times of this process on the device of the group's messages, with as many ranks on its node."""
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
        """Returns the times of kernels on the CPU with another number of torch's threads."""
        changed = {**dict(self.circumstances), "threads": str(threads), "device": "cpu", "card": ""}
        return replace(self, circumstances=tuple(changed.items()))

    def or_measured(self, work: str, rehearsal: Pieces[list[Sample]], highest: Highest) -> Pieces[list[Sample]]:
        """Returns the samples of an earlier rehearsal if every rank has them, else rehearses and keeps the samples.

        Args:
            work: names what the rehearsal times, the same for rehearsals that give samples of the same kernels.
            rehearsal: its pieces; they run on all ranks or on none.
            highest: returns the maximum of numbers over all ranks; collective.
        """
        found = None if self.anew else self.load(work)
        number = 0.0 if found is None else _number_of(found)
        missing, most, negated = highest([float(found is None), number, -number])
        yield
        if found is not None and not missing and most == -negated:
            logger.info("kernels are not measured: their times are those of an earlier job on this machine")
            return found
        samples = yield from rehearsal
        self.keep(work, samples)
        return samples

    def load(self, work: str) -> list[Sample] | None:
        """Returns the samples kept for this work; None where there are none, or none that fit."""
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
        return [(tuple(Compute(**dict(step)) for step in timed.computed), timed.seconds) for timed in times.samples]

    def keep(self, work: str, samples: list[Sample]) -> None:
        """Writes the samples for later jobs, in one move; where that cannot be done, only the log says so."""
        try:
            timed = tuple(
                Timed(computed=tuple(Computed(**asdict(step)) for step in computed), seconds=seconds)
                for computed, seconds in samples
            )
            text = KernelTimes(circumstances=self._circumstances_of(work), samples=timed).to_json()
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
    """Returns the folder of kernel times: `GRADSYNC_CACHE_DIR`, else `gradsync` in the user's cache.

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


def _number_of(samples: list[Sample]) -> float:
    """Returns a number that two lists share exactly if they time the same computations in the same order."""
    computed = json.dumps([[asdict(step) for step in steps] for steps, _ in samples])
    return float(int.from_bytes(hashlib.sha256(computed.encode()).digest()[:DIGEST_BYTES], "big"))


@cache
def _native_digest() -> str:
    """Returns a digest of the native kernels' file; "" where they are not built."""
    try:
        built = native.load().__file__
    except ImportError:
        return ""
    return "" if built is None else hashlib.sha256(Path(built).read_bytes()).hexdigest()[:16]
