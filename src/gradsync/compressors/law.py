"""Laws: the error that a compressor promises. Planners choose by laws, and tests check them.

x is the compressed tensor, C(x) the decoded one; norms are Euclidean.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exact:
    """The promise of a compressor that makes no error: every tensor x is decoded as x, bit by bit."""


@dataclass(frozen=True)
class Unbiased:
    """The promise of a random compressor that it is right in the mean: E C(x) = x.

    C(x) is x compressed and decoded.
    The mean squared error is bounded: E |C(x) - x|^2 <= omega |x|^2, with Euclidean norms. The mean over n ranks that
    draw independently has omega / n. Such a compressor needs no error feedback; C(x) / (1 + omega) is a `Contraction`
    with delta = 1 / (1 + omega).

    Attributes:
        omega: the bound of the mean squared error, as a share of the squared norm; 0 or more.
    """

    omega: float


@dataclass(frozen=True)
class Contraction:
    """The promise of a compressor that its squared error is a share of the tensor's squared norm, less than 1.

    |C(x) - x|^2 <= (1 - delta) |x|^2 with 0 < delta <= 1, where C(x) is x compressed and decoded. Such a compressor is
    biased, and needs error feedback.

    Attributes:
        delta: the share of the squared norm that arrives at least, in (0, 1].
        in_expectation: True: the bound holds in the mean over the compressor's random draws; False: for every draw.
    """

    delta: float
    in_expectation: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.delta <= 1:
            raise ValueError(f"Contraction.delta must be in (0, 1], got {self.delta}")


@dataclass(frozen=True)
class Absolute:
    """The promise of a compressor that no element of a decoded tensor is off by more than `tau`.

    |C(x) - x| <= tau in every element, where C(x) is x compressed and decoded. So error feedback, too, carries at most
    `tau` an element to the next step.

    Attributes:
        tau: the largest error of an element, in the unit of the tensor.
    """

    tau: float


@dataclass(frozen=True)
class Biased:
    """States that a compressor promises no error bound, so that error feedback may fail.

    Attributes:
        why: the reason, in words.
    """

    why: str


Law = Exact | Unbiased | Contraction | Absolute | Biased
"""The error that a compressor promises, as `Compressor.law` returns it."""
