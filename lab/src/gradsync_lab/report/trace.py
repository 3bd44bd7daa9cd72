"""Exports one step of each method as a Chrome trace, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .record import TimelineTask, TrainingRun

TRACE = "trace.json"  # the usual name of the file, beside the run's results


def lanes(tasks: Sequence[TimelineTask]) -> list[tuple[str, list[TimelineTask]]]:
    """Divides tasks into lanes without overlaps, and returns (label, tasks) in the order of the streams' first tasks.

    Operations in flight share the stream `link`. Viewers take overlapping events of one thread for nested calls and
    draw them wrongly, so a stream gets as many lanes as it has tasks at once: `link`, `link 2`, ...
    """
    streams: dict[str, list[list[TimelineTask]]] = {}
    for task in sorted(tasks, key=lambda t: (t.start_s, t.end_s)):
        rows = streams.setdefault(task.stream, [])
        free = next((row for row in rows if row[-1].end_s <= task.start_s), None)
        if free is None:
            rows.append([task])
        else:
            free.append(task)
    return [
        (stream if number == 0 else f"{stream} {number + 1}", row)
        for stream, rows in streams.items()
        for number, row in enumerate(rows)
    ]


def trace_events(run: TrainingRun) -> list[dict[str, Any]]:
    """Returns Chrome trace events: one process per method, one thread per lane, one complete event ("X", microseconds)
    per task.
    """
    events: list[dict[str, Any]] = []
    processes = [(m.name, m.timeline) for m in run.methods if m.timeline]
    processes += [(f"{m.name}, predicted", m.predicted_timeline) for m in run.methods if m.predicted_timeline]
    for pid, (name, timeline) in enumerate(processes, start=1):
        events.append({"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}})
        for tid, (label, tasks) in enumerate(lanes(timeline), start=1):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": label}})
            events.extend(_event(task, pid, tid) for task in tasks)
    return events


def _event(task: TimelineTask, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": task.name,
        "cat": task.stream,
        "ts": task.start_s * 1e6,
        "dur": max(task.end_s - task.start_s, 0.0) * 1e6,
        "args": {"bytes": task.nbytes} if task.nbytes else {},
    }


def write_trace(run: TrainingRun, path: str | Path) -> None:
    """Writes the run's Chrome trace, as JSON, to `path`; methods without a timeline are left out."""
    data = {"traceEvents": trace_events(run), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(data) + "\n", encoding="utf-8")
