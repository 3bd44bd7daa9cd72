// Values in another type, scaled on the way: what travels in 16 bits, and sums of what came.
#pragma once

#include <cstddef>
#include <vector>

#include "scalars.hpp"

namespace gradsync {

constexpr size_t kBlock = 1024;  // values that are scaled or summed before they are rounded: they stay in the cache

template <typename Out> constexpr float kLargest = 65504.0f;
template <> inline constexpr float kLargest<Bfloat16> = 0x1.fep127f;

// out = scale * x, rounded to nearest; what is finite stays finite. Of up to a block.
template <bool stream, typename In, typename Out> void narrow_block(const In *x, size_t count, In scale, Out *out) {
    const In largest = kLargest<Out>;
    float scaled[kBlock];
#pragma omp simd
    for (size_t i = 0; i < count; ++i) {
        const In value = x[i] * scale;
        const In below = value > largest ? largest : value, within = below < -largest ? -largest : below;
        scaled[i] = static_cast<float>(value - value == 0 ? within : value);  // infinity and NaN as they are
    }
    narrow_row<stream>(out, scaled, count);
}

// The same of any number.
template <typename In, typename Out>
void narrow_values(const In *x, size_t count, double scale, Out *out, int threads);

// out = scale * (parts[0] + parts[1] + ...), in float, or in double where either type is; rounded to nearest. There is
// a part; `out` may be one.
template <typename In, typename Out>
void sum_values(const std::vector<const In *> &parts, size_t count, double scale, Out *out, int threads);

}  // namespace gradsync
