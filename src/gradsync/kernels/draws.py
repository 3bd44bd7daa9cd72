"""Random parameters of whole sections (tensors in a flat tensor), drawn in Python for all kernel implementations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gradsync.kernels.checks import MAX_ROTATED, Sections

_WORD = 2**32 - 1
_ROW_KEY = 0x9E3779B97F4A7C15  # the distance between the keys of one seed
GOLDEN = 0x9E3779B9
MOST_LANES = 32  # neighbours that share one draw of a count sketch: 32 bits give 32 signs
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)


def mixed(h: int) -> int:
    """Returns a 32-bit hash of the 32-bit number `h`, in which every bit depends on all of `h` (Wellons' lowbias32)."""
    h = (h ^ h >> 16) * MULTIPLIERS[0] & _WORD
    h = (h ^ h >> 15) * MULTIPLIERS[1] & _WORD
    return h ^ h >> 16


def draw(place: int, seed: int) -> int:
    """Returns 32 random bits for the element at index `place` of a tensor with this seed, as `reference.draws` does."""
    first = mixed((place ^ seed) & _WORD)
    return mixed(first + (seed >> 32) + (place >> 32) * GOLDEN & _WORD)


class RunDraw(NamedTuple):
    """The numbers by which `random_k` draws runs (adjacent elements) of one section of a flat tensor.

    A random permutation of [0, a * b), of at least `runs` numbers, maps 0, 1, ... to the numbers of the drawn runs.

    Attributes:
        offset: the place of the section in the flat tensor.
        length: the elements of the section.
        taken: the runs that are drawn.
        run: the elements of a run.
        runs: the runs of the section.
        shift: where the first run begins; the section is seen as a ring.
        a, b: the sides of the permuted rectangle.
        key: the key of the permutation.
    """

    offset: int  # the place of the section in the flat tensor
    length: int  # elements of the section
    taken: int  # runs that are drawn
    run: int  # elements of a run
    runs: int  # runs of the section
    shift: int  # where the first run begins; the section is seen as a ring
    a: int
    b: int
    key: int  # of the permutation


def run_draws(sections: Sections, counts: Sequence[int], block: int) -> list[RunDraw]:
    """Returns for each section the parameters by which `random_k` draws `counts` runs of `block` neighbours.

    Raises:
        ValueError: without seeds, for more runs than a section has, or for a block that is not positive.
    """
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    if len(sections.seeds) != len(sections.lengths):
        raise ValueError(f"random_k draws: it needs a seed for each of {len(sections.lengths)} sections, got none")
    if len(counts) != len(sections.lengths):
        raise ValueError(f"counts must be one for each of {len(sections.lengths)} sections, got {len(counts)}")
    found, offset = [], 0
    for length, start, seed, count in zip(sections.lengths, sections.places, sections.seeds, counts, strict=True):
        run = max(1, min(block, length))
        runs = length // run
        if not 0 <= count <= runs:
            raise ValueError(f"counts must be at most the runs of {run} in {length} elements, {runs}, got {count}")
        a = max(1, math.isqrt(max(runs - 1, 0)) + 1)
        shift = draw(start, seed) * length >> 32 if run > 1 else 0
        key = draw(start, seed ^ _WORD) << 32 | draw(start, seed)  # of parts of one tensor, each its own
        found.append(RunDraw(offset, length, count, run, runs, shift, a, max(1, -(-runs // a)), key))
        offset += length
    return found


class Rotation(NamedTuple):
    """Adjacent chunks of 2^bits elements; `hadamard` multiplies each by a random orthogonal matrix of its own.

    Attributes:
        begin: the first element's index in the flat tensor.
        place: the first element's index in its own tensor.
        seed: decides the signs.
        bits: a chunk has 2^bits elements.
        chunks: the number of chunks.
    """

    begin: int  # the first element's index in the flat tensor
    place: int  # the first element's index in its own tensor
    seed: int
    bits: int
    chunks: int


def rotations(sections: Sections, chunk: int) -> Iterator[Rotation]:
    """Yields the chunks that `hadamard` rotates in each section: of `chunk` elements, then of falling powers of two."""
    begin = 0
    for length, start, seed in zip(sections.lengths, sections.places, sections.seeds, strict=True):
        done = 0
        while done < length:
            bits = min(chunk, length - done).bit_length() - 1
            count = length - done >> bits  # one, where it is not a whole `chunk`
            yield Rotation(begin + done, start + done, seed, bits, count)
            done += count << bits
        begin += length


def rotation_sizes(lengths: Sequence[int], chunk: int) -> list[int]:
    """Returns the number of elements of each chunk that `hadamard` rotates, for tensors of these lengths.

    A tensor is cut into chunks of `chunk` elements, and its remainder into powers of two, as 12 into 8 and 4.

    Raises:
        ValueError: if `chunk` is not a power of two in [1, MAX_ROTATED].
    """
    sections = Sections(tuple(lengths), seeds=(0,) * len(lengths))
    check_rotation(sections, chunk)
    return [1 << rotation.bits for rotation in rotations(sections, chunk) for _ in range(rotation.chunks)]


def check_rotation(sections: Sections, chunk: int) -> None:
    """Raises ValueError unless `chunk` is a power of two in [1, MAX_ROTATED] and each section has a seed."""
    if not 1 <= chunk <= MAX_ROTATED or chunk & (chunk - 1):
        raise ValueError(f"chunk must be a power of two up to {MAX_ROTATED}, got {chunk}")
    if len(sections.seeds) != len(sections.lengths):
        raise ValueError(
            f"hadamard draws signs: it needs a seed for each of {len(sections.lengths)} sections, got none"
        )


def most_lanes(columns: int) -> int:
    """Returns the most neighbouring elements that a count sketch with `columns` counters in a row may hash together.

    They go to one window, as many adjacent counters. This is the largest power of two up to 32 and the square root of
    `columns`, so that a row has at least as many windows as a window has counters.
    """
    return min(MOST_LANES, 1 << max(math.isqrt(columns).bit_length() - 1, 0))


def sketch_lanes(columns: int) -> int:
    """Returns how many neighbouring elements a count sketch with `columns` counters in a row hashes together.

    This is the largest power of two up to `most_lanes` that divides `columns`.
    """
    return math.gcd(columns, most_lanes(columns))


def sketch_keys(seed: int, row: int) -> tuple[int, int]:
    """Returns two 64-bit keys of a row of a count sketch: one to draw elements' counters, one to draw their signs."""
    return (seed + 2 * row * _ROW_KEY) % 2**64, (seed + (2 * row + 1) * _ROW_KEY) % 2**64


def check_sketch(sections: Sections, columns: Sequence[int], rows: int) -> None:
    """Raises ValueError if a count sketch has no rows, a section no seed, or a section with elements no counters.

    A row must have fewer than 2^31 counters for a section, as many as a draw of 32 bits can tell apart.
    """
    if rows < 1:
        raise ValueError(f"rows must be positive, got {rows}")
    if len(sections.seeds) != len(sections.lengths):
        raise ValueError(f"a sketch is drawn: it needs a seed for each of {len(sections.lengths)} sections, got none")
    if len(columns) != len(sections.lengths):
        raise ValueError(f"columns must be one for each of {len(sections.lengths)} sections, got {len(columns)}")
    for length, count in zip(sections.lengths, columns, strict=True):
        if not min(length, 1) <= count < 1 << 31:
            raise ValueError(f"columns must be in [1, 2^31) for {length} elements, got {count}")


def check_median(rows: int) -> None:
    """Raises ValueError if a count sketch has an even number of rows, as the median is then no row's value."""
    if rows % 2 == 0:
        raise ValueError(f"rows must be odd, for a median, got {rows}")
