// A bitmap whose set bits know their rank: the popcount prefix over its words gives each set bit its place among all,
// so that what belongs to it is written straight to where it goes. No sort, no hash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "scratch.hpp"

namespace gradsync {

constexpr size_t kWordBits = 64;
constexpr uint64_t kMaxBits = uint64_t{1} << 34;  // 3 GiB of words and ranks

// Throws std::length_error for more than kMaxBits.
void check_bits(uint64_t bits);

inline int popcount(uint64_t word) { return __builtin_popcountll(word); }
inline int lowest_bit(uint64_t word) { return __builtin_ctzll(word); }
inline size_t popcount(const uint64_t *words, size_t num_words) {
    size_t count = 0;
    for (size_t w = 0; w < num_words; ++w) count += popcount(words[w]);
    return count;
}
inline size_t words_for(uint64_t bits) { return (bits + kWordBits - 1) / kWordBits; }

// Share t of `threads` shares of [0, count) begins here; share `threads` begins at its end.
inline size_t share_begin(size_t count, int t, int threads) {
    return count / threads * t + count % threads * t / threads;
}

// Byte by byte: ascending bits come to the same byte seldom enough not to wait for the store before.
inline void set_bit(uint64_t *words, uint64_t bit) {
    constexpr uint64_t kSwap = __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? sizeof(uint64_t) - 1 : 0;
    reinterpret_cast<unsigned char *>(words)[(bit / 8) ^ kSwap] |= static_cast<unsigned char>(1u << (bit % 8));
}

struct WordRange {
    size_t begin, end;
};

// How many set bits stand before a bit. By value, for loops to keep it in registers.
struct BitRanks {
    const uint64_t *words;
    const uint32_t *before;  // each word
    size_t operator[](uint64_t bit) const {
        const uint64_t below = (uint64_t{1} << (bit % kWordBits)) - 1;
        return before[bit / kWordBits] + popcount(words[bit / kWordBits] & below);
    }
};

class RankBitmap {
public:
    // All bits clear. Set bits through words(), then call rank_bits().
    explicit RankBitmap(uint64_t bits, int threads);
    RankBitmap() = default;

    uint64_t *words() const { return words_.begin(); }
    size_t num_words() const { return words_.size(); }
    void rank_bits();

    size_t count() const { return count_; }
    size_t rank_of_word(size_t word) const { return ranks_[word]; }  // set bits before it; num_words(): all
    BitRanks ranks() const { return {words_.begin(), ranks_.begin()}; }

    // The words of share t of `threads` shares with about the same number of set bits.
    WordRange share(int t, int threads) const { return {word_at_share(t, threads), word_at_share(t + 1, threads)}; }
    // Past the last word of a block that starts at `word` and holds at most max_bits set bits, or one word.
    size_t block_end(size_t word, size_t end, size_t max_bits) const;

    // The positions of the set bits, ascending.
    template <typename Index> void write_indices(Index *out, int threads) const;

private:
    size_t word_at_share(int t, int threads) const;

    Scratch<uint64_t> words_;
    Scratch<uint32_t> ranks_;
    size_t count_ = 0;
};

// Writes base + position of each set bit of words[0, num_words); `out` has room for exactly `count`, their number.
template <typename Index>
void decode_words(const uint64_t *words, size_t num_words, uint64_t base, Index *out, size_t count);

}  // namespace gradsync
