"""The inner loops: one function a kernel, one table of implementations, chosen once for the process.

`reference` (plain torch) defines what a kernel does; `native` (C++, CPU) and `triton` (CUDA) give the same bits faster.
`auto`, the default, takes triton for tensors on a CUDA device and native for those on the CPU, where they can be loaded
and know the dtypes, and says in one log line what cannot be loaded.

The caller owns every output. Where its size is known only after a look at the input, a kernel has two phases: the
function counts and returns an object with `count`; its methods then write into buffers of that size. The object keeps
its inputs alive; they must not change between the phases. Tensors are rows of adjacent elements: a row stride that is
larger, as in a slice of columns, is fine. The native and Triton kernels never copy: any other stride, dtype, device or
layout is a TypeError.
A NaN stays a NaN in every conversion, but not which one.
"""

from gradsync.kernels.checks import (
    PackedPositions,
    RowsPart,
    Sections,
    SignScale,
    Stripes,
    offsets_nbytes,
    packed_nbytes,
    sign_scales_shape,
)
from gradsync.kernels.choice import Implementation, active, use
from gradsync.kernels.chunks import take_chunks
from gradsync.kernels.digests import digest
from gradsync.kernels.draws import rotation_sizes
from gradsync.kernels.elements import join_elements, nonzero_elements, partition_elements, unite_elements
from gradsync.kernels.formats import count_bits, decode_bitmap, decode_offsets, encode_bitmap, encode_offsets
from gradsync.kernels.grids import AnyGrid, FloatGrid, Grid, codes_nbytes, num_scales
from gradsync.kernels.hierarchy import HashedIndices
from gradsync.kernels.owners import (
    hierarchical_hash,
    owned_by_hash,
    owners_by_hash,
    partition_hashed,
    partition_rotated,
    positions_in,
    rotated_index,
)
from gradsync.kernels.phases import (
    ElementPartition,
    ElementUnion,
    HashedPartition,
    NonzeroElements,
    NonzeroRows,
    RotatedPartition,
    RowUnion,
)
from gradsync.kernels.precision import block_scales, dequantize, narrow, pack_signs, quantize, sum_parts, unpack_signs
from gradsync.kernels.randomized import hadamard, random_k
from gradsync.kernels.reference import accumulation_dtype
from gradsync.kernels.rows import join_columns, nonzero_rows, scatter_rows, sum_rows, unite_rows
from gradsync.kernels.selection import count_above, select_above, squared_norms, top_k
from gradsync.kernels.sketches import count_sketch, sketch_estimates

__all__ = [
    "AnyGrid",
    "ElementPartition",
    "ElementUnion",
    "FloatGrid",
    "Grid",
    "HashedIndices",
    "HashedPartition",
    "Implementation",
    "NonzeroElements",
    "NonzeroRows",
    "PackedPositions",
    "RotatedPartition",
    "RowUnion",
    "RowsPart",
    "Sections",
    "SignScale",
    "Stripes",
    "accumulation_dtype",
    "active",
    "block_scales",
    "codes_nbytes",
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
    "num_scales",
    "offsets_nbytes",
    "owned_by_hash",
    "owners_by_hash",
    "pack_signs",
    "packed_nbytes",
    "partition_elements",
    "partition_hashed",
    "partition_rotated",
    "positions_in",
    "quantize",
    "random_k",
    "rotated_index",
    "rotation_sizes",
    "scatter_rows",
    "select_above",
    "sign_scales_shape",
    "sketch_estimates",
    "squared_norms",
    "sum_parts",
    "sum_rows",
    "take_chunks",
    "top_k",
    "unite_elements",
    "unite_rows",
    "unpack_signs",
    "use",
]
