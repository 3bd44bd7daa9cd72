"""`gradsync plan` finds a plan for a measured job; `gradsync explain` says why a plan is as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..compressors import names as compressors
from ..costs.cluster import Cluster
from ..planner.default.named import SCHEMES_IN_WORDS, lossy_of
from ..planner.search.candidates import searched
from ..planner.search.job import Job
from ..planner.search.reasons import as_data, describe
from ..planner.search.reasons import explain as explained
from ..planner.search.ways import Constraints, ways_of
from ..plans.plan import Plan
from ..plans.profile import Profile
from ..schemes import LeafConstraints
from .console import beside, plain_errors, writable
from .progress import phase
from .results import Json, put, words

Measured = Annotated[Path, typer.Option("--profile", help="Profile of the job, as `gradsync measure` writes it.")]
OnCluster = Annotated[
    Path | None, typer.Option("--cluster", help="Plan for this cluster (TOML file), not the one of the measurement.")
]
Allow = Annotated[
    str,
    typer.Option(
        help=f"Lossy schemes allowed for dense gradients, comma-separated: {SCHEMES_IN_WORDS}; and compressors: "
        f"{compressors.NAMES_IN_WORDS}. By default all gradients stay exact."
    ),
]
Exact = Annotated[list[str] | None, typer.Option(help="Name or pattern of parameters that stay exact; repeatable.")]
MatricesOnly = Annotated[bool, typer.Option(help="Tensors of one dimension, such as biases, stay exact.")]
MostError = Annotated[
    float | None,
    typer.Option(min=0.0, help="Largest relative error of each parameter's gradient in one step, as measured."),
]
MostDelay = Annotated[
    float | None,
    typer.Option(min=0.0, help="Instead, with error feedback: most steps' worth of gradient that a residual holds."),
]
MostDelayFrozen = Annotated[
    float | None,
    typer.Option(min=0.0, help="The same for schemes that freeze optimiser state of chunks that were not sent."),
]
MostCompressions = Annotated[
    int | None,
    typer.Option(min=0, help="Most times that one gradient is compressed on its way; 1 by default."),
]
Without = Annotated[
    list[str] | None,
    typer.Option(help="A collective or device barred from compressed gradients (all_to_all, offload); repeatable."),
]
FlatOnly = Annotated[bool, typer.Option(help="No stages inside nodes for compressed gradients.")]


def plan(
    profile: Annotated[Path, typer.Argument(help="Profile that `gradsync measure` wrote.")] = Path("profile.json"),
    cluster: OnCluster = None,
    allow: Allow = "",
    exact: Exact = None,
    matrices_only: MatricesOnly = False,
    most_error: MostError = None,
    most_delay: MostDelay = None,
    most_delay_frozen: MostDelayFrozen = None,
    most_compressions: MostCompressions = None,
    without: Without = None,
    flat_only: FlatOnly = False,
    out: Annotated[Path, typer.Option("--out", "-o", callback=writable, help="File for the plan.")] = Path("plan.json"),
    json: Json = None,
) -> None:
    """Find a plan for a measured job: which gradients to merge, which to compress, and how to exchange them."""
    with plain_errors():
        measured = _profile(profile, cluster)
        job = _job(measured, cluster)
        leaves = _leaves(most_compressions, without, flat_only)
        constraints = _constraints(job, allow, exact, matrices_only, most_error, most_delay, most_delay_frozen, leaves)
        with phase(f"searching a plan for {len(measured.parameters)} parameters", now="searching") as shown:
            found = searched(job, constraints)
            found.plan.measured_on(measured.device).save(out)
            shown.say("comparing it with other plans")
            reasons, gap = explained(found.plan, job, found.ways), found.certificate().gap
    _print(describe(reasons), json)
    model = "the search's model with halved latencies" if found.hiding else "the search's model"
    words(json).print(f"By {model}, it takes at most {gap:.1%} longer than the best plan.", highlight=False)
    put(json, {**as_data(reasons), "gap": gap})
    beside.print(f"Plan: {out}")


def explain(
    plan: Annotated[Path, typer.Argument(help="A plan, as `gradsync plan` or `Plan.save` wrote it.")],
    profile: Measured = Path("profile.json"),
    cluster: OnCluster = None,
    allow: Allow = "",
    exact: Exact = None,
    matrices_only: MatricesOnly = False,
    most_error: MostError = None,
    most_delay: MostDelay = None,
    most_delay_frozen: MostDelayFrozen = None,
    most_compressions: MostCompressions = None,
    without: Without = None,
    flat_only: FlatOnly = False,
    json: Json = None,
) -> None:
    """Explain a plan: the best other schemes for each bucket, and whether plain DDP is as fast."""
    with plain_errors():
        job = _job(_profile(profile, cluster), cluster)
        leaves = _leaves(most_compressions, without, flat_only)
        constraints = _constraints(job, allow, exact, matrices_only, most_error, most_delay, most_delay_frozen, leaves)
        found = Plan.load(plan)
        with phase(f"comparing {plan} with other plans"):
            reasons = explained(found, job, ways_of(job, constraints))
    _print(describe(reasons), json)
    put(json, as_data(reasons))


def _profile(profile: Path, cluster: Path | None) -> Profile:
    for path in (profile, cluster):
        if path is not None and not path.exists():
            raise ValueError(f"there is no file {path}; `gradsync measure -- train.py` writes a profile")
    return Profile.load(profile)


def _job(measured: Profile, cluster: Path | None) -> Job:
    return Job.of(measured, None if cluster is None else Cluster.load(cluster))


def _leaves(most_compressions: int | None, without: Sequence[str] | None, flat_only: bool) -> LeafConstraints | None:
    if most_compressions is None and not without and not flat_only:
        return None
    return LeafConstraints(1 if most_compressions is None else most_compressions, tuple(without or ()), flat_only)


def _constraints(
    job: Job,
    allow: str,
    exact: Sequence[str] | None,
    matrices_only: bool,
    most_error: float | None,
    most_delay: float | None,
    most_delay_frozen: float | None,
    leaves: LeafConstraints | None,
) -> Constraints:
    lossy = tuple(lossy_of(name, job.world_size) for name in allow.split(",") if name)
    return Constraints(
        lossy,
        exact=tuple(exact or ()),
        matrices_only=matrices_only,
        most_error=most_error,
        most_delay=most_delay,
        most_delay_frozen=most_delay_frozen,
        errors=job.errors,
        leaves=leaves,
    )


def _print(lines: Iterable[str], json: str | None) -> None:
    for line in lines:
        words(json).print(line, highlight=False, soft_wrap=True)
