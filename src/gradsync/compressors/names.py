"""Short names of compressors in records and `gradsync bench`: `topk0.01`, `int8`, `topk0.01_no_feedback`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import (
    QSGD,
    THC,
    BlockInt,
    BlockTopK,
    Cast,
    Compressor,
    CountSketch,
    DCTTopK,
    ErrorFeedback,
    Float8,
    GaussianK,
    Natural,
    OneBit,
    RandomK,
    ScaledSign,
    SharedBlockInt,
    SharedTernGrad,
    Sign,
    Signum,
    SketchML,
    TernGrad,
    Threshold,
    TopK,
    dgc,
)

WITHOUT, WITH = "_no_feedback", "_feedback"  # suffixes that switch error feedback against the family's default
USUAL_RANKS = 8  # the number of ranks for compressors that ask for it, by default


@dataclass(frozen=True)
class Family:
    """Compressors whose names have the same word, with different numbers behind it, as `topk0.01` and `topk0.001`.

    Attributes:
        make: returns the compressor for the number in a name; takes none if there are no `numbers`.
        feedback: whether the compressor trains with error feedback by default; None: it has a residual of its own.
        numbers: the numbers that benchmarks measure unless others are named; none if names have no number.
        matrices_only: whether tensors of one dimension are sent uncompressed.
        asks: names of further arguments of `make`: `momentum` (the optimiser's, which the compressor applies in its
            place), `summands` (the number of ranks).
    """

    make: Callable[..., Compressor[Any]]
    feedback: bool | None
    numbers: tuple[float, ...] = ()
    matrices_only: bool = False
    asks: tuple[str, ...] = ()


FAMILIES: dict[str, Family] = {
    "bf16": Family(partial(Cast, "bfloat16"), feedback=False),
    "fp16": Family(partial(Cast, "float16"), feedback=False),
    "int8": Family(partial(BlockInt, 8), feedback=True),
    "int4": Family(partial(BlockInt, 4), feedback=True),
    "int8_shared": Family(SharedBlockInt, feedback=True, asks=("summands",)),
    "qsgd": Family(lambda bits: QSGD(2 ** (bits - 1) - 1), feedback=False, numbers=(8, 4)),
    "terngrad": Family(TernGrad, feedback=False),
    "terngrad_shared": Family(SharedTernGrad, feedback=False, asks=("summands",)),
    "natural": Family(Natural, feedback=False),
    "fp8": Family(partial(Float8, "e4m3"), feedback=True),
    "fp8_e5m2": Family(partial(Float8, "e5m2"), feedback=True),
    "sign": Family(Sign, feedback=False),
    "signum": Family(Signum, feedback=False),
    "efsign": Family(ScaledSign, feedback=True),
    "rmssign": Family(partial(ScaledSign, "rms"), feedback=True),
    "onebit": Family(OneBit, feedback=True),
    "topk": Family(TopK, feedback=True, numbers=(0.01,)),
    "bf16topk": Family(partial(TopK, values="bfloat16"), feedback=True, numbers=(0.01,)),
    "blocktopk": Family(BlockTopK, feedback=True, numbers=(0.01,)),
    "gaussiank": Family(GaussianK, feedback=True, numbers=(0.01,)),
    "threshold": Family(Threshold, feedback=True, numbers=(0.001,)),
    "randomk": Family(RandomK, feedback=True, numbers=(0.01,)),
    "randomk_own": Family(partial(RandomK, shared=False), feedback=True, numbers=(0.01,)),
    "sketchml": Family(SketchML, feedback=True, numbers=(0.01,)),
    "countsketch": Family(lambda ratio: CountSketch(ratio, ratio / 5), feedback=False, numbers=(0.05,)),
    "dct": Family(DCTTopK, feedback=True),
    "thc": Family(THC, feedback=True, asks=("summands",)),
    "dgc": Family(dgc, feedback=None, numbers=(0.01,), matrices_only=True, asks=("momentum",)),
}


@dataclass(frozen=True)
class Named:
    """The compressor that a short name such as "topk0.01" stands for.

    Attributes:
        family: what the name has in common with others, such as "topk0.001".
        bare: the compressor without error feedback.
        trained: the compressor as it is used in training: with error feedback if the name implies it.
    """

    family: Family
    bare: Compressor[Any]
    trained: Compressor[Any]

    @property
    def with_feedback(self) -> Compressor[Any] | None:
        """The compressor with error feedback; None if its family does without, or has a residual of its own."""
        return ErrorFeedback(self.bare) if self.family.feedback else None


def usual_names() -> tuple[str, ...]:
    """Returns the names of compressors that benchmarks measure by default, such as "topk0.01" and "int8".

    They are all families, each with each of its usual `numbers`.
    """
    return tuple(f"{family}{number}" for family, of in FAMILIES.items() for number in of.numbers or ("",))


def is_known(name: str) -> bool:
    """Whether a name is one of a compressor, as "topk" with any number behind it ("topk0.02") or "int8".

    Known names are those of `FAMILIES`, perhaps with "_feedback" or "_no_feedback" behind them.
    """
    try:
        _parted(name)
    except ValueError:
        return False
    return True


def named(name: str, *, momentum: float = 0.0, summands: int = USUAL_RANKS) -> Named:
    """Returns the compressor of a short name such as "topk0.01", with and without error feedback.

    Args:
        name: the family and its number, and perhaps "_feedback" or "_no_feedback" behind them.
        momentum: the optimiser's momentum, which only a compressor that applies momentum itself takes (`Family.asks`).
        summands: the number of ranks, which only a compressor whose codes are summed takes.

    Raises:
        ValueError: for an unknown name, listing the known ones, or a number that the compressor refuses.
    """
    known, number, suffix = _parted(name)
    family, settings = FAMILIES[known], {"momentum": momentum, "summands": summands}
    bare = family.make(*number, **{setting: settings[setting] for setting in family.asks})
    feedback = suffix == WITH or (family.feedback is True and suffix != WITHOUT)
    return Named(family, bare, ErrorFeedback(bare) if feedback else bare)


def _parted(name: str) -> tuple[str, tuple[float, ...], str]:
    """Returns the parts of a name: the family, the number in a tuple (empty without one), and the suffix."""
    stem, suffix = name, ""
    number: tuple[float, ...] = ()
    for ending in (WITHOUT, WITH):
        if not suffix and name.endswith(ending):
            stem, suffix = name.removesuffix(ending), ending
    if stem in FAMILIES and not FAMILIES[stem].numbers:
        family = stem
    else:
        match = re.fullmatch(r"(.*?[a-z_])(\d+(?:\.\d+)?)", stem)
        if match is None or match[1] not in FAMILIES or not FAMILIES[match[1]].numbers:
            raise ValueError(f"unknown compressor {name!r}; there are {NAMES_IN_WORDS}")
        family, number = match[1], (float(match[2]) if "." in match[2] else int(match[2]),)
    if suffix and FAMILIES[family].feedback is None:
        raise ValueError(f"{stem} has a residual of its own: there is no {name!r}, use {stem!r}")
    return family, number, suffix


NAMES_IN_WORDS = f"{', '.join(usual_names())}, with other numbers too, and {WITHOUT} or {WITH} behind them"
