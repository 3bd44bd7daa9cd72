"""Which implementation of a kernel runs: asked for by name, else by where the tensors are and what can be loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

from torch import Tensor

from gradsync.kernels import cpu, device, reference

Implementation = Literal["native", "triton", "reference", "auto"]
KERNELS = (
    "sum_rows", "unite_rows", "join_columns", "scatter_rows", "nonzero_rows", "nonzero_elements", "encode_bitmap",
    "decode_bitmap", "count_bits", "encode_offsets", "decode_offsets", "partition_elements", "unite_elements",
    "join_elements", "partition_rotated", "rotated_index", "owners_by_hash", "partition_hashed", "owned_by_hash",
    "positions_in", "hierarchical_hash", "top_k", "select_above", "count_above", "narrow", "sum_parts", "quantize",
    "block_scales", "dequantize", "random_k", "hadamard", "pack_signs", "unpack_signs", "count_sketch",
    "sketch_estimates", "squared_norms", "take_chunks", "digest",
)  # fmt: skip
_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # kernel: (reference, native)
    kernel: (getattr(reference, kernel), getattr(cpu, kernel)) for kernel in KERNELS
}
_logger = logging.getLogger("gradsync.kernels")
_requested: Implementation = "auto"
_fallback_logged = False


def use(implementation: Implementation) -> ExitStack:
    """Chooses the implementation of every kernel, for the whole process; as a `with` block, until its end.

    Raises:
        ImportError: `native` was asked for and is not built, or `triton` and Triton cannot be imported.
        ValueError: an unknown name.
    """
    if implementation not in ("native", "triton", "reference", "auto"):
        raise ValueError(f"implementation must be native, triton, reference or auto, got {implementation!r}")
    if implementation == "native":
        cpu.load()
    if implementation == "triton":
        device.load()
    restore = ExitStack()
    restore.callback(_request, _requested)
    _request(implementation)
    return restore


def active() -> str:
    """The implementation in use, under `auto` that on the CPU: a kernel may still run as another, see above."""
    if _requested != "auto":
        return _requested
    try:
        cpu.load()
    except ImportError as error:
        _log_fallback_once(error)
        return "reference"
    return "native"


def pick(kernel: str, tensors: Sequence[Tensor], entries: int = 0) -> Callable[..., Any]:
    """The implementation of a kernel for these tensors, of a table with so many rows or elements."""
    fallback, native = _IMPLEMENTATIONS[kernel]
    if _requested == "triton" or (_requested == "auto" and device.supports(tensors)):
        return _on_device(kernel, fallback)
    if active() == "reference" or (_requested == "auto" and not cpu.supports(tensors, entries)):
        return fallback
    return native


def given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _on_device(kernel: str, fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's version of a kernel; what has none, and all where Triton is missing, runs as torch operations there."""
    try:
        chosen: Callable[..., Any] = getattr(device.load(), kernel, fallback)
    except ImportError as error:
        _log_fallback_once(error)
        return fallback
    return chosen


def _request(implementation: Implementation) -> None:
    global _requested  # noqa: PLW0603 (the choice is the whole process's)
    _requested = implementation


def _log_fallback_once(error: ImportError) -> None:
    global _fallback_logged  # noqa: PLW0603 (once a process)
    if not _fallback_logged:
        _logger.warning("gradsync.kernels: using the torch reference implementation: %s", error)
    _fallback_logged = True
