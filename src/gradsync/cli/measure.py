"""`gradsync measure`: writes a profile of a script or workload, from which planners make plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..compressors.names import NAMES_IN_WORDS
from ..planner.default.named import lossy_of
from ..plans.profile import Profile, describe_profile
from ..tuning.kernels import CANDIDATES
from ..tuning.measurement import Measurement
from .console import beside, plain_errors, writable
from .extensions import WORKLOADS, extension
from .results import JsonOfRank0, put, words
from .script import NamedWorkload, Script, WorkloadOptions, run_as_main
from .world import ranks_of_environment


def measure(
    script: Script = None,
    workload: NamedWorkload = None,
    option: WorkloadOptions = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time gradients in; as many more to time overlap.")] = 10,
    warmup: Annotated[int, typer.Option(min=2, help="Steps before the first timed one.")] = 5,
    compressor: Annotated[
        list[str] | None,
        typer.Option(help=f"A compressor to measure the kernels of; repeatable. {NAMES_IN_WORDS}."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="File that rank 0 writes.")] = Path("profile.json"),
    json: JsonOfRank0 = None,
) -> None:
    """Measure a job: when gradients are ready, what kernels and links cost, and how much overlap slows both."""
    if bool(script) == (workload is not None):
        raise typer.BadParameter("give one of --workload NAME, or -- SCRIPT ARGUMENTS")
    with plain_errors():
        rank, ranks = ranks_of_environment(joins=workload is not None)
        problem = _unwritable(out, json) if rank == 0 else None
        if problem is not None and ranks == 1:
            raise problem
        candidates = (*CANDIDATES, *(lossy_of(name, ranks) for name in compressor or ()))
        if workload is not None:
            measured = extension(WORKLOADS, "measure", f"the workload {workload}")
            profile = measured(
                workload, option or (), steps=steps, warmup=warmup, candidates=candidates, problem=problem
            )
        else:
            measurement = Measurement(steps, warmup, candidates=candidates, ends_script=True, problem=problem)
            profile = _of_script(script or (), measurement, rank, json)
        if rank == 0:
            profile.save(out)
            for line in describe_profile(profile):
                words(json).print(line, highlight=False, soft_wrap=True)
            put(json, profile.to_json())
            beside.print(f"Profile: {out}")


def _unwritable(out: Path, json: str | None) -> ValueError | None:
    """Returns the error about a file that rank 0 cannot write; None if it can write both."""
    try:
        writable(out)
        writable(json)
    except typer.BadParameter as error:
        return ValueError(error.message)
    return None


def _of_script(script: Sequence[str], measured: Measurement, rank: int, json: str | None) -> Profile:
    """Runs the user's script on this rank until it has been measured, and returns the profile (the measurements)."""
    if rank == 0:  # no spinner: the script has the terminal
        said = f"measuring {script[0]} for {measured.steps_needed} steps or more, and its links and kernels"
        beside.print(said, highlight=False, soft_wrap=True)
    with measured.active():
        run_as_main(script, json)
    if measured.profile is not None:
        return measured.profile
    if measured.refusal is not None:
        raise measured.refusal
    if not measured.steps_taken:
        raise RuntimeError(
            f"{script[0]} synchronised no gradients: does it call gradsync.attach(model) and backward()?"
        )
    raise RuntimeError(
        f"{script[0]} ended after {measured.steps_taken} of the {measured.steps_needed} steps that measuring takes: "
        "let it make more, or ask for fewer by --steps and --warmup"
    )
