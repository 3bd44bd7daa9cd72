"""The command `gradsync bench`: measures methods side by side, prints the results and saves them as records."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gradsync.characterization.footprint import DEFAULT_SAMPLE
from gradsync.cli.console import WIDE, beside, plain_errors
from gradsync.cli.results import Json, put, words
from gradsync.compressors import names as compressors

from ..bench import averaging
from ..bench import grid as grids
from ..bench.automatic import ENDINGS_IN_WORDS
from ..bench.balance import SUBJECTS as MAPS
from ..bench.balance import BalanceSpec, run_balance
from ..bench.characterization import SUBJECT, LookSpec, run_looks
from ..bench.compress import MANY, MANY_BYTES, QUICK_SIZES_BYTES, SIZES_BYTES, CompressSpec, run_compress
from ..bench.converge import ConvergeSpec, run_converge, usual_methods
from ..bench.kernels import KernelsSpec, run_kernels
from ..bench.methods import METHODS, RIVALS_IN_WORDS
from ..bench.options import parse_options
from ..bench.patterns import UNIT
from ..bench.plan import DRAWN_ITEMS, PlanSpec, run_planning
from ..bench.reach import ReachSpec, learners_of, run_reach, timed_runs
from ..bench.scenarios import SCENARIOS, settings_of
from ..bench.start import EARLY, JOBS, StartSpec, run_starts
from ..bench.steal import MOST_STOLEN
from ..bench.sync import DENSE_SIZES_BYTES, SUBJECTS, SyncSpec, run_sync
from ..bench.topk import TopKWorkload
from ..bench.topk import kind_of as exchange_kind_of
from ..bench.topk import names as exchange_names
from ..bench.train import TrainSpec, check_names, run_training
from ..bench.works import WORK
from ..papers.models import PAPER_MODELS
from ..report.balance import balance_table
from ..report.compress import compress_tables, loss_table, size_in_words, size_of
from ..report.figures import written
from ..report.planning import planning_table
from ..report.record import Record, load_records, save_records
from ..report.starts import start_table
from ..report.tables import judgements, records_table
from ..workloads import declared_options, kind_of, names
from .grid import measure, show_plan
from .progress import event_bar

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer(help="Compare methods in one run and keep the records.", no_args_is_help=True)

QUICK_REPEATS = 5
GRID_WORKLOADS, GRID_LINKS = ("deepfm", "lstm", "resnet32", "alexnet"), ("200mbit", "1gbit", "unshaped")
INTERRUPTED = 130  # exit status, as shells give it

Nodes = Annotated[int, typer.Option(min=2, help="Nodes of the emulated cluster.")]
RanksPerNode = Annotated[int, typer.Option(min=1, help="Ranks on each node.")]
Rate = Annotated[str, typer.Option(help="Rate of every node's link, e.g. 200mbit, 1gbit, unshaped.")]
Quick = Annotated[bool, typer.Option(help="A short run, under a minute.")]
Require = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SUBJECT<=BOUND",
        help="Exit with 1 unless the subject's ratio holds the bound, by the noise rule; repeatable.",
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="Option of every workload of the run; repeatable. "
        + " ".join(f"{name}: {', '.join(declared_options(kind_of(name)))}." for name in names()),
    ),
]


OPTIONS_OF_TOPK = [name for name in declared_options(TopKWorkload) if name not in declared_options(kind_of("gpt"))]


class Grid(StrEnum):
    """The grids of `bench train`: cells of workloads and links for `--methods`, or the grid of defaults."""

    LINKS = "links"
    DEFAULTS = "defaults"


class SchemeSet(StrEnum):
    """The schemes that `bench sync` measures on each workload: those of the plan, or all."""

    PLANNED = "planned"
    ALL = "all"


Loopback = Annotated[bool, typer.Option(help="No namespaces: plain loopback, without limits on rates.")]


@app.command()
def sync(
    workload: Annotated[
        str,
        typer.Option(
            help=f"Workloads whose gradients travel, comma-separated: {', '.join(exchange_names())}. "
            f"topk: the largest elements of gpt's; its options are also {', '.join(OPTIONS_OF_TOPK)}."
        ),
    ] = "deepfm",
    option: Options = None,
    nodes: Nodes = 4,
    ranks_per_node: RanksPerNode = 1,
    link: Rate = "1gbit",
    schemes: Annotated[
        SchemeSet,
        typer.Option(help="planned: the plan that training would use; all: every scheme, and the selected one."),
    ] = SchemeSet.PLANNED,
    repeats: Annotated[int, typer.Option(min=5, help="Measurements of each exchange.")] = 15,
    json: Json = None,
    quick: Quick = False,
    loopback: Loopback = False,
    require: Require = None,
) -> None:
    """Measures the gradient exchange alone: every scheme compared with DDP's collectives for the same tensors."""
    chosen = tuple(workload.split(","))
    with plain_errors():
        options = parse_options(chosen, option or (), exchange_kind_of)
    spec = SyncSpec(
        workloads=chosen,
        options=options,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        link=link,
        schemes=schemes.value,
        repeats=QUICK_REPEATS if quick else repeats,
        loopback=loopback,
    )
    bounds = bounds_of(require, SUBJECTS)
    with (
        plain_errors(),
        event_bar(f"exchanges on {nodes} nodes, {link}", 1 + len(DENSE_SIZES_BYTES) + len(spec.workloads)) as on_event,
    ):
        records, notes = run_sync(spec, on_event)
    finish(records, notes, json, bounds)


@app.command()
def train(
    context: typer.Context,
    workload: Annotated[str, typer.Option(help=f"What to train: {', '.join(names())}.")] = "deepfm",
    option: Options = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated; the first is the baseline. ddp, ddp_sparse and ddp_16bit, wherever they stand: the "
            "best of DDP's settings, also with sparse gradients of tables, and in 16 bits. "
            f"There are ddp, ddp_sparse, {', '.join(METHODS)}; averages of parameters: {averaging.NAMES_IN_WORDS}; "
            f"{RIVALS_IN_WORDS}; compressors: {compressors.NAMES_IN_WORDS}; and searches, which measure the job first: "
            f"{ENDINGS_IN_WORDS}."
        ),
    ] = "ddp,ddp_sparse,ddp_sparse_bf16,gradsync",
    nodes: Nodes = 4,
    ranks_per_node: RanksPerNode = 1,
    link: Rate = "1gbit",
    scenario: Annotated[
        str | None,
        typer.Option(
            help=f"Clusters with a bottleneck, comma-separated, one run each: {', '.join(SCENARIOS)}. What they slow "
            "down is relative to --link. Blocks are compared by their mean step."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=5, help="Pairs of blocks that are compared.")] = 10,
    block_steps: Annotated[int, typer.Option(min=1, help="Steps of a block.")] = 8,
    row_length: Annotated[int | None, typer.Option(help="Short for --option dim=N.")] = None,
    grid: Annotated[
        Grid | None,
        typer.Option(
            help=f"links: {', '.join(GRID_WORKLOADS)}, each at {', '.join(GRID_LINKS)}, instead of --workload and "
            f"--link. defaults: DDP's best line, {', '.join(grids.SUBJECTS)} on {', '.join(grids.WORKLOADS)}, each at "
            f"{', '.join(grids.LINKS)}, on 4 nodes and on 2 of two ranks; --json keeps finished cells, and the same "
            "command goes on behind them."
        ),
    ] = None,
    only: Annotated[
        str, typer.Option(help="Cells of --grid defaults with all of these words, as deepfm,1gbit,4x1; default: all.")
    ] = "",
    again: Annotated[bool, typer.Option(help="Measure cells anew that the file of --grid defaults has.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Print the cells of --grid defaults and how long they take.")] = False,
    emulate_compute: Annotated[
        bool,
        typer.Option(
            help="Forward, backward and optimiser are slept through, for as long as they take one rank alone: as on "
            "nodes with cores of their own. Nothing is learnt."
        ),
    ] = False,
    device: Annotated[
        Literal["cpu", "cuda"],
        typer.Option(help="cuda: on GPUs, over NCCL; ranks that share a GPU exchange by sockets, as nodes do."),
    ] = "cpu",
    patience: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds, in each cell, for measuring again what the host of a virtual machine disturbed: where it "
            f"took more than {MOST_STOLEN:.0%} of the processors' time. None with --quick.",
        ),
    ] = 300.0,
    json: Json = None,
    quick: Quick = False,
    loopback: Loopback = False,
    require: Require = None,
) -> None:
    """Measures training steps: methods take turns on the same model, data and cluster."""
    if grid is Grid.DEFAULTS:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
        with plain_errors():
            wanted = {"repeats": repeats, "pick_repeats": repeats, "block_steps": block_steps, "patience_s": patience}
            measure_defaults(
                grids.cells_with(_listed(only)),
                defaults_of(given, wanted, quick=quick, loopback=loopback, emulate_compute=emulate_compute),
                json,
                again=again,
                dry_run=dry_run,
            )
        return
    if only or again or dry_run:
        raise typer.BadParameter("--only, --again and --dry-run are for --grid defaults")
    if emulate_compute and device != "cpu":
        raise typer.BadParameter("--emulate-compute is for the CPU: take --device cpu, or leave it out")
    texts = [*(option or ()), *([] if row_length is None else [f"dim={row_length}"])]
    with plain_errors():
        options = parse_options([workload], texts)
    spec = TrainSpec(
        workload=workload,
        options=options,
        methods=tuple(methods.split(",")),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        link=link,
        repeats=QUICK_REPEATS if quick else repeats,
        block_steps=3 if quick else block_steps,
        loopback=loopback,
        device=device,
        emulate_compute=emulate_compute,
        patience_s=0.0 if quick else patience,
    )
    with plain_errors():
        check_names(spec.methods)
    if len(spec.methods) == 1:
        raise typer.BadParameter(
            f"two methods or more are compared, the first is the baseline; got {methods!r} alone: add one, as in "
            f"'ddp,{methods}'",
            param_hint="--methods",
        )
    bounds = bounds_of(require, spec.methods[1:])
    with plain_errors():
        cells = cells_of(grid is Grid.LINKS, _listed(scenario or ""), nodes, link)
    records: list[Record] = []
    notes: list[str] = []
    for each in (spec.model_copy(update=cell) for cell in cells):
        scene = f", {each.scenario_name}" if each.scenario_name else ""
        with plain_errors(), event_bar(f"{each.workload} on {nodes} nodes, {each.link}{scene}", each.turns) as on_event:
            run = run_training(each, on_event)
        records += run.records
        notes += [f"{each.workload}, {each.link}{scene}: {note}" for note in run.notes] if len(cells) > 1 else run.notes
        if len(cells) > 1 and json is not None and json != "-":
            save_records(records, json)  # finished records stay if the run is interrupted
    finish(records, notes, json, bounds)


@app.command()
def start(
    model: Annotated[
        str,
        typer.Option(
            help="What starts: tables, a small recommender with 200,000 rows; mlp, a dense model; or "
            f"{', '.join(names())}."
        ),
    ] = "tables",
    nodes: Nodes = 4,
    ranks_per_node: RanksPerNode = 1,
    link: Rate = "1gbit",
    steps: Annotated[int, typer.Option(min=2 * EARLY, help="Steps of each job.")] = 500,
    repeats: Annotated[int, typer.Option(min=1, help=f"Repeats, each of {len(JOBS)} jobs.")] = 5,
    json: Json = None,
    quick: Quick = False,
    loopback: Loopback = False,
) -> None:
    """Measures the start of a job: attach, the first steps, the longest step, and when the plan has settled.

    gradsync and auto, as the first job on a machine and as a later one, are compared with DDP by default.
    """
    spec = StartSpec(
        model=model,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        link=link,
        steps=2 * EARLY if quick else steps,
        repeats=1 if quick else repeats,
        loopback=loopback,
    )
    with plain_errors(), event_bar(f"starts of {model} on {nodes} nodes, {link}", spec.jobs) as on_event:
        records, notes = run_starts(spec, on_event)
    finish(records, notes, json, [], start_table)


@app.command()
def kernels(
    names: Annotated[
        str | None, typer.Option("--kernels", help=f"Comma-separated; by default all: {', '.join(WORK)}.")
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="cuda: the kernels in Triton, on this GPU.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of both sides, on the CPU.")] = 1,
    repeats: Annotated[int, typer.Option(min=5, help="Measurements of each kernel.")] = 25,
    json: Json = None,
    quick: Quick = False,
    require: Require = None,
) -> None:
    """Measures kernels, native or for CUDA, compared with their definitions in torch and with a bound by memory
    bandwidth.
    """
    spec = KernelsSpec(
        kernels=tuple(names.split(",")) if names else (),
        device=device,
        threads=threads,
        repeats=QUICK_REPEATS if quick else repeats,
    )
    with plain_errors():
        cases = spec.cases
        bounds = bounds_of(require, tuple(dict.fromkeys(kernel for kernel, _ in cases)))
        with event_bar(f"kernels, {device}, threads {threads}", len(cases), "making inputs") as on_event:
            records = run_kernels(spec, on_event)
    finish(records, [], json, bounds)


@app.command()
def characterize(
    workload: Annotated[str, typer.Option(help="Workloads, comma-separated.")] = "deepfm,lstm",
    option: Options = None,
    sample: Annotated[int, typer.Option(min=0, help="Rows examined in each tensor; 0: all.")] = DEFAULT_SAMPLE,
    every: Annotated[int, typer.Option(min=1, help="Examine the gradients of one step in so many.")] = 16,
    repeats: Annotated[int, typer.Option(min=5, help="Measurements of examinations and steps, in turns.")] = 30,
    json: Json = None,
    require: Require = None,
) -> None:
    """Measures the time of examining the sparsity of a step's gradients, compared with the step's own time."""
    chosen = tuple(workload.split(","))
    with plain_errors():
        spec = LookSpec(chosen, parse_options(chosen, option or ()), sample or None, every, repeats)
    bounds = bounds_of(require, (SUBJECT,))
    with plain_errors(), event_bar("looks at gradients", len(chosen), "opening the data") as on_event:
        records = run_looks(spec, on_event)
    finish(records, [], json, bounds)


@app.command()
def balance(
    workload: Annotated[
        str, typer.Option(help="Workloads whose gradients are used too, comma-separated; '' for none.")
    ] = "deepfm,lstm,topk",
    option: Options = None,
    elements: Annotated[int, typer.Option(help=f"Elements of random gradients, a multiple of {UNIT}.")] = 1 << 24,
    ranks: Annotated[
        str, typer.Option(help="Numbers of ranks, all of which are owners, comma-separated.")
    ] = "8,16,128",
    repeats: Annotated[
        int, typer.Option(min=2, help="Draws of each gradient, each with other seeds of the maps.")
    ] = 10,
    json: Json = None,
    quick: Quick = False,
    require: Require = None,
) -> None:
    """Measures how evenly owner maps (which rank sums which element) spread gradients, compared with Zen's hash.

    Figures are imbalances of messages to owners (push) and of their sums (pull), no times.
    """
    chosen = _listed(workload)
    with plain_errors():
        numbers = _numbers("--ranks", ranks)
        options = parse_options(chosen, option or (), exchange_kind_of)
        spec = BalanceSpec(chosen, options, elements, numbers, QUICK_REPEATS if quick else repeats)
    bounds = bounds_of(require, MAPS)
    with plain_errors(), event_bar("imbalance of owner maps", len(spec.cases), "drawing") as on_event:
        records = run_balance(spec, on_event)
    finish(records, [], json, bounds, balance_table)


@app.command()
def compress(
    names: Annotated[
        str | None,
        typer.Option(
            "--compressors", help=f"Comma-separated; by default one of each kind: {compressors.NAMES_IN_WORDS}."
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help=f"Sizes of tensors; by default {','.join(size_in_words(n).replace(' ', '') for n in SIZES_BYTES)}."
        ),
    ] = None,
    many: Annotated[
        int, typer.Option(min=0, help=f"Equal tensors of a bucket of {size_in_words(MANY_BYTES)}; 0: no such bucket.")
    ] = MANY,
    threads: Annotated[str, typer.Option(help="Numbers of threads, comma-separated.")] = "1,2",
    workload: Annotated[
        str, typer.Option(help="Workloads on whose gradients errors are measured, comma-separated; '' for none.")
    ] = "gpt,lstm,deepfm",
    option: Options = None,
    steps: Annotated[
        int, typer.Option(min=0, help="Training steps before the gradient that errors are measured on.")
    ] = 20,
    repeats: Annotated[int, typer.Option(min=5, help="Measurements of each operation.")] = 11,
    json: Json = None,
    quick: Quick = False,
    require: Require = None,
) -> None:
    """Measures compressors: encoding and decoding compared with a copy, wire bytes, and errors on real gradients."""
    with plain_errors():
        chosen = _listed(workload) if workload != "gpt,lstm,deepfm" or not quick else ("gpt",)
        spec = CompressSpec(
            names=_listed(names) if names else compressors.usual_names(),
            sizes_bytes=tuple(map(size_of, _listed(sizes))) if sizes else QUICK_SIZES_BYTES if quick else SIZES_BYTES,
            many=many,
            threads=_numbers("--threads", "1" if quick else threads),
            workloads=chosen,
            options=parse_options(chosen, option or ()),
            training_steps=min(steps, QUICK_REPEATS) if quick else steps,
            repeats=QUICK_REPEATS if quick else repeats,
        )
    bounds = bounds_of(require, spec.names)
    with plain_errors(), event_bar("compressors", spec.turns, "making inputs") as on_event:
        records = run_compress(spec, on_event)
    finish(records, [], json, bounds, compress_tables)


@app.command()
def plan(
    models: Annotated[
        str, typer.Option(help=f"The papers' models, comma-separated; '' for none. {', '.join(PAPER_MODELS)}.")
    ] = ",".join(PAPER_MODELS),
    items: Annotated[str, typer.Option(help="Numbers of gradients of random problems, comma-separated.")] = ",".join(
        map(str, DRAWN_ITEMS)
    ),
    small: Annotated[int, typer.Option(min=0, help="Small random problems, for which every plan is tried.")] = 1000,
    repeats: Annotated[int, typer.Option(min=1, help="Searches of each problem.")] = 15,
    json: Json = None,
    quick: Quick = False,
    require: Require = None,
) -> None:
    """Measures the search for a plan: its time and its plan's step compared with ByteComp's, and the gap to the best
    plan.
    """
    with plain_errors():
        spec = PlanSpec(
            models=_listed(models),
            drawn=_numbers("--items", items),
            small=min(small, 100) if quick else small,
            repeats=min(repeats, 2) if quick else repeats,
        )
    bounds = bounds_of(require, ("gradsync",))
    with plain_errors(), event_bar("plans", spec.turns, "reading models") as on_event:
        records = run_planning(spec, on_event)
    finish(records, [], json, bounds, planning_table)


@app.command()
def converge(
    workload: Annotated[str, typer.Option(help=f"What to train, comma-separated: {', '.join(names())}.")] = "gpt,lstm",
    option: Options = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"Comma-separated; by default {', '.join(usual_methods())}. Compressors: {compressors.NAMES_IN_WORDS}."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 100,
    epochs: Annotated[
        float | None, typer.Option(help="Passes over the training samples in each run, in place of --steps.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks, simulated in one process.")] = 2,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method, with other weights and batches.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once, of one thread each.")] = 2,
    json: Json = None,
    quick: Quick = False,
    require: Require = None,
) -> None:
    """Compares held-out losses of lossy methods with those of dense gradients after equally many steps: no times, no
    network.

    When interrupted, the command keeps the records of finished methods.
    """
    chosen = _listed(workload)
    with plain_errors():
        spec = ConvergeSpec(
            workloads=chosen,
            methods=_listed(methods) if methods else usual_methods(),
            options=parse_options(chosen, option or ()),
            steps=min(steps, 5) if quick else steps,
            epochs=None if quick else epochs,
            ranks=ranks,
            seeds=1 if quick else seeds,
            jobs=jobs,
        )
    bounds = bounds_of(require, spec.methods)
    with plain_errors(), event_bar("losses", len(spec.runs), "opening the data") as on_event:
        records, notes = run_converge(spec, on_event)
    interrupted = len(records) < len(spec.cases)
    with suppress(typer.Exit) if interrupted else nullcontext():
        finish(records, notes, json, bounds, loss_table)
    if interrupted:  # whether the bounds hold or not
        raise typer.Exit(INTERRUPTED)


@app.command()
def reach(
    timed: Annotated[Path, typer.Argument(help="Records of `gradsync bench train`, of one workload.")],
    loss: Annotated[float, typer.Option(help="The held-out loss to reach.")],
    baseline: Annotated[str, typer.Option(help="A method of that run.")] = "ddp_bf16",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method, with other weights and batches.")] = 3,
    every: Annotated[int, typer.Option(min=1, help="Steps between evaluations.")] = 10,
    most_steps: Annotated[
        int, typer.Option(min=1, help="Steps after which a run that has not reached the loss ends.")
    ] = 500,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once, of one thread each.")] = 2,
    whole: Annotated[
        str,
        typer.Option(
            help="Methods, comma-separated, that are also trained to the loss on the emulated cluster, each by itself "
            "from the first seed, and the baseline too: a check of the estimate."
        ),
    ] = "",
    json: Json = None,
    require: Require = None,
) -> None:
    """Estimates the time to a loss: a method's steps, trained from several seeds without a network, times seconds per
    step.
    """
    with plain_errors():
        records = load_records(timed)
        spec = ReachSpec(
            loss, baseline, seeds=seeds, every=every, most_steps=most_steps, jobs=jobs, whole=_listed(whole)
        )
        runs = timed_runs(records)
    bounds = bounds_of(require, list(dict.fromkeys(name for run in runs for name in run.steps_s)))
    total = len(learners_of(runs)) * seeds + len(runs) * len(spec.trained_whole)
    with plain_errors(), event_bar("runs", total, "opening the data") as on_event:
        found, notes = run_reach(runs, spec, on_event)
    finish(found, notes, json, bounds)


@app.command()
def figures(
    root: Annotated[Path, typer.Option(help="The folder of the repository.")] = Path(),
    json: Json = None,
) -> None:
    """Writes the figures of README and of other pages from the records in benchmarks/results, by the templates in
    benchmarks/figures; --json lists these pages.
    """
    with plain_errors():
        pages = written(root)
        for page, text in pages.items():
            (root / page).write_text(text, encoding="utf-8")
            words(json).print(f"{page}: written")
    put(json, [page.as_posix() for page in pages], "Pages")


SETS_OWN = frozenset(
    ("workload", "option", "methods", "nodes", "ranks_per_node", "link", "scenario", "row_length", "device")
)


def defaults_of(given: set[str], wanted: dict[str, Any], *, quick: bool, **more: bool) -> TrainSpec:
    """Returns the settings of the grid of defaults: its own, and those of the options that are `given`.

    Raises:
        ValueError: an option is given that the grid sets itself.
    """
    if own := sorted(given & SETS_OWN | given & {"require"}):
        named = ", ".join(f"--{name.replace('_', '-')}" for name in own)
        raise ValueError(f"--grid defaults has workloads, methods, links and layouts of its own; leave out {named}")
    options = {"repeats": "repeats", "pick_repeats": "repeats", "block_steps": "block_steps", "patience_s": "patience"}
    changes = {name: wanted[name] for name, option in options.items() if option in given}
    if quick:
        changes |= {"block_steps": 1, "pick_repeats": 1, "warmup_steps": 2, "patience_s": 0.0}
    return grids.USUAL.model_copy(update={**changes, **more})


def measure_defaults(
    cells: Sequence[grids.Cell], spec: TrainSpec, json: str | None, *, again: bool, dry_run: bool
) -> None:
    """Measures the grid of defaults, or prints its cells; exits with 1 where a cell has failed."""
    if dry_run:
        show_plan(cells, spec, json)
        return
    if json is None or json == "-":
        raise ValueError("--grid defaults keeps finished cells in a file: name it by --json FILE")
    if any(each.failed for each in measure(cells, spec, Path(json), again=again)):
        raise typer.Exit(1)


def cells_of(grid: bool, scenarios: Sequence[str], nodes: int, link: str) -> list[dict[str, Any]]:
    """Returns, for each run of a command, the changed fields of its specification: none, or workload, link, scenario.

    Raises:
        ValueError: a scenario is unknown, or does not suit these nodes and links.
    """
    cells: list[dict[str, Any]] = [{}]
    if grid:
        cells = [{"workload": workload, "link": rate} for workload in GRID_WORKLOADS for rate in GRID_LINKS]
    if not scenarios:
        return cells
    return [
        {**cell, "scenario_name": name, "scenario": settings_of(name, nodes, cell.get("link", link))}
        for cell in cells
        for name in scenarios
    ]


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _numbers(name: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f"{name} must look like 8,16, got {text!r}")
    return tuple(map(int, text.split(",")))


def bounds_of(requirements: Sequence[str] | None, subjects: Sequence[str]) -> list[tuple[str, float]]:
    """Parses `--require` texts like "gradsync<=0.35" into (subject, bound); a wrong one ends the command at once."""
    bounds = []
    for text in requirements or ():
        match = re.fullmatch(r"\s*([^\s<=]+)\s*<=\s*([0-9]*\.?[0-9]+)\s*", text)
        if match is None or float(match[2]) == 0:
            raise typer.BadParameter(f"--require must look like 'gradsync<=0.35', with a positive bound, got {text!r}")
        if match[1] not in subjects:
            raise typer.BadParameter(
                f"--require {text!r}: this run compares no {match[1]!r} with a baseline, only {', '.join(subjects)}"
            )
        bounds.append((match[1], float(match[2])))
    return bounds


def finish(
    records: list[Record],
    notes: list[str],
    json: str | None,
    bounds: list[tuple[str, float]],
    table: Callable[..., RenderableType] = records_table,
) -> None:
    """Prints records as a table, gives them as JSON where `json` says, and prints whether bounds hold.

    Raises:
        typer.Exit: with code 1, a bound does not hold.
    """
    said = words(json)
    for note in notes:
        beside.print(f"Note: {note}", style="yellow")
    said.print(table(records, compact=said.width < WIDE))
    put(json, [record.model_dump(mode="json") for record in records], "Records")
    judged = judgements(records, bounds)
    for holds, text in judged:
        said.print(text, style="green" if holds else "red")
    if not all(holds for holds, _ in judged):
        raise typer.Exit(1)
