"""`gradsync doctor`: prints a report on the installation, to look at or to paste."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated

import typer

from ..diagnosis.examination import Report, examined
from .console import plain_errors
from .progress import phase
from .results import Json, put, words


def doctor(
    ranks: Annotated[bool, typer.Option(help="Train with two ranks on this machine; it takes some seconds.")] = True,
    json: Json = None,
) -> None:
    """Check an installation: versions, devices, backends, kernels, and two ranks; exits with 1 for a fault."""
    with plain_errors(), phase("examining the installation") as shown:
        report = examined(ranks=ranks, tell=shown.say)
    for line in described(report):
        words(json).print(line, highlight=False, soft_wrap=True)
    put(json, dataclasses.asdict(report))
    if any(finding.verdict == "fault" for finding in report.findings):
        raise typer.Exit(1)


def described(report: Report) -> Iterator[str]:
    """Yields the report on an installation as lines of text for people."""
    yield "   ".join(f"{name} {found or '(not installed)'}" for name, found in report.versions.items())
    yield report.machine
    yield f"accelerators: {'; '.join(report.devices) or 'none'}"
    yield "backends: " + ", ".join(f"{backend} for {kind}" for kind, backend in report.backends.items())
    yield "environment: " + (" ".join(f"{name}={value}" for name, value in report.settings.items()) or "no settings")
    width = max(len(finding.about) for finding in report.findings)
    for finding in report.findings:
        yield f"{finding.verdict:6}{finding.about:{width}}  {finding.text}"
