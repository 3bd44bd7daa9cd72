// The sum of row-sparse parts by rank bitmap: one bit per row of the table, set where any part has that row. The
// popcount prefix over the bitmap's words gives each row its place (rank) in the sorted union of the indices, so rows
// are added straight to where they belong: no sort, no hash, no dense buffer. A row is summed by one thread, in the
// order of the parts and then of occurrence, so the bits of the result do not depend on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// Both modules live in one process in the tests; each gets its own namespace, or their functions would be merged.
namespace MODULE_NAME {

// bfloat16 as its 16 bits: the upper half of a float.
struct Bfloat16 {
    uint16_t bits;
};

// The row indices of one part: int64 or int32, in any order, duplicates allowed.
struct Indices {
    const void *data;
    bool wide;  // int64, else int32
    size_t count;
    bool sorted = false;  // filled in by RowUnion
};

// The first index outside the table, in the order of the parts.
struct BadIndex {
    size_t part;
    int64_t index;
};

// Which rows occur in any of the parts, and at which place of the sorted union each of them stands.
class RowUnion {
public:
    // Throws BadIndex. The index memory must outlive the object.
    RowUnion(std::vector<Indices> parts, uint64_t num_rows, int threads);

    size_t count() const { return count_; }
    size_t num_parts() const { return parts_.size(); }
    size_t part_count(size_t part) const { return parts_[part].count; }

    // The sorted distinct indices, count() of them.
    void write_indices(int64_t *out, int threads) const;

    // out (count() x dim) = scale * sum of the parts' rows; values[p] is (part_count(p) x dim). Overwrites all of out.
    template <typename In, typename Acc>
    void sum(const std::vector<const In *> &values, size_t dim, Acc scale, Acc *out, int threads) const;

private:
    using WordRange = std::pair<size_t, size_t>;  // [first, second) of words_

    template <typename Index> void mark(const Indices &part, const Index *index, WordRange words);
    template <typename Index, typename In, typename Acc>
    size_t add_part(const Indices &part, const Index *index, size_t item, WordRange words, const In *values, size_t dim,
                    Acc *out) const;
    template <typename In, typename Acc>
    void sum_words(WordRange words, size_t max_rows, const std::vector<const In *> &values, size_t dim, Acc scale,
                   Acc *out) const;
    size_t rank(uint64_t row) const;
    size_t block_end(size_t first_word, size_t end_word, size_t max_rows) const;
    size_t word_at_share(int share, int shares) const;

    std::vector<Indices> parts_;
    std::vector<uint64_t> words_;  // bit r % 64 of word r / 64: row r occurs
    std::vector<uint32_t> ranks_;  // set bits before each word, and their total at the end
    size_t count_ = 0;
};

}  // namespace MODULE_NAME
