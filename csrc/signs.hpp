// The signs of a tensor's elements as bits, with what stands for the magnitudes of each block, and back. 1 is negative.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "blocks.hpp"
#include "scalars.hpp"

namespace gradsync {

// What the signs of a block are of: the mean magnitude, the root of the mean square, the means of the elements that
// are not negative and of those that are (two scales), or 1 (no scale).
enum class SignScale { mean, rms, two, one };

constexpr size_t scales_per_block(SignScale scale) {
    return scale == SignScale::two ? 2 : scale == SignScale::one ? 0 : 1;
}

// Bit i % 8 of words[i / 8]: x[i] + residual[i] is negative; bits behind the last one are 0. `left` gets what the
// decoded tensor lacks. `residual` and `left`: both or neither (null); apart.
template <typename T>
void pack_signs(const Blocks &blocks, SignScale scale, const T *x, const Accumulator<T> *residual, Accumulator<T> *left,
                uint8_t *words, float *scales, int threads);

struct Signs {
    const uint8_t *words;
    const float *scales;
};

// out = factor * sum of what the parts decode to, in their order, rounded once.
template <typename T>
void unpack_signs(const Blocks &blocks, SignScale scale, const std::vector<Signs> &parts, T *out, double factor,
                  int threads);

}  // namespace gradsync
