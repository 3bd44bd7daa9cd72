"""The grid of defaults: DDP's best line and gradsync's methods without settings, over models, links and layouts.

The file of records keeps each finished cell, so that a run goes on where another one ended. A cell that failed is tried
once more by the next run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cluster import Scenario
from ..cluster.scenario import rate_bytes_per_s
from ..report.record import Record, load_records, save_records
from .launch import Loopback, cluster
from .methods import DDP, DDP_SPARSE, SWEEPS
from .provenance import code
from .train import TrainSpec, run_training
from .train_rank import CALIBRATION_STEPS

SUBJECTS = ("gradsync", "auto", "auto_lossy")
LINKS = ("200mbit", "1gbit", "unshaped")
LAYOUTS = ((4, 1), (2, 2))  # nodes, and ranks on each
TRIES = 2  # of a cell that fails, each by another run


@dataclass(frozen=True)
class Load:
    """The cost of a step of a workload, for estimates: seconds alone on a core, and bytes of a rank's gradients."""

    compute_s: float
    dense_bytes: float
    sparse_bytes: float | None = None  # with sparse gradients of tables; None for models without tables


WORKLOADS = {  # measured on an AMD EPYC
    "deepfm": Load(0.06, 18.4e6, 2.4e6),
    "lstm": Load(0.13, 52.2e6, 1.5e6),
    "nmt": Load(0.12, 14.9e6, 1.4e6),
    "resnet32": Load(0.10, 1.9e6),
    "alexnet": Load(0.03, 8.6e6),
    "gpt": Load(0.09, 5.8e6),
}
START_S, SETTLING_S, SETTLING_STEPS = 20.0, 15.0, 100  # of a cell; of each automatic method in it


@dataclass(frozen=True)
class Cell:
    """One cell of the grid: a workload on a link and a layout of ranks."""

    workload: str
    link: str
    nodes: int
    ranks_per_node: int

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.link}, {self.nodes}x{self.ranks_per_node}"

    @property
    def has_tables(self) -> bool:
        return WORKLOADS[self.workload].sparse_bytes is not None

    @property
    def methods(self) -> tuple[str, ...]:
        """Returns the methods of the cell; the faster of DDP's sweeps is the baseline."""
        return (DDP, *((DDP_SPARSE,) if self.has_tables else ()), *SUBJECTS)

    def spec(self, usual: TrainSpec) -> TrainSpec:
        """Returns the settings of the cell's run: those of the grid, and the cell's own."""
        own = {"workload": self.workload, "link": self.link, "nodes": self.nodes, "methods": self.methods}
        return usual.model_copy(update={**own, "ranks_per_node": self.ranks_per_node, "fastest_first": True})


CELLS = tuple(Cell(workload, link, *layout) for layout in LAYOUTS for workload in WORKLOADS for link in LINKS)

USUAL = TrainSpec(repeats=5, pick_repeats=5, block_steps=3, warmup_steps=3, most_block_s=4.0, patience_s=60.0)
SETTINGS = (
    *("repeats", "pick_repeats", "block_steps", "most_block_s", "warmup_steps", "patience_s"),
    *("emulate_compute", "loopback", "seed"),
)  # fields of `TrainSpec` that are the same in all cells


def cells_with(words: Iterable[str]) -> tuple[Cell, ...]:
    """Returns the cells whose name has all of these words: a workload, a link, a layout as 4x1.

    Raises:
        ValueError: no cell has them.
    """
    wanted = set(words)
    found = tuple(cell for cell in CELLS if wanted <= set(cell.name.split(", ")))
    if not found:
        known = dict.fromkeys(word for cell in CELLS for word in cell.name.split(", "))
        raise ValueError(f"no cell has all of {', '.join(sorted(wanted))}; there are {', '.join(known)}")
    return found


def estimate_s(cell: Cell, spec: TrainSpec) -> float:
    """Returns about how many seconds a cell takes on this machine, by gradients' bytes and the model's compute."""
    load, world = WORKLOADS[cell.workload], cell.nodes * cell.ranks_per_node
    compute_s = load.compute_s * max(1.0, world / (os.cpu_count() or 1))
    rate = rate_bytes_per_s(cell.link) or float("inf")
    dense_s = compute_s + 2 * (world - 1) / world * load.dense_bytes / rate
    ours_s, tables = dense_s, 0
    if load.sparse_bytes is not None:
        ours_s, tables = compute_s + (world - 1) * load.sparse_bytes / rate, 1  # each rank gets all others' rows
    block = 1 + max(1, min(spec.block_steps, int(spec.most_block_s / dense_s)))
    before = 1 + spec.warmup_steps + CALIBRATION_STEPS
    picking, comparing = before + spec.sweep_repeats * block, before + spec.repeats * block
    lines_s = len(SWEEPS[DDP]) * dense_s + tables * len(SWEEPS[DDP_SPARSE]) * ours_s
    compared_s = dense_s + (len(SUBJECTS) + 1 + tables) * ours_s  # 1: the baseline's second copy
    settling_s = 2 * (SETTLING_S + SETTLING_STEPS * ours_s)
    return START_S + picking * lines_s + comparing * compared_s + settling_s


@dataclass(frozen=True)
class Finished:
    """The records of one cell that has run: by how many tries, in how many seconds, and what failed, if anything."""

    records: list[Record]
    tries: int
    seconds: float

    @property
    def compared(self) -> list[Record]:
        """Returns the records of methods compared with the best line of DDP, without those that chose it."""
        return [record for record in self.records if "phase" not in record.params]

    @property
    def failed(self) -> str | None:
        """Returns the first error of a compared method; None if none failed."""
        return next((record.failed for record in self.compared if record.failed), None)


class Kept:
    """The finished cells of a grid, kept in a file of records: each record says which cell and settings it is of."""

    def __init__(self, path: Path, settings: dict[str, Any], *, again: bool = False) -> None:
        """Reads the file, if there is one.

        Args:
            again: forget what the file has; it is overwritten when the first cell has finished.

        Raises:
            ValueError: the file holds something else, or cells of other settings or of another library.
        """
        self._path, self._settings = path, settings
        self.cells: dict[str, Finished] = {}
        records = load_records(path) if path.exists() and path.stat().st_size and not again else []
        for record in records:
            self._require_like(record)
        for name in dict.fromkeys(record.params["grid"]["cell"] for record in records):
            own = [record for record in records if record.params["grid"]["cell"] == name]
            about = own[0].params["grid"]
            self.cells[name] = Finished(own, about["tries"], about["seconds"])

    def _require_like(self, record: Record) -> None:
        way_out = f"move {self._path} away, name another file, or measure all cells anew with --again"
        about = record.params.get("grid")
        if about is None:
            raise ValueError(f"{self._path} has records that are not of a grid of defaults; {way_out}")
        engine = code()["engine"]
        if record.engine != engine:
            raise ValueError(
                f"{self._path} was measured with another library: its digest is {record.engine}, now it is {engine}; "
                f"{way_out}"
            )
        if about["settings"] != self._settings:
            theirs = about["settings"]
            other = [name for name, value in self._settings.items() if theirs.get(name) != value]
            said = ", ".join(f"{name} {theirs.get(name)} and not {self._settings[name]}" for name in other)
            raise ValueError(f"{self._path} was measured with other settings: {said}; {way_out}")

    @property
    def records(self) -> list[Record]:
        """Returns the records of all cells, in the grid's order."""
        return [record for cell in CELLS if cell.name in self.cells for record in self.cells[cell.name].records]

    def is_left(self, cell: Cell) -> bool:
        """Whether a run has to measure the cell: it is not there, or has failed and may be tried again."""
        kept = self.cells.get(cell.name)
        return kept is None or (kept.failed is not None and kept.tries < TRIES)

    def keep(self, cell: Cell, records: Sequence[Record], seconds: float) -> Finished:
        """Writes a cell's records to the file, in place of those of an earlier try."""
        tries = 1 + (self.cells[cell.name].tries if cell.name in self.cells else 0)
        about = {"cell": cell.name, "tries": tries, "seconds": round(seconds, 1), "settings": self._settings}
        own = [record.model_copy(update={"params": {**record.params, "grid": about}}) for record in records]
        self.cells[cell.name] = Finished(own, tries, seconds)
        save_records(self.records, self._path)
        return self.cells[cell.name]


def settings_of(spec: TrainSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json", include=set(SETTINGS))


def require_links() -> None:
    """Raises RuntimeError where this machine cannot emulate links: a grid must not run on loopback unnoticed."""
    notes: list[str] = []
    with cluster(Scenario(nodes=2), notes) as where:
        if isinstance(where, Loopback):
            raise RuntimeError("; ".join(notes))


def run_cell(
    cell: Cell, usual: TrainSpec, kept: Kept, on_event: Callable[[dict[str, Any]], None]
) -> tuple[Finished, list[str]]:
    """Measures one cell and keeps its records, or the error that ended it; returns them, and notes."""
    spec, began_s = cell.spec(usual), time.monotonic()
    try:
        run = run_training(spec, on_event)
    except RuntimeError as error:
        failed = [_failure(spec, subject, str(error)) for subject in SUBJECTS]
        return kept.keep(cell, failed, time.monotonic() - began_s), []
    return kept.keep(cell, run.records, time.monotonic() - began_s), run.notes


def _failure(spec: TrainSpec, subject: str, error: str) -> Record:
    params = {"nodes": spec.nodes, "link": spec.link, "workload": spec.workload, "ranks_per_node": spec.ranks_per_node}
    return Record(
        case="train",
        metric="step_s",
        subject=subject,
        baseline=spec.methods[0],
        params=params,
        repeats=0,
        subject_s=None,
        baseline_s=None,
        ratio=None,
        aa=None,
        seeds=[spec.seed],
        failed=error,
        **code(),
    )
