"""Laws: the error that a compressor promises. Planners choose by laws, and tests check them.

x is the compressed tensor, C(x) the decoded one; norms are Euclidean.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exact:
    """The law of a compressor without error: every tensor x is decoded as x, bit by bit."""


@dataclass(frozen=True)
class Unbiased:
    """A law for x decoded as C(x): right in the mean, E C(x) = x, and E |C(x) - x|^2 <= omega |x|^2.

    The mean over n ranks that draw independently has omega / n. An unbiased compressor needs no error feedback;
    C(x) / (1 + omega) is a contraction by 1 / (1 + omega).
    """

    omega: float


@dataclass(frozen=True)
class Contraction:
    """A law for x decoded as C(x): |C(x) - x|^2 <= (1 - delta) |x|^2, 0 < delta <= 1. Biased: needs error feedback."""

    delta: float
    in_expectation: bool = False  # True: holds in the mean over the compressor's random draws; False: for every draw

    def __post_init__(self) -> None:
        if not 0 < self.delta <= 1:
            raise ValueError(f"Contraction.delta must be in (0, 1], got {self.delta}")


@dataclass(frozen=True)
class Absolute:
    """The promise of a compressor that no element of a decoded tensor is off by more than `tau`.

    |C(x) - x| <= tau in every element, where C(x) is x compressed and decoded. So error feedback, too, carries at most
    `tau` an element to the next step.
    """

    tau: float


@dataclass(frozen=True)
class Biased:
    """The law of a compressor without an error bound, for which error feedback may fail; `why` tells the reason."""

    why: str


Law = Exact | Unbiased | Contraction | Absolute | Biased
