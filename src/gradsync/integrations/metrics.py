"""`StepMetrics` turns an attachment's bytes and times into metrics for a framework's loggers, and logs its plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch import nn

from ..engine.totals import Totals
from ..frontends.attach import Attachment, attachment_of

logger = logging.getLogger(__name__)

PREFIX = "gradsync/"
MEGABYTE = 1e6
MS_PER_S = 1e3


class StepMetrics:
    """Reads an attached model's metrics since they were read last, and logs its plan in words, once.

    Args:
        handle: the result of `gradsync.attach` on this rank.

    Attributes:
        handle: this result.
    """

    def __init__(self, handle: Attachment) -> None:
        self.handle = handle
        self._before = Totals()
        self._has_logged_plan = False

    def read(self) -> dict[str, float]:
        """Returns means per step since the last call, and counts since attach, by name; {} if no step has ended since.

        Means are "gradsync/sent_mb" (10^6 bytes that this rank sent), "gradsync/communication_ms" (milliseconds of
        exchanges) and "gradsync/exposed_ms" (milliseconds of exchanges after the end of backward). Counts are
        "gradsync/plan_changes", "gradsync/comparisons" of the ranks' parameters, and "gradsync/differences" that these
        found.
        """
        now, before = self.handle.totals(), self._before
        steps = now.steps - before.steps
        if steps < 0:  # counted anew, see `Totals`
            before, steps = Totals(), now.steps
        if not steps:
            return {}
        self._before = now
        return {
            f"{PREFIX}sent_mb": (now.sent_bytes - before.sent_bytes) / steps / MEGABYTE,
            f"{PREFIX}communication_ms": (now.communication_s - before.communication_s) / steps * MS_PER_S,
            f"{PREFIX}exposed_ms": (now.exposed_s - before.exposed_s) / steps * MS_PER_S,
            f"{PREFIX}plan_changes": float(now.plan_changes),
            f"{PREFIX}comparisons": float(now.comparisons),
            f"{PREFIX}differences": float(now.differences),
        }

    def log_plan_once(self, say: Callable[[str], object] = logger.info) -> None:
        """Calls `say` on rank 0 with each line of the plan in words, once trials of plans are over (`settled`)."""
        if self._has_logged_plan or not self.handle.settled:
            return
        self._has_logged_plan = True
        if self.handle.rank == 0:
            say("gradsync's plan has settled:")
            for line in self.handle.explain():
                say(f"  {line}")


_known: WeakKeyDictionary[nn.Module, StepMetrics] = WeakKeyDictionary()


def metrics_of(model: nn.Module) -> StepMetrics | None:
    """Returns the `StepMetrics` of a model, the same object at each call; None where gradsync is not attached to it."""
    handle = attachment_of(model)
    if handle is None:
        return None
    known = _known.get(model)
    if known is None or known.handle is not handle:
        known = _known[model] = StepMetrics(handle)
    return known
