"""One bucket of gradients while it is trained: its scheme, memory and state, and the bytes and seconds spent so far."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..comm import Group, Ledger, RecordingGroup
from ..costs.steps import Pattern, Step, Transfer, transfers
from ..costs.timeline import covered_s
from ..kernels import accumulation_dtype
from ..schemes import Scheme, State
from ..state import (
    NOT_STRICT,
    StateSlice,
    arrived,
    at_step,
    carried_residual,
    carried_slices,
    dtype_at,
    has_place,
    keeps_values,
    left_to_send,
    rescaled,
    slices,
    with_slices,
    without,
)
from ..tensors.arrivals import Arrival
from ..tensors.bucket import NUM_MARKS, Bucket, Layout, StepMarks
from ..tensors.density import DensityProfile, ParameterProfile, joined
from ..tensors.gradients import FlatGradients, Gradients, gradients_of, is_finite


@dataclass(frozen=True)
class BucketStatistics:
    """The bytes sent and the communication times of one bucket, since `attach` or the last change of plans.

    Attributes:
        id: the bucket's id in the plan.
        names: its parameters, in order.
        scheme: the name of its scheme, such as "all_reduce".
        density: the share of non-zero rows of tables, else of elements, in one rank's gradient: a mean over the ranks;
            None where it was not measured.
        steps: synchronised training steps.
        sent_bytes: bytes of payload that this rank handed to the transport.
        predicted_bytes: the same as the scheme predicts it (`Scheme.steps`); None while the density is not known.
        communication_s: seconds in which the bucket had an operation in flight.
        exposed_s: the part of `communication_s` after the end of backward, in seconds.
    """

    id: str
    names: tuple[str, ...]
    scheme: str
    density: float | None
    steps: int
    sent_bytes: float
    predicted_bytes: float | None
    communication_s: float
    exposed_s: float


@dataclass
class BucketRun:
    """One bucket of gradients while it is trained on this rank: its scheme of exchange, memory, state and statistics.

    The state is what the scheme keeps from step to step, such as residuals of compression.
    """

    bucket: Bucket
    scheme: Scheme[Any]
    gradients: Gradients
    group: RecordingGroup
    state: State
    of_gradients: bool = True  # False: of parameters, to which residuals of gradients must not be added
    flags_apart: bool = False  # the flags do not ride with the gradients but are summed after them
    next_state: State | None = None
    carried_residual: Tensor | None = None  # what another plan's schemes left to be sent: goes with the next gradients
    some_rank_carries: bool = False  # some rank carries a residual: what follows from it must be the same on all
    still_carries: bool = False  # so it will be when the step is kept
    next_carried_residual: Tensor | None = None
    result_is_finite: Tensor | None = None  # where it might not be: 0-D bool
    waiting: set[str] = field(default_factory=set)  # parameters that were not loaded in this step yet
    rests: bool = False  # none is to be loaded in this step, in which this rank exchanges nothing of the bucket
    steps: int = 0
    sent_bytes: float = 0.0
    predicted_bytes: float = 0.0  # of the steps that are not in `unpredicted`, by what was known of gradients then
    # Steps that `predicted_bytes` lacks, by `Scheme.unchanged_since`.
    unpredicted: Counter[int] = field(default_factory=Counter)
    communication_s: float = 0.0
    exposed_s: float = 0.0

    @classmethod
    def make(
        cls,
        bucket: Bucket,
        scheme: Scheme[Any],
        templates: Mapping[str, Tensor],
        device: torch.device,
        group: Group,
        *,
        of_gradients: bool = True,
    ) -> BucketRun:
        """Returns a bucket with newly allocated memory for gradients and the first state of its scheme.

        Args:
            bucket: the parameters, or slices of them, that are synchronised together.
            scheme: how the bucket is exchanged.
            templates: tensors with the shapes and strides of the parameters, by name, on any device, `meta` too.
            device: where the gradients are.
            group: the ranks that exchange them.
            of_gradients: whether gradients are synchronised, not parameters.
        """
        recording = RecordingGroup(group, Ledger())
        state = scheme.init(bucket, recording)
        # State is of elements by their index, whatever plans and memory formats it meets; so is what it is added to.
        gradients = gradients_of(bucket, templates, device, in_order=bool(state))
        run = cls(bucket, scheme, gradients, recording, state, of_gradients)
        run.flags_apart = bucket.layout is Layout.FLAT and not bucket.flags_ride
        return run

    def __post_init__(self) -> None:
        self._names, self._dtype = frozenset(self.bucket.names), self.bucket.dtype

    @property
    def carries_marks(self) -> bool:
        """Whether `StepMarks` are summed with this bucket: numbers that reveal that ranks are late or out of step."""
        return self.bucket.layout is Layout.FLAT or self.flags_apart

    @property
    def may_carry(self) -> bool:
        """Whether residuals that the scheme does not keep can be added to what is loaded next: to flat gradients."""
        return self.of_gradients and self.bucket.layout is Layout.FLAT

    def begin(self, resting: Set[str] = frozenset()) -> None:
        """Starts a training step, in which no gradient of the bucket is loaded yet.

        `resting`: the parameters of which this rank exchanges nothing in this step, and loads no gradients.
        """
        # State, and a residual to be added, are of gradients that are not scaled yet.
        scales_first = self.scheme.traits.scales_first and not self.state and self.carried_residual is None
        self.gradients.begin(1.0 / self.group.size if scales_first else 1.0)
        self.waiting = set(self._names).difference(resting)
        self.rests = not self.waiting

    def load(self, name: str, gradient: Tensor | None, *, used: bool) -> bool:
        """Puts a parameter's gradient into the bucket; returns whether the bucket has all of its gradients now.

        Args:
            name: the parameter's name.
            gradient: with the parameter's shape; None: zero.
            used: whether this rank used the parameter in this step.

        Raises:
            RuntimeError: for another dtype than the bucket's, or a parameter that was loaded in this step already.
        """
        if gradient is not None and gradient.dtype is not self._dtype:
            raise RuntimeError(
                f"the gradient of {name!r} is {gradient.dtype}, it was {self._dtype} when gradsync was "
                "attached; change a model's element type before attach()"
            )
        if name not in self.waiting:
            assert not self.rests, f"{name!r} rests in this step: it is not to be loaded"
            raise _ready_twice(name)
        self.gradients.load(name, gradient, used=used)
        self.waiting.discard(name)
        return not self.waiting

    def load_views(self, names: Sequence[str]) -> bool:
        """Loads gradients of used parameters that live in their views of the bucket, so that nothing is copied.

        Returns whether the bucket has all of its gradients now, as `load` does.

        Raises:
            RuntimeError: for a parameter that was loaded in this step already, or is twice in `names`.
        """
        assert isinstance(self.gradients, FlatGradients)
        if len(self.waiting) - len(self.waiting.difference(names)) < len(names):
            raise _ready_twice(next(name for name in names if name not in self.waiting or names.count(name) > 1))
        self.gradients.load_views(names)
        self.waiting.difference_update(names)
        return not self.waiting

    async def synchronize(self, *, check_finite: bool, marks: StepMarks, step: int) -> Any:
        """Runs the scheme on the loaded gradients and returns their mean over the ranks, for `accept`.

        Args:
            check_finite: whether to look for NaN and infinity in this rank's gradients and in the result.
            marks: numbers sent with the gradients, which reveal ranks that are late or out of step.
            step: the number of the training step, on which the state of some schemes depends.

        Returns:
            One flat tensor, or a tuple of `SparseRows`, one for each table; None if the bucket rests in this step.
        """
        self.result_is_finite = None
        if self.rests:
            self.gradients.flags.zero_()
            return None
        x = self.gradients.take(check_finite=check_finite and not self._shows_non_finite, marks=marks)
        if self.carried_residual is not None:
            assert isinstance(self.gradients, FlatGradients)
            self.gradients.add(self.carried_residual)  # which is what `x` looks at
        state = at_step(self.state, step)
        scale = 1.0 / self.group.size / self.gradients.factor  # 1 if gradients were loaded with it
        result, self.next_state = await self.scheme.synchronize(x, state, self.group, scale)
        if check_finite and self.bucket.layout is Layout.FLAT:  # while other buckets are in flight
            self.result_is_finite = is_finite(result)
        if self.flags_apart:
            await self.group.all_reduce(self.gradients.flags)
        return result

    def accept(self, result: Any, step: int) -> None:
        """Stores `result`, which `synchronize` returned in training step `step`, in the bucket.

        The scheme's next state waits for `commit`. In it parameters that no rank used keep their former state.
        """
        self.steps += 1
        self.unpredicted[self.scheme.unchanged_since(step)] += 1
        if self.rests:
            return
        self.gradients.accept(result)
        if not self.next_state and not self.some_rank_carries:
            return
        unused = {name for name in self.bucket.names if not self.gradients.used(name)}
        if self.next_state:
            self.next_state = without(self.next_state, self.state, unused)
        self.still_carries = bool(unused) and self.some_rank_carries
        if unused and self.carried_residual is not None:  # their result was given to nobody
            used = [segment.name not in unused for segment in self.bucket.segments]
            lengths = torch.tensor([segment.numel for segment in self.bucket.segments])
            self.next_carried_residual = self.carried_residual.masked_fill(
                torch.tensor(used).repeat_interleave(lengths), 0.0
            )

    @property
    def arrival(self) -> Arrival:
        """The elements of the bucket that got synchronised gradients in the last step; after its `commit`: all.

        It also says whether optimisers must leave the other elements unchanged.
        """
        return Arrival(self.bucket, arrived(self.next_state or {}, self.bucket), self.scheme.traits.freezes)

    def fill_nan(self, where: Tensor | None = None) -> None:
        """Overwrites the result by NaN after a step in which some rank saw NaN or infinity.

        Only flat buckets with state of a lossy scheme, or with a residual of a former plan, are overwritten. The state
        of such a step is dropped, so the result must not be used: NaN tells a GradScaler so. A finite result of a lossy
        scheme would hide what the rank saw.

        `where`: whether some rank saw them, 0-D bool on the gradients' device; None: it did.
        """
        lossy = bool(self.state) and not self.scheme.traits.exact
        if (lossy or self.some_rank_carries) and isinstance(self.gradients, FlatGradients):
            self.gradients.fill_nan(where)

    @property
    def _shows_non_finite(self) -> bool:
        """Whether NaN or infinity of any rank shows in the result: then inputs need no check. False if row-sparse."""
        exact = self.scheme.traits.exact and not self.state
        return self.bucket.layout is Layout.FLAT and (exact or self.scheme.traits.shows_infinity)

    def non_finite(self) -> Iterator[Tensor]:
        """Yields 0-D bools, the same on all ranks: has a rank's gradient, or has the result, NaN or infinity?

        Results count, too, as a sum may overflow though all summands are finite.
        """
        if self.rests:
            return
        yield self.gradients.had_non_finite()
        if isinstance(self.gradients, FlatGradients):
            finite = self.result_is_finite
            yield ~(is_finite(self.gradients.values) if finite is None else finite)

    def commit(self, *, keep: bool) -> None:
        """Ends the last step for the scheme's state: if `keep`, the next state, which that step made, replaces it.

        Else the next state is dropped: a step that failed, or in which some rank saw NaN, is not kept.
        """
        if self.next_state is not None and keep:
            self.state, self.carried_residual = self.next_state, self.next_carried_residual
            self.some_rank_carries = self.still_carries
        self.next_state = self.next_carried_residual = None

    def rescale(self, factor: float) -> None:
        """Multiplies residuals (gradients that are still to be sent) by `factor`.

        Call it when the loss scale, and with it all coming gradients, has become `factor` times as large.
        """
        self.state = rescaled(self.state, factor)
        self.carried_residual = None if self.carried_residual is None else self.carried_residual * factor

    def reset_state(self) -> None:
        self.next_state = self.carried_residual = self.next_carried_residual = None
        self.some_rank_carries = self.still_carries = False
        self.state = self.scheme.init(self.bucket, self.group)

    def state_slices(self) -> Iterator[StateSlice]:
        """Yields copies of the scheme's state (such as residuals of compression) for checkpoints and other plans.

        There is one for each parameter, or slice of one, in the bucket and each point where the scheme compresses.
        Residuals that a former plan left to be sent have slices of their own.
        """
        yield from slices(self.bucket, self.state)
        if self.carried_residual is not None:
            yield from carried_slices(self.bucket, self.carried_residual)

    def take_over(self, saved: Sequence[StateSlice]) -> None:
        """Copies saved state, for the elements that are in this bucket, into the bucket's state.

        The plan that saved it may have had other buckets. Residuals (what compression left to be sent) that the scheme
        here does not keep are added to the next gradients of a flat bucket; never to parameters.
        """
        self.state = with_slices(self.bucket, self.state, saved)
        if self.may_carry:
            self.carried_residual = carried_residual(self.bucket, self.state, saved)

    def count_bytes(self) -> None:
        """Adds the bytes that this rank sent in a finished training step to the bucket's totals."""
        self.sent_bytes += self.group.ledger.take_sent_bytes()

    def count_times(self, flights: Sequence[tuple[float, float]], backward_ended_s: float, ended_s: float) -> None:
        """Adds the seconds of communication of a finished training step to the bucket's totals.

        Args:
            flights: when the bucket had an operation in flight: begin and end, in seconds since the step began.
            backward_ended_s: when backward ended; what comes later is exposed.
            ended_s: when the step's exchange ended.
        """
        self.communication_s += covered_s(flights, 0.0, ended_s)
        self.exposed_s += covered_s(flights, backward_ended_s, ended_s)

    def statistics(self, profiles: Mapping[str, ParameterProfile]) -> BucketStatistics:
        """Returns the totals of the bucket. `profiles`: the gradients' densities, by parameter name."""
        densities = self._densities(profiles) or ()
        rows = sum(d.num_rows for d in densities)
        return BucketStatistics(
            id=self.bucket.id,
            names=tuple(self.bucket.names),
            scheme=self.scheme.name,
            density=sum(d.rows for d in densities) / rows if rows else None,
            steps=self.steps,
            sent_bytes=self.sent_bytes,
            predicted_bytes=self._predicted_bytes(profiles),
            communication_s=self.communication_s,
            exposed_s=self.exposed_s,
        )

    def _densities(self, profiles: Mapping[str, ParameterProfile]) -> tuple[DensityProfile, ...] | None:
        """Returns a profile of rows per gradient if row-sparse, else a single one of all elements; None: unknown."""
        of_rows = self.bucket.layout is Layout.ROWS
        known = [profiles[n].density if of_rows else profiles[n].elements for n in self.bucket.names]
        found = [density for density in known if density is not None]
        if len(found) < len(known):
            return None
        return tuple(found) if of_rows else (joined(found),)

    def close_prediction(self, profiles: Mapping[str, ParameterProfile]) -> None:
        """Adds to `predicted_bytes` the steps that it does not cover yet, by the densities known so far.

        Call it before the ranks replace `profiles`, the densities by parameter name, by new ones.
        """
        predicted = self._predicted_bytes(profiles)
        if predicted is not None:
            self.predicted_bytes = predicted
            self.unpredicted.clear()

    def _predicted_bytes(self, profiles: Mapping[str, ParameterProfile]) -> float | None:
        predicted = self.predicted_bytes
        for step, count in self.unpredicted.items():
            expected = self.expected_steps(profiles, step)
            if expected is None:
                return None
            traffic = (transfer.carried_by(self.group.transport) for transfer in transfers(expected))
            predicted += count * sum(each.sent_bytes(self.group.rank) for each in traffic)
        return predicted

    def expected_steps(self, profiles: Mapping[str, ParameterProfile], step: int) -> list[Step] | None:
        """Returns the scheme's expected computations and transfers, in order, in training step `step`.

        `profiles`: the gradients' densities, by parameter name. Returns None for tables whose density is not known yet.
        """
        densities = self._densities(profiles)
        if densities is None and self.bucket.layout is Layout.ROWS:
            return None
        steps = list(self.scheme.steps(self.bucket.specs, densities or (), self.group.placement, step))
        if self.flags_apart:
            flags_bytes = self.gradients.flags.numel() * self.gradients.flags.element_size()
            steps.append(Transfer("flags", Pattern.ALL_REDUCE, (float(flags_bytes),) * self.group.size))
        return steps


class BucketRuns:
    """All buckets of a plan at run time (`BucketRun`), in the plan's order."""

    def __init__(self, runs: Iterable[BucketRun] = ()) -> None:
        self._by_bucket = {run.bucket.id: run for run in runs}
        if self._by_bucket and not any(run.carries_marks for run in self):
            next(iter(self)).flags_apart = True  # only tables: nothing the marks could ride in
        self._of: dict[str, list[BucketRun]] = {}
        for run in self:
            for name in dict.fromkeys(run.bucket.names):
                self._of.setdefault(name, []).append(run)

    def __iter__(self) -> Iterator[BucketRun]:
        return iter(self._by_bucket.values())

    def __len__(self) -> int:
        return len(self._by_bucket)

    def __getitem__(self, bucket: str) -> BucketRun:
        return self._by_bucket[bucket]

    def of(self, name: str) -> list[BucketRun]:
        """Returns the runs of all buckets that hold the parameter or slices of it."""
        return self._of[name]

    def resting(self, step: int) -> frozenset[str]:
        """Returns the names of parameters of which this rank exchanges nothing in training step `step`."""
        active = [run for run in self if not run.scheme.rests(run.group.rank, step)]
        if len(active) == len(self):
            return frozenset()
        return frozenset(self._of).difference(name for run in active for name in run.bucket.names)

    @property
    def prepared(self) -> frozenset[str]:
        """The ids of buckets whose schemes begin with a computation, which starts as soon as the bucket is complete."""
        return frozenset(run.bucket.id for run in self if run.scheme.traits.prepares)

    @property
    def offload(self) -> bool:
        """Whether some scheme offloads computations to another core or to the host, which takes one more thread."""
        return any(run.scheme.traits.offloads for run in self)

    @property
    def have_state(self) -> bool:
        """Whether some bucket's scheme has state, which a step with NaN must leave unchanged; the same on all ranks."""
        for run in self:  # not by `any`, which resumes a generator for each bucket
            if run.state or run.some_rank_carries:
                return True
        return False

    @property
    def keep_values(self) -> bool:
        """Whether some state, such as compression's residuals, differs between ranks: checkpoints need every rank's."""
        return any(keeps_values(run.state) or run.some_rank_carries for run in self)

    @property
    def kept_names(self) -> frozenset[str]:
        """The parameters whose buckets keep state that differs between ranks, such as residuals; alike on all ranks."""
        kept = (run for run in self if keeps_values(run.state) or run.some_rank_carries)
        return frozenset(name for run in kept for name in run.bucket.names)

    def state_slices(self) -> Iterator[StateSlice]:
        """Yields copies of the state of all buckets' schemes, such as residuals, as slices of parameters."""
        return (part for run in self for part in run.state_slices())

    def commit(self, *, keep: bool) -> None:
        """Ends the last step for all buckets' state: if `keep`, the next states, which that step made, replace it.

        Else the next states are dropped: a step that failed, or in which some rank saw NaN, is not kept.
        """
        for run in self:
            run.commit(keep=keep)

    def restore(self, state: Sequence[StateSlice], gather: Callable[[bytes], list[bytes]]) -> None:
        """Replaces the state of all buckets' schemes by saved slices. Collective.

        Some state is not kept for each element (PowerSGD's factors, or numbers by which a scheme chooses ranges to
        send). It must be the same on all ranks; where saved values differ, the bucket's state of this kind begins anew.

        Args:
            state: this rank's saved slices.
            gather: sends bytes to all ranks and returns all ranks' bytes, by rank.
        """
        for run in self:
            run.reset_state()
            run.take_over(state)
        whole = [(run.bucket.id, part) for run in self for part in run.state_slices() if part.whole]
        mine = json.dumps([(bucket, part.key, part.digest) for bucket, part in whole])
        digests: dict[tuple[str, str], set[str]] = {}
        for theirs in gather(mine.encode()):
            for bucket, key, digest in json.loads(theirs):
                digests.setdefault((bucket, key), set()).add(digest)
        for bucket in sorted({bucket for (bucket, _), found in digests.items() if len(found) > 1}):
            self[bucket].reset_state()
            self[bucket].take_over([part for part in state if not part.whole])

    def inherit(self, state: Iterable[StateSlice]) -> None:
        """Loads the state that the schemes of the former plan kept, given as slices of parameters.

        Residuals (what compression left to be sent) that no scheme here keeps are sent with the next gradients. State
        of a whole matrix (PowerSGD's factors) is dropped where no scheme keeps it: it was only a good start.

        Raises:
            ValueError: if no scheme here keeps some other state, or a residual of a table, which would be lost.
        """
        saved = [part for part in state if not part.whole or self._keeps(part)]
        self.require_place(
            saved,
            "plans that follow each other, or are tried in turns, must have schemes with the same state for the same "
            "parameters; a table whose gradient shows to be sparse in the first step must not be compressed before",
        )
        for run in self:
            run.take_over(saved)

    def agree_on_carried(self, gather: Callable[[Tensor], list[Tensor]]) -> None:
        """Sets `some_rank_carries` of each bucket: whether a former plan left some rank a residual to be sent.

        A residual is what compression left out of the gradients. Collective. `gather` sends a tensor, (buckets,) uint8,
        to all ranks and returns all ranks' tensors, by rank.
        """
        if len(self):
            mine = torch.tensor([run.carried_residual is not None for run in self], dtype=torch.uint8)
            carrying = torch.stack([part.cpu() for part in gather(mine)]).amax(dim=0).tolist()
            for run, carries in zip(self, carrying, strict=True):
                run.some_rank_carries = bool(carries)

    def require_place(self, state: Iterable[StateSlice], advice: str) -> None:
        """Checks that these buckets' schemes can keep all of the saved state, or send it with the next gradients.

        `state`: what schemes kept, such as residuals, as slices of parameters.

        Raises:
            ValueError: naming the state that would be lost, followed by `advice`.
        """
        for part in state:
            runs = self.of(part.name)
            if left_to_send(part) and all(run.may_carry for run in runs):
                continue
            if not self._keeps(part):
                ways = " and ".join(dict.fromkeys(run.scheme.title for run in runs))
                raise ValueError(
                    f"the plan has no place for the state {part.key!r}, which would be lost, as {part.name!r} travels "
                    f"by {ways}: {advice}"
                )

    def require_dtypes(self, state: Iterable[StateSlice]) -> None:
        """Checks that the saved state has the dtypes in which these buckets keep it.

        Raises:
            ValueError: naming the state that has another dtype.
        """
        for part in state:
            runs = self.of(part.name)
            kept = dtype_at([run.state for run in runs], part)
            if kept is None and left_to_send(part):  # it goes with gradients
                kept = accumulation_dtype(runs[0].bucket.dtype)
            if kept is not None and part.values.dtype is not kept:
                raise ValueError(
                    f"the state {part.key!r} is {part.values.dtype}, {kept} is kept there: what was rounded in between "
                    f"is lost; load it as it was saved, or take it as it is by {NOT_STRICT}"
                )

    def _keeps(self, part: StateSlice) -> bool:
        return has_place([run.state for run in self.of(part.name)], part)

    def marks(self) -> Tensor:
        """Returns the marks of the last step summed over ranks, (NUM_MARKS,); `marks_of_ranks` reads them.

        Marks are numbers sent with the gradients, which reveal ranks that are late or out of step.
        """
        return next(run for run in self if run.carries_marks).gradients.flags[-NUM_MARKS:]

    def expected_steps(self, profiles: Mapping[str, ParameterProfile], step: int) -> dict[str, list[Step]]:
        """Returns the computations and transfers expected in training step `step`, in order, by bucket id.

        Buckets of tables whose density is not known yet are left out. `profiles`: the gradients' densities, by
        parameter name.
        """
        steps = {run.bucket.id: run.expected_steps(profiles, step) for run in self}
        return {bucket: expected for bucket, expected in steps.items() if expected is not None}


def _ready_twice(name: str) -> RuntimeError:
    return RuntimeError(
        f"the gradient of {name!r} became ready twice in one backward; re-entrant activation checkpointing "
        "does that: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
    )
