#include "hadamard.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "draws.hpp"
#include "scalars.hpp"

namespace gradsync {

namespace {

constexpr size_t kMost = size_t{1} << kMostRotatedBits;
constexpr size_t kSignBits = 32;  // of one draw: signs of so many elements

inline float signed_by(float value, uint32_t bit) { return float_of(bits_of(value) ^ bit << 31); }
inline double signed_by(double value, uint32_t bit) { return bit ? -value : value; }

// Calls body(i, sign bit) for the elements of a chunk, in groups that a loop of constant length can take.
template <typename Group> void for_signs(const Rotated &chunk, size_t count, Group group) {
    const uint64_t word = chunk.place / kSignBits;
    const uint32_t lag = chunk.place % kSignBits;
    const auto draw = [&](uint64_t place) { return Draws(chunk.seed, place)(static_cast<uint32_t>(place)); };
    uint32_t next = draw(word);
    for (size_t i = 0, j = 1; i < count; i += kSignBits, ++j) {
        const uint32_t current = next;
        next = draw(word + j);
        const uint32_t bits = lag == 0 ? current : current >> lag | next << (kSignBits - lag);
        group(i, std::min(kSignBits, count - i), bits);
    }
}

template <typename In, typename A>
inline void load(const In *__restrict x, A *__restrict v, size_t count, const Rotated &chunk, bool with_signs) {
    if (!with_signs) {
        for (size_t i = 0; i < count; ++i) v[i] = widen(x[i]);
        return;
    }
    for_signs(chunk, count, [&](size_t i, size_t some, uint32_t bits) {
        if (some == kSignBits)
            for (uint32_t lane = 0; lane < kSignBits; ++lane)
                v[i + lane] = signed_by(static_cast<A>(widen(x[i + lane])), bits >> lane & 1);
        else
            for (uint32_t lane = 0; lane < some; ++lane)
                v[i + lane] = signed_by(static_cast<A>(widen(x[i + lane])), bits >> lane & 1);
    });
}

template <typename Out, typename A>
inline void store(const A *__restrict v, Out *__restrict out, size_t count, A scale, const Rotated &chunk,
                  bool with_signs) {
    if (!with_signs) {
        for (size_t i = 0; i < count; ++i) out[i] = narrow<Out>(v[i] * scale);
        return;
    }
    for_signs(chunk, count, [&](size_t i, size_t some, uint32_t bits) {
        if (some == kSignBits)
            for (uint32_t lane = 0; lane < kSignBits; ++lane)
                out[i + lane] = narrow<Out>(signed_by(v[i + lane] * scale, bits >> lane & 1));
        else
            for (uint32_t lane = 0; lane < some; ++lane)
                out[i + lane] = narrow<Out>(signed_by(v[i + lane] * scale, bits >> lane & 1));
    });
}

template <typename A> inline void butterfly(A &first, A &second) {
    const A sum = first + second;
    second = first - second;
    first = sum;
}

template <typename A> void stage(A *v, size_t n, size_t h) {
    for (size_t base = 0; base < n; base += 2 * h)
        for (size_t i = base; i < base + h; ++i) butterfly(v[i], v[i + h]);
}

// Stages h, 2h and 4h in one pass; h is a multiple of a vector.
template <typename A> void three_stages(A *v, size_t n, size_t h) {
    for (size_t base = 0; base < n; base += 8 * h) {
        A *const p = v + base;
#pragma omp simd
        for (size_t i = 0; i < h; ++i) {
            const A x0 = p[i], x1 = p[i + h], x2 = p[i + 2 * h], x3 = p[i + 3 * h];
            const A x4 = p[i + 4 * h], x5 = p[i + 5 * h], x6 = p[i + 6 * h], x7 = p[i + 7 * h];
            const A y0 = x0 + x1, y1 = x0 - x1, y2 = x2 + x3, y3 = x2 - x3;
            const A y4 = x4 + x5, y5 = x4 - x5, y6 = x6 + x7, y7 = x6 - x7;
            const A z0 = y0 + y2, z1 = y1 + y3, z2 = y0 - y2, z3 = y1 - y3;
            const A z4 = y4 + y6, z5 = y5 + y7, z6 = y4 - y6, z7 = y5 - y7;
            p[i] = z0 + z4, p[i + h] = z1 + z5, p[i + 2 * h] = z2 + z6, p[i + 3 * h] = z3 + z7;
            p[i + 4 * h] = z0 - z4, p[i + 5 * h] = z1 - z5, p[i + 6 * h] = z2 - z6, p[i + 7 * h] = z3 - z7;
        }
    }
}

template <typename A> void two_stages(A *v, size_t n, size_t h) {
    for (size_t base = 0; base < n; base += 4 * h) {
        A *const p = v + base;
#pragma omp simd
        for (size_t i = 0; i < h; ++i) {
            const A x0 = p[i], x1 = p[i + h], x2 = p[i + 2 * h], x3 = p[i + 3 * h];
            const A y0 = x0 + x1, y1 = x0 - x1, y2 = x2 + x3, y3 = x2 - x3;
            p[i] = y0 + y2, p[i + h] = y1 + y3, p[i + 2 * h] = y0 - y2, p[i + 3 * h] = y1 - y3;
        }
    }
}

// Stages 1, 2 and 4: within a vector.
template <typename A> void first_stages(A *v, size_t n) {
    for (size_t base = 0; base < n; base += 8) three_stages(v + base, 8, 1);
}

#if defined(__AVX2__)
// Lanes that are the first of their pair get first + second, the others first - second. `swapped`: the partners.
template <int mask> inline __m256 butterflies(__m256 x, __m256 swapped) {
    const __m256 negated = _mm256_xor_ps(x, _mm256_set1_ps(-0.0f));
    return _mm256_add_ps(swapped, _mm256_blend_ps(x, negated, mask));
}

inline void first_stages(float *v, size_t n) {
    for (size_t base = 0; base < n; base += 8) {
        __m256 x = _mm256_loadu_ps(v + base);
        x = butterflies<0b10101010>(x, _mm256_permute_ps(x, 0b10110001));
        x = butterflies<0b11001100>(x, _mm256_permute_ps(x, 0b01001110));
        x = butterflies<0b11110000>(x, _mm256_permute2f128_ps(x, x, 1));
        _mm256_storeu_ps(v + base, x);
    }
}
#endif

template <typename A> void transform(A *v, size_t n) {
    size_t h = 1;
    if (n >= 8) {
        first_stages(v, n);
        h = 8;
    }
    for (; h >= 8 && 8 * h <= n; h *= 8) three_stages(v, n, h);
    if (h >= 8 && 4 * h <= n) {
        two_stages(v, n, h);
        h *= 4;
    }
    for (; h < n; h *= 2) stage(v, n, h);
}

}  // namespace

std::vector<Rotated> rotated_chunks(const std::vector<uint64_t> &lengths, const std::vector<uint64_t> &starts,
                                    const std::vector<uint64_t> &seeds, uint32_t chunk) {
    std::vector<Rotated> chunks;
    uint64_t begin = 0;
    uint32_t most = 0;
    while (most < kMostRotatedBits && uint32_t{2} << most <= chunk) ++most;
    for (size_t s = 0; s < lengths.size(); ++s) {
        uint32_t bits = most;
        for (uint64_t done = 0; done < lengths[s]; done += uint64_t{1} << bits) {
            while (uint64_t{1} << bits > lengths[s] - done) --bits;
            chunks.push_back({begin + done, starts[s] + done, seeds[s], bits});
        }
        begin += lengths[s];
    }
    return chunks;
}

template <typename In, typename Out>
void hadamard(const In *x, Out *out, const std::vector<Rotated> &chunks, bool inverse, int threads) {
    using A = Accumulator<In>;
    static_assert(std::is_same_v<A, Accumulator<Out>>);
    const auto rotate = [&](const Rotated &chunk) {
        alignas(64) A v[kMost];  // 64 KiB at most, of the stack
        const size_t count = size_t{1} << chunk.bits;
        const double scale = std::ldexp(chunk.bits % 2 ? std::sqrt(0.5) : 1.0, -static_cast<int>(chunk.bits / 2));
        load(x + chunk.begin, v, count, chunk, !inverse);
        transform(v, count);
        store(v, out + chunk.begin, count, static_cast<A>(scale), chunk, inverse);
    };
    const int64_t count = static_cast<int64_t>(chunks.size());
    if (threads > 1) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t c = 0; c < count; ++c) rotate(chunks[c]);
    } else {
        for (int64_t c = 0; c < count; ++c) rotate(chunks[c]);
    }
}

template void hadamard(const float *, float *, const std::vector<Rotated> &, bool, int);
template void hadamard(const double *, double *, const std::vector<Rotated> &, bool, int);
template void hadamard(const Bfloat16 *, float *, const std::vector<Rotated> &, bool, int);
template void hadamard(const Float16 *, float *, const std::vector<Rotated> &, bool, int);
template void hadamard(const float *, Bfloat16 *, const std::vector<Rotated> &, bool, int);
template void hadamard(const float *, Float16 *, const std::vector<Rotated> &, bool, int);

}  // namespace gradsync
