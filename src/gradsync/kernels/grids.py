"""Codes of few bits: the numbers they stand for, how they lie in memory, and how many bytes they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from gradsync.kernels.checks import Sections

MOST_LEVELS = {8: 127, 4: 7, 2: 1}  # of a code of so many bits, on either side of zero
FLOATS = {"e4m3": 448.0, "e5m2": 57344.0, "exponent": 1.0}  # the largest number; `exponent` has no scale
SMALLEST_EXPONENT, LARGEST_EXPONENT = -109, 16  # of `exponent`: codes 1 to 126
SCALES = ("max", "norm", "given")

Rounding = Literal["nearest", "stochastic", "e4m3", "e5m2", "exponent"]
Scale = Literal["max", "norm", "given", "none"]


@dataclass(frozen=True)
class Grid:
    """Whole levels -s to s of the scale of a block: an element x counts as round(s x / scale) * scale / s."""

    levels: int  # s
    bits: int = 8  # of a code: 8, 4 (s up to 7) or 2 (s = 1)
    block: int = 0  # elements of a section that share a scale; 0: the whole section
    scale: Scale = "max"  # of magnitudes; "norm": the Euclidean norm; "given": brought by the caller
    stochastic: bool = False  # rounds up as likely as the fraction says; False: to the nearest, ties to even

    def __post_init__(self) -> None:
        if self.bits not in MOST_LEVELS:
            raise ValueError(f"Grid.bits must be 8, 4 or 2, got {self.bits}")
        if type(self.levels) is not int or not 1 <= self.levels <= MOST_LEVELS[self.bits]:
            raise ValueError(
                f"Grid.levels must be in [1, {MOST_LEVELS[self.bits]}] for {self.bits} bits, got {self.levels}"
            )
        if self.scale not in SCALES:
            raise ValueError(f"Grid.scale must be one of {', '.join(SCALES)}, got {self.scale!r}")
        _check_block(self)

    @property
    def top(self) -> float:
        """The level of an element as large as the scale."""
        return float(self.levels)

    @property
    def rounding(self) -> Rounding:
        return "stochastic" if self.stochastic else "nearest"


@dataclass(frozen=True)
class FloatGrid:
    """Floating-point numbers of 8 bits, times a scale of the block that makes its largest magnitude the largest number.

    `e4m3` (no infinity, up to 448) and `e5m2` (up to 57344) are those of the OCP specification, rounded to the nearest,
    ties to even. `exponent` is a sign and a power of two, 2^-109 to 2^16, with no scale: rounded to a neighbouring one
    with the probability that keeps the mean; above, it is the largest, and below half the smallest, as a rule zero.
    """

    format: Literal["e4m3", "e5m2", "exponent"]
    block: int = 0  # elements of a section that share a scale; 0: the whole section

    bits = 8

    def __post_init__(self) -> None:
        if self.format not in FLOATS:
            raise ValueError(f"FloatGrid.format must be one of {', '.join(FLOATS)}, got {self.format!r}")
        _check_block(self)

    @property
    def top(self) -> float:
        return FLOATS[self.format]

    @property
    def scale(self) -> Scale:
        return "none" if self.format == "exponent" else "max"

    @property
    def rounding(self) -> Rounding:
        return self.format


AnyGrid = Grid | FloatGrid


@dataclass(frozen=True)
class Run:
    """Blocks of one length, side by side in a section."""

    begin: int  # of the elements in the flat tensor
    place: int  # of the first in its tensor
    seed: int
    blocks: int
    length: int  # elements of each block
    codes: int  # the first byte
    scale: int  # the first block
    nbytes: int  # of the codes of a block

    @property
    def elements(self) -> slice:
        return slice(self.begin, self.begin + self.blocks * self.length)

    @property
    def bytes(self) -> slice:
        return slice(self.codes, self.codes + self.blocks * self.nbytes)

    @property
    def scales(self) -> slice:
        return slice(self.scale, self.scale + self.blocks)


def runs(sections: Sections, grid: AnyGrid) -> Iterator[Run]:
    """All blocks in order: of a section the whole ones, then what is left."""
    begin = codes = scale = 0
    for number, numel in enumerate(sections.lengths):
        place = sections.starts[number] if sections.starts else 0
        seed = sections.seeds[number] if sections.seeds else 0
        block = min(grid.block, numel) or numel
        for blocks, length in ((numel // block, block), (1, numel % block)) if numel else ():
            if length:
                nbytes = -(-length * grid.bits // 8)
                yield Run(begin, place, seed, blocks, length, codes, scale, nbytes)
                begin, place = begin + blocks * length, place + blocks * length
                codes, scale = codes + blocks * nbytes, scale + blocks


def draws(grid: AnyGrid) -> bool:
    """Whether codes are rounded at random."""
    return grid.rounding in ("stochastic", "exponent")


def check_drawn(sections: Sections, grid: AnyGrid) -> None:
    """Refuses sections without seeds where numbers are drawn."""
    if draws(grid) and sections.lengths and not sections.seeds:
        raise ValueError(f"{grid} draws numbers: Sections.seeds must have one for each section")


def codes_nbytes(sections: Sections, grid: AnyGrid) -> int:
    """The bytes of the codes of all sections."""
    return _counts(sections.lengths, grid)[0]


def num_scales(sections: Sections, grid: AnyGrid) -> int:
    """The blocks of all sections, each of which has a scale."""
    return 0 if grid.scale == "none" else _counts(sections.lengths, grid)[1]


@lru_cache(maxsize=1024)
def _counts(lengths: tuple[int, ...], grid: AnyGrid) -> tuple[int, int]:
    """Bytes of codes, and blocks."""
    found = list(runs(Sections(lengths), grid))
    return sum(run.blocks * run.nbytes for run in found), sum(run.blocks for run in found)


def _check_block(grid: AnyGrid) -> None:
    if type(grid.block) is not int or not 0 <= grid.block < 1 << 62:
        raise ValueError(f"{type(grid).__name__}.block must be in [0, 2^62), got {grid.block}")
