// The element types of gradients, and their conversion to and from the type that sums are kept in: float, and double
// for double. Narrowing rounds to nearest, ties to even; a NaN stays a NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace MODULE_NAME {

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

template <typename Out>
inline void narrow_row(Out *__restrict to, const Accumulator<Out> *__restrict from, size_t count) {
    for (size_t i = 0; i < count; ++i) to[i] = narrow<Out>(from[i]);
}

#if defined(__F16C__)
inline void add_row(float *__restrict to, const Float16 *__restrict from, size_t dim) {
    size_t d = 0;
    for (; d + 8 <= dim; d += 8) {
        const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from + d)));
        _mm256_storeu_ps(to + d, _mm256_add_ps(_mm256_loadu_ps(to + d), wide));
    }
    for (; d < dim; ++d) to[d] += widen(from[d]);
}

inline void narrow_row(Float16 *__restrict to, const float *__restrict from, size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + i), half);
    }
    for (; i < count; ++i) to[i] = narrow<Float16>(from[i]);
}
#endif

}  // namespace MODULE_NAME
