#include "convert.hpp"

#include <algorithm>
#include <cstdint>

#include "rows.hpp"

namespace MODULE_NAME {
namespace {

constexpr size_t kBlock = 1024;  // values that are scaled before they are rounded: they stay in the cache

template <typename Out> constexpr float kLargest = 65504.0f;
template <> constexpr float kLargest<Bfloat16> = 0x1.fep127f;

template <bool stream, typename In, typename Out>
void narrow_block(const In *x, size_t count, In scale, Out *out) {
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

}  // namespace

template <typename In, typename Out>
void narrow_values(const In *x, size_t count, double scale, Out *out, int threads) {
    const size_t blocks = (count + kBlock - 1) / kBlock;
    const bool stream = count * sizeof(Out) >= kStreamedBytes;
    const auto narrow_some = stream ? narrow_block<true, In, Out> : narrow_block<false, In, Out>;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; ++t) {
        for (size_t b = share_begin(blocks, t, threads); b < share_begin(blocks, t + 1, threads); ++b) {
            const size_t begin = b * kBlock;
            narrow_some(x + begin, std::min(kBlock, count - begin), static_cast<In>(scale), out + begin);
        }
        order_stores();
    }
}

template void narrow_values(const float *, size_t, double, Bfloat16 *, int);
template void narrow_values(const float *, size_t, double, Float16 *, int);
template void narrow_values(const double *, size_t, double, Bfloat16 *, int);
template void narrow_values(const double *, size_t, double, Float16 *, int);

}  // namespace MODULE_NAME
