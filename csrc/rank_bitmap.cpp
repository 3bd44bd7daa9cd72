#include "rank_bitmap.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace gradsync {
namespace {

constexpr size_t kLanes = 8;            // bits that the table decodes at once
constexpr size_t kSparseBitsPerWord = 3;  // about 5 %: below, bit by bit is faster

struct Expansion {
    std::array<std::array<uint8_t, kLanes>, 256> positions{};
    std::array<uint8_t, 256> counts{};
};

constexpr Expansion expand() {
    Expansion table{};
    for (unsigned byte = 0; byte < 256; ++byte)
        for (uint8_t bit = 0; bit < kLanes; ++bit)
            if (byte >> bit & 1) table.positions[byte][table.counts[byte]++] = bit;
    return table;
}

constexpr Expansion kExpansion = expand();

template <typename Index> inline Index *decode_bits(uint64_t word, uint64_t base, Index *out) {
    for (; word != 0; word &= word - 1) *out++ = static_cast<Index>(base + lowest_bit(word));
    return out;
}

template <typename Index> inline void write_lanes(const uint8_t *positions, Index base, Index *out) {
    for (size_t lane = 0; lane < kLanes; ++lane) out[lane] = base + positions[lane];
}

#if defined(__AVX2__)
inline void write_lanes(const uint8_t *positions, int32_t base, int32_t *out) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(positions)));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(out), _mm256_add_epi32(wide, _mm256_set1_epi32(base)));
}
#endif

// Always writes kLanes entries for each byte and goes on behind the valid ones.
template <typename Index> inline Index *decode_bytes(uint64_t word, uint64_t base, Index *out) {
    for (size_t byte = 0; byte < kWordBits / 8; ++byte, word >>= 8, base += 8) {
        const auto &positions = kExpansion.positions[word & 0xff];
        write_lanes(positions.data(), static_cast<Index>(base), out);
        out += kExpansion.counts[word & 0xff];
    }
    return out;
}

}  // namespace

template <typename Index>
void decode_words(const uint64_t *words, size_t num_words, uint64_t base, Index *out, size_t count) {
    const Index *const end = out + count;
    const bool sparse = count < kSparseBitsPerWord * num_words;
    for (size_t w = 0; w < num_words; ++w, base += kWordBits) {
        const bool room = static_cast<size_t>(end - out) >= kWordBits + kLanes;
        out = sparse || !room ? decode_bits(words[w], base, out) : decode_bytes(words[w], base, out);
    }
}

template void decode_words(const uint64_t *, size_t, uint64_t, int32_t *, size_t);
template void decode_words(const uint64_t *, size_t, uint64_t, int64_t *, size_t);

void check_bits(uint64_t bits) {
    if (bits > kMaxBits)
        throw std::length_error("a bitmap of " + std::to_string(bits) + " entries is more than the native kernels take (" +
                                std::to_string(kMaxBits) + "): split the tensor");
}

RankBitmap::RankBitmap(uint64_t bits, int threads) {
    check_bits(bits);
    words_ = Scratch<uint64_t>(words_for(bits));
    ranks_ = Scratch<uint32_t>(words_.size() + 1);
    if (words_.size() == 0) return;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; ++t)
        std::fill(words_.begin() + share_begin(words_.size(), t, threads),
                  words_.begin() + share_begin(words_.size(), t + 1, threads), 0);
}

void RankBitmap::rank_bits() {
    uint64_t before = 0;
    for (size_t w = 0; w < words_.size(); ++w) {
        ranks_[w] = static_cast<uint32_t>(before);
        before += popcount(words_[w]);
    }
    if (before > std::numeric_limits<uint32_t>::max()) throw std::length_error("more than 2^32 - 1 entries: split the tensor");
    ranks_[words_.size()] = static_cast<uint32_t>(before);
    count_ = before;
}

size_t RankBitmap::block_end(size_t word, size_t end, size_t max_bits) const {
    const uint64_t limit = std::min<uint64_t>(ranks_[word] + uint64_t{max_bits}, std::numeric_limits<uint32_t>::max());
    const auto after = std::upper_bound(ranks_.begin() + word + 1, ranks_.begin() + end + 1, static_cast<uint32_t>(limit));
    return std::max<size_t>(word + 1, after - ranks_.begin() - 1);
}

size_t RankBitmap::word_at_share(int t, int threads) const {
    if (t == 0) return 0;
    if (t == threads) return words_.size();
    const auto bits = static_cast<uint32_t>(share_begin(count_, t, threads));
    return std::lower_bound(ranks_.begin(), ranks_.end() - 1, bits) - ranks_.begin();
}

template <typename Index> void RankBitmap::write_indices(Index *out, int threads) const {
    if (count_ == 0) return;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; ++t) {
        const WordRange range = share(t, threads);
        decode_words(words() + range.begin, range.end - range.begin, range.begin * kWordBits, out + ranks_[range.begin],
                     ranks_[range.end] - ranks_[range.begin]);
    }
}

template void RankBitmap::write_indices(int32_t *, int) const;
template void RankBitmap::write_indices(int64_t *, int) const;

}  // namespace gradsync
