"""The devices of this machine: its processor, and its accelerators with their names and memory."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import NamedTuple

import torch


class Accelerator(NamedTuple):
    """An accelerator that torch can use, such as a GPU.

    Attributes:
        device: the device, with its index.
        name: the product's name, as the driver gives it; "" where it gives none.
        nbytes: the size of its memory; 0 where the driver does not say it.
    """

    device: torch.device
    name: str
    nbytes: int


def accelerators() -> list[Accelerator]:
    """Returns the accelerators that this process can use, by index; none where the driver or its devices are absent."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    assert kind is not None  # as one is available
    module, found = torch.get_device_module(kind), []
    for index in range(torch.accelerator.device_count()):
        told = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
        found.append(
            Accelerator(
                torch.device(kind.type, index), getattr(told, "name", ""), int(getattr(told, "total_memory", 0))
            )
        )
    return found


def name_of(device: torch.device) -> str:
    """Returns the product's name of an accelerator; "" for the CPU, and where the driver gives none."""
    index = device.index or 0
    return next((card.name for card in accelerators() if card.device == torch.device(device.type, index)), "")


def built_for() -> str:
    """Returns the type of accelerator that torch was built for, such as "cuda", even if this machine has none.

    A build for the CPU gives "".
    """
    kind = torch.accelerator.current_accelerator()
    return "" if kind is None else kind.type


def processor() -> str:
    """Returns the name of the processor's model, or of its architecture if the system does not tell the model."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
