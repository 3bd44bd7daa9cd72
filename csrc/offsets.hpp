// Ascending indices without duplicates as offsets within blocks of 256 or 65536, between a list and a bitmap in
// density: the count of each block, then all offsets. With 8 bits a count is one byte, in which 255 stands for 255 and,
// where the block's first offset is 255, for a full block: 255, 0, 1, ..., 254.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rows.hpp"

namespace MODULE_NAME {

struct Offsets8 {
    using Offset = uint8_t;
    using Count = uint8_t;
};
struct Offsets16 {
    using Offset = uint16_t;
    using Count = int32_t;
};

// Indices that share all but their lowest bits.
template <typename Format> constexpr uint64_t kBlockSize = uint64_t{1} << 8 * sizeof(typename Format::Offset);

template <typename Format> uint64_t num_blocks(uint64_t size) {
    return size / kBlockSize<Format> + (size % kBlockSize<Format> != 0);
}

template <typename Format> uint64_t offsets_nbytes(uint64_t count, uint64_t size) {
    return num_blocks<Format>(size) * sizeof(typename Format::Count) + count * sizeof(typename Format::Offset);
}

// Writes offsets_nbytes() bytes. Throws BadIndex if an index is not in [0, size), NotSorted if two neighbours do not
// ascend or are equal; both before it writes.
template <typename Format> void encode_offsets(Indices indices, uint64_t size, char *message);

// The `count` indices of a message of offsets_nbytes() bytes. Throws std::invalid_argument for one that no such indices
// have; `out` has been written to then.
template <typename Format, typename Index>
void decode_offsets(const char *message, uint64_t size, Index *out, size_t count);

}  // namespace MODULE_NAME
