"""Random sets of elements and random rotations, in plain torch operations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.kernels.checks import Sections, check_floating, check_index_out, check_sections, check_shape
from gradsync.kernels.draws import RunDraw, check_rotation, rotations, run_draws
from gradsync.kernels.reference.draws import draws_at
from gradsync.kernels.reference.rows import accumulation_dtype

_ROUNDS = 4
_SIGNS = 32  # that one draw gives


def random_k(sections: Sections, counts: Sequence[int], indices: Tensor, *, block: int = 1) -> None:
    """See `gradsync.kernels.random_k`."""
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
    """A Feistel network: rounds add to one half of a number what is drawn for the other half."""
    left, right = numbers // drawn.b, numbers % drawn.b
    for number in range(0, _ROUNDS, 2):
        left = (left + (draws_at(right + (number << 32), drawn.key) * drawn.a >> 32)) % drawn.a
        right = (right + (draws_at(left + (number + 1 << 32), drawn.key) * drawn.b >> 32)) % drawn.b
    return left * drawn.b + right


def check_hadamard(x: Tensor, sections: Sections, out: Tensor, chunk: int, inverse: bool) -> None:
    """Refuses what `hadamard` cannot work on."""
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
    """What makes the transform of 2^bits elements orthonormal."""
    return math.ldexp(math.sqrt(0.5) if bits % 2 else 1.0, -(bits // 2))


@torch.no_grad()
def hadamard(x: Tensor, sections: Sections, out: Tensor, *, chunk: int, inverse: bool = False) -> None:
    """See `gradsync.kernels.hadamard`."""
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
