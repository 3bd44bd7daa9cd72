#include "offsets.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace MODULE_NAME {
namespace {

constexpr size_t kChunk = 4096;  // items that are seen more than once while in the first-level cache

// The first item that is not greater than the one before it, of [first, stop); else `stop`.
template <typename Index> size_t find_descent(const Index *index, size_t first, size_t stop) {
    for (size_t begin = std::max<size_t>(first, 1); begin < stop; begin += kChunk) {
        const size_t end = std::min(stop, begin + kChunk);
        Index descends = 0;
        for (size_t i = begin; i < end; ++i) descends |= index[i] <= index[i - 1];
        if (!descends) continue;
        while (index[begin] > index[begin - 1]) ++begin;
        return begin;
    }
    return stop;
}

template <typename Index> void require_ascent(const Index *index, Indices indices, uint64_t size) {
    const size_t item = find_descent(index, 0, indices.count);
    const bool inside = indices.count == 0 || (index[0] >= 0 && static_cast<uint64_t>(index[indices.count - 1]) < size);
    if (item == indices.count && inside) return;
    check_indices(indices, 0, size);
    throw NotSorted{index[item - 1], index[item]};
}

// Of all full blocks, and of no other, the first offset is the largest.
void mark_full(uint8_t *offsets) {
    for (int i = 255; i > 0; --i) offsets[i] = static_cast<uint8_t>(i - 1);
    offsets[0] = 255;
}

bool is_full(const uint8_t *offsets) {
    uint8_t different = 0;
    for (int i = 1; i < 256; ++i) different |= offsets[i] ^ static_cast<uint8_t>(i - 1);
    return different == 0 && offsets[0] == 255;
}

template <typename Offset, typename Index>
void write_offsets(const Index *__restrict index, size_t count, char *__restrict offsets) {
    for (size_t i = 0; i < count; ++i) {
        const Offset offset = static_cast<Offset>(index[i]);
        std::memcpy(offsets + i * sizeof offset, &offset, sizeof offset);
    }
}

// Where the items of each block end, where it has some; else 0. Every item notes its own end in its block's place, and
// the last one stays: none waits for the one before it, as it would to count.
template <typename Format, typename Index>
void note_ends(const Index *__restrict index, size_t count, uint32_t *__restrict ends, size_t blocks) {
    std::fill(ends, ends + blocks, 0);
    for (size_t i = 0; i < count; ++i)
        ends[static_cast<uint64_t>(index[i]) / kBlockSize<Format>] = static_cast<uint32_t>(i + 1);
}

// The same, for many items in a block: in steps that grow until they pass its last one.
template <typename Format, typename Index>
void seek_ends(const Index *index, size_t count, uint32_t *ends, size_t blocks) {
    size_t begin = 0;
    for (size_t block = 0; block < blocks; ++block) {
        const auto inside = [block](Index i) { return static_cast<uint64_t>(i) / kBlockSize<Format> == block; };
        size_t step = 16;
        while (begin + step < count && inside(index[begin + step])) begin += step, step *= 2;
        begin = std::partition_point(index + begin, index + std::min(count, begin + step), inside) - index;
        ends[block] = static_cast<uint32_t>(begin);
    }
}

// Returns where the block ends.
template <typename Format>
uint32_t write_count(size_t block, uint32_t begin, uint32_t end, char *message, char *offsets) {
    uint32_t count = end - begin;
    if (std::is_same_v<Format, Offsets8> && count == kBlockSize<Offsets8>) {
        mark_full(reinterpret_cast<uint8_t *>(offsets) + begin);
        count = 255;
    }
    const auto written = static_cast<typename Format::Count>(count);
    std::memcpy(message + block * sizeof written, &written, sizeof written);
    return end;
}

template <typename Format, typename Index>
void encode(const Index *index, const Indices &indices, uint64_t size, char *message) {
    constexpr size_t kMany = 16;  // items in a block
    require_ascent(index, indices, size);
    const size_t count = indices.count;
    if (count > std::numeric_limits<uint32_t>::max()) throw std::length_error("more than 2^32 - 1 indices: split them");
    const Scratch<uint32_t> ends(num_blocks<Format>(size));
    char *const offsets = message + ends.size() * sizeof(typename Format::Count);
    write_offsets<typename Format::Offset>(index, count, offsets);
    if (count / kMany >= ends.size()) seek_ends<Format>(index, count, ends.begin(), ends.size());
    else note_ends<Format>(index, count, ends.begin(), ends.size());
    uint32_t begin = 0;
    for (size_t block = 0; block < ends.size(); ++block)
        begin = write_count<Format>(block, begin, std::max(begin, ends[block]), message, offsets);
}

[[noreturn]] void refuse_message(const std::string &reason) {
    throw std::invalid_argument("decode_offsets: the message is malformed: " + reason);
}

// out = base + offsets; there is room for `room` entries, and as many offsets can be read. Eight at once, however few
// there are: what is too much is written over.
template <typename Offset, typename Index>
void widen_offsets(const char *offsets, size_t count, Index base, Index *__restrict out, size_t room) {
    constexpr size_t kLanes = 8;
    size_t i = 0;
    for (; i + kLanes <= room; i += kLanes) {
        Offset lanes[kLanes];
        std::memcpy(lanes, offsets + i * sizeof(Offset), sizeof lanes);
        for (size_t lane = 0; lane < kLanes; ++lane) out[i + lane] = base + lanes[lane];
        if (i + kLanes >= count) return;
    }
    for (; i < count; ++i) {
        Offset offset;
        std::memcpy(&offset, offsets + i * sizeof offset, sizeof offset);
        out[i] = base + offset;
    }
}

// Of the 256 offsets of a full block.
template <typename Index> void write_block(Index base, Index *out) {
    for (int i = 0; i < 256; ++i) out[i] = base + i;
}

template <typename Index> void require_ascending(const Index *out, size_t first, size_t stop) {
    const size_t item = find_descent(out, first, stop);
    if (item < stop)
        refuse_message("index " + std::to_string(out[item]) + " follows " + std::to_string(out[item - 1]));
}

}  // namespace

template <typename Format> void encode_offsets(Indices indices, uint64_t size, char *message) {
    with_indices(indices, [&](auto *index) { encode<Format>(index, indices, size, message); });
}

template void encode_offsets<Offsets8>(Indices, uint64_t, char *);
template void encode_offsets<Offsets16>(Indices, uint64_t, char *);

template <typename Format, typename Index>
void decode_offsets(const char *message, uint64_t size, Index *out, size_t count) {
    using Offset = typename Format::Offset;
    using Count = typename Format::Count;
    const uint64_t blocks = num_blocks<Format>(size);
    const char *const offsets = message + blocks * sizeof(Count);
    size_t begin = 0, checked = 0;
    for (uint64_t block = 0; block < blocks; ++block) {
        Count counted;
        std::memcpy(&counted, message + block * sizeof counted, sizeof counted);
        const size_t room = count - begin;
        size_t found = static_cast<uint32_t>(counted);  // a negative one is too many
        const char *const from = offsets + begin * sizeof(Offset);
        const Index base = static_cast<Index>(block * kBlockSize<Format>);
        if (std::is_same_v<Format, Offsets8> && found == 255 && room >= 256 &&
            is_full(reinterpret_cast<const uint8_t *>(from))) {
            write_block(base, out + begin);
            found = 256;
        } else if (found <= room) {
            widen_offsets<Offset>(from, found, base, out + begin, room);
        } else {
            refuse_message("its counts add up to more than " + std::to_string(count));
        }
        begin += found;
        if (begin - checked >= kChunk) require_ascending(out, checked, begin), checked = begin;
    }
    require_ascending(out, checked, begin);
    if (begin < count)
        refuse_message("its counts add up to " + std::to_string(begin) + ", expected " + std::to_string(count));
    if (count > 0 && static_cast<uint64_t>(out[count - 1]) >= size)
        refuse_message("index " + std::to_string(out[count - 1]) + " is outside [0, size=" + std::to_string(size) + ")");
}

template void decode_offsets<Offsets8>(const char *, uint64_t, int32_t *, size_t);
template void decode_offsets<Offsets8>(const char *, uint64_t, int64_t *, size_t);
template void decode_offsets<Offsets16>(const char *, uint64_t, int32_t *, size_t);
template void decode_offsets<Offsets16>(const char *, uint64_t, int64_t *, size_t);

}  // namespace MODULE_NAME
