// Random numbers by counting: what an element draws depends on its section's seed and on its place in the tensor alone.
#pragma once

#include <cstdint>

#include "scalars.hpp"

namespace gradsync {

// A bijection of 32 bits in which each bit of the input changes each of the output half of the time.
inline uint32_t mix(uint32_t h) {
    h ^= h >> 16;
    h *= 0x7feb352du;
    h ^= h >> 15;
    h *= 0x846ca68bu;
    return h ^ h >> 16;
}

// The draws of all places of a tensor whose upper 32 bits are those of `place`.
class Draws {
public:
    Draws(uint64_t seed, uint64_t place)
        : key_(static_cast<uint32_t>(seed)),
          added_(static_cast<uint32_t>(seed >> 32) + static_cast<uint32_t>(place >> 32) * 0x9e3779b9u) {}
    uint32_t operator()(uint32_t low) const { return mix(mix(low ^ key_) + added_); }

private:
    uint32_t key_, added_;
};

// What rounding draws, for the places that `Draws` has: half as much arithmetic for each, with keys that are draws.
class Noise {
public:
    Noise() : key_(0), added_(0) {}  // where nothing is drawn
    Noise(uint64_t seed, uint64_t place) : key_(Draws(seed, place)(0)), added_(Draws(seed, place)(1)) {}
    uint32_t operator()(uint32_t low) const {  // mix(), keyed before and within
        uint32_t h = low ^ key_;
        h ^= h >> 16;
        h *= 0x7feb352du;
        h ^= h >> 15;
        h = (h + added_) * 0x846ca68bu;
        return h ^ h >> 16;
    }
#if defined(__AVX2__)
    // Of eight places side by side.
    __m256i of_eight(uint32_t low) const {
        const auto folded = [](__m256i h, int bits) { return _mm256_xor_si256(h, _mm256_srli_epi32(h, bits)); };
        __m256i h = _mm256_add_epi32(every(low), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        h = folded(_mm256_xor_si256(h, every(key_)), 16);
        h = folded(_mm256_mullo_epi32(h, every(0x7feb352du)), 15);
        h = _mm256_mullo_epi32(_mm256_add_epi32(h, every(added_)), every(0x846ca68bu));
        return folded(h, 16);
    }
#endif

private:
    uint32_t key_, added_;
};

}  // namespace gradsync
