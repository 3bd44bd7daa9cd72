"""The kernels for CUDA, in Triton: each function does what its namesake in `gradsync.kernels` says, on the device.

A kernel reads its inputs once or twice (`top_k`: as often as they have digits) and writes its outputs; scans and sorts
between kernels are torch operations on the device, as are all of `select_above` and `count_above`. The host waits only
where the contract makes it: for counts and for errors, together in one transfer where they come together. Each output
element has one writer, or takes atomic ORs or sums of integers or one compare-and-swap, so that no kernel has a race
and all but `hierarchical_hash` give the same bits in every run. No tensor is copied: what cannot be worked on in place
is refused.

Loops over what a program is given or has computed are `while`: Triton's interpreter cannot count to it by `range`.

Triton comes with torch for CUDA and is imported with this package, which `import gradsync` does not load.
"""

from gradsync.kernels.in_steps import Steps
from gradsync.kernels.reference.largest import count_above, select_above
from gradsync.kernels.triton.chunks import take_chunks
from gradsync.kernels.triton.convert import narrow, sum_parts
from gradsync.kernels.triton.digests import digest
from gradsync.kernels.triton.elements import NonzeroElements, count_bits, decode_bitmap, encode_bitmap, nonzero_elements
from gradsync.kernels.triton.hashing import owned_by_hash, owners_by_hash, partition_hashed, positions_in
from gradsync.kernels.triton.hierarchy import hierarchical_hash
from gradsync.kernels.triton.largest import top_k
from gradsync.kernels.triton.norms import squared_norms
from gradsync.kernels.triton.offsets import decode_offsets, encode_offsets
from gradsync.kernels.triton.quantize import block_scales, dequantize, quantize
from gradsync.kernels.triton.randomized import hadamard, random_k
from gradsync.kernels.triton.rotated import join_rotated, partition_rotated, rotated_index
from gradsync.kernels.triton.rows import (
    NonzeroRows,
    RowUnion,
    join_columns,
    nonzero_rows,
    scatter_rows,
    sum_rows,
    unite_rows,
)
from gradsync.kernels.triton.signs import pack_signs, unpack_signs
from gradsync.kernels.triton.sketches import count_sketch, sketch_estimates

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

__all__ = [
    "NonzeroElements",
    "NonzeroRows",
    "RowUnion",
    "block_scales",
    "count_above",
    "count_bits",
    "count_sketch",
    "decode_bitmap",
    "decode_offsets",
    "dequantize",
    "digest",
    "encode_bitmap",
    "encode_offsets",
    "hadamard",
    "hierarchical_hash",
    "join_columns",
    "join_elements",
    "narrow",
    "nonzero_elements",
    "nonzero_rows",
    "owned_by_hash",
    "owners_by_hash",
    "pack_signs",
    "partition_elements",
    "partition_hashed",
    "partition_rotated",
    "positions_in",
    "quantize",
    "random_k",
    "rotated_index",
    "scatter_rows",
    "select_above",
    "sketch_estimates",
    "squared_norms",
    "sum_parts",
    "sum_rows",
    "take_chunks",
    "top_k",
    "unite_elements",
    "unite_rows",
    "unpack_signs",
]
