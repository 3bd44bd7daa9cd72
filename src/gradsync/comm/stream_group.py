"""`StreamGroup`: a group on NCCL, or on another backend whose operations run on a device's streams."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ..costs.steps import Pattern
from ..devices.streams import Moment
from .distributed import TorchGroup
from .errors import GroupError
from .group import Pending, place_of_wait
from .links import Exchange
from .monitor import LOOK_S, Monitor

T = TypeVar("T")

POLL_S = 1e-4  # between two looks at a device
GRACE_S = 30.0  # from our timeout to the backend's, whose watchdog ends the process


class StreamGroup(TorchGroup):
    """The members of a process group whose operations run on streams, as NCCL's: only streams wait for them.

    The host goes on at once. A `Monitor` notices operations that do not end; the next one that is issued then raises.
    """

    _monitor: Monitor  # one for a group and its subgroups

    def _open(self, process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
        super()._open(process_group, timeout_s)
        if isinstance(self._parent, StreamGroup):
            self._monitor = self._parent._monitor
        else:
            self._monitor = Monitor(timeout_s)
            self._releases.append(lambda _: self._monitor.stop())
        self._measure_links(partial(Exchange.of, self, Pattern.ALL_TO_ALL), timeout_s)

    def _communicator(self) -> dist.ProcessGroup:
        if self.on_calling_thread and self._parent is None:
            return self._process_group or distributed_c10d._get_default_group()
        return super()._communicator()

    @property
    def device(self) -> torch.device:
        return self._device

    def _patience_s(self, timeout_s: float) -> float:
        return timeout_s + GRACE_S

    def _pending(self, work: Any, result: Callable[[], T], keep: Tensor | None = None) -> Pending[T]:
        self._require_none_late()
        return super()._pending(work, result, keep)

    def _wait(self, work: Any, number: int, timeout_s: float) -> None:
        self._require_none_late()
        work.wait()  # makes the current stream wait, not the host
        self._monitor.watch(work, self._whereabouts, number, place_of_wait())

    def reach(self, moment: Moment, timeout_s: float) -> None:
        began_s = time.monotonic()
        while not moment.has_passed:
            self._require_none_late()
            if time.monotonic() - began_s > timeout_s + LOOK_S:
                raise GroupError(f"the device did not get to the end of {place_of_wait()} within {timeout_s:.0f} s")
            time.sleep(POLL_S)

    def _require_none_late(self) -> None:
        if error := self._monitor.error:
            raise GroupError(str(error), error.ranks)

    def _close(self, *, hanging: bool) -> None:
        super()._close(hanging=hanging or self._monitor.error is not None)
