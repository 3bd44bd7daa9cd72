"""`gradsync characterize`: shows how sparse gradients are, from a workload, a recording, or the user's script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..characterization.figures import Characterization, characterize_footprints
from ..characterization.footprint import DEFAULT_SAMPLE
from ..characterization.recording import Recorder, await_recording, discard_recording, load_recording, save_recording
from ..characterization.views import sparsity_table, summary, views, write_sparsity_page
from ..engine.step_listener import recording
from .console import WIDE, beside, folder, plain_errors, writable
from .extensions import WORKLOADS, extension
from .progress import phase
from .results import JsonOfRank0, put, words
from .script import NamedWorkload, Script, WorkloadOptions, run_as_main
from .world import Ranks, ranks_of_environment

OTHER_RANKS_TIMEOUT_S = 60.0


def characterize(
    script: Script = None,
    workload: NamedWorkload = None,
    option: WorkloadOptions = None,
    recorded: Annotated[Path | None, typer.Option(help="Folder of an earlier recording of a script.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks of a workload; one process runs them all.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps; figures are means over steps.")] = 3,
    every: Annotated[int, typer.Option(min=1, help="Record one of so many steps of a script.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of a workload's weights and batches.")] = 0,
    sample: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Most rows to read of each tensor; 0 reads all. "
            f"By default all for a workload, {DEFAULT_SAMPLE} for a script.",
        ),
    ] = None,
    partitions: Annotated[int | None, typer.Option(min=1, help="One more number of partitions for skewness.")] = None,
    out: Annotated[
        Path, typer.Option(callback=folder, help="Folder for a script's recording, one file per rank.")
    ] = Path("recorded"),
    json: JsonOfRank0 = None,
    plot: Annotated[Path | None, typer.Option(help="HTML file for plots.")] = None,
) -> None:
    """Show how sparse gradients are, how much ranks overlap, how their sum fills up, and how skewed it is."""
    if sum((bool(script), workload is not None, recorded is not None)) != 1:
        raise typer.BadParameter("give one of --workload NAME, --recorded FOLDER, or -- SCRIPT ARGUMENTS")
    with plain_errors():
        here = ranks_of_environment(joins=False) if script else Ranks(0, 1)
        if here.rank == 0:  # the other ranks' machines need not have the folders
            writable(json)
            writable(plot)
        if plot is not None and plot.suffix != ".html":
            raise typer.BadParameter(f"--plot must name an .html file, got {plot}")
        if workload is not None:
            footprints_of_ranks = extension(WORKLOADS, "characterize", f"the workload {workload}")
            footprints = footprints_of_ranks(
                workload, option or (), ranks=ranks, steps=steps, seed=seed, sample=sample or None
            )
        else:
            if script:
                kept = DEFAULT_SAMPLE if sample is None else sample or None
                _record(script, Recorder(steps, kept, every=every), out, json, here)
                if here.rank > 0:
                    return
            with phase("reading the recording"):
                footprints = load_recording(recorded or out)
        with phase("counting non-zeros"):
            found = characterize_footprints(footprints, partitions=partitions)
        _show(found, json, plot)


def _record(script: Sequence[str], recorder: Recorder, out: Path, json: str | None, here: Ranks) -> None:
    """Runs the script and writes indices of gradients' non-zeros to `out`; rank 0 waits until all ranks have."""
    if here.rank == 0:  # no spinner: the script has the terminal
        said = f"recording the gradients of {script[0]} in {recorder.steps} step{'s' if recorder.steps > 1 else ''}"
        said += f", one of every {recorder.every}" if recorder.every > 1 else ""
        beside.print(said, highlight=False, soft_wrap=True)
    discard_recording(out, rank=here.rank, ranks=here.size)
    with recording(recorder):
        run_as_main(script, json)
    if not recorder.footprints:
        raise RuntimeError(f"{script[0]} showed no gradients: does it call gradsync.attach(model) and backward()?")
    save_recording(out, recorder.footprints, rank=here.rank, ranks=here.size)
    if here.rank == 0:
        with phase("waiting for the recordings of all ranks"):
            await_recording(out, here.size, OTHER_RANKS_TIMEOUT_S)


def _show(found: Characterization, json: str | None, plot: Path | None) -> None:
    said = words(json)
    if views(found):
        said.print(sparsity_table(found, compact=said.width < WIDE))
    said.print(summary(found), highlight=False)
    put(json, found.to_json(), "Figures")
    if plot is not None:
        with phase("drawing the plots"):
            write_sparsity_page(found, plot)
        beside.print(f"Plots: {plot}")
