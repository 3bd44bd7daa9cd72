// Ascending positions without duplicates as they travel: a bitmap, offsets within blocks, or the integers themselves.
// They are read and written a chunk at a time by whoever works through a part in order, who needs no list of them all.
//
// Offsets: how many each block has, then all offsets. Of 16 bits: an int32 for each block. Of 8 bits: a byte for each
// block, in which 255 stands for 255 and, where the block's first offset is 255, for a full block: 255, 0, 1, ..., 254;
// or, where that is shorter, a one for each index and a zero behind each block, from the lowest bit of a byte on (Elias
// and Fano's upper bits).
#pragma once

#include <cstddef>
#include <cstdint>

#include "rows.hpp"

namespace gradsync {

// How positions travel, by its bits an index.
enum class Format : int { bitmap = 1, offsets8 = 8, offsets16 = 16, list32 = 32, list64 = 64 };

uint64_t packed_nbytes(uint64_t count, uint64_t size, Format format);

struct Packed {
    const char *data;  // packed_nbytes(), at an address that is a multiple of a word's or integer's size
    size_t count;
    Format format;
};

// Reads positions in [0, size) from the front on. Throws std::invalid_argument where they do not ascend, are outside, or
// are more or fewer than `count`: what was read until then may be wrong too.
class PackedReader {
public:
    static constexpr size_t kLanes = 8;  // entries that are written at once, however many are meant

    PackedReader(Packed part, uint64_t size);

    // Goes on at `begin`, a multiple of 256.
    void skip_to(uint64_t begin);
    // base + each position from where the last call ended up to `end`, a multiple of 256 or at least `size`; how many.
    // `room`: entries that may be written to, as many as there may be; kLanes more make it faster.
    template <typename Index> size_t read(uint64_t end, int64_t base, Index *out, size_t room);
    // Those read or skipped until now.
    size_t item() const { return item_; }

private:
    template <typename Index> size_t read_bitmap(uint64_t end, int64_t base, Index *out, size_t room);
    template <typename Index> size_t read_counted(uint64_t end, int64_t base, Index *out, size_t room);
    template <typename Index> size_t read_unary(uint64_t end, int64_t base, Index *out, size_t room);
    template <typename Index> size_t read_offsets16(uint64_t end, int64_t base, Index *out, size_t room);
    template <typename Integer, typename Index> size_t read_list(uint64_t end, int64_t base, Index *out, size_t room);
    uint32_t counted(uint64_t block, size_t item) const;
    void begin_block16(uint64_t block);
    uint64_t unary_from(uint64_t bit) const;

    Packed part_;
    uint64_t size_, blocks_;
    const char *offsets_;
    bool unary_;
    uint64_t next_ = 0;      // where the next chunk begins
    size_t item_ = 0;        // the next one
    uint64_t bit_ = 0;       // unary counts: the next one
    size_t block_end_ = 0;   // offsets of 16 bits: behind the items of the block that is being read
    bool in_block_ = false;
};

// Where packed_nbytes() bytes are to be written.
struct PackedOut {
    char *data;
    Format format;
};

// Writes positions, of `count` in [0, size), from the one numbered `item` on: all but what tells of blocks or bits.
class PackedWriter {
public:
    PackedWriter(PackedOut out, size_t count, uint64_t size, size_t item);
    // base + each position.
    void append(const int32_t *positions, size_t count, uint64_t base);

private:
    char *to_;
    Format format_;
};

// Writes the rest of them, whose bits are set in a bitmap of [0, size).
void write_marks(const uint64_t *words, uint64_t size, size_t count, PackedOut out);

// Writes packed_nbytes() bytes, of offsets. Throws BadIndex if an index is not in [0, size), NotSorted if two neighbours
// do not ascend or are equal; both before it writes.
void encode_offsets(Indices indices, uint64_t size, Format format, char *message);

// The indices of a message of packed_nbytes() bytes. Throws as PackedReader does; `out` has been written to then.
template <typename Index> void decode_offsets(Packed message, uint64_t size, Index *out);

}  // namespace gradsync
