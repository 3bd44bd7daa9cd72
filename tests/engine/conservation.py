"""What schemes have left to be sent, of each parameter: what came in is what was sent and what is left."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn


def left_to_send(model: nn.Module, state: dict[str, Any]) -> dict[str, Tensor]:
    """By parameter, (numel,): all residuals in what `state_dict` gave under "state"."""
    left = {name: torch.zeros(p.numel()) for name, p in model.named_parameters()}
    for key, values in state.items():
        if key.endswith(".residual"):
            form = re.fullmatch(r"(.*)\[(\d+):(\d+)\].*", key)
            assert form is not None
            left[form[1]][int(form[2]) : int(form[3])] += values
    return left
