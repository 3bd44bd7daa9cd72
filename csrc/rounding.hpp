// Numbers in units of a step as codes of 8 bits or fewer, and what the codes stand for: gradsync.kernels.quantize
// defines both. Vectors give the same bits as one number after the other.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "draws.hpp"
#include "scalars.hpp"

namespace gradsync {

enum class Rounding : int { nearest, stochastic, e4m3, e5m2, exponent };

template <typename A> using Bits = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;

template <typename A> Bits<A> integer_bits(A value) {
    Bits<A> bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// A scale of zero, or one whose inverse no float holds, makes all of its block zero.
template <typename A> struct Steps {
    A inverse, step;  // levels in a unit, and back
    Steps(float scale, float top)
        : inverse(std::isfinite(top / scale) ? static_cast<A>(top) / static_cast<A>(scale) : A{0}),
          step(static_cast<A>(scale) / static_cast<A>(top)) {}
    Steps() : inverse(1), step(1) {}  // without scales
};

// Adding it to a number of far fewer bits rounds that to a whole one, ties to even.
template <typename A> constexpr A kWhole = sizeof(A) == 8 ? static_cast<A>(0x1.8p52) : static_cast<A>(0x1.8p23);

// Up with the probability that the fraction says. In 2^-24 of a level, which 32 bits hold of levels up to 127.
template <typename A> int32_t rounded_by(uint32_t noise, A level) {
    const auto fixed = static_cast<int32_t>(level * A{0x1p24f});
    return (fixed + static_cast<int32_t>(noise >> 8)) >> 24;  // to the whole one below
}

// Floats of 8 bits, so many of them for the fraction.
template <int kFraction, int kBias> struct SmallFloat {
    static constexpr int kDropped = 23 - kFraction;
    static constexpr uint32_t kLeast = static_cast<uint32_t>(127 - kBias + 1) << 23;  // the smallest normal one
    static constexpr uint32_t kUnit = static_cast<uint32_t>(254 - kBias) << 23;       // what a code's bits are too small by
};

using E4M3 = SmallFloat<3, 7>;
using E5M2 = SmallFloat<2, 15>;

// To the nearest one; NaN is zero.
template <typename Format> uint32_t small_float(float value, float top) {
    const float kept = value == value ? value : 0.0f;
    const float magnitude = std::min(std::fabs(kept), top);
    const uint32_t power = std::max(bits_of(magnitude) & 0x7f800000u, Format::kLeast), sign = bits_of(kept) >> 24 & 0x80;
    // Added to a float whose ulp is the code's, the magnitude becomes a whole number of these.
    const uint32_t unit = power + (static_cast<uint32_t>(Format::kDropped) << 23);
    const uint32_t fraction = bits_of(magnitude + float_of(unit)) - unit;
    return sign | (fraction + ((power - Format::kLeast) >> Format::kDropped));
}

template <typename Format> float small_value(uint32_t code) {
    const uint32_t magnitude = code & 0x7fu;
    const float value = float_of(magnitude << Format::kDropped) * float_of(Format::kUnit);
    // e4m3 has no infinity and one NaN; e5m2 has both as IEEE has them.
    constexpr bool kHasInfinity = std::is_same_v<Format, E5M2>;
    const bool special = kHasInfinity ? magnitude >= 0x7c : magnitude == 0x7f;
    const uint32_t as_special = kHasInfinity && magnitude == 0x7c ? 0x7f800000u : 0x7fc00000u;
    return float_of((code & 0x80u) << 24 | (special ? as_special : bits_of(value)));
}

constexpr int32_t kExponents = 126;     // codes 1 to 126 are 2^-109 to 2^16, 0 is zero and 127 NaN
constexpr int32_t kExponentBias = 17;   // from the exponent field of a float to the code
constexpr uint32_t kNaN = 0x7fc00000u;

constexpr uint32_t kLargestBits = 0x7f7fffff;  // of a finite float

// A mask, not a condition: of several of these, gcc would make a choice between all that can come of them. Below 2^31.
inline uint32_t ones_if_less(uint32_t a, uint32_t b) {
    return static_cast<uint32_t>(static_cast<int32_t>(a - b) >> 31);
}

// What is finite stays finite.
inline float in_float(float value) { return value; }
inline float in_float(double value) {
    constexpr double kMost = std::numeric_limits<float>::max();
    const double below = value > kMost ? kMost : value, within = below < -kMost ? -kMost : below;
    return static_cast<float>(value - value == 0 ? within : value);
}

inline uint32_t exponent_code(float value, uint32_t draw) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    const int32_t rounded = static_cast<int32_t>((magnitude + (draw >> 9)) >> 23) - kExponentBias;
    const auto code = static_cast<uint32_t>(std::min(std::max(rounded, 0), kExponents));
    const uint32_t signed_code = code | (bits >> 24 & 0x80u & ones_if_less(0, code));
    const uint32_t special = ones_if_less(kLargestBits, magnitude);
    return (signed_code & ~special) | (special & 0x7fu);
}

inline float exponent_value(uint32_t code) {
    const uint32_t exponent = code & 0x7fu;
    const uint32_t power = (exponent + kExponentBias) << 23 & ones_if_less(0, exponent);
    return float_of((code & 0x80u) << 24 | power | (kNaN & ones_if_less(kExponents, exponent)));
}

// Elements of a row to round.
template <typename A> struct Numbers {
    const A *p;
    size_t count, ahead;  // so far on in memory the row goes on, which is fetched meanwhile
};

// What whole vectors make of the first elements of round_each(), and how many these are.
template <Rounding rounding, bool keeps, typename A>
size_t round_vectors(const Numbers<A> &, Steps<A>, float, Noise, uint32_t, uint8_t *, A *) {
    return 0;
}

#if defined(__AVX2__)
struct FloatVector {  // eight of them
    __m256 v;
    FloatVector(__m256 v) : v(v) {}
    explicit FloatVector(float value) : v(_mm256_set1_ps(value)) {}
    explicit FloatVector(__m256i bits) : v(_mm256_castsi256_ps(bits)) {}
    __m256i bits() const { return _mm256_castps_si256(v); }
    FloatVector operator*(FloatVector o) const { return _mm256_mul_ps(v, o.v); }
    FloatVector operator+(FloatVector o) const { return _mm256_add_ps(v, o.v); }
    FloatVector operator-(FloatVector o) const { return _mm256_sub_ps(v, o.v); }
    FloatVector or_zero() const { return _mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q)); }  // where it is no number
    FloatVector at_most(FloatVector o) const { return _mm256_min_ps(v, o.v); }
    FloatVector at_least(FloatVector o) const { return _mm256_max_ps(v, o.v); }
};

template <typename Format> __m256i small_floats(FloatVector values, float top) {
    const FloatVector kept = values.or_zero();
    const FloatVector magnitude = FloatVector(_mm256_and_si256(kept.bits(), every(0x7fffffff))).at_most(FloatVector(top));
    const __m256i least = every(Format::kLeast), sign = _mm256_and_si256(_mm256_srli_epi32(kept.bits(), 24), every(0x80));
    const __m256i power = _mm256_max_epi32(_mm256_and_si256(magnitude.bits(), every(0x7f800000)), least);
    const __m256i unit = _mm256_add_epi32(power, every(static_cast<uint32_t>(Format::kDropped) << 23));
    const __m256i fraction = _mm256_sub_epi32((magnitude + FloatVector(unit)).bits(), unit);
    const __m256i exponent = _mm256_srli_epi32(_mm256_sub_epi32(power, least), Format::kDropped);
    return _mm256_or_si256(sign, _mm256_add_epi32(fraction, exponent));
}

// Of codes that stand for finite numbers.
template <typename Format> FloatVector small_values(__m256i codes) {
    const __m256i magnitude = _mm256_slli_epi32(_mm256_and_si256(codes, every(0x7f)), Format::kDropped);
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, every(0x80)), 24);
    const FloatVector value = FloatVector(magnitude) * FloatVector(every(Format::kUnit));
    return FloatVector(_mm256_or_si256(sign, value.bits()));
}

inline __m256i exponent_codes(FloatVector values, __m256i draws) {
    const __m256i bits = values.bits(), magnitude = _mm256_and_si256(bits, every(0x7fffffff)), zero = _mm256_setzero_si256();
    const __m256i up = _mm256_srli_epi32(_mm256_add_epi32(magnitude, _mm256_srli_epi32(draws, 9)), 23);
    const __m256i rounded = _mm256_max_epi32(_mm256_sub_epi32(up, every(kExponentBias)), zero);
    const __m256i code = _mm256_min_epi32(rounded, every(kExponents));
    const __m256i minus = _mm256_and_si256(_mm256_srli_epi32(bits, 24), every(0x80));
    const __m256i signed_code = _mm256_or_si256(code, _mm256_andnot_si256(_mm256_cmpeq_epi32(code, zero), minus));
    return _mm256_blendv_epi8(signed_code, every(0x7f), _mm256_cmpgt_epi32(magnitude, every(kLargestBits)));
}

inline FloatVector exponent_values(__m256i codes) {
    const __m256i exponent = _mm256_and_si256(codes, every(0x7f)), zero = _mm256_setzero_si256();
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, every(0x80)), 24);
    const __m256i shifted = _mm256_slli_epi32(_mm256_add_epi32(exponent, every(kExponentBias)), 23);
    const __m256i power = _mm256_andnot_si256(_mm256_cmpeq_epi32(exponent, zero), shifted);
    const __m256i special = _mm256_and_si256(_mm256_cmpgt_epi32(exponent, every(kExponents)), every(kNaN));
    return FloatVector(_mm256_or_si256(_mm256_or_si256(sign, power), special));
}

template <Rounding rounding> __m256i codes_of(FloatVector scaled, float top, const Noise &noise, uint32_t low) {
    if constexpr (rounding == Rounding::e4m3) {
        return small_floats<E4M3>(scaled, top);
    } else if constexpr (rounding == Rounding::e5m2) {
        return small_floats<E5M2>(scaled, top);
    } else if constexpr (rounding == Rounding::exponent) {
        return exponent_codes(scaled, noise.of_eight(low));
    } else {
        const FloatVector kept = scaled.or_zero().at_most(FloatVector(top)).at_least(FloatVector(-top));
        if constexpr (rounding == Rounding::nearest) return _mm256_cvtps_epi32(kept.v);
        const __m256i fixed = _mm256_cvttps_epi32((kept * FloatVector(0x1p24f)).v);
        return _mm256_srai_epi32(_mm256_add_epi32(fixed, _mm256_srli_epi32(noise.of_eight(low), 8)), 24);
    }
}

template <Rounding rounding> FloatVector levels_of(__m256i codes) {
    if constexpr (rounding == Rounding::e4m3) return small_values<E4M3>(codes);
    else if constexpr (rounding == Rounding::e5m2) return small_values<E5M2>(codes);
    else if constexpr (rounding == Rounding::exponent) return exponent_values(codes);
    else return _mm256_cvtepi32_ps(codes);
}

// The lowest bytes of 32 numbers that 8 bits hold.
inline __m256i bytes_of(const __m256i *numbers, bool are_signed) {
    const __m256i first = _mm256_packs_epi32(numbers[0], numbers[1]), second = _mm256_packs_epi32(numbers[2], numbers[3]);
    const __m256i bytes = are_signed ? _mm256_packs_epi16(first, second) : _mm256_packus_epi16(first, second);
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));  // packed by halves
}

template <Rounding rounding, bool keeps>
size_t round_vectors(const Numbers<float> &row, Steps<float> steps, float top, Noise noise, uint32_t low, uint8_t *codes,
                     float *next) {
    constexpr bool kSigned = rounding == Rounding::nearest || rounding == Rounding::stochastic;
    const FloatVector inverse(steps.inverse), step(steps.step);
    size_t done = 0;
    for (; done + 32 <= row.count; done += 32) {
        // As they are used, or they would wait for each other.
        for (size_t line = 0; line < 32; line += 16)
            _mm_prefetch(reinterpret_cast<const char *>(row.p + done + row.ahead + line), _MM_HINT_T0);
        __m256i numbers[4];
        for (size_t k = 0; k < 4; ++k) {
            const size_t i = done + 8 * k;
            const FloatVector value = _mm256_loadu_ps(row.p + i);
            numbers[k] = codes_of<rounding>(value * inverse, top, noise, low + static_cast<uint32_t>(i));
            if constexpr (keeps) _mm256_storeu_ps(next + i, (value - levels_of<rounding>(numbers[k]) * step).v);
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(codes + done), bytes_of(numbers, kSigned));
    }
    return done;
}
#endif

// The code of each element, and what it leaves; `low` is the place of the first in its tensor, of which all have the
// same upper 32 bits. No more than `kMost` elements.
template <size_t kMost, Rounding rounding, bool keeps, typename A>
void round_each(const Numbers<A> &row, Steps<A> steps, float top, Noise noise, uint32_t low, uint8_t *__restrict codes,
                A *__restrict next) {
    const A *__restrict p = row.p;
    const auto count = static_cast<uint32_t>(row.count);
    const auto first = static_cast<uint32_t>(round_vectors<rounding, keeps>(row, steps, top, noise, low, codes, next));
    const A most = static_cast<A>(top);
    // Codes that take much arithmetic are made in lanes as wide as the numbers, so that the registers do.
    [[maybe_unused]] uint32_t wide[kMost];
#pragma omp simd
    for (uint32_t i = first; i < count; ++i) {
        const A scaled = p[i] * steps.inverse;
        A level;
        if constexpr (rounding == Rounding::nearest || rounding == Rounding::stochastic) {
            A kept = scaled == scaled ? scaled : A{0};
            kept = kept > most ? most : kept;
            kept = kept < -most ? -most : kept;
            if constexpr (rounding == Rounding::nearest) {
                const A shifted = kept + kWhole<A>;
                level = shifted - kWhole<A>;
                codes[i] = static_cast<uint8_t>(integer_bits(shifted));  // its lowest bits are the level's
            } else {
                const int32_t whole = rounded_by(noise(low + i), kept);
                wide[i] = static_cast<uint32_t>(whole);
                level = static_cast<A>(whole);
            }
        } else if constexpr (rounding == Rounding::e4m3) {
            wide[i] = small_float<E4M3>(static_cast<float>(scaled), top);
            level = small_value<E4M3>(wide[i]);
        } else if constexpr (rounding == Rounding::e5m2) {
            wide[i] = small_float<E5M2>(static_cast<float>(scaled), top);
            level = small_value<E5M2>(wide[i]);
        } else {
            wide[i] = exponent_code(in_float(scaled), noise(low + i));
            level = exponent_value(wide[i]);
        }
        if constexpr (keeps) next[i] = p[i] - level * steps.step;
    }
    if constexpr (rounding != Rounding::nearest)
        for (uint32_t i = first; i < count; ++i) codes[i] = static_cast<uint8_t>(wide[i]);
}

}  // namespace gradsync
