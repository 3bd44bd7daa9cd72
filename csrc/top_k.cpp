#include "top_k.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "nonzero.hpp"
#include "rank_bitmap.hpp"

namespace gradsync {
namespace {

constexpr size_t kSamples = 16384;     // sections of no more are looked at as a whole
constexpr double kDeviations = 4;      // of the sample: how far below its k-th largest the threshold is taken
constexpr size_t kMostCandidates = 4;  // times k (and the samples): from there on, a select over all costs no more
constexpr size_t kBlockWords = 16;     // of the bitmap: their elements are compared while they are in the cache

template <size_t size> struct Unsigned;
template <> struct Unsigned<2> { using type = uint16_t; };
template <> struct Unsigned<4> { using type = uint32_t; };
template <> struct Unsigned<8> { using type = uint64_t; };
template <typename P> using Key = typename Unsigned<sizeof(P)>::type;

template <typename K> constexpr K kMagnitude = std::numeric_limits<K>::max() >> 1;  // all bits but the sign

template <typename V> constexpr Accumulator<V> kLargest = std::numeric_limits<Accumulator<V>>::max();
template <> constexpr float kLargest<Bfloat16> = 0x1.fep127f;
template <> constexpr float kLargest<Float16> = 65504.0f;

template <typename P> Key<P> magnitude(const P &value) {
    Key<P> bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits & kMagnitude<Key<P>>;
}

// The largest keys, known digit by digit, the highest first.
template <typename K> struct Nth {
    K key = 0;     // the digits of the k-th largest that are known so far
    size_t equal;  // how many that begin with them are among the k
    K fixed = 0;   // where the digits are that are known
    int bits = 8 * sizeof(K) - 1;  // below these

    explicit Nth(size_t k) : equal(k) {}

    template <typename KeyAt> void find_digit(size_t count, KeyAt key_at) {
        constexpr int kDigitBits = 11;
        const int shift = std::max(bits - kDigitBits, 0);
        const K digits = static_cast<K>((K{1} << (bits - shift)) - 1);
        size_t counts[size_t{1} << kDigitBits] = {};
        for (size_t i = 0; i < count; ++i) {
            const K candidate = key_at(i);
            if ((candidate & fixed) == key) ++counts[candidate >> shift & digits];
        }
        K digit = digits;
        while (counts[digit] < equal) equal -= counts[digit--];
        key = static_cast<K>(key | digit << shift);
        fixed = static_cast<K>(fixed | digits << shift);
        bits = shift;
    }
};

// The k-th largest of [0, count); 0 < k <= count.
template <typename K, typename KeyAt> Nth<K> nth_largest(size_t count, size_t k, KeyAt key_at) {
    Nth<K> nth(k);
    while (nth.bits > 0) nth.find_digit(count, key_at);
    return nth;
}

// Bit i: |p[i]| >= threshold, for count <= 64 elements.
template <typename P> uint64_t at_least_mask(const P *p, size_t count, Key<P> threshold) {
    uint64_t mask = 0;
    for (size_t i = 0; i < count; ++i) mask |= uint64_t{magnitude(p[i]) >= threshold} << i;
    return mask;
}

// The same for 64 elements. Magnitudes have no sign, so that they compare as signed integers.
#if defined(__AVX2__)
template <typename P> uint64_t at_least_mask(const P *p, Key<P> threshold) {
    uint64_t mask = 0;
    if constexpr (sizeof(P) == 2) {
        const __m256i magnitude = _mm256_set1_epi16(kMagnitude<uint16_t>);
        const __m256i below = _mm256_set1_epi16(static_cast<int16_t>(threshold - 1));
        const auto above = [&](int i) {
            return _mm256_cmpgt_epi16(_mm256_and_si256(load256(p + 16 * i), magnitude), below);
        };
        for (int i = 0; i < 2; ++i) {
            const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(above(2 * i), above(2 * i + 1)), 0xd8);
            mask |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(bytes))} << (32 * i);
        }
    } else if constexpr (sizeof(P) == 4) {
        const __m256i magnitude = _mm256_set1_epi32(kMagnitude<uint32_t>);
        const __m256i below = _mm256_set1_epi32(static_cast<int32_t>(threshold - 1));
        for (int i = 0; i < 8; ++i) {
            const __m256i above = _mm256_cmpgt_epi32(_mm256_and_si256(load256(p + 8 * i), magnitude), below);
            mask |= uint64_t{static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(above)))} << (8 * i);
        }
    } else {
        const __m256i magnitude = _mm256_set1_epi64x(kMagnitude<uint64_t>);
        const __m256i below = _mm256_set1_epi64x(static_cast<int64_t>(threshold - 1));
        for (int i = 0; i < 16; ++i) {
            const __m256i above = _mm256_cmpgt_epi64(_mm256_and_si256(load256(p + 4 * i), magnitude), below);
            mask |= uint64_t{static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(above)))} << (4 * i);
        }
    }
    return mask;
}
#else
template <typename P> uint64_t at_least_mask(const P *p, Key<P> threshold) {
    return at_least_mask(p, kWordBits, threshold);
}
#endif

// The word of a bitmap whose elements begin at p[begin].
template <typename P> uint64_t mask_at(const P *p, size_t begin, size_t numel, Key<P> threshold) {
    const size_t rest = numel - begin;
    return rest >= kWordBits ? at_least_mask(p + begin, threshold) : at_least_mask(p + begin, rest, threshold);
}

// The smallest magnitude that is not within the threshold.
template <typename P> Key<P> least_above(Accumulator<P> threshold) {
    if (!(threshold >= 0)) return 0;
    const P rounded = narrow<P>(threshold);
    return static_cast<Key<P>>(magnitude(rounded) + (widen(rounded) > threshold ? 0 : 1));
}

// The elements to choose from. Where there is a residual they are sums, made by functions that alone know x's type.
template <typename P> struct Elements {
    const P *p;
    void (*sample)(const Elements &, size_t numel, Key<P> *keys);
    void (*sum)(const Elements &, size_t begin, size_t end) = nullptr;  // left = residual + x; p is `left`
    Accumulator<P> *left = nullptr;
    const Accumulator<P> *residual = nullptr;
    const char *x = nullptr;
    size_t itemsize = 0;  // of x

    Elements from(size_t begin) const {
        if (!sum) return {p + begin, sample};
        return {p + begin, sample, sum, left + begin, residual + begin, x + begin * itemsize, itemsize};
    }
};

// The keys of one element of each of kSamples equal parts, at a place in it that a multiplicative hash gives.
template <typename K, typename At> void sample_keys(size_t numel, K *keys, At at) {
    for (size_t i = 0; i < kSamples; ++i) {
        const size_t begin = share_begin(numel, i, kSamples), part = share_begin(numel, i + 1, kSamples) - begin;
        const uint32_t hash = static_cast<uint32_t>(i) * 0x9e3779b9u;
        keys[i] = magnitude(at(begin + (uint64_t{hash} * part >> 32)));
    }
}

template <typename T> Elements<T> plain_elements(const T *x) {
    const auto sample = [](const Elements<T> &of, size_t numel, Key<T> *keys) {
        sample_keys(numel, keys, [&](size_t i) { return of.p[i]; });
    };
    return {x, sample};
}

template <typename T> Elements<Accumulator<T>> summed_elements(Choice<T> choice) {
    using P = Accumulator<T>;
    const auto sample = [](const Elements<P> &of, size_t numel, Key<P> *keys) {
        const T *x = reinterpret_cast<const T *>(of.x);
        sample_keys(numel, keys, [&](size_t i) { return of.residual[i] + widen(x[i]); });
    };
    const auto sum = [](const Elements<P> &of, size_t begin, size_t end) {
        const T *x = reinterpret_cast<const T *>(of.x);
        if constexpr (std::is_same_v<T, double>)
            for (size_t i = begin; i < end; ++i) of.left[i] = of.residual[i] + x[i];
        else
            add_row(of.left + begin, of.residual + begin, x + begin, end - begin);
    };
    return {choice.left, sample, sum, choice.left, choice.residual, reinterpret_cast<const char *>(choice.x), sizeof(T)};
}

// Of one section.
template <typename P> class Selection {
public:
    Selection(const Elements<P> &elements, size_t numel, int threads)
        : elements_(elements), numel_(numel), threads_(threads), chosen_(numel, threads) {}

    RankBitmap largest(size_t k) && {
        if (k == 0 || k == numel_) {
            mark(k == 0 ? kNone : Key<P>{0}, true);
        } else if (numel_ <= kSamples) {
            sum(0, numel_);
            Nth<Key<P>> nth(k);
            nth.find_digit(numel_, key_at());
            mark(nth.key, false);
            if (chosen_.count() > k) choose_from_marked(k);
        } else {
            mark(suggested_threshold(k), true);
            if (chosen_.count() < k) choose_from_all(k);
            else cut(k);
        }
        return std::move(chosen_);
    }

    RankBitmap above(Accumulator<P> threshold, size_t most) && {
        mark(least_above<P>(threshold), true);
        if (most == 0) mark(kNone, false);
        else cut(most);
        return std::move(chosen_);
    }

private:
    static constexpr Key<P> kNone = kMagnitude<Key<P>> + 1;  // larger than all magnitudes

    auto key_at() const {
        return [p = elements_.p](size_t i) { return magnitude(p[i]); };
    }

    void sum(size_t begin, size_t end) const {
        if (elements_.sum) elements_.sum(elements_, begin, end);
    }

    Key<P> suggested_threshold(size_t k) const {
        const Scratch<Key<P>> sample(kSamples);
        elements_.sample(elements_, numel_, sample.begin());
        const double expected = static_cast<double>(kSamples) * k / numel_;
        const size_t nth = std::min<size_t>(kSamples, expected + kDeviations * (std::sqrt(expected) + 1));
        return nth_largest<Key<P>>(kSamples, nth, [&](size_t i) { return sample[i]; }).key;
    }

    void mark(Key<P> threshold, bool sums) {
        const P *const p = elements_.p;
        const size_t num_words = chosen_.num_words();
#pragma omp parallel for num_threads(threads_) schedule(static) if (threads_ > 1)
        for (size_t first = 0; first < num_words; first += kBlockWords) {
            const size_t stop = std::min(first + kBlockWords, num_words);
            if (sums) sum(first * kWordBits, std::min(stop * kWordBits, numel_));
            for (size_t w = first; w < stop; ++w) chosen_.words()[w] = mask_at(p, w * kWordBits, numel_, threshold);
        }
        chosen_.rank_bits();
    }

    // The k largest of those that are marked, if there are more.
    void cut(size_t k) {
        if (chosen_.count() > kMostCandidates * (k + kSamples)) choose_from_all(k);
        else if (chosen_.count() > k) choose_from_marked(k);
    }

    void choose_from_marked(size_t k) {
        const P *const p = elements_.p;
        const Scratch<Key<P>> keys(chosen_.count());
#pragma omp parallel for num_threads(threads_) schedule(static) if (threads_ > 1)
        for (size_t w = 0; w < chosen_.num_words(); ++w) {
            Key<P> *key = &keys[chosen_.rank_of_word(w)];
            for (uint64_t bits = chosen_.words()[w]; bits != 0; bits &= bits - 1)
                *key++ = magnitude(p[w * kWordBits + lowest_bit(bits)]);
        }
        Nth<Key<P>> nth = nth_largest<Key<P>>(keys.size(), k, [&](size_t i) { return keys[i]; });
        const Key<P> *key = keys.begin();
        for (size_t w = 0; w < chosen_.num_words(); ++w) {
            uint64_t kept = 0;
            for (uint64_t bits = chosen_.words()[w]; bits != 0; bits &= bits - 1, ++key)
                if (*key > nth.key || (*key == nth.key && nth.equal > 0 && nth.equal-- > 0)) kept |= bits & -bits;
            chosen_.words()[w] = kept;
        }
        chosen_.rank_bits();
    }

    void choose_from_all(size_t k) {
        Nth<Key<P>> nth = nth_largest<Key<P>>(numel_, k, key_at());
        mark(static_cast<Key<P>>(nth.key + 1), false);
        for (size_t i = 0; nth.equal > 0; ++i)
            if (key_at()(i) == nth.key) set_bit(chosen_.words(), i), --nth.equal;
        chosen_.rank_bits();
    }

    Elements<P> elements_;
    size_t numel_;
    int threads_;
    RankBitmap chosen_;
};

// Rounded to nearest; what is finite stays finite.
template <typename V, typename Wide> V rounded(Wide value) {
    if constexpr (sizeof(V) >= sizeof(Wide)) return static_cast<V>(value);
    else {
        const Wide largest = static_cast<Wide>(kLargest<V>), within = std::max(-largest, std::min(largest, value));
        const auto wide = static_cast<Accumulator<V>>(value - value == 0 ? within : value);  // infinity, NaN as they are
        return narrow<V>(wide);
    }
}

// Where a section begins: in the whole tensor, and in the outputs.
struct Place {
    size_t begin, room;
};

// Where what is chosen goes to, by functions that alone know the types of the outputs. Of the elements, the type is P.
template <typename P> struct Outputs {
    void *indices, *values;
    void (*write_indices)(const RankBitmap &, Place, void *indices, int threads);
    void (*take_values)(const RankBitmap &, const P *, Accumulator<P> *left, Place, void *values, int threads);
};

template <typename Index> void write_indices(const RankBitmap &chosen, Place place, void *indices, int threads) {
    Index *const to = static_cast<Index *>(indices) + place.room;
    chosen.write_indices(to, threads);
    for (size_t i = 0; i < chosen.count(); ++i) to[i] += static_cast<Index>(place.begin);
}

template <typename P, typename V>
void take_values(const RankBitmap &chosen, const P *p, Accumulator<P> *left, Place place, void *values, int threads) {
    V *const to = static_cast<V *>(values) + place.room;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (size_t w = 0; w < chosen.num_words(); ++w) {
        V *value = to + chosen.rank_of_word(w);
        for (uint64_t bits = chosen.words()[w]; bits != 0; bits &= bits - 1, ++value) {
            const size_t i = w * kWordBits + lowest_bit(bits);
            const Accumulator<P> exact = widen(p[i]);
            *value = rounded<V>(exact);
            if (left) left[i] = exact - static_cast<Accumulator<P>>(widen(*value));
        }
    }
}

// Without thresholds the largest. Returns how many of each section were chosen.
template <typename P>
std::vector<size_t> choose_each(const Elements<P> &all, const std::vector<Section> &sections,
                                const Accumulator<P> *thresholds, const Outputs<P> &to, int threads) {
    std::vector<Place> places{{0, 0}};
    for (const Section &section : sections)
        places.push_back({places.back().begin + section.length, places.back().room + section.most});
    std::vector<size_t> counts(sections.size());
    const auto choose = [&](size_t s, int threads) {
        const Elements<P> elements = all.from(places[s].begin);
        Selection<P> selection(elements, sections[s].length, threads);
        const RankBitmap chosen = thresholds ? std::move(selection).above(thresholds[s], sections[s].most)
                                             : std::move(selection).largest(sections[s].most);
        to.write_indices(chosen, places[s], to.indices, threads);
        to.take_values(chosen, elements.p, elements.left, places[s], to.values, threads);
        counts[s] = chosen.count();
    };
    // Small sections side by side, large ones one after the other, each by all threads.
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (size_t s = 0; s < sections.size(); ++s)
        if (sections[s].length <= kSamples) choose(s, 1);
    for (size_t s = 0; s < sections.size(); ++s)
        if (sections[s].length > kSamples) choose(s, threads);
    return counts;
}

template <typename T, typename V, typename Index>
std::vector<size_t> choose_to(Choice<T> choice, const std::vector<Section> &sections, const Accumulator<T> *thresholds,
                              Index *indices, V *values, int threads) {
    using P = Accumulator<T>;
    if (choice.residual) {
        const Outputs<P> to{indices, values, write_indices<Index>, take_values<P, V>};
        return choose_each(summed_elements(choice), sections, thresholds, to, threads);
    }
    const Outputs<T> to{indices, values, write_indices<Index>, take_values<T, V>};
    return choose_each(plain_elements(choice.x), sections, thresholds, to, threads);
}

// Moves what was chosen of each section up to that of the section before it; returns how many there are of all.
size_t close_gaps(const std::vector<Section> &sections, const std::vector<size_t> &counts, void *items, size_t itemsize) {
    char *const begin = static_cast<char *>(items);
    size_t room = 0, total = 0;
    for (size_t s = 0; s < sections.size(); ++s) {
        if (counts[s] > 0) std::memmove(begin + total * itemsize, begin + room * itemsize, counts[s] * itemsize);
        room += sections[s].most;
        total += counts[s];
    }
    return total;
}

}  // namespace

template <typename T, typename V, typename Index>
void top_k(Choice<T> choice, const std::vector<Section> &sections, Index *indices, V *values, int threads) {
    choose_to(choice, sections, static_cast<const Accumulator<T> *>(nullptr), indices, values, threads);
}

template <typename T, typename V, typename Index>
size_t select_above(Choice<T> choice, const std::vector<Section> &sections, const Accumulator<T> *thresholds,
                    Index *indices, V *values, int threads) {
    const std::vector<size_t> counts = choose_to(choice, sections, thresholds, indices, values, threads);
    close_gaps(sections, counts, indices, sizeof *indices);
    return close_gaps(sections, counts, values, sizeof *values);
}

template <typename T>
void count_above(const T *x, const std::vector<Section> &sections, const Accumulator<T> *thresholds, int64_t *counts,
                 int threads) {
    for (size_t s = 0; s < sections.size(); ++s) {
        const Key<T> least = least_above<T>(thresholds[s]);
        const size_t numel = sections[s].length;
        int64_t count = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : count) if (threads > 1 && numel > kSamples)
        for (size_t w = 0; w < words_for(numel); ++w) count += popcount(mask_at(x, w * kWordBits, numel, least));
        counts[s] = count;
        x += numel;
    }
}

#define INSTANTIATE_OUTPUTS(T, V, Index)                                                                             \
    template void top_k(Choice<T>, const std::vector<Section> &, Index *, V *, int);                                 \
    template size_t select_above(Choice<T>, const std::vector<Section> &, const Accumulator<T> *, Index *, V *, int);
#define INSTANTIATE(T)                                                                                     \
    INSTANTIATE_OUTPUTS(T, float, int32_t)                                                                 \
    INSTANTIATE_OUTPUTS(T, float, int64_t)                                                                 \
    INSTANTIATE_OUTPUTS(T, double, int32_t)                                                                \
    INSTANTIATE_OUTPUTS(T, double, int64_t)                                                                \
    INSTANTIATE_OUTPUTS(T, Bfloat16, int32_t)                                                              \
    INSTANTIATE_OUTPUTS(T, Bfloat16, int64_t)                                                              \
    INSTANTIATE_OUTPUTS(T, Float16, int32_t)                                                               \
    INSTANTIATE_OUTPUTS(T, Float16, int64_t)                                                               \
    template void count_above(const T *, const std::vector<Section> &, const Accumulator<T> *, int64_t *, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(Bfloat16)
INSTANTIATE(Float16)

}  // namespace gradsync
