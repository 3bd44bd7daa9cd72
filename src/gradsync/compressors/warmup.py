"""Warm-up: other compressors, milder as a rule, for the first steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from ..bucket import FlatSpec
from .base import Compressor, Payload, State
from .feedback import Feedback
from .law import Contraction, Law

P = TypeVar("P", bound=Payload)


@dataclass(frozen=True)
class Warmup(Compressor[P]):
    """One compressor after the other, by how often it compressed before. (Lin et al., 2018, for ratios of top-k)

    All make payloads of one kind and keep what they remember of each tensor side by side. Error feedback goes around
    it, so that one residual lasts through all stages. Of contractions the law is the weakest, else the last stage's.
    Wire: as the stage's of that step.
    """

    stages: tuple[tuple[int, Compressor[P]], ...]  # (first step, compressor), the first at step 0

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.stages]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"Warmup.stages must begin at step 0 and ascend, got steps {starts}")
        compressors = [compressor for _, compressor in self.stages]
        if any(isinstance(compressor, Feedback) for compressor in compressors):
            raise ValueError("Warmup of compressors with feedback: put the feedback around the Warmup")
        kinds = {compressor.payload for compressor in compressors}
        if len(kinds) > 1:
            raise ValueError(f"Warmup.stages must make payloads of one kind, got {sorted(k.__name__ for k in kinds)}")
        object.__setattr__(self, "payload", kinds.pop())

    def at(self, step: int) -> Compressor[P]:
        """The compressor of a step."""
        return next(compressor for start, compressor in reversed(self.stages) if start <= step)

    @property
    def most_summands(self) -> int | None:
        limits = [compressor.most_summands for _, compressor in self.stages]
        return min((limit for limit in limits if limit is not None), default=None)

    def law(self, spec: FlatSpec) -> Law:
        laws = [compressor.law(spec) for _, compressor in self.stages]
        deltas = [law.delta for law in laws if isinstance(law, Contraction)]
        return Contraction(min(deltas)) if len(deltas) == len(laws) else laws[-1]

    def init(self, spec: FlatSpec, stream: int = 0) -> State:
        states = [compressor.init(spec, stream) for _, compressor in self.stages]
        elements = {name: kept for state in states for name, kept in state.elements.items()}
        tensors = {name: kept for state in states for name, kept in state.tensors.items()}
        return replace(states[0], elements=elements, tensors=tensors)

    def observe(self, x: Tensor, state: State) -> Tensor | None:
        return self.at(state.step).observe(x, state)

    def compress(self, x: Tensor, state: State) -> tuple[P, State]:
        return self.at(state.step).compress(x, state)

    def compress_with_feedback(self, x: Tensor, residual: Tensor, state: State) -> tuple[P, Tensor, State]:
        return self.at(state.step).compress_with_feedback(x, residual, state)

    def decompress(self, payload: P) -> Tensor:
        return self.at(payload.step).decompress(payload)

    def sum_into(self, out: Tensor, payloads: Sequence[P], scale: float = 1.0) -> None:
        steps = {payload.step for payload in payloads}
        if len(steps) > 1:
            raise ValueError(f"payloads to be summed must be of one step, got {sorted(steps)}")
        self.at(steps.pop() if steps else 0).sum_into(out, payloads, scale)

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return self.at(step).nbytes(spec, step)

    def remainder(self, x: Tensor, payload: P) -> Tensor:
        return self.at(payload.step).remainder(x, payload)
