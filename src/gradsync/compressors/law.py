"""What a compressor promises of the error that it makes: what plans are made by, and tests hold it to.

x is what is compressed, C(x) what comes back; norms are Euclidean.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exact:
    """C(x) = x, bit by bit."""


@dataclass(frozen=True)
class Unbiased:
    """E C(x) = x and E |C(x) - x|^2 <= omega |x|^2. The mean over n ranks that draw on their own has omega / n.

    It needs no error feedback; with it, C(x) / (1 + omega) is a contraction by 1 / (1 + omega).
    """

    omega: float


@dataclass(frozen=True)
class Contraction:
    """|C(x) - x|^2 <= (1 - delta) |x|^2 with 0 < delta <= 1. Biased: it needs error feedback."""

    delta: float
    in_expectation: bool = False  # over what the compressor draws; else for every draw

    def __post_init__(self) -> None:
        if not 0 < self.delta <= 1:
            raise ValueError(f"Contraction.delta must be in (0, 1], got {self.delta}")


@dataclass(frozen=True)
class Absolute:
    """|C(x) - x| <= tau in every element, whatever x is. Error feedback keeps the residual as small."""

    tau: float


@dataclass(frozen=True)
class Biased:
    """No bound relative to x: error feedback may not make good what is lost, or `why` not."""

    why: str


Law = Exact | Unbiased | Contraction | Absolute | Biased
