"""Results of measurements: the record schema of `benchmarks/results/`, and the result of a training run.

Figures of a subject and its baseline always come from one run, in which the two took turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from gradsync.characterization.statistics import Estimate
from gradsync.inputs.files import from_json, naming, read_as, read_text, replace_text

Metric = Literal[
    "step_s",
    "start_s",
    "sync_s",
    "selected_sync_s",
    "kernel_s",
    "plan_s",
    "time_to_loss_s",
    "imbalance",
    "cost",
    "error",
    "loss",
    "gap",
]


class Spread(BaseModel):
    """Median with the 5th and 95th percentile of repeated measurements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    median: float
    p5: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Returns the median and the 5th and 95th percentile of `values`.

        Raises:
            ValueError: `values` is empty.
        """
        import numpy as np

        if not values:
            raise ValueError("a spread needs at least one value")
        p5, median, p95 = np.percentile(np.asarray(values, dtype=np.float64), [5, 50, 95])
        return cls(median=float(median), p5=float(p5), p95=float(p95))


class WireBytes(BaseModel):
    """Bytes per step of subject and baseline.

    They count the busiest node's network interface with protocol overhead, or payload only (`Record.payload_bytes`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: float | None = None
    baseline: float | None = None


class Imbalance(BaseModel):
    """The load of the most loaded owner (rank that sums a part) over an even share, as mean over draws; ideal is 1.

    It is Zen's measure (OSDI 2025, section 2). Where it holds the difference of two owner maps, the figures are
    differences and the ideal is not defined.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    push: Estimate  # of the rank whose own elements are spread worst over the owners
    pull: Estimate  # of the sums that owners send back


class Balance(BaseModel):
    """The imbalance of two owner maps (which rank sums which element) on the same random draws."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: Imbalance
    baseline: Imbalance
    excess: Imbalance  # subject minus baseline, draw by draw


class FittedCost(BaseModel):
    """The linear cost fitted to timings of an operation: `call_s + byte_s * bytes` seconds, as in `costs.KernelCost`.

    `bytes` counts what the operation must read and write.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str  # the name that `Scheme.steps` uses
    call_s: float
    byte_s: float

    @property
    def knee_bytes(self) -> float:
        """Returns the size in bytes above which the bytes cost more than the call."""
        return self.call_s / self.byte_s


class CompressionError(BaseModel):
    """A compressor's error |C(x) - x| / |x| (Euclidean norms) on a gradient, and the error bound (`law`) it states."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    relative: float  # root mean square over the draws
    law: str  # exact, unbiased, contraction, absolute or biased
    declared: float | None = None  # omega, delta or tau
    measured: float | None = None  # the law's constant as measured on this gradient
    holds: bool | None = None  # whether `measured` is within `declared`; None where the law declares nothing


class Losses(BaseModel):
    """Held-out losses, or accuracies, of subject and baseline, one for each seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: list[float]
    baseline: list[float]


class PlanningRun(BaseModel):
    """The predicted step time of a searched plan, that of the baseline's plan, and a lower bound for all plans.

    Steps are predicted for the machine that the plans are made for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_s: float  # by the subject's plan
    baseline_step_s: float
    bound_s: float  # no plan's step is shorter
    certificate_s: float  # time spent on computing the bound
    buckets: int


class PlanRan(BaseModel):
    """The synchronisation plan (buckets and their schemes) that a method used in a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str | None = None  # `Plan.digest`; None of methods that are not gradsync's
    words: list[str]  # as `Attachment.explain` gives them


class Record(BaseModel):
    """One comparison of a subject with a baseline.

    `ratio` is subject / baseline of pairs that were measured side by side: below 1, the subject is faster. `aa` is the
    ratio of two measurements of the baseline, which shows the noise.

    - `bound_s`: the least time that the network allows for the subject's transfers.
    - `predicted_s`: the cost model's prediction for the whole subject, with costs fitted in the same run. None where
      nothing predicts the subject, as for training steps whose job no automatic plan has measured. For whole runs to a
      loss, steps times seconds a step.
    - `cpu_s`: processor time of all ranks together. Where ranks share a machine, the subject cannot take less than
      `cpu_s / environment["cores"]`, whatever the network allows.
    - `alone_s`: a step of the subject's model on one rank that exchanges nothing; known where computation is emulated.

    What `ratio` and `aa` are for metrics that are not times:

    - `imbalance`: push imbalance, draw by draw.
    - `loss`: held-out losses, seed by seed; `aa` compares the baseline's with one seed and the next.
    - `gap`: the step by the subject's plan over the step by the best of all plans, problem by problem.
    """

    model_config = ConfigDict(extra="forbid")

    case: Literal[
        "sync", "train", "start", "compress", "kernels", "plan", "simulate", "characterize", "balance", "converge"
    ]
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
    loss_steps: int | None = None  # training steps before both measures; None where subject and baseline differ
    plan: PlanRan | None = None  # the subject's, at the end of the run; None where there is none
    baseline_plan: PlanRan | None = None
    seeds: list[int] = []
    wire_bytes: WireBytes | None = None
    payload_bytes: WireBytes | None = None  # bytes that the schemes handed to the transport
    balance: Balance | None = None  # for the metric `imbalance`
    cost: FittedCost | None = None  # for the metric `cost`
    error: CompressionError | None = None  # for the metric `error`
    losses: Losses | None = None  # for the metric `loss`
    accuracies: Losses | None = None  # for the metric `loss`, where the workload measures accuracy
    planning: PlanningRun | None = None  # for the metric `plan_s`
    versions: dict[str, str] = {}
    environment: dict[str, Any] = {}
    commit: str | None = None
    engine: str | None = None  # digest of the library's sources, see `bench.provenance`; None of old records
    failed: str | None = None

    @property
    def scaling(self) -> float | None:
        """Returns the throughput of n ranks over n times that of one rank, at equal batches; 1 where exchanges are
        free.
        """
        if self.alone_s is None or self.subject_s is None:
            return None
        return self.alone_s / self.subject_s.median

    def within(self, bound: float) -> bool:
        """Whether "ratio <= bound" holds, given noise: 5th percentile <= bound * 95th of `aa`, baseline over itself."""
        return self.ratio is not None and self.aa is not None and self.ratio.p5 <= bound * self.aa.p95


class TimelineTask(BaseModel):
    """One task of a step's timeline (`gradsync.costs.timeline`); times are seconds since the step's backward began."""

    name: str
    stream: str
    start_s: float
    end_s: float
    nbytes: float = 0.0


class BucketRow(BaseModel):
    """One bucket of a method's plan: its parameters, its scheme, and its bytes and times per step."""

    names: list[str]
    scheme: str
    density: float | None = None
    sent_bytes: float  # payload, a step and rank
    predicted_bytes: float | None = None
    communication_s: float
    exposed_s: float


class MethodRun(BaseModel):
    """The step times, losses, bytes and plan of one method in a training run.

    Step times exclude warm-up; losses are the mean over the ranks, step by step.
    """

    name: str
    failed: str | None = None
    step_s: list[float] = []
    losses: list[float] = []
    samples_per_step: int = 0
    interface_bytes_per_step: float | None = None  # busiest node, sent
    final: dict[str, float] = {}  # held-out loss, auc, perplexity, ...
    backward_s: float | None = None  # medians of one step's parts; None where the method does not measure them
    exposed_s: float | None = None
    plan: list[str] = []  # in words
    plan_digest: str | None = None
    buckets: list[BucketRow] = []
    timeline: list[TimelineTask] = []
    predicted_timeline: list[TimelineTask] = []  # the same step as predicted
    step_memory_bytes: int | None = None  # peak of the tensors made in a step, of models in shards; else None

    @property
    def ran(self) -> PlanRan | None:
        """Returns the plan that the method used; None for a method without a plan, such as DDP."""
        return PlanRan(digest=self.plan_digest, words=self.plan) if self.plan else None


class TrainingRun(BaseModel):
    """The results of all methods in one run, with the workload, network and machine."""

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
    engine: str | None = None  # digest of the library's sources
    command: str = ""  # command line that repeats the run
    notes: list[str] = []


def save_records(records: Sequence[Record], path: str | Path) -> None:
    """Writes records to `path` as a JSON list; a file that is there is replaced at once, or kept if writing fails."""
    data = [record.model_dump(mode="json") for record in records]
    replace_text(path, json.dumps(data, indent=1) + "\n")


def load_records(path: str | Path) -> list[Record]:
    """Reads records that `save_records` wrote.

    Raises:
        ValueError: naming the file, if it cannot be read, is no JSON, or holds no records.
    """
    text = read_text(path, "list of records")
    with naming(path):
        data = from_json(text, "list of records", any_number=True)
        return read_as(TypeAdapter(list[Record]).validate_json, data, "list of records")
