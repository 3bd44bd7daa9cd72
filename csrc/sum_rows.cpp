#include "sum_rows.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace MODULE_NAME {
namespace {

constexpr size_t kBlockBytes = 128 << 10;  // output rows of a block: stay in the second-level cache for all parts
constexpr size_t kMinBlockedDim = 16;      // narrower rows do not pay for walking the parts block by block

inline int popcount(uint64_t word) { return __builtin_popcountll(word); }
inline int lowest_bit(uint64_t word) { return __builtin_ctzll(word); }

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(Bfloat16 value) {
    const uint32_t bits = uint32_t{value.bits} << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

struct Scan {
    bool in_range = true;
    bool sorted = true;
};

template <typename Index> Scan scan(const Index *index, size_t count, uint64_t num_rows) {
    bool outside = false, descends = false;
    for (size_t i = 0; i < count; ++i) outside |= static_cast<uint64_t>(index[i]) >= num_rows;
    for (size_t i = 1; i < count; ++i) descends |= index[i] < index[i - 1];
    return {!outside, !descends};
}

template <typename Index> int64_t first_outside(const Index *index, uint64_t num_rows) {
    while (static_cast<uint64_t>(*index) < num_rows) ++index;
    return *index;
}

// Calls body(const Index *) with the part's indices in their own type.
template <typename Body> auto with_indices(const Indices &part, Body body) {
    return part.wide ? body(static_cast<const int64_t *>(part.data)) : body(static_cast<const int32_t *>(part.data));
}

// The first item of a sorted part at or after `row`; of an unsorted part, the first item.
template <typename Index> size_t seek(const Index *index, const Indices &part, uint64_t row) {
    if (!part.sorted) return 0;
    const auto before = [](Index i, uint64_t row) { return static_cast<uint64_t>(i) < row; };
    return std::lower_bound(index, index + part.count, row, before) - index;
}

template <typename In, typename Acc> inline void add_row(Acc *__restrict to, const In *__restrict from, size_t dim) {
    for (size_t d = 0; d < dim; ++d) to[d] += widen(from[d]);
}

}  // namespace

RowUnion::RowUnion(std::vector<Indices> parts, uint64_t num_rows, int threads) : parts_(std::move(parts)) {
    size_t total = 0;
    for (size_t p = 0; p < parts_.size(); ++p) {
        Indices &part = parts_[p];
        const Scan found = with_indices(part, [&](auto *index) { return scan(index, part.count, num_rows); });
        if (!found.in_range)
            throw BadIndex{p, with_indices(part, [&](auto *index) { return first_outside(index, num_rows); })};
        part.sorted = found.sorted;
        total += part.count;
    }
    if (total > std::numeric_limits<uint32_t>::max()) throw std::length_error("sum_rows: more than 2^32 - 1 rows");
    if (total == 0) num_rows = 0;

    words_.assign((num_rows + 63) / 64, 0);
    // By range of rows, not of items: each word has one writer.
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; ++t) {
        const WordRange words{words_.size() * t / threads, words_.size() * (t + 1) / threads};
        for (const Indices &part : parts_) with_indices(part, [&](auto *index) { mark(part, index, words); });
    }

    ranks_.resize(words_.size() + 1);
    uint32_t before = 0;
    for (size_t w = 0; w < words_.size(); ++w) {
        ranks_[w] = before;
        before += popcount(words_[w]);
    }
    ranks_.back() = before;
    count_ = before;
}

template <typename Index> void RowUnion::mark(const Indices &part, const Index *index, WordRange words) {
    const uint64_t first_row = words.first * 64, num_rows = (words.second - words.first) * 64;
    for (size_t item = seek(index, part, first_row); item < part.count; ++item) {
        const uint64_t row = index[item];
        if (row - first_row < num_rows) words_[row / 64] |= uint64_t{1} << (row % 64);
        else if (part.sorted) break;
    }
}

inline size_t RowUnion::rank(uint64_t row) const {
    const uint64_t below = (uint64_t{1} << (row % 64)) - 1;
    return ranks_[row / 64] + popcount(words_[row / 64] & below);
}

// Past the last word of a block that starts at first_word and holds at most max_rows rows, or one word.
size_t RowUnion::block_end(size_t first_word, size_t end_word, size_t max_rows) const {
    const auto begin = ranks_.begin() + first_word + 1;
    const auto after = std::upper_bound(begin, ranks_.begin() + end_word + 1, ranks_[first_word] + max_rows);
    return std::max<size_t>(first_word + 1, after - ranks_.begin() - 1);
}

// Cuts the words so that each share has about the same number of distinct rows.
size_t RowUnion::word_at_share(int share, int shares) const {
    if (share == shares) return words_.size();
    const auto rows = static_cast<uint32_t>(count_ * share / shares);
    return share == 0 ? 0 : std::lower_bound(ranks_.begin(), ranks_.end() - 1, rows) - ranks_.begin();
}

void RowUnion::write_indices(int64_t *out, int threads) const {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; ++t) {
        const size_t end = word_at_share(t + 1, threads);
        for (size_t w = word_at_share(t, threads); w < end; ++w) {
            int64_t *next = out + ranks_[w];
            for (uint64_t word = words_[w]; word != 0; word &= word - 1) *next++ = w * 64 + lowest_bit(word);
        }
    }
}

// Adds the items of one part whose rows are in [words.first, words.second) * 64; returns where a sorted part goes on.
template <typename Index, typename In, typename Acc>
size_t RowUnion::add_part(const Indices &part, const Index *index, size_t item, WordRange words, const In *values,
                          size_t dim, Acc *out) const {
    const uint64_t first_row = words.first * 64, num_rows = (words.second - words.first) * 64;
    for (; item < part.count; ++item) {
        const uint64_t row = index[item];
        if (row - first_row < num_rows) add_row(out + rank(row) * dim, values + item * dim, dim);
        else if (part.sorted) return item;
    }
    return part.sorted ? item : 0;
}

template <typename In, typename Acc>
void RowUnion::sum_words(WordRange words, size_t max_rows, const std::vector<const In *> &values, size_t dim, Acc scale,
                         Acc *out) const {
    std::vector<size_t> next(parts_.size());  // per part: the first item not yet added
    for (size_t p = 0; p < parts_.size(); ++p)
        next[p] = with_indices(parts_[p], [&](auto *index) { return seek(index, parts_[p], words.first * 64); });

    for (size_t word = words.first, stop; word < words.second; word = stop) {
        stop = block_end(word, words.second, max_rows);
        Acc *const block = out + ranks_[word] * dim, *const block_stop = out + ranks_[stop] * dim;
        std::fill(block, block_stop, Acc{0});
        for (size_t p = 0; p < parts_.size(); ++p) {
            next[p] = with_indices(parts_[p], [&](auto *index) {
                return add_part(parts_[p], index, next[p], {word, stop}, values[p], dim, out);
            });
        }
        if (scale != Acc{1})
            for (Acc *value = block; value < block_stop; ++value) *value *= scale;
    }
}

template <typename In, typename Acc>
void RowUnion::sum(const std::vector<const In *> &values, size_t dim, Acc scale, Acc *out, int threads) const {
    const bool sorted = std::all_of(parts_.begin(), parts_.end(), [](const Indices &part) { return part.sorted; });
    const bool blocked = sorted && dim >= kMinBlockedDim;  // blocks would scan an unsorted part again and again
    const size_t max_rows = blocked ? std::max<size_t>(1, kBlockBytes / (dim * sizeof(Acc))) : count_;

#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; ++t)
        sum_words({word_at_share(t, threads), word_at_share(t + 1, threads)}, max_rows, values, dim, scale, out);
}

template void RowUnion::sum(const std::vector<const float *> &, size_t, float, float *, int) const;
template void RowUnion::sum(const std::vector<const double *> &, size_t, double, double *, int) const;
template void RowUnion::sum(const std::vector<const Bfloat16 *> &, size_t, float, float *, int) const;

}  // namespace MODULE_NAME
