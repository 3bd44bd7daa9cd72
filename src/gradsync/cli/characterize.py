"""`gradsync characterize`: how sparse gradients are, of a workload, of a recording, or of one's own script."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..characterization.figures import Characterization, characterize_footprints
from ..characterization.footprint import DEFAULT_SAMPLE
from ..characterization.recording import Recorder, await_recording, discard_recording, load_recording, save_recording
from ..characterization.views import sparsity_table, summary, views, write_sparsity_page
from ..engine.step_listener import recording
from .console import WIDE, beside, console, plain_errors
from .extensions import WORKLOADS, extension
from .script import NamedWorkload, Script, WorkloadOptions, run_as_main

OTHER_RANKS_TIMEOUT_S = 60.0


def characterize(
    script: Script = None,
    workload: NamedWorkload = None,
    option: WorkloadOptions = None,
    recorded: Annotated[Path | None, typer.Option(help="A folder that a script's run has left.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of a workload, computed one after the other.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Steps; figures are means over them.")] = 3,
    every: Annotated[int, typer.Option(min=1, help="Of a script one step in so many is looked at.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of a workload's weights and batches.")] = 0,
    sample: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Rows looked at in each tensor, 0: all. "
            f"By default all of a workload's, {DEFAULT_SAMPLE} of a script's.",
        ),
    ] = None,
    partitions: Annotated[int | None, typer.Option(min=1, help="Also the skew over so many partitions.")] = None,
    out: Annotated[Path, typer.Option(help="Where a script's recording goes, a file a rank.")] = Path("recorded"),
    json: Annotated[str | None, typer.Option("--json", help="File for all figures; - prints them.")] = None,
    plot: Annotated[Path | None, typer.Option(help="HTML page of the plots.")] = None,
) -> None:
    """How sparse gradients are, how much the ranks overlap, how their sum fills up, how skewed they are."""
    if sum((bool(script), workload is not None, recorded is not None)) != 1:
        raise typer.BadParameter("give one of --workload NAME, --recorded FOLDER, or -- SCRIPT ARGUMENTS")
    if plot is not None and plot.suffix != ".html":
        raise typer.BadParameter(f"--plot must name an .html file, got {plot}")
    with plain_errors():
        if workload is not None:
            footprints_of_ranks = extension(WORKLOADS, "characterize", f"the workload {workload}")
            footprints = footprints_of_ranks(
                workload, option or (), ranks=ranks, steps=steps, seed=seed, sample=sample or None
            )
        else:
            if script:
                kept = DEFAULT_SAMPLE if sample is None else sample or None
                if not _record(script, Recorder(steps, kept, every=every), out):
                    return
            footprints = load_recording(recorded or out)
        found = characterize_footprints(footprints, partitions=partitions)
        _show(found, json, plot)


def _record(script: Sequence[str], recorder: Recorder, out: Path) -> bool:
    """Runs this rank's script and leaves its recording; True on rank 0, once all ranks have left theirs."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    discard_recording(out, rank=rank, ranks=ranks)
    with recording(recorder):
        run_as_main(script)
    if not recorder.footprints:
        raise RuntimeError(f"{script[0]} has shown no gradients: does it call gradsync.attach(model) and backward()?")
    save_recording(out, recorder.footprints, rank=rank, ranks=ranks)
    if rank == 0:
        await_recording(out, ranks, OTHER_RANKS_TIMEOUT_S)
    return rank == 0


def _show(found: Characterization, json: str | None, plot: Path | None) -> None:
    if json == "-":
        typer.echo(found.to_json())
    else:
        if views(found):
            console.print(sparsity_table(found, compact=console.width < WIDE))
        console.print(summary(found), highlight=False)
    if json is not None and json != "-":
        Path(json).write_text(found.to_json() + "\n", encoding="utf-8")
        beside.print(f"Figures: {json}")
    if plot is not None:
        write_sparsity_page(found, plot)
        beside.print(f"Plots: {plot}")
