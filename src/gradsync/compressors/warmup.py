"""Warm-up: other compressors for the first steps, which usually send more."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from ..tensors.bucket import FlatSpec
from .base import Compressor, CompressorState, CompressorTraits, Payload, Summand
from .expressions import register
from .feedback import Feedback
from .law import Contraction, Law

P = TypeVar("P", bound=Payload)


@register
@dataclass(frozen=True)
class Warmup(Compressor[P]):
    """Uses several compressors one after the other, switching at given steps. (Lin et al., 2018, for ratios of top-k)

    All compressors make payloads of one class; their states lie side by side in one `CompressorState`. Wrap the Warmup
    in error feedback, not its compressors, so that one residual lasts through all of them. If all are contractions, the
    error bound (`law`) is the weakest one; otherwise that of the last compressor.
    Wire: as the compressor of the step.

    Attributes:
        compressors: the compressors, in the order of use.
        starts: the first training step of each compressor; ascending from 0.
    """

    compressors: tuple[Compressor[P], ...]
    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        starts = list(self.starts)
        if len(starts) != len(self.compressors) or starts[:1] != [0] or starts != sorted(set(starts)):
            raise ValueError(
                f"Warmup.starts must be one step for each of {len(self.compressors)} compressors, ascending from 0, "
                f"got {starts}"
            )
        if any(isinstance(compressor, Feedback) for compressor in self.compressors):
            raise ValueError("Warmup of compressors with error feedback: put the feedback around the Warmup")
        kinds = {(each.traits.payload.__name__, each.traits.agrees) for each in self.compressors}
        if len(kinds) > 1:
            raise ValueError(
                "Warmup.compressors must all have the same traits `payload` and `agrees`, "
                f"got {', '.join(f'{payload} (agrees: {agrees})' for payload, agrees in sorted(kinds))}"
            )

    def at(self, step: int) -> Compressor[P]:
        """Returns the compressor that is used at step `step`, from 0."""
        return self.compressors[bisect_right(self.starts, step) - 1]

    @property
    def title(self) -> str:
        return f"{self.compressors[-1].title} with warm-up"

    @cached_property
    def traits(self) -> CompressorTraits:
        of_stages = [compressor.traits for compressor in self.compressors]
        limits = [each.most_summands for each in of_stages if each.most_summands is not None]
        ranks = [each.made_for_ranks for each in of_stages if each.made_for_ranks is not None]
        return replace(
            of_stages[0],
            feeds_back=all(each.feeds_back for each in of_stages),
            most_summands=min(limits, default=None),
            made_for_ranks=ranks[0] if ranks else None,
            follows_scale=all(each.follows_scale for each in of_stages),
        )

    def num_agreed(self, spec: FlatSpec) -> int:
        """Returns how many numbers `observe` returns for a tensor like `spec`, whose maxima over the ranks are needed.

        `spec` has its shapes and dtype. The number is the same for all compressors; `init` checks it.
        """
        return self.compressors[0].num_agreed(spec)

    def num_kept(self, spec: FlatSpec, step: int = 0) -> int:
        return self.at(step).num_kept(spec, step)

    def number_dtype(self, spec: FlatSpec) -> torch.dtype:
        """Returns the dtype in which ranks sum payloads of a tensor like `spec`; it is the same for all compressors."""
        return self.compressors[0].number_dtype(spec)

    def law(self, spec: FlatSpec) -> Law:
        laws = [compressor.law(spec) for compressor in self.compressors]
        deltas = [law.delta for law in laws if isinstance(law, Contraction)]
        drawn = any(isinstance(law, Contraction) and law.in_expectation for law in laws)
        return Contraction(min(deltas), drawn) if len(deltas) == len(laws) else laws[-1]

    def init(self, spec: FlatSpec, stream: int = 0) -> CompressorState:
        """Returns the state before the first step, with what each of the compressors keeps.

        Raises:
            ValueError: if the compressors differ in how many numbers ranks agree on, or in the dtype that is summed.
        """
        agreed = [compressor.num_agreed(spec) for compressor in self.compressors]
        summed = [c.number_dtype(spec) for c in self.compressors if issubclass(c.traits.payload, Summand)]
        for differing, what in ((agreed, "let the ranks agree on equally many numbers"), (summed, "sum one dtype")):
            if len(set(differing)) > 1:
                raise ValueError(
                    f"Warmup.compressors must {what}, got {', '.join(map(str, differing))} for {spec.numel} elements: "
                    "give them the same block and summands"
                )
        states = [compressor.init(spec, stream) for compressor in self.compressors]
        elements = {name: kept for state in states for name, kept in state.elements.items()}
        tensors = {name: kept for state in states for name, kept in state.tensors.items()}
        return replace(states[0], elements=elements, tensors=tensors)

    def observe(self, x: Tensor, state: CompressorState) -> Tensor | None:
        return self.at(state.step).observe(x, state)

    def compress(self, x: Tensor, state: CompressorState) -> tuple[P, CompressorState]:
        return self.at(state.step).compress(x, state)

    def compress_with_feedback(
        self, x: Tensor, residual: Tensor, state: CompressorState
    ) -> tuple[P, Tensor, CompressorState]:
        return self.at(state.step).compress_with_feedback(x, residual, state)

    def decompress(self, payload: P) -> Tensor:
        return self.at(payload.step).decompress(payload)

    def sum_into(self, out: Tensor, payloads: Sequence[P], scale: float = 1.0) -> None:
        steps = {payload.step for payload in payloads}
        if len(steps) > 1:
            raise ValueError(f"payloads that are summed must be of one step, got {sorted(steps)}")
        self.at(steps.pop() if steps else 0).sum_into(out, payloads, scale)

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return self.at(step).nbytes(spec, step)

    def unchanged_since(self, step: int) -> int:
        start = self.starts[bisect_right(self.starts, step) - 1]
        return max(start, self.at(step).unchanged_since(step))

    def remainder(self, x: Tensor, payload: P) -> Tensor:
        return self.at(payload.step).remainder(x, payload)
