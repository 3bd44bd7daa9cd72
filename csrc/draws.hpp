// Random draws that need no state: each is a hash of what it is for. See gradsync.kernels.reference.draws.
#pragma once

#include <cstdint>

namespace MODULE_NAME {

inline uint32_t mixed(uint32_t h) {
    h = (h ^ h >> 16) * 0x7feb352du;
    h = (h ^ h >> 15) * 0x846ca68bu;
    return h ^ h >> 16;
}

// 32 bits for the element at place upper * 2^32 + lower of a tensor.
inline uint32_t draw(uint32_t lower, uint32_t upper, uint64_t seed) {
    const uint32_t first = mixed(lower ^ static_cast<uint32_t>(seed));
    return mixed(first + static_cast<uint32_t>(seed >> 32) + upper * 0x9e3779b9u);
}

inline uint32_t draw(uint64_t place, uint64_t seed) {
    return draw(static_cast<uint32_t>(place), static_cast<uint32_t>(place >> 32), seed);
}

}  // namespace MODULE_NAME
