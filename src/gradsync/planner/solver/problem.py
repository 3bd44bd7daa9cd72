"""The planning problem as numbers: gradients that become ready one after another, and ways to exchange them.

ByteComp (EuroSys 2023) chooses an option for every tensor, MergeComp (arXiv 2103.15195) where to cut the sequence of
tensors into buckets. Here both are one problem: cut the items into parts of consecutive items, and give each part an
option.

The machine model: backward makes the items ready in order, on `COMPUTE`. A part is ready with its last item; then the
demands of its option follow one another, each on one resource, which serves one demand at a time:

- `COMPUTE` serves backward and demands; a demand runs as soon as it can, and the rest of backward waits.
- `OFFLOAD` (another core, or the host's), `INTRA` (links inside a node) and `INTER` (links between nodes) serve what
  has waited longest, but a part's n-th demand on a resource never before the n-th of an earlier part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from math import inf, isfinite


class Resource(IntEnum):
    """A resource of the solver's machine model, a core or a kind of link, which serves one task (demand) at a time."""

    COMPUTE = 0  # where backward runs: its thread, or the GPU's stream
    OFFLOAD = 1
    INTRA = 2
    INTER = 3


@dataclass(frozen=True)
class Curve:
    """A function from an amount, such as bytes, to seconds: linear between its knots (amount, seconds), never falling.

    Beyond the last knot it goes on as between the last two. The first knot has amount 0 and the cost of a call.
    """

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.amounts) != len(self.seconds) or len(self.amounts) < 2:
            raise ValueError(f"a Curve needs at least 2 knots, got {self.amounts} and {self.seconds}")
        if not all(map(isfinite, (*self.amounts, *self.seconds))):
            raise ValueError(f"a Curve's knots must be finite, got {self.amounts} and {self.seconds}")
        if self.amounts[0] != 0.0 or any(a >= b for a, b in pairwise(self.amounts)):
            raise ValueError(f"Curve.amounts must begin with 0 and rise, got {self.amounts}")
        if self.seconds[0] < 0 or any(a > b for a, b in pairwise(self.seconds)):
            raise ValueError(f"Curve.seconds must not be negative nor fall, got {self.seconds}")

    @classmethod
    def linear(cls, call_s: float, unit_s: float) -> Curve:
        """Returns a function from an amount, such as bytes, to seconds: `call_s` plus `unit_s` for every unit."""
        return cls((0.0, 1.0), (call_s, call_s + unit_s))

    @classmethod
    def knee(cls, call_s: float, unit_s: float, knee: float) -> Curve:
        """Returns a function from an amount, such as bytes, to seconds that rises only beyond the amount `knee`.

        It is `call_s` up to there, then `unit_s` more for every further unit.
        """
        return cls((0.0, knee, knee + 1.0), (call_s, call_s, call_s + unit_s))

    def __call__(self, amount: float) -> float:
        place = min(max(bisect_right(self.amounts, amount), 1), len(self.amounts) - 1)
        (a, b), (s, t) = self.amounts[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return s + (amount - a) * (t - s) / (b - a)


@dataclass(frozen=True)
class Demand:
    """One task of exchanging a bucket on one resource; it takes `curve(x)` seconds, x being the sum of `amounts`.

    `amounts` has one entry for each item (gradient) of the problem, and those of the bucket's items are added; None
    stands for the items' bytes.
    """

    resource: Resource
    curve: Curve
    amounts: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Option:
    """A way to exchange a bucket: a chain of tasks (`Demand`), each of which waits for the one before it."""

    name: str
    chain: tuple[Demand, ...]


@dataclass(frozen=True)
class Problem:
    """A planning problem in numbers: items (gradients) in the order in which they get ready, and ways to exchange them.

    Attributes:
        gaps_s: seconds of backward from the readiness of item i-1, or the begin, to that of item i.
        nbytes: dense bytes of each item.
        options: ways to exchange a bucket.
        allowed: indices of options that each item may take; a bucket may take what all of its items may. None: all.
        alone: whether each item must be the only one of its bucket. None: none must.
        rest_s: seconds of backward after the last item is ready.
    """

    gaps_s: tuple[float, ...]
    nbytes: tuple[float, ...]
    options: tuple[Option, ...]
    allowed: tuple[frozenset[int], ...] | None = None
    alone: tuple[bool, ...] | None = None
    rest_s: float = 0.0

    def __post_init__(self) -> None:
        count = len(self.gaps_s)
        for name, values in (("nbytes", self.nbytes), ("allowed", self.allowed), ("alone", self.alone)):
            if values is not None and len(values) != count:
                raise ValueError(f"Problem.{name} must have one entry for each of the {count} items, got {len(values)}")
        if not all(0 <= number < inf for number in (*self.gaps_s, *self.nbytes, self.rest_s)):
            raise ValueError("Problem.gaps_s, nbytes and rest_s must be finite and not negative")
        if not self.options:
            raise ValueError("Problem.options is empty: there must be a way to exchange the items")
        for number, chosen in enumerate(self.allowed or ()):
            if not chosen:
                raise ValueError(f"item {number} may take no option: loosen the constraints")
            if not chosen <= set(range(len(self.options))):
                raise ValueError(f"item {number} may take options {sorted(chosen)}, there are {len(self.options)}")

    @property
    def size(self) -> int:
        return len(self.gaps_s)

    def seconds(self, option: int, start: int, stop: int) -> list[float]:
        """Returns the seconds of each task of a way to exchange the bucket that consists of items [start, stop).

        `option`: index of the way in `options`. Items are gradients.
        """
        return [demand.curve(self.amount(demand, start, stop)) for demand in self.options[option].chain]

    def amount(self, demand: Demand, start: int, stop: int) -> float:
        """Returns the amount that `demand.curve` turns into seconds for a bucket of items (gradients) [start, stop).

        It is the sum over these items of their bytes or, where it is not None, of `demand.amounts`.
        """
        return sum((self.nbytes if demand.amounts is None else demand.amounts)[start:stop])


@dataclass(frozen=True)
class Part:
    """A bucket in a search: consecutive items (gradients) [start, stop), and the index of the option to exchange it.

    An option is a way of exchange among those of the `Problem`.
    """

    start: int
    stop: int
    option: int


@dataclass(frozen=True)
class Solution:
    """A solution of a planning problem: buckets (`parts`) that cover all items (gradients) in order, and its seconds.

    The seconds pass from the begin of backward until it and all tasks of the exchange have ended.
    """

    parts: tuple[Part, ...]
    seconds: float


def layerwise(problem: Problem, option: int) -> tuple[Part, ...]:
    """Returns the plan with a bucket for each item (gradient), all exchanged by the option with index `option`."""
    return tuple(Part(number, number + 1, option) for number in range(problem.size))


def check_parts(problem: Problem, parts: Sequence[Part]) -> None:
    """Checks that `parts`, one for each bucket, are a plan that the problem allows.

    Raises:
        ValueError: if the buckets do not cover the problem's items (gradients) in order, if an item that must be alone
            shares a bucket, or if an item may not be exchanged by its bucket's option (way of exchange).
    """
    reached = 0
    for part in parts:
        if part.start != reached or part.stop <= part.start:
            raise ValueError(f"parts must follow one another from item 0 on, got {part} after item {reached}")
        reached = part.stop
        items = range(part.start, part.stop)
        if problem.alone is not None and len(items) > 1 and any(problem.alone[i] for i in items):
            raise ValueError(f"{part} has an item that must be alone")
        if problem.allowed is not None and not all(part.option in problem.allowed[i] for i in items):
            raise ValueError(f"{part} has an item that may not take option {part.option}")
    if reached != problem.size:
        raise ValueError(f"the parts end with item {reached}, there are {problem.size}")
