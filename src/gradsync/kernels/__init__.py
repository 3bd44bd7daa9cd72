"""Kernels: the inner loops of gradsync, each a function with three implementations, chosen for the whole process.

`reference` (plain torch) defines what a kernel does; `native` (C++, CPU) and `triton` (CUDA) give the same bits faster.
A call of a function here runs one of them; `sum_rows.reference` is the definition of `sum_rows` itself.
`auto`, the default, uses triton for tensors on a CUDA device and native for tensors on the CPU, if the implementation
can be loaded and supports the dtypes; one log line says what cannot be loaded, for the native one at import already.

The caller owns every output. Where its size is known only after a look at the input, a kernel has two phases: the
function counts and returns an object with `count`; its methods then write into buffers of that size. The object keeps
its inputs alive; they must not change between the phases. Tensors are rows of adjacent elements: a row stride that is
larger, as in a slice of columns, is fine. The native and Triton kernels never copy: any other stride, dtype, device or
layout is a TypeError.
A NaN stays a NaN in every conversion, but its bits may change.
"""

from .checks import PackedPositions as PackedPositions
from .checks import RowsPart as RowsPart
from .checks import Sections as Sections
from .checks import SignScale as SignScale
from .checks import Stripes as Stripes
from .checks import offsets_nbytes as offsets_nbytes
from .checks import packed_nbytes as packed_nbytes
from .checks import sign_scales_shape as sign_scales_shape
from .choice import Implementation as Implementation
from .choice import active as active
from .choice import use as use
from .choice import warn_if_slow as _warn_if_slow
from .draws import rotation_sizes as rotation_sizes
from .grids import AnyGrid as AnyGrid
from .grids import FloatGrid as FloatGrid
from .grids import Grid as Grid
from .grids import codes_nbytes as codes_nbytes
from .grids import num_scales as num_scales
from .hierarchy import HashedIndices as HashedIndices
from .phases import ElementPartition as ElementPartition
from .phases import ElementUnion as ElementUnion
from .phases import HashedPartition as HashedPartition
from .phases import NonzeroElements as NonzeroElements
from .phases import NonzeroRows as NonzeroRows
from .phases import RotatedPartition as RotatedPartition
from .phases import RowUnion as RowUnion
from .reference.chunks import take_chunks as take_chunks
from .reference.codes import block_scales as block_scales
from .reference.codes import dequantize as dequantize
from .reference.codes import quantize as quantize
from .reference.convert import narrow as narrow
from .reference.convert import sum_parts as sum_parts
from .reference.digests import digest as digest
from .reference.elements import count_bits as count_bits
from .reference.elements import decode_bitmap as decode_bitmap
from .reference.elements import encode_bitmap as encode_bitmap
from .reference.elements import nonzero_elements as nonzero_elements
from .reference.hashing import owned_by_hash as owned_by_hash
from .reference.hashing import owners_by_hash as owners_by_hash
from .reference.hashing import partition_hashed as partition_hashed
from .reference.hashing import positions_in as positions_in
from .reference.hierarchy import hierarchical_hash as hierarchical_hash
from .reference.largest import count_above as count_above
from .reference.largest import select_above as select_above
from .reference.largest import top_k as top_k
from .reference.norms import squared_norms as squared_norms
from .reference.offsets import decode_offsets as decode_offsets
from .reference.offsets import encode_offsets as encode_offsets
from .reference.parts import join_elements as join_elements
from .reference.parts import partition_elements as partition_elements
from .reference.parts import unite_elements as unite_elements
from .reference.parts import unite_messages as unite_messages
from .reference.randomized import hadamard as hadamard
from .reference.randomized import random_k as random_k
from .reference.rotated import partition_rotated as partition_rotated
from .reference.rotated import rotated_index as rotated_index
from .reference.rows import accumulation_dtype as accumulation_dtype
from .reference.rows import join_columns as join_columns
from .reference.rows import nonzero_rows as nonzero_rows
from .reference.rows import scatter_rows as scatter_rows
from .reference.rows import sum_rows as sum_rows
from .reference.rows import unite_rows as unite_rows
from .reference.signs import pack_signs as pack_signs
from .reference.signs import unpack_signs as unpack_signs
from .reference.sketches import count_sketch as count_sketch
from .reference.sketches import sketch_estimates as sketch_estimates

_warn_if_slow()
