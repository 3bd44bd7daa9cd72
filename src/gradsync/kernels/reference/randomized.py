"""Random sets of elements and random rotations, in plain torch operations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.kernels.checks import Sections, check_floating, check_index_out, check_sections, check_shape
from gradsync.kernels.choice import dispatched
from gradsync.kernels.draws import RunDraw, check_rotation, rotations, run_draws
from gradsync.kernels.reference.draws import draws_at
from gradsync.kernels.reference.rows import accumulation_dtype

_ROUNDS = 4
_SIGNS = 32  # signs from one draw


@dispatched("indices")
def random_k(sections: Sections, counts: Sequence[int], indices: Tensor, *, block: int = 1) -> None:
    """Draws distinct random elements of each section by its seed: the first ones of a permutation that is not stored.

    The permutation is a Feistel network over [0, a) x [0, b), with a and b about the square root of the number of runs.
    A draw is a run of `block` neighbours (a shorter section is one run); runs begin at a random place, and the section
    is seen as a ring, so that every element is drawn with the same probability, and every run has exactly `block`
    elements. Parts of one tensor that begin at different places have different permutations.

    Args:
        sections: with seeds.
        counts: how many runs are drawn from each section.
        indices: (k,) int64, or int32 for up to 2^31 elements, k = counts times the elements of a run: indices into the
            flat tensor, section by section, in the order of the draws. Overwritten.

    Raises:
        ValueError: more runs than there are, no seeds, another size of `indices`.
        TypeError: other dtypes.
    """
    found = run_draws(sections, counts, block)
    check_index_out("indices", indices, sum(d.taken * d.run for d in found), sum(sections.lengths))
    at = 0
    for drawn in found:
        elements = _elements(drawn, indices.device)
        indices[at : at + len(elements)] = elements
        at += len(elements)


def _elements(drawn: RunDraw, device: torch.device) -> Tensor:
    numbers = _permuted(torch.arange(drawn.taken, device=device), drawn)
    while True:  # as long as some are sent outside of what there is
        outside = (numbers >= drawn.runs).nonzero().flatten()
        if len(outside) == 0:
            break
        numbers[outside] = _permuted(numbers[outside], drawn)
    begins = drawn.shift + numbers * drawn.run
    elements = (begins[:, None] + torch.arange(drawn.run, device=device)).flatten()
    return drawn.offset + torch.where(elements < drawn.length, elements, elements - drawn.length)


def _permuted(numbers: Tensor, drawn: RunDraw) -> Tensor:
    """Maps numbers by a random permutation of [0, drawn.a * drawn.b): a Feistel network by `drawn.key`."""
    left, right = numbers // drawn.b, numbers % drawn.b
    for number in range(0, _ROUNDS, 2):
        left = (left + (draws_at(right + (number << 32), drawn.key) * drawn.a >> 32)) % drawn.a
        right = (right + (draws_at(left + (number + 1 << 32), drawn.key) * drawn.b >> 32)) % drawn.b
    return left * drawn.b + right


def check_hadamard(x: Tensor, sections: Sections, out: Tensor, chunk: int, inverse: bool) -> None:
    """Checks the arguments of `hadamard`, and raises the errors that its docstring lists."""
    check_rotation(sections, chunk)
    check_floating("x", x)
    check_sections("x", x, sections)
    wide = accumulation_dtype(x.dtype)
    check_floating("x", x, wide if inverse else None)
    check_floating("out", out, None if inverse else wide)
    if accumulation_dtype(out.dtype) != wide:
        raise TypeError(f"out must be as wide as x, got {out.dtype} for {x.dtype}")
    check_shape("out", out, x.numel())


def rotation_scale(bits: int) -> float:
    """Returns the factor that makes the Walsh-Hadamard transform of 2^bits elements orthonormal."""
    return math.ldexp(math.sqrt(0.5) if bits % 2 else 1.0, -(bits // 2))


@dispatched("x", "out", entries="x")
@torch.no_grad()
def hadamard(x: Tensor, sections: Sections, out: Tensor, *, chunk: int, inverse: bool = False) -> None:
    """Rotates each chunk at random: multiplies by random signs, then by the orthonormal Walsh-Hadamard matrix.

    out = H D x / sqrt(n), with n the elements of the chunk; inverse: D H x / sqrt(n). A section is cut into chunks of
    `chunk` elements and, at its end, powers of two in descending order (`rotation_sizes`): nothing is padded. The sign
    of the element at place i of its tensor is bit i mod 32 of what is drawn for place i // 32: 1 is negative. Computed
    in float32 (float64 for float64), stages from neighbours to halves, and scaled last.

    Args:
        x: (numel,) floating; inverse: float32 or float64.
        sections: with seeds.
        out: (numel,) float32, float64 for float64; inverse: any dtype that is computed in that of x. It may be `x`.
        chunk: a power of two up to 8192.

    Raises:
        ValueError: another chunk, no seeds, shapes that do not fit.
        TypeError: other dtypes.
    """
    check_hadamard(x, sections, out, chunk, inverse)
    for begin, place, seed, bits, count in rotations(sections, chunk):
        part = x[begin : begin + (count << bits)].to(accumulation_dtype(x.dtype))
        places = torch.arange(place, place + len(part), device=x.device)
        negative = (draws_at(places // _SIGNS, seed) >> places % _SIGNS & 1).bool()
        if not inverse:
            part = torch.where(negative, -part, part)
        for stage in range(bits):
            first, second = part.view(-1, 2, 1 << stage).unbind(1)
            part = torch.stack([first + second, first - second], dim=1).flatten()
        part = part * rotation_scale(bits)
        if inverse:
            part = torch.where(negative, -part, part)
        out[begin : begin + len(part)] = part
