"""The sum of the residuals of all ranks: gradients that came in are either sent or left."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.compressors import copies_at


def left_to_send(model: nn.Module, state: dict[str, Any]) -> dict[str, Tensor]:
    """Returns {parameter: (numel,)}: the sum of its residuals; a residual that several ranks hold alike counts once."""
    left = {name: torch.zeros(p.numel()) for name, p in model.named_parameters()}
    for key, values in state.items():
        if key.endswith(".residual"):
            form = re.fullmatch(r"(.*)\[(\d+):(\d+)\]/(.*)\.residual", key)
            assert form is not None
            left[form[1]][int(form[2]) : int(form[3])] += values / (copies_at(form[4]) or 1)
    return left
