"""Native (C++) kernels that pack indices as offsets within blocks and back, on one thread: two are hardly faster."""

from __future__ import annotations

from torch import Tensor

from gradsync.kernels.checks import check_size
from gradsync.kernels.cpu.boundary import plain
from gradsync.kernels.native import load


def encode_offsets(indices: Tensor, size: int, bits: int, out: Tensor) -> None:
    check_size("size", size)
    load().encode_offsets(plain("indices", indices), size, bits, plain("out", out))


def decode_offsets(message: Tensor, size: int, bits: int, out: Tensor) -> None:
    check_size("size", size)
    load().decode_offsets(plain("message", message), size, bits, plain("out", out))
