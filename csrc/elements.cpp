#include "elements.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "nonzero.hpp"

namespace MODULE_NAME {

void encode_bitmap(Indices indices, uint64_t size, uint64_t *words) {
    check_indices(indices, 0, size);
    std::fill(words, words + words_for(size), 0);
    with_indices(indices, [&](auto *index) {
        for (size_t i = 0; i < indices.count; ++i) set_bit(words, index[i]);
    });
}

uint64_t count_bits(const uint64_t *words, size_t num_words, int threads) {
    uint64_t count = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : count) if (threads > 1)
    for (size_t w = 0; w < num_words; ++w) count += popcount(words[w]);
    return count;
}

template <typename Index>
void decode_bitmap(const uint64_t *words, size_t num_words, Index *out, size_t count, int threads) {
    std::vector<size_t> begins(threads + 1, 0);
    begins[threads] = count;
    for (int t = 1; t < threads; ++t) {
        const size_t first = share_begin(num_words, t - 1, threads), stop = share_begin(num_words, t, threads);
        begins[t] = begins[t - 1] + count_bits(words + first, stop - first, threads);
    }
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; ++t) {
        const size_t first = share_begin(num_words, t, threads), stop = share_begin(num_words, t + 1, threads);
        decode_words(words + first, stop - first, first * kWordBits, out + begins[t], begins[t + 1] - begins[t]);
    }
}

template void decode_bitmap(const uint64_t *, size_t, int32_t *, size_t, int);
template void decode_bitmap(const uint64_t *, size_t, int64_t *, size_t, int);

NonzeroElements::NonzeroElements(const void *x, size_t numel, size_t itemsize, int threads)
    : x_(x), numel_(numel), itemsize_(itemsize), bitmap_(numel, threads) {
    if (itemsize == 2) mark<uint16_t>(threads);
    else if (itemsize == 4) mark<uint32_t>(threads);
    else mark<uint64_t>(threads);
    bitmap_.rank_bits();
}

template <typename Unsigned> void NonzeroElements::mark(int threads) {
    const auto *x = static_cast<const Unsigned *>(x_);
    const size_t whole = numel_ / kWordBits;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (size_t w = 0; w < whole; ++w) bitmap_.words()[w] = nonzero_mask(x + w * kWordBits);
    if (whole < bitmap_.num_words()) bitmap_.words()[whole] = nonzero_mask(x + whole * kWordBits, numel_ % kWordBits);
}

template <typename Unsigned, typename Index>
static void write_as(const RankBitmap &bitmap, const void *from, Index *indices, void *to, int threads) {
    constexpr size_t kBlockWords = 256;  // values are taken while their indices are in the first-level cache
    const auto *x = static_cast<const Unsigned *>(from);
    auto *values = static_cast<Unsigned *>(to);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; ++t) {
        const size_t end = share_begin(bitmap.num_words(), t + 1, threads);
        for (size_t first = share_begin(bitmap.num_words(), t, threads); first < end; first += kBlockWords) {
            const size_t stop = std::min(end, first + kBlockWords);
            const size_t begin = bitmap.rank_of_word(first), count = bitmap.rank_of_word(stop) - begin;
            decode_words(bitmap.words() + first, stop - first, first * kWordBits, indices + begin, count);
            for (size_t i = begin; i < begin + count; ++i) values[i] = x[indices[i]];
        }
    }
}

template <typename Index>
void write_elements(const RankBitmap &bitmap, const void *x, size_t itemsize, Index *indices, void *values, int threads) {
    if (itemsize == 2) write_as<uint16_t>(bitmap, x, indices, values, threads);
    else if (itemsize == 4) write_as<uint32_t>(bitmap, x, indices, values, threads);
    else write_as<uint64_t>(bitmap, x, indices, values, threads);
}

template void write_elements(const RankBitmap &, const void *, size_t, int32_t *, void *, int);
template void write_elements(const RankBitmap &, const void *, size_t, int64_t *, void *, int);

RotatedPartition::RotatedPartition(Indices indices, uint64_t size, RotatedStripe stripe, int threads)
    : stripe_(stripe), dealt_(require_sorted(indices, size), stripe.owners(), threads, [stripe](uint64_t element) {
          return stripe.owner(element, stripe.local(element));
      }) {}

void RotatedPartition::write(const void *values, size_t value_bytes, const std::vector<int32_t *> &positions,
                             const std::vector<void *> &outs) const {
    const RotatedStripe stripe = stripe_;
    dealt_.write(values, value_bytes, positions, outs, [stripe](uint64_t element) { return stripe.local(element); });
}

// The first item from `item` on that is at or after `position`, near as a rule: steps grow until they pass it.
static size_t seek_from(size_t item, const int32_t *position, const Indices &part, uint64_t end) {
    const auto before = [end](int32_t q) { return static_cast<uint64_t>(q) < end; };
    size_t step = 16;
    while (item + step < part.count && before(position[item + step])) item += step, step *= 2;
    const int32_t *const stop = position + std::min(part.count, item + step);
    return std::partition_point(position + item, stop, before) - position;
}

// `out` begins with element `base`. A place is computed before it is written to: a loop without stores to memory that
// might alias is vectorised.
template <typename Value>
static void set_elements(RotatedStripe stripe, uint32_t owner, const int32_t *positions, size_t count,
                         const Value *values, Value *out, uint64_t base) {
    constexpr size_t kChunk = 128;
    uint64_t places[kChunk];
    for (size_t first = 0; first < count; first += kChunk) {
        const size_t chunk = std::min(kChunk, count - first);
        for (size_t i = 0; i < chunk; ++i) places[i] = stripe.index(owner, positions[first + i]) - base;
        for (size_t i = 0; i < chunk; ++i) out[places[i]] = values[first + i];
    }
}

// Block by block, so that the lines that the owners write by turns stay in the first-level cache. Outputs that no cache
// holds are put together elsewhere: their lines need not be read before, and hardly more are written than zeros.
template <typename Value>
static void join_as(RotatedStripe stripe, const std::vector<Indices> &positions,
                    const std::vector<const void *> &values, Value *out, uint64_t size, int threads) {
    constexpr size_t kBlockBytes = 16 << 10;
    const uint64_t owners = stripe.owners(), runs = (size + owners - 1) / owners;
    const uint64_t block = std::max<uint64_t>(1, kBlockBytes / (owners * sizeof(Value)));
    const bool stream = size * sizeof(Value) >= kStreamedBytes;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; ++t) {
        const uint64_t begin = share_begin(runs, t, threads), end = share_begin(runs, t + 1, threads);
        const Scratch<Value> joined(stream ? block * owners : 0);
        std::vector<size_t> next(owners);
        for (uint64_t owner = 0; owner < owners; ++owner)
            next[owner] = seek(static_cast<const int32_t *>(positions[owner].data), positions[owner], begin);
        for (uint64_t first = begin, stop; first < end; first = stop) {
            stop = std::min(first + block, end);
            const uint64_t base = first * owners, count = std::min(stop * owners, size) - base;
            Value *const to = stream ? joined.begin() : out + base;
            std::fill(to, to + count, Value{0});
            for (uint64_t owner = 0; owner < owners; ++owner) {
                const auto *position = static_cast<const int32_t *>(positions[owner].data);
                const size_t stopped = seek_from(next[owner], position, positions[owner], stop);
                set_elements(stripe, owner, position + next[owner], stopped - next[owner],
                             static_cast<const Value *>(values[owner]) + next[owner], to, base);
                next[owner] = stopped;
            }
            if (stream)
                stream_bytes(reinterpret_cast<char *>(out + base), reinterpret_cast<const char *>(to),
                             count * sizeof(Value));
        }
        order_stores();
    }
}

void join_rotated(RotatedStripe stripe, std::vector<Indices> positions, const std::vector<const void *> &values,
                  void *out, uint64_t size, size_t itemsize, int threads) {
    for (size_t owner = 0; owner < positions.size(); ++owner) {
        Indices &part = positions[owner];
        part = require_sorted(part, uint64_t{1} << 31, owner);
        if (part.count == 0) continue;
        const uint64_t last = stripe.index(owner, static_cast<const int32_t *>(part.data)[part.count - 1]);
        if (last >= size) throw BadIndex{owner, static_cast<int64_t>(last)};
    }
    if (itemsize == 2) join_as(stripe, positions, values, static_cast<uint16_t *>(out), size, threads);
    else if (itemsize == 4) join_as(stripe, positions, values, static_cast<uint32_t *>(out), size, threads);
    else join_as(stripe, positions, values, static_cast<uint64_t *>(out), size, threads);
}

template <typename Index>
void rotated_indices(RotatedStripe stripe, uint32_t owner, const int32_t *positions, size_t count, Index *out,
                     int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (size_t i = 0; i < count; ++i) out[i] = static_cast<Index>(stripe.index(owner, positions[i]));
}

template void rotated_indices(RotatedStripe, uint32_t, const int32_t *, size_t, int32_t *, int);
template void rotated_indices(RotatedStripe, uint32_t, const int32_t *, size_t, int64_t *, int);

}  // namespace MODULE_NAME
