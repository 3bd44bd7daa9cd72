#include "top_k.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "nonzero.hpp"

namespace MODULE_NAME {
namespace {

constexpr size_t kSamples = 16384;
constexpr double kDeviations = 4;     // of the sample: how far below its k-th largest the threshold is taken
constexpr size_t kMostCandidates = 4;  // times k (and the samples): from there on, a select over all costs no more

template <typename Key> constexpr Key kMagnitude = std::numeric_limits<Key>::max() >> 1;  // all bits but the sign

template <typename Key> struct Nth {
    Key key;       // the k-th largest
    size_t equal;  // how many of this key are among the k
};

// Digit by digit, the highest first: which one the k-th largest of [0, count) has; 0 < k <= count.
template <typename Key, typename KeyAt> Nth<Key> nth_largest(size_t count, size_t k, KeyAt key_at) {
    constexpr int kDigitBits = 11;
    Key found = 0, fixed = 0;  // the digits known so far, and where they are
    for (int bits = 8 * sizeof(Key) - 1; bits > 0; bits -= kDigitBits) {
        const int shift = std::max(bits - kDigitBits, 0);
        const Key digits = static_cast<Key>((Key{1} << (bits - shift)) - 1);
        size_t counts[size_t{1} << kDigitBits] = {};
        for (size_t i = 0; i < count; ++i) {
            const Key key = key_at(i);
            if ((key & fixed) == found) ++counts[key >> shift & digits];
        }
        Key digit = digits;
        while (counts[digit] < k) k -= counts[digit--];
        found = static_cast<Key>(found | digit << shift);
        fixed = static_cast<Key>(fixed | digits << shift);
    }
    return {found, k};
}

// Bit i: |x[i]| >= threshold, for count <= 64 elements.
template <typename Key> uint64_t at_least_mask(const Key *x, size_t count, Key threshold) {
    uint64_t mask = 0;
    for (size_t i = 0; i < count; ++i) mask |= uint64_t{(x[i] & kMagnitude<Key>) >= threshold} << i;
    return mask;
}

// The same for 64 elements. Magnitudes have no sign, so that they compare as signed integers.
#if defined(__AVX2__)
inline uint64_t at_least_mask(const uint16_t *x, uint16_t threshold) {
    const __m256i magnitude = _mm256_set1_epi16(kMagnitude<uint16_t>);
    const __m256i below = _mm256_set1_epi16(static_cast<int16_t>(threshold - 1));
    const auto above = [&](int i) {
        return _mm256_cmpgt_epi16(_mm256_and_si256(load256(x + 16 * i), magnitude), below);
    };
    uint64_t mask = 0;
    for (int i = 0; i < 2; ++i) {
        const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(above(2 * i), above(2 * i + 1)), 0xd8);
        mask |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(bytes))} << (32 * i);
    }
    return mask;
}

inline uint64_t at_least_mask(const uint32_t *x, uint32_t threshold) {
    const __m256i magnitude = _mm256_set1_epi32(kMagnitude<uint32_t>);
    const __m256i below = _mm256_set1_epi32(static_cast<int32_t>(threshold - 1));
    uint64_t mask = 0;
    for (int i = 0; i < 8; ++i) {
        const __m256i above = _mm256_cmpgt_epi32(_mm256_and_si256(load256(x + 8 * i), magnitude), below);
        mask |= uint64_t{static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(above)))} << (8 * i);
    }
    return mask;
}

inline uint64_t at_least_mask(const uint64_t *x, uint64_t threshold) {
    const __m256i magnitude = _mm256_set1_epi64x(kMagnitude<uint64_t>);
    const __m256i below = _mm256_set1_epi64x(static_cast<int64_t>(threshold - 1));
    uint64_t mask = 0;
    for (int i = 0; i < 16; ++i) {
        const __m256i above = _mm256_cmpgt_epi64(_mm256_and_si256(load256(x + 4 * i), magnitude), below);
        mask |= uint64_t{static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(above)))} << (4 * i);
    }
    return mask;
}
#else
template <typename Key> uint64_t at_least_mask(const Key *x, Key threshold) {
    return at_least_mask(x, kWordBits, threshold);
}
#endif

template <typename Key> class Selection {
public:
    Selection(const Key *x, size_t numel, size_t k, int threads)
        : x_(x), numel_(numel), k_(k), threads_(threads), chosen_(numel, threads) {}

    RankBitmap choose() && {
        if (k_ == 0) {
            chosen_.rank_bits();
        } else if (numel_ <= kSamples) {
            choose_from_all();
        } else {
            mark(suggested_threshold());
            if (chosen_.count() < k_ || chosen_.count() > kMostCandidates * (k_ + kSamples)) choose_from_all();
            else if (chosen_.count() > k_) choose_from_marked();
        }
        return std::move(chosen_);
    }

private:
    // One element of each of as many equal parts, at a place in it that a multiplicative hash gives.
    Key suggested_threshold() const {
        const Scratch<Key> sample(kSamples);
        for (size_t i = 0; i < kSamples; ++i) {
            const size_t begin = share_begin(numel_, i, kSamples), part = share_begin(numel_, i + 1, kSamples) - begin;
            const uint32_t hash = static_cast<uint32_t>(i) * 0x9e3779b9u;
            sample[i] = x_[begin + (uint64_t{hash} * part >> 32)] & kMagnitude<Key>;
        }
        const double expected = static_cast<double>(kSamples) * k_ / numel_;
        const size_t nth = std::min<size_t>(kSamples, expected + kDeviations * (std::sqrt(expected) + 1));
        return nth_largest<Key>(kSamples, nth, [&](size_t i) { return sample[i]; }).key;
    }

    void mark(Key threshold) {
        const size_t whole = numel_ / kWordBits;
#pragma omp parallel for num_threads(threads_) schedule(static) if (threads_ > 1)
        for (size_t w = 0; w < whole; ++w) chosen_.words()[w] = at_least_mask(x_ + w * kWordBits, threshold);
        if (whole < chosen_.num_words())
            chosen_.words()[whole] = at_least_mask(x_ + whole * kWordBits, numel_ % kWordBits, threshold);
        chosen_.rank_bits();
    }

    void choose_from_marked() {
        const Scratch<Key> keys(chosen_.count());
#pragma omp parallel for num_threads(threads_) schedule(static) if (threads_ > 1)
        for (size_t w = 0; w < chosen_.num_words(); ++w) {
            Key *key = &keys[chosen_.rank_of_word(w)];
            for (uint64_t bits = chosen_.words()[w]; bits != 0; bits &= bits - 1)
                *key++ = x_[w * kWordBits + lowest_bit(bits)] & kMagnitude<Key>;
        }
        Nth<Key> nth = nth_largest<Key>(keys.size(), k_, [&](size_t i) { return keys[i]; });
        const Key *key = keys.begin();
        for (size_t w = 0; w < chosen_.num_words(); ++w) {
            uint64_t kept = 0;
            for (uint64_t bits = chosen_.words()[w]; bits != 0; bits &= bits - 1, ++key)
                if (*key > nth.key || (*key == nth.key && nth.equal > 0 && nth.equal-- > 0)) kept |= bits & -bits;
            chosen_.words()[w] = kept;
        }
        chosen_.rank_bits();
    }

    void choose_from_all() {
        const auto key_at = [this](size_t i) -> Key { return x_[i] & kMagnitude<Key>; };
        Nth<Key> nth = nth_largest<Key>(numel_, k_, key_at);
        mark(static_cast<Key>(nth.key + 1));
        for (size_t i = 0; nth.equal > 0; ++i)
            if (key_at(i) == nth.key) set_bit(chosen_.words(), i), --nth.equal;
        chosen_.rank_bits();
    }

    const Key *x_;
    size_t numel_, k_;
    int threads_;
    RankBitmap chosen_;
};

template <typename Key> RankBitmap top_k_as(const void *x, size_t numel, size_t k, int threads) {
    return Selection<Key>(static_cast<const Key *>(x), numel, k, threads).choose();
}

}  // namespace

RankBitmap top_k(const void *x, size_t numel, size_t itemsize, size_t k, int threads) {
    if (itemsize == 2) return top_k_as<uint16_t>(x, numel, k, threads);
    if (itemsize == 4) return top_k_as<uint32_t>(x, numel, k, threads);
    return top_k_as<uint64_t>(x, numel, k, threads);
}

}  // namespace MODULE_NAME
