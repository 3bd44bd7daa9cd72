// The test for zero on the bits of IEEE elements, seen as unsigned integers of their size: shifting out the sign makes
// -0.0 zero, while NaN, infinity and subnormals stay what they are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace gradsync {

template <typename Unsigned> inline bool any_nonzero(const Unsigned *row, size_t dim) {
    constexpr size_t kStep = 64 / sizeof(Unsigned);  // look up after each cache line
    size_t d = 0;
    for (; d + kStep <= dim; d += kStep) {
        Unsigned bits = 0;
        for (size_t i = 0; i < kStep; ++i) bits |= row[d + i];
        if (static_cast<Unsigned>(bits << 1) != 0) return true;
    }
    Unsigned bits = 0;
    for (; d < dim; ++d) bits |= row[d];
    return static_cast<Unsigned>(bits << 1) != 0;
}

// Bit i: x[i] is not zero, for count <= 64 elements.
template <typename Unsigned> inline uint64_t nonzero_mask(const Unsigned *x, size_t count) {
    uint64_t mask = 0;
    for (size_t i = 0; i < count; ++i) mask |= uint64_t{static_cast<Unsigned>(x[i] << 1) != 0} << i;
    return mask;
}

// The same for 64 elements.
#if defined(__AVX2__)
inline __m256i load256(const void *from) { return _mm256_loadu_si256(static_cast<const __m256i *>(from)); }

inline uint64_t nonzero_mask(const uint16_t *x) {
    uint64_t zero = 0;
    for (int i = 0; i < 2; ++i) {
        const __m256i low = _mm256_cmpeq_epi16(_mm256_slli_epi16(load256(x + 32 * i), 1), _mm256_setzero_si256());
        const __m256i high = _mm256_cmpeq_epi16(_mm256_slli_epi16(load256(x + 32 * i + 16), 1), _mm256_setzero_si256());
        const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
        zero |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(bytes))} << (32 * i);
    }
    return ~zero;
}

inline uint64_t nonzero_mask(const uint32_t *x) {
    uint64_t zero = 0;
    for (int i = 0; i < 8; ++i) {
        const __m256i equal = _mm256_cmpeq_epi32(_mm256_slli_epi32(load256(x + 8 * i), 1), _mm256_setzero_si256());
        zero |= uint64_t{static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(equal)))} << (8 * i);
    }
    return ~zero;
}

inline uint64_t nonzero_mask(const uint64_t *x) {
    uint64_t zero = 0;
    for (int i = 0; i < 16; ++i) {
        const __m256i equal = _mm256_cmpeq_epi64(_mm256_slli_epi64(load256(x + 4 * i), 1), _mm256_setzero_si256());
        zero |= uint64_t{static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(equal)))} << (4 * i);
    }
    return ~zero;
}
#else
template <typename Unsigned> inline uint64_t nonzero_mask(const Unsigned *x) { return nonzero_mask(x, 64); }
#endif

}  // namespace gradsync
