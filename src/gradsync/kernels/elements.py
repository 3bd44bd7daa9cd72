"""Kernels on single elements: which are not zero, whose they are, and the sums of several parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradsync.kernels.checks import PackedPositions
from gradsync.kernels.choice import pick
from gradsync.kernels.phases import ElementPartition, ElementUnion, NonzeroElements


def nonzero_elements(x: Tensor) -> NonzeroElements:
    """Finds the elements of `x`, (numel,) floating, that are not zero; tested as in `nonzero_rows`."""
    found: NonzeroElements = pick("nonzero_elements", [x], x.numel())(x)
    return found


def partition_elements(x: Tensor, n: int, seed: int) -> ElementPartition:
    """Finds the elements of `x` that are not zero, and which of n owners each of them has, by rotated stripe.

    Element i = n q + r is owner (r + rho(q)) mod n's q-th: each run of n neighbours goes to n different owners in a
    rotation that the seed decides, so neither dense regions nor hot columns load one owner, and an owner's positions q
    stay in order. All ranks compute the same map. What is zero is tested as in `nonzero_rows`.

    Args:
        x: (numel,) floating, numel <= n * 2^31.
        n: owners, at most 2^16.

    Raises:
        ValueError: another n, a size whose positions int32 cannot hold; native: more than 2^34 elements.
        TypeError: other dtypes.
    """
    partition: ElementPartition = pick("partition_elements", [x], x.numel())(x, n, seed)
    return partition


def unite_elements(parts: Sequence[PackedPositions], size: int) -> ElementUnion:
    """First phase of the sum of several parts of [0, size): which positions occur.

    Args:
        parts: messages that may be damaged.

    Raises:
        ValueError: a message of another size, or one that no such positions have; no part; native: a size above 2^34.
        TypeError: other dtypes.
    """
    tensors = [part.packed for part in parts]
    union: ElementUnion = pick("unite_elements", tensors, size)(parts, size)
    return union


def join_elements(parts: Sequence[PackedPositions], values: Sequence[Tensor], seed: int, out: Tensor) -> None:
    """The inverse of `partition_elements`: the elements of all owners where they belong in `out`, zero everywhere else.

    Args:
        parts: per owner, messages that may be damaged.
        values: per owner (count,), in the dtype of `out`.
        out: (size,) floating; overwritten.

    Raises:
        ValueError: a message of another size or one that no such positions have, a position without an element in
            `out`, before anything is written; no owner, or too many.
        TypeError: other or different dtypes.
    """
    tensors = [*(part.packed for part in parts), *values, out]
    pick("join_elements", tensors, out.numel())(parts, values, seed, out)
