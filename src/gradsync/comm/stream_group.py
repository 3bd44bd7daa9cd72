"""`StreamGroup`: a group on NCCL, or on another backend whose operations run on a device's streams."""

from __future__ import annotations

from typing import Any

import torch

from .distributed import TorchGroup


class StreamGroup(TorchGroup):
    """The members of a process group whose operations run on streams: waiting for one makes the current stream wait.

    The host goes on at once, so an operation that never ends is for the backend's own watchdog.
    """

    @property
    def device(self) -> torch.device:
        return self._device

    def _patience_s(self, timeout_s: float) -> float:
        return timeout_s  # the watchdog ends a job that hangs

    def _wait(self, work: Any, number: int, timeout_s: float) -> None:
        work.wait()  # makes the current stream wait, not the host
