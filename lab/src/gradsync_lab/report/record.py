"""What a measurement leaves behind: the record schema of `benchmarks/results/`, and the result of a training run.

Figures of a subject and its baseline always come from one run, in which the two took turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from gradsync.characterization.statistics import Estimate

Metric = Literal[
    "step_s", "sync_s", "kernel_s", "plan_s", "time_to_loss_s", "imbalance", "cost", "error", "loss", "gap"
]


class Spread(BaseModel):
    """Median with the 5th and 95th percentile of repeated measurements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    median: float
    p5: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError for no values."""
        import numpy as np

        if not values:
            raise ValueError("a spread needs at least one value")
        p5, median, p95 = np.percentile(np.asarray(values, dtype=np.float64), [5, 50, 95])
        return cls(median=float(median), p5=float(p5), p95=float(p95))


class WireBytes(BaseModel):
    """Bytes a step at the busiest node's network interface, protocol overhead included."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: float | None = None
    baseline: float | None = None


class Imbalance(BaseModel):
    """How much more than an even share the most loaded owner has, mean over draws (Zen, OSDI 2025, section 2); ideal 1.

    In differences of two of them, by how much.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    push: Estimate  # of the rank whose elements are shared out worst
    pull: Estimate  # of the sums


class Balance(BaseModel):
    """Two owner maps on the same draws."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: Imbalance
    baseline: Imbalance
    excess: Imbalance  # subject less baseline, draw by draw


class FittedCost(BaseModel):
    """What an operation takes: `call_s + byte_s * bytes`, the bytes it must read and write; as `costs.KernelCost`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str  # as steps of schemes name it
    call_s: float
    byte_s: float

    @property
    def knee_bytes(self) -> float:
        """From here on bytes cost more than the call."""
        return self.call_s / self.byte_s


class CompressionError(BaseModel):
    """What a compressor left out of a gradient, beside what it promises. Norms are Euclidean, |C(x) - x| / |x|."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    relative: float  # root mean square over the draws
    law: str  # exact, unbiased, contraction, absolute or biased
    declared: float | None = None  # omega, delta or tau
    measured: float | None = None  # the same of this gradient
    holds: bool | None = None  # whether the measured one is within the declared one; None where nothing is promised


class Losses(BaseModel):
    """Held-out losses, or accuracies, by seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: list[float]
    baseline: list[float]


class PlanningRun(BaseModel):
    """A plan that a search found, and what it is held against; steps are of the machine that plans are made for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_s: float
    baseline_step_s: float
    bound_s: float  # no plan's step is shorter
    certificate_s: float  # what it took to know that
    buckets: int


class PlanRan(BaseModel):
    """The plan that a method ran by."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str | None = None  # `Plan.digest`; None of methods that are not gradsync's
    words: list[str]  # as `Attachment.explain` gives them


class Record(BaseModel):
    """One comparison. `ratio` = subject / baseline of pairs measured side by side: below 1, the subject is faster.

    `bound_s` is what the network allows for the subject's transfers. `predicted_s` is the cost model's word for the
    whole subject, with costs fitted in the same run; None where nothing predicts it, as for training steps of which no
    automatic plan has measured the job; of whole runs to a loss it is steps times seconds of a step. `cpu_s` is the
    processor time of all ranks together: where they share a machine, the subject cannot take less than that over
    `environment["cores"]`, whatever the network allows. Of the metric `imbalance`, which takes no time, `ratio` and
    `aa` are those of push imbalance, draw by draw; of `loss`, `ratio` is that of the held-out losses, seed by seed, and
    `aa` that of the baseline's with one seed and the next; of `gap` that of the step by the subject's plan over the
    step by the best of all plans, problem by problem. `alone_s` is a step of one rank that exchanges nothing, of the
    subject's model; known where computation is emulated.
    """

    model_config = ConfigDict(extra="forbid")

    case: Literal["sync", "train", "compress", "kernels", "plan", "simulate", "characterize", "balance", "converge"]
    metric: Metric
    subject: str
    baseline: str
    params: dict[str, Any]
    options: dict[str, Any] = {}  # of the workload: all of them, those asked for (also in params) and the defaults
    repeats: int
    subject_s: Spread | None
    baseline_s: Spread | None
    ratio: Spread | None
    aa: Spread | None  # the baseline against itself in the same run
    predicted_s: float | None = None
    bound_s: float | None = None
    alone_s: float | None = None
    cpu_s: float | None = None
    loss: dict[str, float] | None = None  # the subject's measures on held-out samples after the run: loss, auc, ...
    baseline_loss: dict[str, float] | None = None
    loss_steps: int | None = None  # of the subject and of the baseline before; None where they are not equal
    plan: PlanRan | None = None  # the subject's, at the end of the run; None where there is none
    baseline_plan: PlanRan | None = None
    seeds: list[int] = []
    wire_bytes: WireBytes | None = None
    payload_bytes: WireBytes | None = None  # what the schemes handed to the transport
    balance: Balance | None = None  # of the metric `imbalance`
    cost: FittedCost | None = None  # of the metric `cost`
    error: CompressionError | None = None  # of the metric `error`
    losses: Losses | None = None  # of the metric `loss`
    accuracies: Losses | None = None  # with it, where the workload has some
    planning: PlanningRun | None = None  # of the metric `plan_s`
    versions: dict[str, str] = {}
    environment: dict[str, Any] = {}
    commit: str | None = None
    failed: str | None = None

    @property
    def scaling(self) -> float | None:
        """What n ranks process over n times what one does, each its batch; 1 where exchanges cost nothing."""
        if self.alone_s is None or self.subject_s is None:
            return None
        return self.alone_s / self.subject_s.median

    def within(self, bound: float) -> bool:
        """Whether "ratio <= bound" holds by the noise rule: the lower end of the ratio's interval is compared with the
        bound times the upper end of what the baseline shows against itself.
        """
        return self.ratio is not None and self.aa is not None and self.ratio.p5 <= bound * self.aa.p95


class TimelineTask(BaseModel):
    """`gradsync.costs.timeline.Task` as data: seconds since the step began."""

    name: str
    stream: str
    start_s: float
    end_s: float
    nbytes: float = 0.0


class BucketRow(BaseModel):
    """One bucket of a method's plan: who is in it, how it travels, what it cost a step."""

    names: list[str]
    scheme: str
    density: float | None = None
    sent_bytes: float  # payload, a step and rank
    predicted_bytes: float | None = None
    communication_s: float
    exposed_s: float


class MethodRun(BaseModel):
    """One method of a training run. Step times exclude warm-up; losses are the mean over the ranks, step by step."""

    name: str
    failed: str | None = None
    step_s: list[float] = []
    losses: list[float] = []
    samples_per_step: int = 0
    interface_bytes_per_step: float | None = None  # busiest node, sent
    final: dict[str, float] = {}  # held-out loss, auc, perplexity, ...
    backward_s: float | None = None  # medians of one step's parts, where the method can tell
    exposed_s: float | None = None
    plan: list[str] = []  # in words
    plan_digest: str | None = None
    buckets: list[BucketRow] = []
    timeline: list[TimelineTask] = []
    predicted_timeline: list[TimelineTask] = []  # of the same step

    @property
    def ran(self) -> PlanRan | None:
        """The plan that ran; None of a method that has none, such as DDP."""
        return PlanRan(digest=self.plan_digest, words=self.plan) if self.plan else None


class TrainingRun(BaseModel):
    """All methods of one run, with what it ran on."""

    workload: str
    options: dict[str, Any] = {}  # of the workload, defaults included
    description: str
    source: str  # where the data came from
    nodes: int
    link: str  # "1gbit", or "loopback (not shaped)"
    methods: list[MethodRun]
    records: list[Record]
    environment: dict[str, Any] = {}
    versions: dict[str, str] = {}
    commit: str | None = None
    command: str = ""  # makes a run like this one
    notes: list[str] = []


def save_records(records: Sequence[Record], path: str | Path) -> None:
    """Writes records as a JSON list."""
    data = [record.model_dump(mode="json") for record in records]
    Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def load_records(path: str | Path) -> list[Record]:
    """Reads what `save_records` wrote."""
    return TypeAdapter(list[Record]).validate_json(Path(path).read_text(encoding="utf-8"))
