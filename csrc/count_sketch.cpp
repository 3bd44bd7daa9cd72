#include "count_sketch.hpp"

#include <algorithm>
#include <limits>

#include "draws.hpp"

namespace gradsync {

namespace {

constexpr uint32_t kMostLanes = 32;
constexpr uint32_t kGroups = 16;  // that are worked on together: what they need of all rows fits a level-1 cache
constexpr size_t kMostElements = kGroups * kMostLanes;
constexpr uint64_t kBatches = 64;  // of so many groups, for one thread to estimate
constexpr uint64_t kRowKey = 0x9e3779b97f4a7c15;

inline float signed_by(float value, uint32_t bit) { return float_of(bits_of(value) ^ bit << 31); }
inline double signed_by(double value, uint32_t bit) { return bit ? -value : value; }

// Neighbouring groups of a section.
struct Batch {
    uint64_t first;  // group
    uint32_t groups;
    size_t begin, count;  // their elements in the section
};

Batch batch_at(const Sketched &s, uint64_t first) {
    const size_t begin = first * s.lanes;
    const size_t count = std::min<uint64_t>(s.length - begin, uint64_t{kGroups} * s.lanes);
    return {first, static_cast<uint32_t>((count + s.lanes - 1) / s.lanes), begin, count};
}

uint64_t groups_of(const Sketched &s) { return (s.length + s.lanes - 1) / s.lanes; }

// What the groups of a batch draw in one row.
struct Windows {
    uint32_t first[kGroups], mask[kGroups], signs[kGroups];

    Windows(const Sketched &s, uint32_t row, const Batch &batch) {
        const uint64_t key = s.seed + 2 * uint64_t{row} * kRowKey;
        for (uint32_t i = 0; i < batch.groups;) {  // as far as the upper halves of the places are the same
            const uint64_t place = s.place + (batch.first + i) * s.lanes;
            const uint64_t alike = ((uint64_t{1} << 32) - static_cast<uint32_t>(place) + s.lanes - 1) / s.lanes;
            const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(batch.groups - i, alike));
            draw(Draws(key, place), Draws(key + kRowKey, place), static_cast<uint32_t>(place), s.columns / s.lanes,
                 s.lanes, i, count);
            i += count;
        }
    }

private:
    void draw(Draws where, Draws which, uint32_t place, uint32_t windows, uint32_t lanes, uint32_t at, uint32_t count) {
        uint32_t *const firsts = first + at, *const masks = mask + at, *const all_signs = signs + at;
#pragma omp simd
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t low = place + i * lanes, drawn = where(low);
            firsts[i] = static_cast<uint32_t>(uint64_t{drawn} * windows >> 32) * lanes;
            masks[i] = drawn & (lanes - 1);
            all_signs[i] = which(low);
        }
    }
};

template <typename A> void add_lanes(const A *x, size_t count, uint32_t mask, uint32_t signs, A *counters) {
    for (uint32_t i = 0; i < count; ++i) counters[i ^ mask] += signed_by(x[i], signs >> (i ^ mask) & 1);
}

template <typename A> void read_lanes(const A *counters, size_t count, uint32_t mask, uint32_t signs, A *values) {
    for (uint32_t i = 0; i < count; ++i) values[i] = signed_by(counters[i ^ mask], signs >> (i ^ mask) & 1) + A{0};
}

#if defined(__AVX2__)
// Vectors of 8 lanes, in which the mask's lower bits change places; its upper ones change vectors.
class Lanes {
public:
    Lanes(uint32_t mask, uint32_t signs)
        : lanes_(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
          order_(_mm256_xor_si256(lanes_, _mm256_set1_epi32(static_cast<int>(mask & 7)))),
          shift_(_mm256_sub_epi32(_mm256_set1_epi32(31), lanes_)), vector_(mask >> 3), signs_(signs) {}

    size_t partner(uint32_t vector) const { return 8 * (vector ^ vector_); }
    __m256 moved(__m256 v) const { return _mm256_permutevar8x32_ps(v, order_); }
    __m256 with_signs(__m256 counters, uint32_t vector) const {
        const __m256i bits = _mm256_set1_epi32(static_cast<int>(signs_ >> 8 * vector));
        const __m256i upper = _mm256_and_si256(_mm256_sllv_epi32(bits, shift_), _mm256_set1_epi32(INT32_MIN));
        return _mm256_xor_ps(counters, _mm256_castsi256_ps(upper));
    }

private:
    __m256i lanes_, order_, shift_;
    uint32_t vector_, signs_;
};

inline void add_lanes(const float *x, size_t count, uint32_t mask, uint32_t signs, float *counters) {
    if (count < kMostLanes) return add_lanes<float>(x, count, mask, signs, counters);
    const Lanes lanes(mask, signs);
    for (uint32_t v = 0; v < 4; ++v) {
        const __m256 addend = lanes.with_signs(lanes.moved(_mm256_loadu_ps(x + lanes.partner(v))), v);
        _mm256_storeu_ps(counters + 8 * v, _mm256_add_ps(_mm256_loadu_ps(counters + 8 * v), addend));
    }
}

inline void read_lanes(const float *counters, size_t count, uint32_t mask, uint32_t signs, float *values) {
    if (count < kMostLanes) return read_lanes<float>(counters, count, mask, signs, values);
    const Lanes lanes(mask, signs);
    for (uint32_t v = 0; v < 4; ++v) {
        const __m256 value = lanes.moved(lanes.with_signs(_mm256_loadu_ps(counters + 8 * v), v));
        _mm256_storeu_ps(values + lanes.partner(v), _mm256_add_ps(value, _mm256_setzero_ps()));
    }
}
#endif

// The elements of a batch as they are summed: where they lie, or widened into `room`.
inline const float *widened(const float *x, size_t, float *) { return x; }
inline const double *widened(const double *x, size_t, double *) { return x; }
template <typename In> const float *widened(const In *x, size_t count, float *room) {
    widen_row(room, x, count);
    return room;
}

// Moves the smaller ones to `lower`.
template <typename A> void order_pairs(A *__restrict lower, A *__restrict upper, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        const A a = lower[i], b = upper[i];
        lower[i] = b < a ? b : a;
        upper[i] = a < b ? b : a;
    }
}

// The medians, into the middle row of `values`, rows of kMostElements; reorders them.
template <typename A> A *medians(A *values, uint32_t rows, size_t count) {
    A nan[kMostElements] = {};  // or 0
    const auto row = [&](uint32_t r) { return values + r * kMostElements; };
    for (uint32_t r = 0; r < rows; ++r)
        for (size_t i = 0; i < count; ++i) nan[i] = row(r)[i] != row(r)[i] ? row(r)[i] : nan[i];
    for (uint32_t smallest = 0; smallest <= rows / 2; ++smallest)
        for (uint32_t r = smallest + 1; r < rows; ++r) order_pairs(row(smallest), row(r), count);
    A *const middle = row(rows / 2);
    for (size_t i = 0; i < count; ++i) middle[i] = nan[i] != nan[i] ? nan[i] : middle[i];
    return middle;
}

}  // namespace

std::vector<Sketched> sketched_sections(const std::vector<uint64_t> &lengths, const std::vector<uint64_t> &starts,
                                        const std::vector<uint64_t> &seeds, const std::vector<uint32_t> &columns,
                                        uint32_t rows) {
    std::vector<Sketched> sections;
    uint64_t begin = 0, counters = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
        uint32_t lanes = kMostLanes;
        while (lanes > 1 && (columns[s] % lanes != 0 || lanes * lanes > columns[s])) lanes /= 2;
        sections.push_back({begin, lengths[s], starts[s], seeds[s], counters, columns[s], lanes});
        begin += lengths[s];
        counters += uint64_t{columns[s]} * rows;
    }
    return sections;
}

template <typename In>
void count_sketch(const In *x, const std::vector<Sketched> &sections, uint32_t rows, Accumulator<In> *counters,
                  int threads) {
    using A = Accumulator<In>;
    const auto add_rows = [&](uint32_t first, uint32_t step) {
        alignas(64) A room[kMostElements];
        for (const Sketched &s : sections) {
            const auto row = [&](uint32_t r) { return counters + s.counters + uint64_t{r} * s.columns; };
            for (uint32_t r = first; r < rows; r += step) std::fill_n(row(r), s.columns, A{0});
            for (uint64_t group = 0; group < groups_of(s); group += kGroups) {
                const Batch batch = batch_at(s, group);
                const A *const values = widened(x + s.begin + batch.begin, batch.count, room);
                for (uint32_t r = first; r < rows; r += step) {
                    const Windows to(s, r, batch);
                    for (uint32_t g = 0; g < batch.groups; ++g) {
                        const size_t done = size_t{g} * s.lanes, count = std::min<size_t>(s.lanes, batch.count - done);
                        add_lanes(values + done, count, to.mask[g], to.signs[g], row(r) + to.first[g]);
                    }
                }
            }
        }
    };
    const uint32_t parts = std::min(rows, static_cast<uint32_t>(std::max(threads, 1)));
#pragma omp parallel for schedule(static) num_threads(parts) if (parts > 1)
    for (uint32_t part = 0; part < parts; ++part) add_rows(part, parts);
}

template <typename Out>
void sketch_estimates(const Accumulator<Out> *counters, const std::vector<Sketched> &sections, uint32_t rows, Out *out,
                      int threads) {
    using A = Accumulator<Out>;
    struct Job {
        const Sketched *section;
        uint64_t first;
    };
    std::vector<Job> jobs;
    for (const Sketched &s : sections)
        for (uint64_t first = 0; first < groups_of(s); first += kBatches * kGroups) jobs.push_back({&s, first});
    const auto estimate = [&](const Job &job, A *values) {
        const Sketched &s = *job.section;
        const uint64_t end = std::min(groups_of(s), job.first + kBatches * kGroups);
        for (uint64_t group = job.first; group < end; group += kGroups) {
            const Batch batch = batch_at(s, group);
            for (uint32_t r = 0; r < rows; ++r) {
                const A *const row = counters + s.counters + uint64_t{r} * s.columns;
                const Windows from(s, r, batch);
                for (uint32_t g = 0; g < batch.groups; ++g) {
                    const size_t done = size_t{g} * s.lanes, count = std::min<size_t>(s.lanes, batch.count - done);
                    read_lanes(row + from.first[g], count, from.mask[g], from.signs[g],
                               values + r * kMostElements + done);
                }
            }
            const A *const found = medians(values, rows, batch.count);
            Out *const to = out + s.begin + batch.begin;
            if constexpr (std::is_same_v<A, Out>) std::copy_n(found, batch.count, to);
            else narrow_row(to, found, batch.count);
        }
    };
    const int64_t count = static_cast<int64_t>(jobs.size());
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<A> values(rows * kMostElements);
#pragma omp for schedule(static)
        for (int64_t j = 0; j < count; ++j) estimate(jobs[j], values.data());
    }
}

template void count_sketch(const float *, const std::vector<Sketched> &, uint32_t, float *, int);
template void count_sketch(const double *, const std::vector<Sketched> &, uint32_t, double *, int);
template void count_sketch(const Bfloat16 *, const std::vector<Sketched> &, uint32_t, float *, int);
template void count_sketch(const Float16 *, const std::vector<Sketched> &, uint32_t, float *, int);
template void sketch_estimates(const float *, const std::vector<Sketched> &, uint32_t, float *, int);
template void sketch_estimates(const double *, const std::vector<Sketched> &, uint32_t, double *, int);
template void sketch_estimates(const float *, const std::vector<Sketched> &, uint32_t, Bfloat16 *, int);
template void sketch_estimates(const float *, const std::vector<Sketched> &, uint32_t, Float16 *, int);

}  // namespace gradsync
