#include "elements.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "nonzero.hpp"

namespace gradsync {

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

RotatedStripe::RotatedStripe(uint32_t owners, uint32_t key)
    : owners_(owners), key_(key), inverse_(owners == 1 ? 0 : ~uint64_t{0} / owners + 1) {}

RotatedPartition::RotatedPartition(Indices indices, uint64_t size, RotatedStripe stripe, int threads)
    : stripe_(stripe), dealt_(require_sorted(indices, size), stripe.owners(), threads, [stripe](uint64_t element) {
          return stripe.owner(element, stripe.local(element));
      }) {}

void RotatedPartition::write(const void *values, size_t value_bytes, const std::vector<int32_t *> &positions,
                             const std::vector<void *> &outs) const {
    const RotatedStripe stripe = stripe_;
    dealt_.write(values, value_bytes, positions, outs, [stripe](uint64_t element) { return stripe.local(element); });
}

uint64_t rotated_bound(RotatedStripe stripe, const int32_t *positions, size_t count) {
    uint64_t bound = 0;
    for (size_t i = 0; i < count; ++i) bound = std::max(bound, (uint64_t(positions[i]) + 1) * stripe.owners());
    return bound;
}

template <typename Index>
void rotated_indices(RotatedStripe stripe, uint32_t owner, const int32_t *positions, size_t count, Index *out,
                     int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (size_t i = 0; i < count; ++i) out[i] = static_cast<Index>(stripe.index(owner, positions[i]));
}

template void rotated_indices(RotatedStripe, uint32_t, const int32_t *, size_t, int32_t *, int);
template void rotated_indices(RotatedStripe, uint32_t, const int32_t *, size_t, int64_t *, int);

}  // namespace gradsync
