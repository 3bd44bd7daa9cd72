"""Grids: the numbers that codes of few bits stand for, the layout of the codes in memory, and their size in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from gradsync.kernels.checks import Sections

MOST_LEVELS = {8: 127, 4: 7, 2: 1}  # bits of a code -> levels on each side of zero
FLOATS = {"e4m3": 448.0, "e5m2": 57344.0, "exponent": 1.0}  # the largest number; `exponent` has no scale
SMALLEST_EXPONENT, LARGEST_EXPONENT = -109, 16  # powers of two of `exponent`: codes 1 to 126
SCALES = ("max", "norm", "given")

Rounding = Literal["nearest", "stochastic", "e4m3", "e5m2", "exponent"]
Scale = Literal["max", "norm", "given", "none"]


@dataclass(frozen=True)
class Grid:
    """An even grid for quantising: x becomes round(s x / scale) * scale / s, one of 2 s + 1 numbers; s is `levels`.

    Attributes:
        levels: s.
        bits: bits of a code: 8, 4 (s up to 7) or 2 (s = 1).
        block: elements of a section (tensor in a flat tensor) that share a scale; 0: the whole section.
        scale: of a block: "max" the largest magnitude, "norm" the Euclidean norm, "given" by the caller.
        stochastic: round up with a probability equal to the fraction; False: to nearest, ties to even.
    """

    levels: int  # s
    bits: int = 8  # bits of a code: 8, 4 (s up to 7) or 2 (s = 1)
    block: int = 0  # elements of a section that share a scale; 0: the whole section
    scale: Scale = "max"  # of a block: "max" the largest magnitude, "norm" the Euclidean norm, "given" by the caller
    stochastic: bool = False  # round up with a probability equal to the fraction; False: to nearest, ties to even

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
        """The largest level (a level is the whole number stored for an element); it decodes to the block's scale."""
        return float(self.levels)

    @property
    def rounding(self) -> Rounding:
        return "stochastic" if self.stochastic else "nearest"


@dataclass(frozen=True)
class FloatGrid:
    """A grid for quantising to 8-bit floats times a scale, which maps a block's largest magnitude to the largest float.

    `e4m3` (no infinity, up to 448) and `e5m2` (up to 57344) follow the OCP specification, rounded to nearest, ties to
    even. `exponent` is a sign and a power of two, 2^-109 to 2^16, without a scale: rounded to one of the neighbouring
    powers with the probability that keeps the mean. Magnitudes above 2^16 become 2^16, below 2^-110 zero.
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
    """Adjacent equally long blocks of a section (tensor in the flat tensor), and where their codes and scales begin.

    Attributes:
        begin: index of the first element in the flat tensor.
        place: index of the first element in its own tensor.
        seed: the section's seed of random rounding.
        blocks: the number of blocks.
        length: elements of each block.
        codes: index of the first byte of codes.
        scale: index of the first scale.
        nbytes: bytes of the codes of a block.
    """

    begin: int  # index of the first element in the flat tensor
    place: int  # index of the first element in its own tensor
    seed: int
    blocks: int
    length: int  # elements of each block
    codes: int  # index of the first byte of codes
    scale: int  # index of the first scale
    nbytes: int  # bytes of the codes of a block

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
    """Yields the blocks that get a scale each, in order: each section's whole blocks, then its shorter last one."""
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
    """Whether quantising to this grid rounds at random, so that tensors (`Sections`) need seeds."""
    return grid.rounding in ("stochastic", "exponent")


def check_drawn(sections: Sections, grid: AnyGrid) -> None:
    """Raises ValueError if the grid rounds at random and the sections (tensors in a flat tensor) have no seeds."""
    if draws(grid) and sections.lengths and not sections.seeds:
        raise ValueError(f"{grid} draws numbers: Sections.seeds must have one for each section")


def codes_nbytes(sections: Sections, grid: AnyGrid) -> int:
    """Returns the size in bytes of the codes to which `quantize` quantises all sections."""
    return _counts(sections.lengths, grid)[0]


def num_scales(sections: Sections, grid: AnyGrid) -> int:
    """Returns the number of scales that `quantize` takes: one for each block, 0 for a grid without scales."""
    return 0 if grid.scale == "none" else _counts(sections.lengths, grid)[1]


@lru_cache(maxsize=1024)
def _counts(lengths: tuple[int, ...], grid: AnyGrid) -> tuple[int, int]:
    """Returns the size in bytes of the quantised codes, and the number of blocks, of sections of these lengths."""
    found = list(runs(Sections(lengths), grid))
    return sum(run.blocks * run.nbytes for run in found), sum(run.blocks for run in found)


def _check_block(grid: AnyGrid) -> None:
    if type(grid.block) is not int or not 0 <= grid.block < 1 << 62:
        raise ValueError(f"{type(grid).__name__}.block must be in [0, 2^62), got {grid.block}")
