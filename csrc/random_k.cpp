#include "random_k.hpp"

#include <algorithm>
#include <type_traits>

#include "draws.hpp"

namespace gradsync {

namespace {

constexpr uint32_t kRounds = 4;

// (value + draw in [0, range)) mod range, for value < range < 2^31.
inline uint32_t added(uint32_t value, uint32_t other, uint32_t round, uint32_t range, uint64_t key) {
    const uint32_t step = static_cast<uint32_t>(uint64_t{Draws(key, uint64_t{round} << 32)(other)} * range >> 32);
    const uint32_t sum = value + step, wrapped = sum - range;
    return sum < wrapped ? sum : wrapped;
}

// One pass through the network; Unsigned holds a * b.
template <typename Unsigned> inline Unsigned permuted(uint32_t l, uint32_t r, uint32_t a, uint32_t b, uint64_t key) {
    for (uint32_t round = 0; round < kRounds; round += 2) {
        l = added(l, r, round, a, key);
        r = added(r, l, round + 1, b, key);
    }
    return static_cast<Unsigned>(l) * b + r;
}

inline uint64_t walked(uint64_t v, const RunDraw &s) {
    while (v >= s.runs)
        v = permuted<uint64_t>(static_cast<uint32_t>(v / s.b), static_cast<uint32_t>(v % s.b), s.a, s.b, s.key);
    return v;
}

// Draws [first, first + count), which lie in one row l of the network: without a division, and as vectors.
template <typename Index> void draw_elements(const RunDraw &s, uint32_t l, uint64_t first, uint32_t count, Index *out) {
    using Unsigned = std::make_unsigned_t<Index>;
    const uint32_t a = s.a, b = s.b;
    const uint64_t key = s.key;
#pragma omp simd
    for (uint32_t r = 0; r < count; ++r) out[first + r] = static_cast<Index>(permuted<Unsigned>(l, r, a, b, key));
    for (uint64_t i = first; i < first + count; ++i)
        out[i] = static_cast<Index>(s.offset + walked(static_cast<Unsigned>(out[i]), s));
}

template <typename Index> void draw_runs(const RunDraw &s, uint32_t l, uint64_t first, uint32_t count, Index *out) {
    for (uint32_t r = 0; r < count; ++r) {
        const uint64_t v = walked(permuted<uint64_t>(l, r, s.a, s.b, s.key), s);
        uint64_t at = s.shift + v * s.run;
        if (at >= s.length) at -= s.length;
        Index *to = out + (first + r) * s.run;
        const uint64_t before_end = std::min(s.run, s.length - at);
        for (uint64_t i = 0; i < before_end; ++i) to[i] = static_cast<Index>(s.offset + at + i);
        for (uint64_t i = before_end; i < s.run; ++i) to[i] = static_cast<Index>(s.offset + i - before_end);
    }
}

}  // namespace

template <typename Index> void random_k(const std::vector<RunDraw> &sections, Index *indices, int threads) {
    for (const RunDraw &s : sections) {
        if (s.count == 0) continue;
        const uint64_t rows = (s.count - 1) / s.b + 1;
        const auto row = [&](uint64_t l) {
            const uint64_t first = l * s.b;
            const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(s.b, s.count - first));
            if (s.run == 1) draw_elements(s, static_cast<uint32_t>(l), first, count, indices);
            else draw_runs(s, static_cast<uint32_t>(l), first, count, indices);
        };
        if (threads > 1 && s.count > 16384) {
#pragma omp parallel for schedule(static) num_threads(threads)
            for (uint64_t l = 0; l < rows; ++l) row(l);
        } else {
            for (uint64_t l = 0; l < rows; ++l) row(l);
        }
        indices += s.count * s.run;
    }
}

template void random_k(const std::vector<RunDraw> &, int32_t *, int);
template void random_k(const std::vector<RunDraw> &, int64_t *, int);

}  // namespace gradsync
