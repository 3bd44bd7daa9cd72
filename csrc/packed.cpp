#include "packed.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "rank_bitmap.hpp"
#include "scratch.hpp"

namespace gradsync {
namespace {

constexpr size_t kChunk = 4096;  // items that are seen more than once while in the first-level cache
constexpr uint64_t kBlock8 = 256, kBlock16 = 65536;

[[noreturn]] void refuse_message(const std::string &reason) {
    throw std::invalid_argument("the message is malformed: " + reason);
}

uint64_t blocks_of(uint64_t size, uint64_t block) { return size / block + (size % block != 0); }

uint64_t block_size(Format format) { return format == Format::offsets16 ? kBlock16 : kBlock8; }

uint64_t unary_nbytes(uint64_t count, uint64_t blocks) { return (count + blocks + 7) / 8; }

uint64_t counts_nbytes(uint64_t count, uint64_t blocks, Format format) {
    if (format == Format::offsets16) return blocks * sizeof(int32_t);
    return std::min(blocks, unary_nbytes(count, blocks));
}

bool is_unary(uint64_t count, uint64_t blocks, Format format) {
    return format == Format::offsets8 && unary_nbytes(count, blocks) < blocks;
}

template <typename T> T load(const char *from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <typename T> void store(char *to, T value) { std::memcpy(to, &value, sizeof value); }

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
void mark_full(char *offsets) {
    for (int i = 255; i > 0; --i) offsets[i] = static_cast<char>(i - 1);
    offsets[0] = static_cast<char>(255);
}

bool is_full(const char *offsets) {
    uint8_t different = 0;
    for (int i = 1; i < 256; ++i) different |= static_cast<uint8_t>(offsets[i]) ^ static_cast<uint8_t>(i - 1);
    return different == 0 && static_cast<uint8_t>(offsets[0]) == 255;
}

// A byte that counts the items of a block whose offsets these are.
char counting_byte(size_t count, char *offsets) {
    if (count == kBlock8) mark_full(offsets);
    return static_cast<char>(std::min<size_t>(count, 255));
}

// Ones and zeros, from the lowest bit of a byte on.
class UnaryWriter {
public:
    explicit UnaryWriter(char *to) : to_(to) {}

    // So many ones, and a zero behind them.
    void add(size_t ones) {
        for (; ones >= kStep; ones -= kStep) push((uint64_t{1} << kStep) - 1, kStep);
        push((uint64_t{1} << ones) - 1, static_cast<int>(ones) + 1);
    }
    void finish() {
        for (; filled_ > 0; filled_ -= 8, bits_ >>= 8) *to_++ = static_cast<char>(bits_);
    }

private:
    static constexpr int kStep = 24, kStored = 32;

    void push(uint64_t bits, int count) {
        bits_ |= bits << filled_;
        filled_ += count;
        if (filled_ < kStored) return;
        store(to_, static_cast<uint32_t>(bits_));
        to_ += sizeof(uint32_t), bits_ >>= kStored, filled_ -= kStored;
    }

    char *to_;
    uint64_t bits_ = 0;  // that are not stored yet, less than kStored of them
    int filled_ = 0;
};

template <typename Offset, typename Index>
void write_offsets(const Index *__restrict index, size_t count, uint64_t base, char *__restrict offsets) {
    for (size_t i = 0; i < count; ++i) store(offsets + i * sizeof(Offset), static_cast<Offset>(base + index[i]));
}

// Where the items of each block end, where it has some; else 0. Every item notes its own end in its block's place, and
// the last one stays: none waits for the one before it, as it would to count.
template <typename Index>
void note_ends(const Index *__restrict index, size_t count, int shift, uint32_t *__restrict ends, size_t blocks) {
    std::fill(ends, ends + blocks, 0);
    for (size_t i = 0; i < count; ++i) ends[static_cast<uint64_t>(index[i]) >> shift] = static_cast<uint32_t>(i + 1);
}

// The same, for many items in a block: in steps that grow until they pass its last one.
template <typename Index>
void seek_ends(const Index *index, size_t count, int shift, uint32_t *ends, size_t blocks) {
    size_t begin = 0;
    for (size_t b = 0; b < blocks; ++b) {
        const auto inside = [=](Index i) { return static_cast<uint64_t>(i) >> shift == b; };
        size_t step = 16;
        while (begin + step < count && inside(index[begin + step])) begin += step, step *= 2;
        begin = std::partition_point(index + begin, index + std::min(count, begin + step), inside) - index;
        ends[b] = static_cast<uint32_t>(begin);
    }
}

template <typename Index>
void write_counts(const Index *index, size_t count, Format format, uint64_t blocks, char *message, char *offsets) {
    constexpr size_t kMany = 16;  // items in a block
    const int shift = format == Format::offsets16 ? 16 : 8;
    const Scratch<uint32_t> ends(blocks);
    if (count / kMany >= blocks) seek_ends(index, count, shift, ends.begin(), blocks);
    else note_ends(index, count, shift, ends.begin(), blocks);
    uint32_t begin = 0;
    for (size_t b = 0; b < blocks; ++b) {
        const uint32_t end = std::max(begin, ends[b]);
        if (format == Format::offsets8) message[b] = counting_byte(end - begin, offsets + begin);
        else store(message + b * sizeof(int32_t), static_cast<int32_t>(end - begin));
        begin = end;
    }
}

// The ones of many indices in a word are put together before it is stored.
template <typename Index> void write_unary(const Index *index, size_t count, uint64_t blocks, char *message) {
    const size_t nbytes = unary_nbytes(count, blocks);
    std::memset(message, 0, nbytes);
    uint64_t word = 0, first = 0;  // bits that are not stored yet, and where they begin: with a byte
    const auto flush = [&] { std::memcpy(message + first / 8, &word, std::min(sizeof word, nbytes - first / 8)); };
    for (size_t i = 0; i < count; ++i) {
        const uint64_t bit = (static_cast<uint64_t>(index[i]) >> 8) + i;
        if (bit - first >= kWordBits) flush(), word = 0, first = bit / 8 * 8;
        word |= uint64_t{1} << (bit - first);
    }
    flush();
}

template <typename Index>
void encode(const Index *index, const Indices &indices, uint64_t size, Format format, char *message) {
    require_ascent(index, indices, size);
    const size_t count = indices.count;
    if (count > std::numeric_limits<uint32_t>::max()) throw std::length_error("more than 2^32 - 1 indices: split them");
    const uint64_t blocks = blocks_of(size, block_size(format));
    char *const offsets = message + counts_nbytes(count, blocks, format);
    if (format == Format::offsets16) write_offsets<uint16_t>(index, count, 0, offsets);
    else write_offsets<uint8_t>(index, count, 0, offsets);
    if (is_unary(count, blocks, format)) write_unary(index, count, blocks, message);
    else write_counts(index, count, format, blocks, message, offsets);
}

// out = base + offsets; there is room for `room` entries, and as many offsets can be read. Eight at once, however few
// there are: what is too much is written over.
template <typename Index>
void widen_offsets(const char *offsets, size_t count, Index base, Index *__restrict out, size_t room) {
    constexpr size_t kLanes = PackedReader::kLanes;
    size_t i = 0;
    for (; i + kLanes <= room; i += kLanes) {
        uint8_t lanes[kLanes];
        std::memcpy(lanes, offsets + i, sizeof lanes);
        for (size_t lane = 0; lane < kLanes; ++lane) out[i + lane] = base + lanes[lane];
        if (i + kLanes >= count) return;
    }
    for (; i < count; ++i) out[i] = base + static_cast<uint8_t>(offsets[i]);
}

}  // namespace

uint64_t packed_nbytes(uint64_t count, uint64_t size, Format format) {
    switch (format) {
    case Format::bitmap: return words_for(size) * sizeof(uint64_t);
    case Format::list32: return count * sizeof(int32_t);
    case Format::list64: return count * sizeof(int64_t);
    default: break;
    }
    const uint64_t width = format == Format::offsets16 ? sizeof(uint16_t) : 1;
    return counts_nbytes(count, blocks_of(size, block_size(format)), format) + count * width;
}

PackedReader::PackedReader(Packed part, uint64_t size)
    : part_(part), size_(size), blocks_(blocks_of(size, block_size(part.format))),
      offsets_(part.data + counts_nbytes(part.count, blocks_, part.format)),
      unary_(is_unary(part.count, blocks_, part.format)) {}

// Items of a block of 8-bit offsets, of which `item` is the first.
uint32_t PackedReader::counted(uint64_t block, size_t item) const {
    const uint32_t count = static_cast<uint8_t>(part_.data[block]);
    if (count == 255 && part_.count - item >= kBlock8 && is_full(offsets_ + item)) return kBlock8;
    if (count > part_.count - item) refuse_message("its counts add up to more than " + std::to_string(part_.count));
    return count;
}

void PackedReader::begin_block16(uint64_t block) {
    const size_t count = load<uint32_t>(part_.data + block * sizeof(uint32_t));  // a negative one is too many
    if (count > part_.count - item_) refuse_message("its counts add up to more than " + std::to_string(part_.count));
    block_end_ = item_ + count;
    in_block_ = true;
}

// Up to 64 bits of the unary counts, the first at `bit`; zeros behind their end.
uint64_t PackedReader::unary_from(uint64_t bit) const {
    const size_t nbytes = offsets_ - part_.data, at = bit / 8;
    uint64_t word = 0;
    if (at < nbytes) std::memcpy(&word, part_.data + at, std::min(sizeof word, nbytes - at));
    return word >> bit % 8;
}

void PackedReader::skip_to(uint64_t begin) {
    if (begin == next_) return;
    switch (part_.format) {
    case Format::bitmap:
        item_ += popcount(reinterpret_cast<const uint64_t *>(part_.data) + next_ / kWordBits,
                            (begin - next_) / kWordBits);
        break;
    case Format::offsets8:
        for (uint64_t block = next_ / kBlock8; block < begin / kBlock8; ++block) {
            if (!unary_) {
                item_ += counted(block, item_);
                continue;
            }
            uint64_t ones;
            do {
                const uint64_t bits = unary_from(bit_);
                ones = std::min<uint64_t>(lowest_bit(~bits | uint64_t{1} << 56), 56);
                bit_ += ones, item_ += ones;
            } while (ones == 56);
            ++bit_;
        }
        if (item_ > part_.count) refuse_message("its counts add up to more than " + std::to_string(part_.count));
        break;
    case Format::offsets16:
        for (uint64_t block = next_ / kBlock16; block < begin / kBlock16; ++block) {
            if (!in_block_) begin_block16(block);
            item_ = block_end_, in_block_ = false;
        }
        if (begin % kBlock16 == 0) break;
        if (!in_block_) begin_block16(begin / kBlock16);
        while (item_ < block_end_ && load<uint16_t>(offsets_ + item_ * sizeof(uint16_t)) < begin % kBlock16) ++item_;
        break;
    case Format::list32: {
        const auto *list = reinterpret_cast<const int32_t *>(part_.data);
        item_ = std::partition_point(list, list + part_.count, [=](int64_t i) { return i < static_cast<int64_t>(begin); }) - list;
        break;
    }
    case Format::list64: {
        const auto *list = reinterpret_cast<const int64_t *>(part_.data);
        item_ = std::partition_point(list, list + part_.count, [=](int64_t i) { return i < static_cast<int64_t>(begin); }) - list;
    }
    }
    next_ = begin;
}

template <typename Index> size_t PackedReader::read_bitmap(uint64_t end, int64_t base, Index *out, size_t room) {
    const auto *words = reinterpret_cast<const uint64_t *>(part_.data);
    const size_t first = next_ / kWordBits, stop = words_for(std::min(end, size_));
    const size_t count = popcount(words + first, stop - first);
    if (count > std::min(room, part_.count - item_))
        refuse_message("it has more than " + std::to_string(part_.count) + " bits set");
    decode_words(words + first, stop - first, base + next_, out, count);
    return count;
}

template <typename Index> size_t PackedReader::read_counted(uint64_t end, int64_t base, Index *out, size_t room) {
    const uint64_t stop = std::min(blocks_, blocks_of(end, kBlock8));
    size_t found = 0;
    for (uint64_t block = next_ / kBlock8; block < stop; ++block) {
        const size_t item = item_ + found, count = counted(block, item);
        const auto first = static_cast<Index>(static_cast<int64_t>(block * kBlock8) + base);
        if (count == kBlock8)
            for (size_t i = 0; i < kBlock8; ++i) out[found + i] = first + static_cast<Index>(i);
        else
            widen_offsets(offsets_ + item, count, first, out + found, std::min(room - found, part_.count - item));
        found += count;
    }
    return found;
}

template <typename Index> size_t PackedReader::read_unary(uint64_t end, int64_t base, Index *out, size_t room) {
    constexpr uint64_t kStep = 56;  // bits that unary_from() surely has
    const uint64_t stop = std::min(blocks_, blocks_of(end, kBlock8));
    uint64_t block = next_ / kBlock8;
    size_t found = 0;
    while (block < stop) {
        uint64_t bits = unary_from(bit_) & ((uint64_t{1} << kStep) - 1);
        const uint64_t zeros = kStep - popcount(bits);
        if (zeros >= stop - block) {  // the last of them ends this chunk: no bit behind it counts
            uint64_t last = ~bits & ((uint64_t{1} << kStep) - 1);
            for (uint64_t more = stop - block; more > 1; --more) last &= last - 1;
            const int width = lowest_bit(last);
            bits &= (uint64_t{1} << width) - 1;
            bit_ += width + 1;
        } else {
            bit_ += kStep;
        }
        const size_t ones = popcount(bits);
        if (ones > std::min(room, part_.count - item_) - found)
            refuse_message("its counts add up to more than " + std::to_string(part_.count));
        const char *const offsets = offsets_ + item_ + found;
        for (size_t i = 0; i < ones; ++i, bits &= bits - 1) {
            const int64_t in = block + lowest_bit(bits) - i;
            out[found + i] = static_cast<Index>(in * static_cast<int64_t>(kBlock8) + base + static_cast<uint8_t>(offsets[i]));
        }
        found += ones;
        block = std::min(block + zeros, stop);
    }
    return found;
}

template <typename Index> size_t PackedReader::read_offsets16(uint64_t end, int64_t base, Index *out, size_t room) {
    size_t found = 0;
    for (uint64_t at = next_; at < std::min(end, size_);) {
        const uint64_t block = at / kBlock16, first = block * kBlock16;
        if (!in_block_) begin_block16(block);
        const char *const from = offsets_ + item_ * sizeof(uint16_t);
        size_t count = block_end_ - item_;
        if (end - first < kBlock16) {  // the chunk ends within this block
            const uint64_t limit = end - first;
            size_t some = 0;
            while (some < count && load<uint16_t>(from + some * sizeof(uint16_t)) < limit) ++some;
            count = some;
        }
        if (count > room - found) refuse_message("a block has more offsets than places");
        const auto to_add = static_cast<Index>(static_cast<int64_t>(first) + base);
        for (size_t i = 0; i < count; ++i) out[found + i] = to_add + load<uint16_t>(from + i * sizeof(uint16_t));
        found += count;
        item_ += count;
        at = std::min(end, first + kBlock16);
        if (at == first + kBlock16 || at >= size_) {
            if (item_ != block_end_) refuse_message("the offsets of a block do not ascend");
            in_block_ = false;
        }
    }
    item_ -= found;  // read() counts them
    return found;
}

template <typename Integer, typename Index>
size_t PackedReader::read_list(uint64_t end, int64_t base, Index *out, size_t room) {
    const auto *list = reinterpret_cast<const Integer *>(part_.data);
    const auto first = static_cast<int64_t>(next_);
    size_t item = item_;
    for (; item < part_.count && list[item] < static_cast<int64_t>(end); ++item) {
        if (item - item_ == room || list[item] < first)
            refuse_message("index " + std::to_string(list[item]) + " is out of order");
        out[item - item_] = static_cast<Index>(list[item] + base);
    }
    return item - item_;
}

template <typename Index> size_t PackedReader::read(uint64_t end, int64_t base, Index *out, size_t room) {
    size_t found = 0;
    switch (part_.format) {
    case Format::bitmap: found = read_bitmap(end, base, out, room); break;
    case Format::offsets8: found = unary_ ? read_unary(end, base, out, room) : read_counted(end, base, out, room); break;
    case Format::offsets16: found = read_offsets16(end, base, out, room); break;
    case Format::list32: found = read_list<int32_t>(end, base, out, room); break;
    case Format::list64: found = read_list<int64_t>(end, base, out, room); break;
    }
    const size_t item = find_descent(out, 0, found);
    if (item < found)
        refuse_message("index " + std::to_string(out[item] - base) + " follows " + std::to_string(out[item - 1] - base));
    const auto first = static_cast<int64_t>(next_), bound = static_cast<int64_t>(std::min(end, size_));
    if (found > 0 && (out[0] - base < first || out[found - 1] - base >= bound)) {
        const int64_t wrong = (out[0] - base < first ? out[0] : out[found - 1]) - base;
        refuse_message("index " + std::to_string(wrong) + " is out of order, or outside [0, size=" +
                       std::to_string(size_) + ")");
    }
    item_ += found;
    next_ = end;
    if (end >= size_ && item_ != part_.count)
        refuse_message("it has " + std::to_string(item_) + " indices in [0, size=" + std::to_string(size_) +
                       "), expected " + std::to_string(part_.count));
    if (end >= size_ && unary_ && unary_from(bit_) != 0) refuse_message("there are bits behind its counts");
    return found;
}

template size_t PackedReader::read(uint64_t, int64_t, int32_t *, size_t);
template size_t PackedReader::read(uint64_t, int64_t, int64_t *, size_t);

PackedWriter::PackedWriter(PackedOut out, size_t count, uint64_t size, size_t item) : format_(out.format) {
    const bool offsets = format_ == Format::offsets8 || format_ == Format::offsets16;
    const uint64_t head = offsets ? counts_nbytes(count, blocks_of(size, block_size(format_)), format_) : 0;
    to_ = out.data + head + item * static_cast<size_t>(format_) / 8;
}

void PackedWriter::append(const int32_t *positions, size_t count, uint64_t base) {
    switch (format_) {
    case Format::bitmap: return;
    case Format::offsets8: write_offsets<uint8_t>(positions, count, base, to_); break;
    case Format::offsets16: write_offsets<uint16_t>(positions, count, base, to_); break;
    case Format::list32: write_offsets<int32_t>(positions, count, base, to_); break;
    case Format::list64: write_offsets<int64_t>(positions, count, base, to_); break;
    }
    to_ += count * static_cast<size_t>(format_) / 8;
}

void write_marks(const uint64_t *words, uint64_t size, size_t count, PackedOut out) {
    const Format format = out.format;
    if (format == Format::bitmap) std::copy_n(words, words_for(size), reinterpret_cast<uint64_t *>(out.data));
    if (format != Format::offsets8 && format != Format::offsets16) return;
    const uint64_t block = block_size(format), blocks = blocks_of(size, block);
    const size_t per_block = block / kWordBits, num_words = words_for(size);
    const bool unary = is_unary(count, blocks, format);
    char *offsets = out.data + counts_nbytes(count, blocks, format);
    UnaryWriter ones(out.data);
    for (uint64_t b = 0; b < blocks; ++b) {
        const size_t found = popcount(words + b * per_block, std::min(per_block, num_words - b * per_block));
        if (unary) ones.add(found);
        else if (format == Format::offsets8) out.data[b] = counting_byte(found, offsets);
        else store(out.data + b * sizeof(int32_t), static_cast<int32_t>(found));
        offsets += found;
    }
    if (unary) ones.finish();
}

void encode_offsets(Indices indices, uint64_t size, Format format, char *message) {
    with_indices(indices, [&](auto *index) { encode(index, indices, size, format, message); });
}

template <typename Index> void decode_offsets(Packed message, uint64_t size, Index *out) {
    PackedReader reader(message, size);
    for (uint64_t begin = 0; begin < size || begin == 0; begin += uint64_t{1} << 20)
        reader.read(std::min(size, begin + (uint64_t{1} << 20)), 0, out + reader.item(), message.count - reader.item());
}

template void decode_offsets(Packed, uint64_t, int32_t *);
template void decode_offsets(Packed, uint64_t, int64_t *);

}  // namespace gradsync
