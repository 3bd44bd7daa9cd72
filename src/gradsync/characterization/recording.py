"""Records footprints (indices of non-zero rows and elements) of gradients while a script trains, one file per rank.

with recording(Recorder(steps=5)) as recorder:
    ...                                        # the script: `attach`, training
save_recording("recorded", recorder.footprints, rank=0, ranks=4)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..engine.step_listener import RecordingDone, StepListener
from ..inputs.settings import PositiveInt, argument
from .footprint import DEFAULT_SAMPLE, Footprint, Footprints, Shape, read_footprints, write_footprints

PATTERN = "rank*.npz"
POLL_S = 0.05


class Recorder(StepListener):
    """Collects the indices of non-zero rows and elements in this rank's gradients, before synchronisation.

    It listens to the first model that trains, and records `steps` steps, one of every `every`, from the first on.
    `gradsync bench characterize` measures the cost: every 16th step takes less than 1 % of a small model's time.

    Args:
        steps: the number of steps to record.
        sample: the most rows (elements, if a tensor has no rows) read of each gradient; None reads all.
        every: records one of so many steps.
    """

    def __init__(self, steps: int, sample: int | None = DEFAULT_SAMPLE, *, every: int = 1) -> None:
        argument("steps", steps, PositiveInt)
        argument("sample", sample, PositiveInt | None)
        argument("every", every, PositiveInt)
        self.steps, self.sample, self.every = steps, sample, every
        self.footprints: list[dict[str, Footprint]] = []
        self._engine: Any = None
        self._seen = 0  # steps
        self._current: dict[str, Footprint] = {}

    def take(self, engine: Any, name: str, gradient: Tensor | None, shape: tuple[int, ...]) -> None:
        if self._engine is None:
            self._engine = engine
        if self._engine is engine and self._seen % self.every == 0:
            self._current[name] = Footprint.of(gradient, Shape(shape), self.sample)

    def step_ended(self, engine: Any, names: Iterable[str]) -> None:
        """Stores where the gradients of the training step that has ended were not zero; engines call it in each step.

        Args:
            engine: synchronises the gradients of one model; steps of any but the first model are not stored.
            names: the model's parameters, in the order in which they are stored.

        Raises:
            RecordingDone: after the last step to record.
        """
        if self._engine is not engine:
            return
        if self._seen % self.every == 0:
            self.footprints.append({name: self._current[name] for name in names})
        self._seen += 1
        if len(self.footprints) == self.steps:
            raise RecordingDone


def path_of(folder: str | Path, rank: int) -> Path:
    """Returns the path of the file in `folder` that has (or is to have) the recording of rank `rank`."""
    return Path(folder) / PATTERN.replace("*", str(rank))


def save_recording(folder: str | Path, steps: Sequence[Footprints], *, rank: int, ranks: int) -> None:
    """Writes where one rank's gradients were not zero to its file in `folder`, which appears only when complete.

    Args:
        steps: for every training step, a footprint (indices of non-zeros) by parameter name.
        rank, ranks: this rank, and the number of ranks.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    unfinished = path_of(folder, rank).with_suffix(".part")
    with unfinished.open("wb") as file:
        write_footprints(file, steps, rank=rank, ranks=ranks)
    unfinished.replace(path_of(folder, rank))


def discard_recording(folder: str | Path, *, rank: int, ranks: int) -> None:
    """Removes this rank's file of an earlier recording; call it before a new one.

    Rank 0 also removes files of ranks that there are no longer, from `ranks` on.
    """
    for path in Path(folder).glob(PATTERN):
        number = path.stem.removeprefix("rank")
        if number == str(rank) or (rank == 0 and number.isdecimal() and int(number) >= ranks):
            path.unlink()


def load_recording(folder: str | Path) -> list[list[Footprints]]:
    """Reads the recordings of all ranks: for each step, for each rank, a dict of footprints by parameter name.

    A footprint has the indices of a gradient's non-zeros.

    Raises:
        ValueError: if a rank's file is missing, is not a recording, or belongs to another recording.
    """
    files = sorted(Path(folder).glob(PATTERN))
    if not files:
        raise ValueError(f"no recording in {folder}: expected a file {PATTERN} for every rank")
    by_rank: dict[int, list[dict[str, Footprint]]] = {}
    sizes = set()
    for path in files:
        with path.open("rb") as file:
            try:
                steps, about = read_footprints(file)
                by_rank[int(about["rank"])] = steps
                sizes.add(int(about["ranks"]))
            except (KeyError, ValueError) as error:
                raise ValueError(f"{path}: {error}") from None
    if len(sizes) > 1 or sorted(by_rank) != list(range(len(files))) or sizes != {len(files)}:
        raise ValueError(f"{folder} has files of ranks {sorted(by_rank)}, of recordings by {sorted(sizes)} ranks")
    lengths = [len(by_rank[rank]) for rank in sorted(by_rank)]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise ValueError(f"every rank must have recorded the same number of steps, at least one; got {lengths}")
    return [[by_rank[rank][step] for rank in sorted(by_rank)] for step in range(lengths[0])]


def await_recording(folder: str | Path, ranks: int, timeout_s: float) -> None:
    """Waits until the folder has a recording file of every one of `ranks` ranks.

    Raises:
        RuntimeError: after `timeout_s` seconds, naming the ranks whose files are missing.
    """
    deadline_s = time.monotonic() + timeout_s
    while missing := [rank for rank in range(ranks) if not path_of(folder, rank).exists()]:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"no recording of rank {', '.join(map(str, missing))} in {folder} after {timeout_s:g} s")
        time.sleep(POLL_S)
