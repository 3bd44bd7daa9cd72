"""Kernels whose numbers come from a seed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradsync.kernels.checks import Sections
from gradsync.kernels.choice import pick


def random_k(sections: Sections, counts: Sequence[int], indices: Tensor, *, block: int = 1) -> None:
    """Draws elements of each section, all different, by its seed: the first of a permutation that is never stored.

    A Feistel network over [0, a) x [0, b), a and b about the root of the number of runs. What is drawn is a run of
    `block` neighbours (of a shorter section, the whole of it) from a random place on, the section seen as a ring: so
    every element is drawn with the same probability, and exactly `block` elements with every run. Parts of one tensor
    that begin elsewhere have permutations of their own.

    Args:
        sections: with seeds.
        counts: of each section, how many runs are drawn.
        indices: (k,) int64, or int32 for up to 2^31 elements, k = counts times the elements of a run: indices into the
            flat tensor, section by section, in the order of the draws.

    Raises:
        ValueError: more runs than there are, no seeds, another size of `indices`.
        TypeError: other dtypes.
    """
    pick("random_k", [indices], sum(sections.lengths))(sections, counts, indices, block=block)


def hadamard(x: Tensor, sections: Sections, out: Tensor, *, chunk: int, inverse: bool = False) -> None:
    """A random rotation: each chunk's signs are drawn, then it is transformed by Walsh and Hadamard; orthonormal.

    out = H D x / sqrt(n), with n the elements of the chunk; inverse: D H x / sqrt(n). A section is cut into chunks of
    `chunk` elements and, at its end, powers of two in descending order (`rotation_sizes`): nothing is padded. The sign
    of the element at place i of its tensor is bit i mod 32 of what is drawn for place i // 32: 1 is negative. Computed
    in float32 (float64 for float64), stages from neighbours to halves, and scaled last.

    Args:
        x: (numel,) floating; inverse: float32 or float64.
        sections: with seeds.
        out: (numel,) float32, float64 for float64; inverse: of any type that is computed in x's. It may be `x`.
        chunk: a power of two up to 8192.

    Raises:
        ValueError: another chunk, no seeds, shapes that do not fit.
        TypeError: other dtypes.
    """
    pick("hadamard", [x, out], x.numel())(x, sections, out, chunk=chunk, inverse=inverse)
