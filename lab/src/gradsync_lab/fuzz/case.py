"""`Case`: one random training job as data: a model, a plan, the ranks, the steps. JSON both ways, drawn by a seed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gradsync import Plan
from gradsync.compressors.expressions import from_expression
from gradsync.costs.steps import FINISH
from gradsync.plans.plan import BucketPlan, What, default_order
from gradsync.schemes import Scheme
from gradsync.tensors.bucket import TensorSpec, model_digest

DType = Literal["float32", "float64", "bfloat16", "float16"]
Segment = tuple[str, int, int]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Part(_Data):
    """A part of a model, which adds its own term to the loss; its parameters' names begin with `key`.

    Attributes:
        kind: "mlp" is a chain of linear layers, "tied" an embedding whose matrix is the output layer, too.
        width: columns of a matrix or table, or channels.
        rows: of a table.
        depth: the number of layers.
        shared: one layer is applied `depth` times instead.
        memory: "strided" gives matrices transposed memory, and convolutions channels-last.
        frozen: the parameters that never get gradients: none, the first layer's, or all.
        frozen_from: the step in which all of them are frozen; None: in none.
        used: when the part takes part in the loss.
        hook: a user's hook on each parameter, which doubles the gradient: by a new tensor, or in place.
    """

    key: str
    kind: Literal["mlp", "table", "bag", "tied", "conv", "scalar", "empty"]
    width: int = 4
    rows: int = 8
    depth: int = 1
    dtype: DType = "float32"
    sparse: bool = False
    shared: bool = False
    memory: Literal["plain", "strided"] = "plain"
    frozen: Literal["none", "first", "all"] = "none"
    frozen_from: int | None = None
    used: Literal["always", "on some ranks", "in some steps", "at times", "never"] = "always"
    hook: Literal["none", "new", "in place"] = "none"

    def takes_part(self, step: int, rank: int, micro: int) -> bool:
        """Whether the part is in the loss of this micro-batch of this rank."""
        match self.used:
            case "on some ranks":
                return (rank + len(self.key)) % 2 == 0
            case "in some steps":
                return step % 2 == 0
            case "at times":
                return Random(f"{self.key} {step} {rank} {micro}").random() < 0.5
        return self.used == "always"


class BucketCase(_Data):
    """A bucket of the plan: its segments, and its scheme as an expression, {"name": {settings}}."""

    segments: tuple[Segment, ...]
    scheme: dict[str, Any]

    @property
    def made(self) -> Scheme[Any]:
        """The scheme that the expression describes."""
        scheme: Scheme[Any] = from_expression(self.scheme, Scheme)
        return scheme


class Spot(_Data):
    """A rank in a training step, as the place of a fault."""

    step: int
    rank: int


class Case(_Data):
    """A job that some ranks run for some steps, and all that is random in it.

    Attributes:
        seed: draws weights and data.
        world: ranks are threads of one process, which drive the engine, or processes, which run a frontend on gloo.
        ranks_per_node: nodes with several ranks change the placement that schemes see, not where ranks run.
        frontend: "engine" in threads; in processes `attach`, `attach` around DDP, or the class in DDP's place.
        what: "parameter": the engine averages parameters, for schemes that mix.
        buckets: None: the plan is the default planner's.
        order: a seed that shuffles turns; 0: the default order. An odd one gives buckets a turn to finish in.
        micro: backwards of a step, of which the last one is synchronised.
        zero: what becomes of gradients before a step: set to None, to zero, or kept.
        ready: a seed that shuffles the order in which gradients are loaded (threads only).
        clip: gradients are clipped by norm before the optimiser's step.
        spoilt: the place where a loss is NaN.
        written: the place where one rank's parameter is changed behind the optimiser's step: the guard must see that.
        verify_every: steps between two comparisons of parameters.
        reload_at: the step before which schemes' state is saved, and loaded under a new engine or attachment.
        ddp: torch's DDP runs beside, for comparison.
    """

    seed: int
    world: Literal["threads", "processes"] = "threads"
    size: int = Field(ge=1, le=5)
    ranks_per_node: int = 1
    frontend: Literal["engine", "attach", "ddp_hook", "class"] = "engine"
    what: Literal["gradient", "parameter"] = "gradient"
    parts: tuple[Part, ...]
    buckets: tuple[BucketCase, ...] | None = None
    order: int = 0
    steps: int = 2
    micro: int = 1
    zero: Literal["none", "zero", "never"] = "none"
    ready: int = 0
    magnitude: float = 1.0
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    clip: bool = False
    spoilt: Spot | None = None
    written: Spot | None = None
    verify_every: int = 1
    reload_at: int | None = None
    ddp: bool = False

    def __hash__(self) -> int:
        return hash(self.seed)

    def to_json(self) -> str:
        """Returns the case as one line of JSON, without settings that have their defaults."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Returns the case that a JSON text describes.

        Raises:
            ValueError: for text that is not JSON, or fields that do not fit, with their names.
        """
        return cls.model_validate_json(text)

    def plan(self, specs: Mapping[str, TensorSpec]) -> Plan | None:
        """Returns the plan for a model with these parameters; None: the default planner's."""
        if self.buckets is None:
            return None
        what = What(self.what)
        buckets = [
            BucketPlan(id=str(number), segments=bucket.segments, what=what, scheme=bucket.made)
            for number, bucket in enumerate(self.buckets)
        ]
        order = default_order(buckets, self.size)
        if self.order:
            order = list(_shuffled(buckets, self.size, self.order))
        return Plan(world=self.size, model=model_digest(specs), order=tuple(order), buckets=tuple(buckets))


def _shuffled(buckets: list[BucketPlan], size: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yields turns in a random order that keeps each bucket's own stages in sequence."""
    rng = Random(seed)
    left = {bucket.id: [*bucket.scheme.stages(size), *([FINISH] if seed % 2 else [])] for bucket in buckets}
    while left := {bucket: stages for bucket, stages in left.items() if stages}:
        bucket = rng.choice(sorted(left))
        yield bucket, left[bucket].pop(0)
