"""The guard compares the ranks' parameters at intervals, so that a difference between ranks is noticed.

Averaged gradients keep equal models equal. A write to one rank's parameters, a step of its optimiser alone, or noise
from its own seed makes models differ, and no exchange of gradients shows that. So at intervals each rank computes a
digest (hash) of its parameters, 8 bytes, and the ranks exchange digests beside the step's gradients. Only where digests
differ, further exchanges find the parameter, the ranks and the difference.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..comm import Group, Pending, gather_numbers
from ..tensors.bucket import TensorSpec

logger = logging.getLogger(__name__)

VERIFY_EVERY = 1000  # steps: parameters are read once at the rate of a copy, 0.02 % of 1000 steps of 100 ms for 250 MB
# The same gradients round differently in the optimisers of unlike processors: a unit in the last place a step, 6e-8 of
# float32, adds up as a random walk to 6e-5 in a million steps, and no more: averaged gradients are the same for all.
# Another rank's own batch or seed shows as percents.
TOLERANCE = 1e-3
TOLERANCE_UNITS = 4  # of the last place, in element types of 16 bits, of which one is more than TOLERANCE
COMPARISON = "comparison of parameters"  # in messages
_AT_ONCE = 1 << 22  # elements that are compared in float64 at a time
_MOST_RANKS = 8  # that a message names

Call = Callable[[str, Callable[[Group], Any]], Any]  # `Peers.call`
Aside = Callable[[Callable[[Group], Any]], Future[Any]]  # `Peers.aside`


@dataclass(frozen=True)
class Verification:
    """Settings of `ParameterGuard`: how often ranks compare their parameters, and which difference is an error.

    Args:
        every: steps from one comparison to the next; 0: never.
        tolerance: differences up to this share of a parameter's largest magnitude are a warning, larger ones an error.
            None: 0.001, but 4 units in the last place of bfloat16 (3 %) and float16 (0.4 %).
    """

    every: int = VERIFY_EVERY
    tolerance: float | None = None

    def allowed(self, dtype: torch.dtype) -> float:
        """Returns the largest relative difference of a parameter of this dtype that is a warning only, no error."""
        if self.tolerance is not None:
            return self.tolerance
        return max(TOLERANCE, TOLERANCE_UNITS * torch.finfo(dtype).eps if dtype.itemsize == 2 else 0.0)

    def __str__(self) -> str:
        return f"verify_every={self.every!r}, verify_tolerance={self.tolerance!r}"


@dataclass(frozen=True)
class Divergence:
    """A difference between the ranks' parameters: which ones differ, between which ranks, and by how much.

    All ranks have an equal object.
    """

    first: str  # parameter, in the order of the model
    sides: tuple[tuple[int, ...], ...]  # ranks that have the same of it
    differing: int  # parameters
    worst: str  # parameter with the largest relative difference, of those beyond the tolerance where there are any
    difference: float  # of it
    allowed: float

    @property
    def is_error(self) -> bool:
        return self.difference > self.allowed

    def __str__(self) -> str:
        sides = " and ".join(map(_ranks, self.sides[:_MOST_RANKS]))
        more = " and others" if len(self.sides) > _MOST_RANKS else ""
        others = f" ({self.differing} parameters differ)" if self.differing > 1 else ""
        of = f" of {self.worst!r}" if self.worst != self.first else ""
        verdict = "more than" if self.is_error else "within"
        return (
            f"the ranks' models have drifted apart: {self.first!r} differs between {sides}{more}{others}; the "
            f"largest relative difference{of} is {self.difference:.3g}, {verdict} verify_tolerance={self.allowed:.3g}. "
            "Likely causes: after attach() parameters were written on some ranks only, or initialised, or had noise "
            "added, by seeds that differ between ranks; an optimiser made a step, or is set otherwise, on some ranks "
            "only; processors that are not alike round differently (then only last bits differ). Make the same changes "
            "on all ranks, or broadcast the parameters from rank 0 after them; parameters that are meant to differ "
            "belong into exclude; verify_every=0 turns the comparison off"
        )


class ParameterGuard:
    """Compares digests (hashes) of the parameters over the ranks at intervals; warns or raises if they differ.

    Args:
        parameters: tensors that should be equal on all ranks, by name, in the same order on all ranks.
        verification: how often to compare, and which difference is an error.
        call: runs a collective operation between two steps, see `Peers.call`.
        timeout_s: seconds to wait for the other ranks.
    """

    def __init__(self, parameters: Mapping[str, Tensor], verification: Verification, call: Call, *, timeout_s: float):
        self._parameters = parameters
        self._specs = {name: TensorSpec.of(p) for name, p in parameters.items()}
        self._verification = verification
        self._call = call
        self._timeout_s = timeout_s
        self._steps_left = 0  # to the next comparison
        self._since_look = 0  # steps since the optimiser's last one: several where it steps by several backwards
        self._digests = torch.empty(0, dtype=torch.int64)
        self._told: Future[Pending[list[Tensor]]] | None = None  # by rank, while a comparison is under way
        self._settled: Tensor | None = None  # digests behind the optimiser's last step before a comparison
        self._is_suspicious = False  # parameters differed at the last comparison, and had not behind the step before it
        self._warned = -1.0  # difference of the last warning
        self.comparisons = 0
        self.differences = 0  # comparisons that found parameters apart

    def is_due(self) -> bool:
        """Counts a training step in which parameters may be compared, and returns whether they must be."""
        if not self._verification.every or not self._parameters:
            return False
        self._steps_left -= 1
        self._since_look += 1
        if self._steps_left > 0:
            return False
        self._steps_left = self._verification.every
        return True

    @property
    def is_under_way(self) -> bool:
        """Whether a comparison is under way, between `begin` and `end`."""
        return self._told is not None

    def look(self) -> None:
        """Stores digests of the parameters after an optimiser step, if ranks may compare them before the next one.

        They may if the backwards until then are as many as those since the last one.
        """
        backwards, self._since_look = max(self._since_look, 1), 0
        may_compare = self._verification.every and self._parameters and self._steps_left <= backwards
        self._settled = digests_of(self._parameters.values()) if may_compare else None

    def begin(self, aside: Aside, *, alone: bool, sees_steps: bool) -> None:
        """Starts the exchange of digests: of the parameters now, and as they were after the last optimiser step.

        The two differ where parameters were written since, or are perturbed for this backward (SAM, noise).

        Args:
            aside: runs the exchange on the communication thread, as `Peers.aside` does.
            alone: whether this rank's optimiser has stepped by its own gradients since the last comparison.
            sees_steps: whether `look` is called after optimiser steps; a rank where it stored no digests counts as
                `alone`.
        """
        now = digests_of(self._parameters.values())
        if self._settled is None:
            self._settled, alone = now, alone or sees_steps
        mine = torch.cat([_joined(now), _joined(self._settled), now.new_tensor([int(alone)])])
        self._digests, self._settled = self._settled, None
        # `end` waits for it: where a rank is lost, a bucket says so.
        self._told = aside(lambda group: group.all_gather(mine))

    def end(self, step: int) -> None:
        """Compares the ranks' digests, which `begin` exchanged, and warns or raises if parameters differ. Collective.

        `begin` exchanged digests of the parameters at that time, and as the last optimiser step left them. If both
        kinds differ between ranks, a search finds the parameters. If only the first kind differs, the next step looks
        again. Nothing is reported if some rank's optimiser stepped by that rank's own gradients.

        `step`: the number of the training step, for messages.

        Raises:
            RuntimeError: on all ranks, where parameters differ by more than the tolerance.
        """
        assert self._told is not None
        pending, self._told = self._told.result(), None
        parts = self._call(COMPARISON, lambda group: torch.stack(list(pending.wait(self._timeout_s))))
        self.comparisons += 1
        now, settled, alone = (set(of_ranks) for of_ranks in parts.T.tolist())
        suspects, self._is_suspicious = self._is_suspicious, False
        if len(now) == 1:  # also where a step left them apart, and a checkpoint was loaded since
            return
        if any(alone):
            logger.debug("step %d: the ranks' models differ, and some rank has stepped alone", step)
        elif len(settled) > 1:
            self._report(self._parameters, self._digests, f"at step {step}")
        elif not suspects:  # written on some rank, or only perturbed for this backward: the next step will tell
            self._is_suspicious, self._steps_left = True, 1

    def compare(self, names: Iterable[str]) -> None:
        """Compares the parameters `names` over the ranks, between two steps; warns or raises if they differ.

        Collective. Nothing is compared if `Verification.every` is 0.

        Raises:
            RuntimeError: on all ranks, where parameters differ by more than the tolerance.
        """
        if not self._verification.every:
            return
        parameters = {name: self._parameters[name] for name in names}
        digests = digests_of(parameters.values())
        self.comparisons += 1
        told = self._call(COMPARISON, lambda group: self._gather(group, _joined(digests)))
        if len(set(told.flatten().tolist())) > 1:
            self._report(parameters, digests, "at the consensus")

    def _report(self, parameters: Mapping[str, Tensor], digests: Tensor, when: str) -> None:
        self.differences += 1
        found: Divergence = self._call(
            "search for parameters that differ", lambda group: self._locate(group, parameters, digests)
        )
        if found.is_error:
            raise RuntimeError(f"{when}, {found}")
        if found.difference > 2 * self._warned:  # grows slowly, if it grows: not at every comparison
            self._warned = found.difference
            logger.warning("%s, %s", when, found)

    @torch.no_grad()
    def _locate(self, group: Group, parameters: Mapping[str, Tensor], digests: Tensor) -> Divergence:
        """Returns which parameters differ, between which ranks and by how much. Collective."""
        fits = all(self._specs[name].is_of(p) for name, p in parameters.items())
        told = self._gather(group, torch.cat([digests, digests.new_tensor([int(fits)])]))
        names = [name for name, of_ranks in zip(parameters, told.T.tolist(), strict=False) if len(set(of_ranks)) > 1]
        first = names[0]
        by_digest: dict[int, list[int]] = {}
        for rank, digest in zip(group.members, told[:, list(parameters).index(first)].tolist(), strict=True):
            by_digest.setdefault(digest, []).append(rank)
        if bool(told[:, -1].all()):
            relative = self._differences(group, [parameters[name] for name in names])
        else:  # some rank's parameters have other shapes by now, and cannot be compared
            relative = [math.inf] * len(names)
        allowed = [self._verification.allowed(self._specs[name].dtype) for name in names]
        found = [(d > a, d, a, name) for name, d, a in zip(names, relative, allowed, strict=True)]
        _, difference, most, worst = max(found, key=lambda each: each[:2])
        return Divergence(first, tuple(map(tuple, by_digest.values())), len(names), worst, difference, most)

    def _differences(self, group: Group, parameters: Sequence[Tensor]) -> list[float]:
        """Returns each parameter's largest difference of any rank from rank 0, relative to its largest magnitude."""
        mine = []
        for parameter in parameters:
            own = _flat(parameter)
            theirs = own.clone()
            group.broadcast(theirs.view(torch.uint8)).wait(self._timeout_s)
            mine.append(_difference(own, theirs))
        told = self._gather(group, torch.tensor(mine, dtype=torch.float64, device=parameters[0].device).flatten())
        differences, magnitudes = told.view(group.size, -1, 2).amax(dim=0).T.tolist()
        return [d if d in (0.0, math.inf) else d / m for d, m in zip(differences, magnitudes, strict=True)]

    def _gather(self, group: Group, mine: Tensor) -> Tensor:
        """Returns all ranks' tensors `mine`, (numbers,) each, stacked to (ranks, numbers) on the CPU."""
        return torch.stack(gather_numbers(group, mine, self._timeout_s)).cpu()


@torch.no_grad()
def digests_of(tensors: Iterable[Tensor]) -> Tensor:
    """Returns a 64-bit hash of each tensor's elements, (tensors,) int64 on the tensors' device.

    It depends on the elements and their order of indices, not on the memory format.
    """
    flat = [_flat(tensor) for tensor in tensors]
    digests = torch.empty(len(flat), dtype=torch.int64, device=flat[0].device if flat else None)
    kernels.digest(flat, digests)
    return digests


def _joined(digests: Tensor) -> Tensor:
    """Returns one 64-bit hash, (1,) int64, of all the digests, (tensors,) int64, in their order."""
    joined = digests.new_empty(1)
    kernels.digest([digests], joined)
    return joined


def _flat(tensor: Tensor) -> Tensor:
    """Returns the tensor's elements in index order, 1-D; a copy if memory has another order (channels-last)."""
    return tensor.detach().reshape(-1).contiguous()


def _difference(own: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Returns two flat tensors' largest difference (infinite where only one is NaN) and largest finite magnitude."""
    difference = magnitude = 0.0
    for some in zip(own.split(_AT_ONCE), theirs.split(_AT_ONCE), strict=True):
        a, b = (part.double() for part in some)
        alike = (a == b) | (a.isnan() & b.isnan())
        apart = torch.where(alike, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        finite = torch.maximum(*(torch.where(part.isfinite(), part.abs(), 0.0) for part in (a, b)))
        difference, magnitude = max(difference, float(apart.max())), max(magnitude, float(finite.max()))
    return difference, magnitude


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", ..." if len(ranks) > _MOST_RANKS else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
