"""The oracles: what all ranks saw of a case must agree with the dense mean, with DDP, and with the ledger.

Nothing here calls a kernel, a scheme's `synchronize`, or the engine: sums are torch's, in float64, of the gradients
that each rank had before the exchange. Bounds follow from element types and the number of ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync.tensors.bucket import Layout

from .case import BucketCase, Case
from .models import FuzzModel
from .promises import bytes_follow_data, conserves, expected_bytes, mixing, promised_eps, promised_spacing
from .trace import Trace, bits_of

MOST_PROBLEMS = 5  # of a case, that are told
FLOAT32_ADDITIONS = 64  # more than any case adds up for one element
ROUNDINGS = 4  # beyond one a rank: at the source, where repeated rows are merged, of the sum, and its scaling
RAISED = "raised"  # in the problem of a rank that ended with an error
GUARD = "drifted apart"  # in the guard's error


def problems(case: Case, traces: Sequence[Trace]) -> list[str]:
    """Returns what is wrong with a case, by its traces of all ranks; an empty list if nothing is."""
    found: list[str] = []
    for problem in _problems(case, traces):
        found.append(problem)
        if len(found) == MOST_PROBLEMS:
            break
    return found


def _problems(case: Case, traces: Sequence[Trace]) -> Iterator[str]:
    yield from _errors(case, traces)
    steps = min(len(trace.steps) for trace in traces)
    judge = _Judge(case, traces)
    for step in range(steps):
        for check in (judge.alike, judge.means, judge.mixed, judge.beside, judge.ledger, judge.bytes_sent):
            for problem in check(step):
                yield f"step {step}: {problem}"


def _errors(case: Case, traces: Sequence[Trace]) -> Iterator[str]:
    """Yields what is wrong with the errors that ended ranks: there must be none, or, after a write, the guard's."""
    # The guard knows parameters as optimisers left them: it may say nothing where steps are skipped.
    stepped = all(step.finite for trace in traces for step in trace.steps)
    expected = case.written is not None and case.written.step + 2 < case.steps and stepped
    expected = expected and case.buckets is not None  # nothing is compared before the planner's plan has settled
    causes_first = sorted(enumerate(traces), key=lambda each: (each[1].error or "").startswith("GroupError"))
    for rank, trace in causes_first:
        if trace.error is not None and not (case.written is not None and GUARD in trace.error):
            yield f"rank {rank} {RAISED} {trace.error}"
        elif trace.error is None and expected:
            assert case.written is not None
            yield f"rank {rank}: the guard did not see that rank {case.written.rank} wrote to a parameter"


@dataclass(frozen=True)
class _Range:
    """A segment of a bucket: [start, stop) of a parameter."""

    bucket: int
    name: str
    start: int
    stop: int


class _Judge:
    def __init__(self, case: Case, traces: Sequence[Trace]) -> None:
        self.case, self.traces = case, traces
        model = FuzzModel(case)
        self.shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
        self.dtypes = {name: p.dtype for name, p in model.named_parameters()}
        self.strides = {name: list(p.stride()) for name, p in model.named_parameters()}
        self.buckets = case.buckets or ()
        self.ranges = [_Range(number, *each) for number, of in enumerate(self.buckets) for each in of.segments]
        self.made = [bucket.made for bucket in self.buckets]
        if not self.buckets:  # the default planner's plans are exact
            self.ranges = [_Range(-1, name, 0, shape.numel()) for name, shape in self.shapes.items()]

    # The data of a step.

    def own(self, step: int, name: str) -> list[Tensor]:
        """Returns each rank's gradient before the exchange, (numel,) float64; zeros where it had none."""
        return [_flat(trace.steps[step].own.get(name), self.shapes[name]) for trace in self.traces]

    def got(self, step: int, rank: int, name: str) -> Tensor:
        return _flat(self.traces[rank].steps[step].got.get(name), self.shapes[name])

    def used(self, step: int, name: str) -> bool:
        """Whether some rank used the parameter."""
        return self.case.what == "parameter" or any(name in trace.steps[step].used for trace in self.traces)

    def is_finite(self, step: int) -> bool:
        """Whether all gradients before the step's exchange are finite."""
        return all(bool(x.isfinite().all()) for name in self.shapes for x in self.own(step, name))

    # The checks of a step.

    def alike(self, step: int) -> Iterator[str]:
        """Yields gradients and parameters that are not the same on all ranks, or have another form than they should."""
        if self.case.what == "parameter":
            return
        for name, shape in self.shapes.items():
            given = [trace.steps[step].got.get(name) for trace in self.traces]
            if not self.used(step, name):
                yield from self._unused(step, name)
                continue
            if any(gradient is None for gradient in given):
                missing = [rank for rank, gradient in enumerate(given) if gradient is None]
                yield f"{name}: ranks {missing} have no gradient, though some rank used the parameter"
                continue
            there = [gradient for gradient in given if gradient is not None]
            for rank, gradient in enumerate(there):
                if gradient.shape != shape or gradient.dtype is not self.dtypes[name]:
                    yield f"{name}: rank {rank} has a gradient of {tuple(gradient.shape)} {gradient.dtype}"
            if len({gradient.layout for gradient in there}) > 1:
                yield f"{name}: the ranks' gradients have different layouts"
                there = [gradient.to_dense() + 0.0 for gradient in there]  # a sparse one has no zeros with a sign
            if len({bits_of(gradient) for gradient in there}) > 1:
                yield f"{name}: the ranks' gradients are not the same bits"
            yield from self._form(step, name)
        written = self.case.written
        apart = len({trace.steps[step].parameters for trace in self.traces}) > 1
        if apart and (written is None or step <= written.step):
            yield "the ranks' parameters are not the same bits after the optimiser's step"

    def _unused(self, step: int, name: str) -> Iterator[str]:
        """Yields a gradient that changed though no rank used the parameter."""
        for rank, trace in enumerate(self.traces):
            before, after = trace.steps[step].own.get(name), trace.steps[step].got.get(name)
            same = after is None if before is None else after is not None and bits_of(before) == bits_of(after)
            if not same and not (
                before is not None and after is not None and self._averaged_again(name, before, after)
            ):
                yield f"{name}: the gradient of rank {rank} changed though no rank used the parameter"

    def _averaged_again(self, name: str, before: Tensor, after: Tensor) -> bool:
        """Whether a kept gradient differs by rounding only, as tables average rows that were kept once more."""
        each = next(part for part in self.ranges if part.name == name)
        scheme = self.buckets[each.bucket].scheme if each.bucket >= 0 else {}
        # A default plan exchanges sparse gradients as tables.
        sparse = before.layout is torch.sparse_coo
        tables = self.made[each.bucket].traits.layout is Layout.ROWS if scheme else sparse
        a, b = before.double().to_dense(), after.double().to_dense()
        if not tables:
            return torch.equal(a, b)
        relative, absolute = promised_eps(scheme, before.dtype), promised_spacing(scheme, before.dtype)
        return bool(((a - b).abs() <= (self.case.size + ROUNDINGS) * (relative * a.abs() + absolute)).all())

    def _form(self, step: int, name: str) -> Iterator[str]:
        """Yields a gradient in another layout than autograd's, or with other strides than the parameter's."""
        layouts = {self._first_layout(name, first, step) for first in (0, self._began(step))}
        for rank, trace in enumerate(self.traces):
            if self.case.frontend != "ddp_hook" and (got := trace.steps[step].got[name].layout) not in layouts:
                yield f"{name}: rank {rank} got a gradient of {got}, the ranks agreed on {layouts}"
            strides = trace.steps[step].strides.get(name)
            if self.case.world == "processes" and strides not in (None, self.strides[name]):
                yield f"{name}: the gradient of rank {rank} has the strides {strides}, not {self.strides[name]}"

    def _first_layout(self, name: str, first: int, step: int) -> torch.layout:
        """Returns the layout on which ranks agree where a gradient is first seen: sparse if it is so on any rank."""
        for number in range(first, step + 1):
            using = [trace.steps[number] for trace in self.traces if name in trace.steps[number].used]
            if brought := {each.own[name].layout for each in using if name in each.own}:
                return torch.sparse_coo if torch.sparse_coo in brought else torch.strided
        return torch.strided

    def _began(self, step: int) -> int:
        """Returns the first step since the state was last loaded."""
        return self.case.reload_at if self.case.reload_at is not None and step >= self.case.reload_at else 0

    def means(self, step: int) -> Iterator[str]:
        """Yields where an exact scheme's result is not the mean of all ranks' gradients."""
        if self.case.what == "parameter":
            return
        for each in self.ranges:
            if not self.used(step, each.name) or not self._is_exact(each):
                continue
            own = [x[each.start : each.stop] for x in self.own(step, each.name)]
            got = self.got(step, 0, each.name)[each.start : each.stop]
            expected = torch.stack(own).sum(dim=0) / self.case.size
            yield from self._off(each, got, expected, self._allowed(step, each, own))

    def _is_exact(self, each: _Range) -> bool:
        return each.bucket < 0 or self.made[each.bucket].traits.exact

    def _allowed(self, step: int, each: _Range, own: list[Tensor]) -> Tensor:
        """Returns the rounding error that a sum of the ranks' values may have, (elements,) float64."""
        size, dtype = self.case.size, self.dtypes[each.name]
        info, single = torch.finfo(dtype), torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32)
        magnitude = torch.stack(own).abs().sum(dim=0) / size
        # Rows that an embedding's gradient repeats are added first, where they may cancel out.
        added = torch.stack([self._added(step, rank, each) for rank in range(size)]).sum(dim=0) / size
        repeats = max(self._repeats(step, rank, each) for rank in range(size))
        return (
            (size + ROUNDINGS + repeats) * info.eps / 2 * torch.maximum(magnitude, added)
            + FLOAT32_ADDITIONS * single.eps * added
            + self._spacing(each)
        )

    def _spacing(self, each: _Range) -> float:
        """Returns how far rounding may move values near zero, of which the smallest ones lie evenly spaced."""
        scheme = self.buckets[each.bucket].scheme if each.bucket >= 0 else {}
        return (self.case.size + ROUNDINGS) * promised_spacing(scheme, self.dtypes[each.name])

    def _added(self, step: int, rank: int, each: _Range) -> Tensor:
        gradient = self.traces[rank].steps[step].own.get(each.name)
        if gradient is not None and gradient.layout is torch.sparse_coo:
            values = gradient._values().double().abs()
            shape = gradient.shape
            gradient = torch.sparse_coo_tensor(gradient._indices(), values, shape, check_invariants=True)
        return _flat(gradient, self.shapes[each.name]).abs()[each.start : each.stop]

    def _repeats(self, step: int, rank: int, each: _Range) -> int:
        """Returns how often the gradient of a rank repeats the row that it repeats most often; 0 without repetition."""
        gradient = self.traces[rank].steps[step].own.get(each.name)
        if gradient is None or gradient.layout is not torch.sparse_coo or not gradient._nnz():
            return 0
        return int(gradient._indices()[0].bincount().max()) - 1

    def _off(self, each: _Range, got: Tensor, expected: Tensor, allowed: Tensor) -> Iterator[str]:
        wrong = ~((got - expected).abs() <= allowed) & ~_equally_special(got, expected)
        if bool(wrong.any()):
            place = int(wrong.nonzero()[0])
            yield (
                f"{each.name}[{each.start}:{each.stop}] of bucket {each.bucket}: element {place} is "
                f"{float(got[place])!r}, expected {float(expected[place])!r} within {float(allowed[place]):.3g} "
                f"({int(wrong.sum())} of {len(wrong)} elements are off)"
            )

    def mixed(self, step: int) -> Iterator[str]:
        """Yields where parameters are not mixed as their scheme says; a lossy one must keep their mean."""
        if self.case.what != "parameter":
            return
        for each in self.ranges:
            scheme = self.made[each.bucket]
            own = torch.stack([x[each.start : each.stop] for x in self.own(step, each.name)])
            got = torch.stack([self.got(step, rank, each.name) for rank in range(self.case.size)])
            got = got[:, each.start : each.stop]
            largest = own.abs().amax() if own.numel() else torch.zeros(())
            eps = promised_eps(self.buckets[each.bucket].scheme, self.dtypes[each.name])
            allowed = torch.full(own.shape[1:], float((self.case.size + 2 * ROUNDINGS) * eps * largest))
            if scheme.traits.lossy:
                yield from self._off(each, got.mean(dim=0), own.mean(dim=0), allowed)
                continue
            expected = mixing(self.buckets[each.bucket].scheme, self.case.size, step) @ own
            for rank in range(self.case.size):
                yield from self._off(each, got[rank], expected[rank], allowed)

    def beside(self, step: int) -> Iterator[str]:
        """Yields where torch's DDP has another gradient: other bits on one or two ranks, else beyond rounding."""
        exact = all(self._is_exact(each) for each in self.ranges)
        if not exact or self.traces[0].steps[step].ddp is None:
            return
        for rank, trace in enumerate(self.traces):
            theirs, ours = trace.steps[step].ddp or {}, trace.steps[step].got
            if theirs.keys() != ours.keys():
                yield f"rank {rank}: DDP has gradients of {sorted(theirs)}, gradsync of {sorted(ours)}"
                continue
            for name in theirs.keys() & self.shapes.keys():
                a, b = _flat(theirs[name], self.shapes[name]), _flat(ours[name], self.shapes[name])
                each = next(part for part in self.ranges if part.name == name)
                whole = _Range(each.bucket, name, 0, len(a))
                own = self.own(step, name)
                allowed = 2 * self._allowed(step, whole, own)
                yield from self._off(whole, b, a, self._halved(whole, own) if self.case.size <= 2 else allowed)

    def _halved(self, each: _Range, own: list[Tensor]) -> Tensor:
        """Returns what DDP loses on two ranks: it halves gradients before their sum, which rounds those near zero."""
        smallest = torch.finfo(self.dtypes[each.name]).smallest_normal
        near_zero = (torch.stack(own).abs() < 2 * smallest).any(dim=0)
        return near_zero * self._spacing(each)

    # The ledger of what was sent and what was left.

    def ledger(self, step: int) -> Iterator[str]:
        """Yields where sent + residual is not gradient + former residual, summed over the ranks."""
        if self.case.what == "parameter":
            return
        finite = self.is_finite(step)
        if not finite:
            yield from self._left_alone(step)
            return
        for number, bucket in enumerate(self.buckets):
            if not self.made[number].traits.exact and conserves(bucket.scheme):
                yield from self._conserved(step, number, bucket)

    def _conserved(self, step: int, number: int, bucket: BucketCase) -> Iterator[str]:
        """Yields what a bucket lost, and residuals that changed though no rank used the parameter."""
        ranges = [each for each in self.ranges if each.bucket == number]
        sums = {each: self._sums(step, each) for each in ranges}
        largest = max((float(s.largest) for s in sums.values() if s.came_in.numel()), default=0.0)
        for each, found in sums.items():
            if not self.used(step, each.name):
                if not torch.equal(found.before, found.after):
                    yield f"{each.name} of bucket {number}: its residual changed though no rank used the parameter"
                continue
            eps = promised_eps(bucket.scheme, self.dtypes[each.name])
            repeats = max(self._repeats(step, rank, each) for rank in range(self.case.size))
            bound = (self.case.size + ROUNDINGS + repeats) * eps + FLOAT32_ADDITIONS * torch.finfo(torch.float32).eps
            allowed = torch.full_like(found.came_in, bound * largest + self.case.size * self._spacing(each))
            expected = found.came_in + found.before
            for problem in self._off(each, found.sent + found.after, expected, allowed):
                yield f"sent + residual is not gradient + former residual: {problem}"

    def _sums(self, step: int, each: _Range) -> _Sums:
        own = torch.stack([x[each.start : each.stop] for x in self.own(step, each.name)])
        sent = self.case.size * self.got(step, 0, each.name)[each.start : each.stop]
        (before, size_before), (after, size_after) = (self._left(number, each) for number in (step - 1, step))
        # Rows that an embedding's gradient repeats are added first, where they may cancel out.
        added = torch.stack([self._added(step, rank, each) for rank in range(self.case.size)]).sum(dim=0)
        sizes = (added, sent.abs(), size_before, size_after)
        largest = max((float(size.amax()) for size in sizes if size.numel()), default=0)
        return _Sums(own.sum(dim=0), sent, before, after, largest)

    def _left(self, step: int, each: _Range) -> tuple[Tensor, Tensor]:
        """Returns the sums of all ranks' residuals of a range after a step, and of their absolute values.

        What several ranks keep alike counts once.
        """
        left = torch.zeros(2, self.shapes[each.name].numel(), dtype=torch.float64)
        for trace in self.traces if step >= 0 else ():
            for key, values in trace.steps[step].state.items():
                form = re.fullmatch(r"(.*)\[(\d+):(\d+)\]/([^/]*)\.residual", key)
                if form is not None and form[1] == each.name:
                    copies = re.search(r" of (\d+)$", form[4])
                    part = values.double() / (int(copies[1]) if copies else 1)
                    left[:, int(form[2]) : int(form[3])] += torch.stack([part, part.abs()])
        total, size = left[:, each.start : each.stop]
        return total, size

    def _left_alone(self, step: int) -> Iterator[str]:
        """Yields state that a step changed though some rank's gradients were not finite."""
        for rank, trace in enumerate(self.traces):
            before = trace.steps[step - 1].state if step else None
            for key, values in trace.steps[step].state.items():
                same = bits_of(before[key]) == bits_of(values) if before else bool(values.isfinite().all())
                if not same:
                    yield f"{key} of rank {rank} changed in a step whose gradients were not finite"

    # The ledger of bytes.

    def bytes_sent(self, step: int) -> Iterator[str]:
        """Yields buckets that sent other bytes than `Scheme.steps` predicts, exactly where data does not matter."""
        for number, bucket in enumerate(self.buckets):
            told = [trace.steps[step].sent.get(str(number)) for trace in self.traces]
            follow = bytes_follow_data(self.case, number)
            for rank, pair in enumerate(told):
                if pair is None:
                    yield f"bucket {number}: rank {rank} has no statistics"
                elif not follow and pair[0] != pair[1]:
                    yield f"bucket {number}: rank {rank} sent {pair[0]} bytes, {pair[1]} were predicted"
            if follow and self.is_finite(step):
                yield from self._bytes_about(step, number, bucket)

    def _bytes_about(self, step: int, number: int, bucket: BucketCase) -> Iterator[str]:
        """Yields a bucket whose bytes over all ranks are far from those predicted for the step's own densities."""
        sent = self._sent_by_all(step, number)
        sent -= self._sent_by_all(step - 1, number) if step > self._began(step) else 0.0
        low, high = expected_bytes(
            self.case, number, [self._present(step, rank, bucket) for rank in range(self.case.size)], step
        )
        if not low <= sent <= high:
            told = f"all ranks sent {sent:.0f} bytes"
            yield f"bucket {number}: {told}, predicted for these gradients: {low:.0f} to {high:.0f}"

    def _sent_by_all(self, step: int, number: int) -> float:
        return math.fsum(trace.steps[step].sent[str(number)][0] or 0.0 for trace in self.traces)

    def _present(self, step: int, rank: int, bucket: BucketCase) -> list[Tensor | None]:
        """Returns a rank's gradients in a bucket, (stop - start,) each, and None where it had none."""
        own = self.traces[rank].steps[step].own
        return [
            _flat(own[name], self.shapes[name])[start:stop] if name in own else None
            for name, start, stop in bucket.segments
        ]


@dataclass(frozen=True)
class _Sums:
    """Sums over the ranks of a range: gradients, what was sent, residuals before and after; and the largest of all."""

    came_in: Tensor
    sent: Tensor
    before: Tensor
    after: Tensor
    largest: float


def _flat(gradient: Tensor | None, shape: torch.Size) -> Tensor:
    if gradient is None:
        return torch.zeros(shape.numel(), dtype=torch.float64)
    return gradient.double().to_dense().reshape(-1)


def _equally_special(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())
