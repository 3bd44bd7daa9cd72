"""`gradsync characterize`: how sparse gradients are, of a workload, of a recording, or of one's own script."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..bench.options import parse_options
from ..bench.topk import TopKWorkload, kind_of, load, names
from ..characterization.figures import Characterization, characterize_footprints, footprints_of
from ..characterization.footprint import DEFAULT_SAMPLE, Footprints
from ..characterization.recording import (
    Recorder,
    await_recording,
    discard_recording,
    load_recording,
    save_recording,
)
from ..characterization.views import sparsity_table, summary, views, write_sparsity_page
from ..engine.step_listener import recording
from ..workloads import Batch, Workload
from .bench import Options
from .console import WIDE, beside, console, plain_errors
from .progress import event_bar
from .script import Script, run_as_main

if TYPE_CHECKING:
    from torch import Tensor, nn

OTHER_RANKS_TIMEOUT_S = 60.0


def characterize(
    script: Script = None,
    workload: Annotated[str | None, typer.Option(help=f"A workload: {', '.join(names())}.")] = None,
    option: Options = None,
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
            footprints = _of_workload(workload, option, ranks, steps, seed, sample or None)
        else:
            if script:
                kept = DEFAULT_SAMPLE if sample is None else sample or None
                if not _record(script, Recorder(steps, kept, every=every), out):
                    return
            footprints = load_recording(recorded or out)
        found = characterize_footprints(footprints, partitions=partitions)
        _show(found, json, plot)


def _of_workload(
    name: str, texts: Sequence[str] | None, ranks: int, steps: int, seed: int, sample: int | None
) -> list[list[Footprints]]:
    """All ranks' gradients at the initial weights, one batch after the other."""
    task = load(name, **parse_options([name], texts or (), kind_of))
    model = task.model(sparse=True, seed=seed)
    batches = [task.batches(rank, ranks, seed) for rank in range(ranks)]
    found: list[list[Footprints]] = []
    with event_bar(f"{name}, {ranks} ranks", steps * ranks, "opening the data") as on_event:
        for step in range(steps):
            found.append([])
            for rank in range(ranks):
                found[-1] += footprints_of([_gradients(task, model, batches[rank])], sample)
                on_event({"step": step, "rank": rank})
    return found


def _gradients(task: Workload, model: nn.Module, batches: Iterator[Batch]) -> dict[str, Tensor | None]:
    """Of the next step, by parameter; of `topk`, what is left of all of them, as one tensor."""
    if isinstance(task, TopKWorkload):
        return {"all parameters": task.sparsified(model, batches)}
    model.zero_grad()
    task.loss(model, next(batches)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


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
