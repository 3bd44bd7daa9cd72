// The element types of gradients, and their conversion to and from the type that sums are kept in: float, and double
// for double. Narrowing rounds to nearest, ties to even; a NaN stays a NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace gradsync {

struct Bfloat16 {  // the upper half of a float
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

template <typename T> struct AccumulatorOf { using type = float; };
template <> struct AccumulatorOf<double> { using type = double; };
template <typename T> using Accumulator = typename AccumulatorOf<T>::type;

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(Bfloat16 value) { return float_of(uint32_t{value.bits} << 16); }
inline float widen(Float16 value) {
    const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16, magnitude = value.bits & 0x7fffu;
    if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | magnitude << 13);  // infinity, NaN
    return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));          // subnormals come out right too
}

template <typename T> T narrow(Accumulator<T> value);
template <> inline float narrow<float>(float value) { return value; }
template <> inline double narrow<double>(double value) { return value; }
template <> inline Bfloat16 narrow<Bfloat16>(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <> inline Float16 narrow<Float16>(float value) {
    const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    uint32_t half;
    if (magnitude > 0x7f800000) half = 0x7e00 | (magnitude >> 13 & 0x3ff);
    else if (magnitude >= 0x47800000) half = 0x7c00;  // 2^16 and more
    else if (magnitude < 0x38800000) half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;  // a float's ulp at 0.5
    else half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;                // is 2^-24
    return {static_cast<uint16_t>(sign | half)};
}

// Calls body(dim); for the usual lengths of rows, with a constant, which leaves no loop.
template <typename Body> inline auto with_known_dim(size_t dim, Body body) {
    if (dim == 1) return body(std::integral_constant<size_t, 1>{});
    if (dim == 16) return body(std::integral_constant<size_t, 16>{});
    return body(dim);
}

// Whole vectors first, in a loop whose inner length the compiler knows.
template <typename In> inline void add_row(Accumulator<In> *__restrict to, const In *__restrict from, size_t dim) {
    constexpr size_t kStep = 16;
    size_t d = 0;
    for (; d + kStep <= dim; d += kStep)
        for (size_t i = 0; i < kStep; ++i) to[d + i] += widen(from[d + i]);
    for (; d < dim; ++d) to[d] += widen(from[d]);
}

// to = before + from, where `before` is `to` or elsewhere.
template <typename In> inline void add_row(float *to, const float *before, const In *__restrict from, size_t dim) {
    constexpr size_t kStep = 16;
    size_t d = 0;
    for (; d + kStep <= dim; d += kStep) {
        float sums[kStep];  // cannot be `before`, so that the loop is vectorised
        for (size_t i = 0; i < kStep; ++i) sums[i] = before[d + i] + widen(from[d + i]);
        std::memcpy(to + d, sums, sizeof sums);
    }
    for (; d < dim; ++d) to[d] = before[d] + widen(from[d]);
}

template <typename In> inline void widen_row(float *__restrict to, const In *__restrict from, size_t count) {
    for (size_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}

// `stream`: past the caches, where the machine can; see stream_bytes().
template <bool stream = false, typename Out>
inline void narrow_row(Out *__restrict to, const float *__restrict from, size_t count) {
    for (size_t i = 0; i < count; ++i) to[i] = narrow<Out>(from[i]);
}

#if defined(__AVX2__)  // and with it F16C, see has_avx2()
inline __m256i every(uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }

inline __m256 widen_vector(const Bfloat16 *from) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

inline void add_row(float *to, const float *before, const Bfloat16 *from, size_t dim) {
    size_t d = 0;
    for (; d + 16 <= dim; d += 16) {
        const __m256 first = _mm256_add_ps(_mm256_loadu_ps(before + d), widen_vector(from + d));
        const __m256 second = _mm256_add_ps(_mm256_loadu_ps(before + d + 8), widen_vector(from + d + 8));
        _mm256_storeu_ps(to + d, first);
        _mm256_storeu_ps(to + d + 8, second);
    }
    for (; d < dim; ++d) to[d] = before[d] + widen(from[d]);
}

// Eight floats rounded to the upper halves of their bits, each in the lower half of a lane.
inline __m256i round_to_bfloat16(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values), upper = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), quiet, is_nan);
}

template <bool stream> inline void store_vector(void *to, __m256i bits) {
    if constexpr (stream) _mm256_stream_si256(static_cast<__m256i *>(to), bits);
    else _mm256_storeu_si256(static_cast<__m256i *>(to), bits);
}

template <bool stream = false>
inline void narrow_row(Bfloat16 *__restrict to, const float *__restrict from, size_t count) {
    size_t i = 0;
    if (stream)
        for (; i < count && reinterpret_cast<uintptr_t>(to + i) % sizeof(__m256i) != 0; ++i)
            to[i] = narrow<Bfloat16>(from[i]);
    for (; i + 16 <= count; i += 16) {
        const __m256i first = round_to_bfloat16(_mm256_loadu_ps(from + i));
        const __m256i second = round_to_bfloat16(_mm256_loadu_ps(from + i + 8));
        store_vector<stream>(to + i, _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8));  // by halves
    }
    for (; i < count; ++i) to[i] = narrow<Bfloat16>(from[i]);
}

inline void add_row(float *to, const float *before, const Float16 *from, size_t dim) {
    size_t d = 0;
    for (; d + 8 <= dim; d += 8) {
        const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from + d)));
        _mm256_storeu_ps(to + d, _mm256_add_ps(_mm256_loadu_ps(before + d), wide));
    }
    for (; d < dim; ++d) to[d] = before[d] + widen(from[d]);
}

inline void widen_row(float *__restrict to, const Float16 *__restrict from, size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i))));
    for (; i < count; ++i) to[i] = widen(from[i]);
}

inline void add_row(float *to, const Float16 *from, size_t dim) { add_row(to, to, from, dim); }

template <bool stream = false>
inline void narrow_row(Float16 *__restrict to, const float *__restrict from, size_t count) {
    const auto half = [&](size_t i) { return _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT); };
    size_t i = 0;
    if (stream)
        for (; i < count && reinterpret_cast<uintptr_t>(to + i) % sizeof(__m256i) != 0; ++i)
            to[i] = narrow<Float16>(from[i]);
    for (; i + 16 <= count; i += 16) store_vector<stream>(to + i, _mm256_set_m128i(half(i + 8), half(i)));
    for (; i < count; ++i) to[i] = narrow<Float16>(from[i]);
}
#endif

}  // namespace gradsync
