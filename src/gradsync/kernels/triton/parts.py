"""Kernels that split, unite and join sparse elements in messages, composed of other Triton kernels."""

from __future__ import annotations

from gradsync.kernels.in_steps import Steps
from gradsync.kernels.triton.elements import decode_bitmap, encode_bitmap, nonzero_elements
from gradsync.kernels.triton.offsets import decode_offsets, encode_offsets
from gradsync.kernels.triton.rotated import join_rotated, partition_rotated
from gradsync.kernels.triton.rows import unite_rows

_STEPS = Steps(
    encode_bitmap,
    decode_bitmap,
    encode_offsets,
    decode_offsets,
    nonzero_elements,
    partition_rotated,
    unite_rows,
    join_rotated,
)
partition_elements = _STEPS.partition_elements
unite_elements = _STEPS.unite_elements
join_elements = _STEPS.join_elements
