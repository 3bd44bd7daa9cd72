"""The digest of a tensor's elements."""

from __future__ import annotations

from torch import Tensor

from gradsync.kernels.choice import pick


def digest(x: Tensor, out: Tensor) -> None:
    """Writes a digest of 64 bits, by which ranks tell whether their tensors are the same without sending them.

    It depends on the bits of every element and on their order, not on the number of threads, the implementation or the
    device. All NaNs count as one, and both zeros. Tensors that differ have the same digest by a chance of about 2^-64,
    unless somebody makes them so on purpose.

    Args:
        x: (numel,) floating point of 16, 32 or 64 bits, or int64; contiguous.
        out: (1,) int64. Overwritten.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: other dtypes.
    """
    pick("digest", [x, out], x.numel())(x, out)
