"""Every kernel in plain torch operations: the definition that the fast implementations must meet bit for bit.

Runs on any device and dtype, so it is also the fallback. `gradsync.kernels` says what each kernel promises.
"""

from gradsync.kernels.in_steps import Steps
from gradsync.kernels.reference.chunks import take_chunks
from gradsync.kernels.reference.convert import narrow, sum_parts
from gradsync.kernels.reference.digests import digest
from gradsync.kernels.reference.draws import draws, draws_at, noise
from gradsync.kernels.reference.elements import (
    NonzeroElements,
    count_bits,
    decode_bitmap,
    encode_bitmap,
    nonzero_elements,
)
from gradsync.kernels.reference.hashing import (
    HashedPartition,
    owned_by_hash,
    owners_by_hash,
    partition_hashed,
    positions_in,
)
from gradsync.kernels.reference.hierarchy import hierarchical_hash
from gradsync.kernels.reference.largest import count_above, select_above, top_k
from gradsync.kernels.reference.norms import squared_norms
from gradsync.kernels.reference.offsets import decode_offsets, encode_offsets
from gradsync.kernels.reference.quantize import block_scales, dequantize, quantize
from gradsync.kernels.reference.randomized import hadamard, random_k
from gradsync.kernels.reference.rotated import (
    RotatedPartition,
    join_rotated,
    partition_rotated,
    rotated_index,
    rotation,
)
from gradsync.kernels.reference.rows import (
    NonzeroRows,
    RowUnion,
    accumulation_dtype,
    join_columns,
    nonzero_rows,
    scatter_rows,
    sum_rows,
    unite_rows,
)
from gradsync.kernels.reference.signs import pack_signs, unpack_signs
from gradsync.kernels.reference.sketches import count_sketch, sketch_estimates

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
    "HashedPartition",
    "NonzeroElements",
    "NonzeroRows",
    "RotatedPartition",
    "RowUnion",
    "accumulation_dtype",
    "block_scales",
    "count_above",
    "count_bits",
    "count_sketch",
    "decode_bitmap",
    "decode_offsets",
    "dequantize",
    "digest",
    "draws",
    "draws_at",
    "encode_bitmap",
    "encode_offsets",
    "hadamard",
    "hierarchical_hash",
    "join_columns",
    "join_elements",
    "narrow",
    "noise",
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
    "rotation",
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
