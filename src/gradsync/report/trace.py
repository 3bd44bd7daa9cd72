"""The last step of each method as a Chrome trace, which ui.perfetto.dev opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .record import TrainingRun


def trace_events(run: TrainingRun) -> list[dict[str, Any]]:
    """A process a method, a thread a stream, a complete event ("X", microseconds) a task."""
    events: list[dict[str, Any]] = []
    for pid, method in enumerate((m for m in run.methods if m.timeline), start=1):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": method.name}})
        streams = list(dict.fromkeys(task.stream for task in method.timeline))
        for tid, stream in enumerate(streams, start=1):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": stream}})
        for task in method.timeline:
            events.append(
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": streams.index(task.stream) + 1,
                    "name": task.name,
                    "ts": task.start_s * 1e6,
                    "dur": max(task.end_s - task.start_s, 0.0) * 1e6,
                    "args": {"nbytes": task.nbytes},
                }
            )
    return events


def write_trace(run: TrainingRun, path: str | Path) -> None:
    """Writes the trace; methods that cannot tell what they did when are left out."""
    data = {"traceEvents": trace_events(run), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(data) + "\n", encoding="utf-8")
