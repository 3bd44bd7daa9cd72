"""The native CPU kernels: checks of the arguments, number of threads, and calls into the C++ module (csrc/).

The module is built twice from one source, for any CPU and for AVX2; `load` picks what this machine runs. Each function
takes, beside the arguments of its namesake in `gradsync.kernels`, `threads` (by default torch's number of threads, and
1 where the work is small) and `module` (by default `load()`). No tensor is copied: what the C++ code cannot work on in
place it refuses.
"""

from gradsync.kernels.cpu.boundary import load, supports
from gradsync.kernels.cpu.chunks import take_chunks
from gradsync.kernels.cpu.convert import narrow, sum_parts
from gradsync.kernels.cpu.digests import digest
from gradsync.kernels.cpu.elements import NonzeroElements, count_bits, decode_bitmap, encode_bitmap, nonzero_elements
from gradsync.kernels.cpu.hashing import owned_by_hash, owners_by_hash, partition_hashed, positions_in
from gradsync.kernels.cpu.hierarchy import hierarchical_hash
from gradsync.kernels.cpu.largest import count_above, select_above, top_k
from gradsync.kernels.cpu.norms import squared_norms
from gradsync.kernels.cpu.offsets import decode_offsets, encode_offsets
from gradsync.kernels.cpu.parts import join_elements, partition_elements, unite_elements
from gradsync.kernels.cpu.quantize import block_scales, dequantize, quantize
from gradsync.kernels.cpu.randomized import hadamard, random_k
from gradsync.kernels.cpu.rotated import partition_rotated, rotated_index
from gradsync.kernels.cpu.rows import (
    NonzeroRows,
    RowUnion,
    join_columns,
    nonzero_rows,
    scatter_rows,
    sum_rows,
    unite_rows,
)
from gradsync.kernels.cpu.signs import pack_signs, unpack_signs
from gradsync.kernels.cpu.sketches import count_sketch, sketch_estimates

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
    "load",
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
    "supports",
    "top_k",
    "unite_elements",
    "unite_rows",
    "unpack_signs",
]
