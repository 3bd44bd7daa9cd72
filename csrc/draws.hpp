// Random numbers by counting: what an element draws depends on its section's seed and on its place in the tensor alone.
#pragma once

#include <cstdint>

namespace MODULE_NAME {

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

private:
    uint32_t key_, added_;
};

}  // namespace MODULE_NAME
