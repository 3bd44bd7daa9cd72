"""The command `gradsync lab`: an emulated cluster for one's own script."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from gradsync.cli.console import beside, plain_errors
from gradsync.cli.progress import phase
from gradsync.cli.results import Json, prints_apart, put, words
from gradsync.costs.cluster import format_rate

from ..cluster import Lab, LabUnavailableError, LinkRate, Scenario
from ..cluster.scenario import parse_background, parse_moving_background, parse_slow, parse_stalls

app = typer.Typer(help="An emulated cluster on this machine: namespaces joined by limited links.", no_args_is_help=True)

# TCP payload is 94-97 % of the line rate; the rest of the tolerance is for a machine that others use too.
LOWEST_SHARE, HIGHEST_SHARE = 0.85, 1.02

TIME_WAS_UP, SIGNALLED = 124, 128  # exit codes, as of timeout(1) and of shells

Nodes = Annotated[int, typer.Option(min=1, help="Nodes of the cluster.")]
Rate = Annotated[str, typer.Option(help="Rate of every node's link: 200mbit, 1gbit, unshaped.")]
RackSize = Annotated[int | None, typer.Option(help="Nodes of a rack.")]
Trunk = Annotated[str | None, typer.Option(help="Rate of each rack's uplink.")]
Slow = Annotated[list[str] | None, typer.Option(help="A node with another rate, NODE=RATE; repeatable.")]
Background = Annotated[list[str] | None, typer.Option(help="Traffic all the time, FROM->TO=RATE; repeatable.")]
Moving = Annotated[
    str | None, typer.Option("--moving-background", help="Traffic that moves to other nodes now and then, RATE@TIME.")
]
Stalls = Annotated[str | None, typer.Option(help="Ranks that stop now and then, TIME@TIME between, as 500ms@4s.")]
Procs = Annotated[int, typer.Option("--procs-per-node", min=1, help="Ranks on each node.")]


def scenario_of(
    nodes: int,
    link: str,
    rack_size: int | None,
    trunk: str | None,
    slow: list[str] | None,
    background: list[str] | None,
    procs_per_node: int = 1,
    moving_background: str | None = None,
    stalls: str | None = None,
) -> Scenario:
    """Returns the emulated cluster's scenario for these options.

    Raises:
        ValueError: for a wrong option.
    """
    return Scenario(
        nodes=nodes,
        link=link,
        ranks_per_node=procs_per_node,
        rack_size=rack_size,
        trunk=trunk,
        slow=parse_slow(slow or []),
        background=parse_background(background or []),
        moving_background=None if moving_background is None else parse_moving_background(moving_background),
        stalls=None if stalls is None else parse_stalls(stalls),
    )


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(help="The command of every rank, behind --.")],
    nodes: Nodes = 4,
    link: Rate = "1gbit",
    rack_size: RackSize = None,
    trunk: Trunk = None,
    slow: Slow = None,
    background: Background = None,
    moving_background: Moving = None,
    stalls: Stalls = None,
    procs_per_node: Procs = 1,
    timeout: Annotated[float | None, typer.Option(min=0.0, help="Seconds after which all ranks are ended.")] = None,
    json: Json = None,
) -> None:
    """Runs a command as every rank of an emulated cluster, with the environment variables that torchrun would set."""
    with plain_errors():
        scenario = scenario_of(
            nodes, link, rack_size, trunk, slow, background, procs_per_node, moving_background, stalls
        )
        with _built(scenario) as lab:
            began_s = time.monotonic()
            with prints_apart(json):
                codes = lab.run([*command, *context.args], timeout_s=timeout)
            seconds = time.monotonic() - began_s
    code = exit_code(codes, lab.first_failed)
    put(json, {"exit_code": code, "codes": codes, "first_failed": lab.first_failed, "seconds": round(seconds, 3)})
    raise typer.Exit(code)


@contextmanager
def _built(scenario: Scenario) -> Iterator[Lab]:
    """Yields the emulated cluster of a scenario; without one, ends the command with 2 and the reason."""
    with ExitStack() as stack:
        try:
            with phase(f"building {scenario.nodes} nodes"):
                lab = stack.enter_context(Lab(scenario))
        except LabUnavailableError as error:
            beside.print(f"No lab: {error}", style="red", soft_wrap=True)
            raise typer.Exit(2) from None
        yield lab


def exit_code(codes: list[int], first_failed: int | None) -> int:
    """Returns the exit code of the rank that failed first, as shells do; the others may only have ended because of it.

    Without a failure, returns 0, or `TIME_WAS_UP` if ranks were killed.
    """
    if first_failed is not None:
        code = codes[first_failed]
        return code if code > 0 else SIGNALLED - code
    return TIME_WAS_UP if any(codes) else 0


@app.command()
def check(
    nodes: Annotated[int, typer.Option(min=2, help="Nodes of the cluster.")] = 4,
    link: Rate = "1gbit",
    rack_size: RackSize = None,
    trunk: Trunk = None,
    slow: Slow = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long the links are loaded.")] = 4.0,
    json: Json = None,
) -> None:
    """Loads all links at once and compares measured with configured rates; exit code 1 if a link is off."""
    with plain_errors(), _built(scenario_of(nodes, link, rack_size, trunk, slow, background=None)) as lab:
        with phase(f"loading all links for {seconds:g} s"):
            rates = lab.check(seconds)
        description = lab.describe()
    said = words(json)
    said.print(rates_table(rates))
    said.print(
        f"congestion control {description['congestion_control']}, {description['lab']}; a link is good between "
        f"{LOWEST_SHARE:.0%} and {HIGHEST_SHARE:.0%} of its rate"
    )
    put(json, {"links": [asdict(rate) for rate in rates], "environment": description})
    raise typer.Exit(0 if all(map(good, rates)) else 1)


def good(rate: LinkRate) -> bool:
    """Whether a link's measured rate is close enough to the configured one."""
    if rate.configured_bytes_per_s is None:
        return True
    return LOWEST_SHARE <= rate.measured_bytes_per_s / rate.configured_bytes_per_s <= HIGHEST_SHARE


def rates_table(rates: list[LinkRate]) -> Table:
    table = Table(title="All links loaded at once, in both directions")
    for column in ("link", "configured", "measured", "share", "round trip", ""):
        table.add_column(column, justify="left" if column == "link" else "right")
    for rate in rates:
        configured = rate.configured_bytes_per_s
        table.add_row(
            f"node {rate.source} -> node {rate.target}",
            "not shaped" if configured is None else format_rate(configured),
            format_rate(rate.measured_bytes_per_s),
            "" if configured is None else f"{rate.measured_bytes_per_s / configured:.1%}",
            f"{rate.round_trip_s * 1e3:.2f} ms",
            "ok" if good(rate) else "off",
        )
    return table
