"""Digests of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradsync.kernels.choice import pick


def digest(xs: Sequence[Tensor], out: Tensor) -> None:
    """Writes a digest of 64 bits of each tensor, by which ranks tell whether theirs are the same without sending them.

    It depends on the bits of every element and on their order, not on the number of threads, the implementation or the
    device. All NaNs count as one, and both zeros. Tensors that differ have the same digest by a chance of about 2^-64,
    unless somebody makes them so on purpose.

    Args:
        xs: each (numel,), floating point of 16, 32 or 64 bits, or int64; contiguous.
        out: (tensors,) int64. Overwritten.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: other dtypes.
    """
    pick("digest", [*xs, out], max((x.numel() for x in xs), default=0))(xs, out)
