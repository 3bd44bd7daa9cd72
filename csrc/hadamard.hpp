// The randomised Walsh-Hadamard transform of chunks that a level-1 cache holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradsync {

constexpr uint32_t kMostRotatedBits = 13;  // a chunk has up to 2^13 elements

// 2^bits elements of the flat tensor.
struct Rotated {
    uint64_t begin;  // in the flat tensor
    uint64_t place;  // of its first element in its tensor
    uint64_t seed;
    uint32_t bits;
};

// Chunks of sections of these lengths, one after the other: as many of `chunk` elements, a power of two, as there are,
// then powers of two in descending order.
std::vector<Rotated> rotated_chunks(const std::vector<uint64_t> &lengths, const std::vector<uint64_t> &starts,
                                    const std::vector<uint64_t> &seeds, uint32_t chunk);

// out = H D x / sqrt(2^bits) of each chunk, D its signs; inverse: D H x / sqrt(2^bits). In and Out have one accumulator,
// in which it is computed. Stages run from neighbours to halves, so that the bits are always the same.
template <typename In, typename Out>
void hadamard(const In *x, Out *out, const std::vector<Rotated> &chunks, bool inverse, int threads);

}  // namespace gradsync
