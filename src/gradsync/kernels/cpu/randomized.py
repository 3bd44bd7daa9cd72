"""Native (C++) kernels that draw random numbers: random sets of elements, and randomised Hadamard rotations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradsync.kernels.checks import Sections
from gradsync.kernels.cpu.boundary import plain, threads_for
from gradsync.kernels.draws import check_rotation, run_draws
from gradsync.kernels.native import load


def random_k(sections: Sections, counts: Sequence[int], indices: Tensor, *, block: int = 1) -> None:
    draws = [tuple(drawn) for drawn in run_draws(sections, counts, block)]
    threads = threads_for(indices.numel())
    load().random_k(draws, sum(sections.lengths), plain("indices", indices), threads)


def hadamard(x: Tensor, sections: Sections, out: Tensor, *, chunk: int, inverse: bool = False) -> None:
    check_rotation(sections, chunk)
    table = list(sections.lengths), list(sections.places), list(sections.seeds)
    threads = threads_for(x.numel())
    load().hadamard(plain("x", x), *table, chunk, plain("out", out), inverse, threads)
