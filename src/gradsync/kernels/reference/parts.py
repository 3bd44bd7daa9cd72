"""Kernels on messages of non-zero elements (packed positions and values), composed of other kernels' definitions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradsync.kernels import phases
from gradsync.kernels.checks import PackedPositions
from gradsync.kernels.choice import dispatched
from gradsync.kernels.in_steps import Steps
from gradsync.kernels.reference.elements import decode_bitmap, encode_bitmap, nonzero_elements
from gradsync.kernels.reference.offsets import decode_offsets, encode_offsets
from gradsync.kernels.reference.rotated import join_rotated, partition_rotated
from gradsync.kernels.reference.rows import unite_rows

_STEPS = Steps(
    encode_bitmap.reference,
    decode_bitmap.reference,
    encode_offsets.reference,
    decode_offsets.reference,
    nonzero_elements.reference,
    partition_rotated.reference,
    unite_rows.reference,
    join_rotated,
)


@dispatched("x", entries="x")
def partition_elements(x: Tensor, n: int, seed: int) -> phases.ElementPartition:
    """Finds the non-zero elements of `x` and splits them among n owners (ranks that sum a part) by rotated stripe.

    Element i = n q + r belongs to owner (r + rho(q)) mod n, at position q of its part: each run of n neighbours goes to
    n different owners in a rotation that the seed decides, so that neither dense regions nor hot columns overload an
    owner, and the positions q of an owner ascend. All ranks compute the same map. Zero is tested as in `nonzero_rows`.

    Args:
        x: (numel,) floating, numel <= n * 2^31.
        n: owners, at most 2^16.

    Raises:
        ValueError: another n, a size whose positions int32 cannot hold; native: more than 2^34 elements.
        TypeError: other dtypes.
    """
    return _STEPS.partition_elements(x, n, seed)


@dispatched("parts", entries="size")
def unite_elements(parts: Sequence[PackedPositions], size: int) -> phases.ElementUnion:
    """Finds the union of the element positions in several messages, all in [0, size): the first phase of their sum.

    Args:
        parts: packed positions from messages, which may be damaged.

    Raises:
        ValueError: a message of another size, or a malformed one; no part; native: a size above 2^34.
        TypeError: other dtypes.
    """
    return _STEPS.unite_elements(parts, size)


@dispatched("parts", "values", "out", entries="out")
def join_elements(parts: Sequence[PackedPositions], values: Sequence[Tensor], seed: int, out: Tensor) -> None:
    """Writes the elements of all owners to their places in `out`, zero elsewhere: the inverse of `partition_elements`.

    Args:
        parts: for each owner, packed positions from its message, which may be damaged.
        values: for each owner (count,), in the dtype of `out`.
        out: (size,) floating; overwritten.

    Raises:
        ValueError: a message of another size or a malformed one, or a position without an element in `out`, before
            anything is written; no owner, or too many.
        TypeError: other or different dtypes.
    """
    _STEPS.join_elements(parts, values, seed, out)
