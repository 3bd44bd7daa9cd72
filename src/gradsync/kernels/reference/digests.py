"""The kernel that computes digests of tensors, in plain torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.kernels.checks import check_dtype, check_flat, check_shape, describe
from gradsync.kernels.choice import dispatched
from gradsync.kernels.reference.draws import draws
from gradsync.kernels.reference.hashing import finalised

WORDS = 1024  # of a block, 32 bits each
KEY_SEED = 0x6772616473796E63  # any; the same everywhere
_AT_ONCE = 1 << 8  # blocks: 2 MiB for each step of the arithmetic, which caches hold
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by itemsize
INFINITY_AND_NAN = {  # the bits of infinity, beyond which magnitudes are NaNs, and of the NaN that stands for all
    torch.float64: (0x7FF0000000000000, 0x7FF8000000000000),
    torch.float32: (0x7F800000, 0x7FC00000),
    torch.bfloat16: (0x7F80, 0x7FC0),
    torch.float16: (0x7C00, 0x7E00),
}


def check_digest(xs: Sequence[Tensor], out: Tensor) -> None:
    """Checks the arguments of `digest`, and raises the errors that its docstring lists."""
    for x in xs:
        if x.dtype != torch.int64 and x.dtype not in INFINITY_AND_NAN:
            raise TypeError(f"xs must be floating point of 16, 32 or 64 bits, or int64, got {describe(x)}")
        check_flat("xs", x)
    check_dtype("out", out, torch.int64)
    check_shape("out", out, len(xs))


def keys(device: torch.device) -> Tensor:
    """Returns the odd factors by which `digest` weights the words of a block in two sums, (2, WORDS) int64 < 2^32."""
    return draws(KEY_SEED, 0, 2 * WORDS, device).view(2, WORDS) | 1


@dispatched("xs", "out")
@torch.no_grad()
def digest(xs: Sequence[Tensor], out: Tensor) -> None:
    """Writes a 64-bit digest of each tensor, so that ranks can compare tensors without sending them.

    A digest depends on the bits of every element and on their order, not on the number of threads, the implementation
    or the device. All NaNs count as equal, and both zeros. Different tensors have the same digest with a probability of
    about 2^-64, unless somebody constructs them for it.

    Args:
        xs: each (numel,), floating point of 16, 32 or 64 bits, or int64; contiguous.
        out: (tensors,) int64. Overwritten.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: other dtypes.
    """
    check_digest(xs, out)
    factors = keys(out.device)
    for place, x in enumerate(xs):
        total = torch.zeros_like(out[place])
        for begin in range(0, x.numel(), WORDS * _AT_ONCE):  # begins a block, whatever the element type
            words = _words(x[begin : begin + WORDS * _AT_ONCE])
            words = torch.nn.functional.pad(words, (0, -len(words) % WORDS)).view(-1, WORDS)
            first, second = ((words * factor).sum(1) for factor in factors)
            number = begin * x.element_size() // 4 // WORDS + torch.arange(len(words), device=x.device)
            total += finalised(first ^ finalised(second ^ finalised(number + 1))).sum()
        out[place] = total
    write_digests(out, [x.numel() for x in xs], out)


def write_digests(totals: Tensor, lengths: Sequence[int], out: Tensor) -> None:
    """Writes to `out`, (tensors,) int64, a hash of each tensor's length and total (sum of hashes of its blocks)."""
    counts = finalised(torch.tensor(lengths, dtype=torch.int64) + 1)
    out.copy_(finalised(totals ^ counts.to(totals.device, non_blocking=True)))


def _words(x: Tensor) -> Tensor:
    """Returns the bits of `x`, 1-D, as 32-bit words, 1-D int64; all NaNs give the same words, and so do both zeros.

    An element of 64 bits is two words, the lower half first; two elements of 16 bits are one word.
    """
    size = x.element_size()
    bits = x.contiguous().view(_BITS[size]).long()
    if x.dtype in INFINITY_AND_NAN:
        infinity, nan = INFINITY_AND_NAN[x.dtype]
        magnitude = bits & (1 << 8 * size - 1) - 1  # a comparison of the numbers would take subnormal ones for zeros
        bits = bits.masked_fill(magnitude > infinity, nan).masked_fill(magnitude == 0, 0)
    if size == 8:
        return torch.stack([bits & 0xFFFFFFFF, bits >> 32 & 0xFFFFFFFF], dim=1).flatten()
    if size == 4:
        return bits & 0xFFFFFFFF
    pairs = torch.nn.functional.pad(bits & 0xFFFF, (0, len(bits) % 2)).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 16
