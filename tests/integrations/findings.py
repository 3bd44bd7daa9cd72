"""Figures that several scripts of ranks report; they import this file from beside them."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def apart(values: Tensor) -> float:
    """Returns the largest difference between any rank's values and rank 0's, of the same shape. Collective."""
    found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values)
    return max(float((each - found[0]).abs().max()) for each in found)


class Told(logging.Handler):
    """The warnings of gradsync since this object was made: `lines`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("gradsync").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the text of a warning."""
        self.lines.append(record.getMessage())


def error_of(function: Callable[[], Any]) -> str:
    """Returns the class and the text of the error that `function` raises; "nothing" without one."""
    try:
        function()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def owed(state: Mapping[str, Any]) -> float:
    """Returns the sum of a rank's residuals in an attachment's `state_dict`."""
    return sum(float(values.double().sum()) for key, values in state["state"].items() if "residual" in key)


def common(name: str = "") -> str:
    """Returns the path of a new folder that all ranks know, or of this name in it. Collective."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return str(Path(str(box[0])) / name)


def tell(found: Any, end: Callable[[], object] = lambda: None) -> None:
    """Prints what each rank has found, on rank 0, calls `end`, and destroys the process group. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    if dist.get_rank() == 0:
        print("FOUND", json.dumps(gathered), flush=True)
    end()
    dist.barrier()  # gloo's threads let go of the tensors above, for which they need Python
    dist.destroy_process_group()
