// The sum of row-sparse parts by rank bitmap: one bit per row of the table, set where any part has that row. The rank
// of a row's bit is its place in the sorted union of the indices, so rows are added straight to where they belong: no
// dense buffer. A row is summed by one thread, in the order of the parts and then of occurrence, so the bits of the
// result do not depend on the number of threads.
//
// Of a large table with few items, whose bitmap would take longer to clear than the items to sort, the rows that occur
// are numbered first, and the numbers are summed as the rows of a table that has no others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "rank_bitmap.hpp"
#include "rows.hpp"
#include "scalars.hpp"

namespace gradsync {

// To clear and rank a bitmap of more words than this, and this many more for each item, takes longer than to sort the
// items (measured on one thread: from one to two words an item on).
constexpr size_t kMinSortedWords = 2048, kSortedWordsPerItem = 4;

// Which rows occur in any of the parts, and at which place of the sorted union each of them stands.
class RowUnion {
public:
    // Throws BadIndex, and std::length_error beyond kMaxBits rows. The index memory must outlive the object.
    RowUnion(std::vector<Indices> parts, uint64_t num_rows, int threads);

    size_t count() const { return bitmap_.count(); }
    template <typename Index> void write_indices(Index *out, int threads) const;
    size_t num_parts() const { return parts_.size(); }
    size_t part_count(size_t part) const { return parts_[part].count; }

    // Writes scale * sum of the parts' rows, rounded once, into the stripes; values[p] has part_count(p) rows of dim.
    template <typename T>
    void sum(const std::vector<Rows<const T>> &values, size_t dim, double scale, const std::vector<Stripe<T>> &outs,
             int threads) const;

private:
    template <typename T> class Sum;

    size_t number_rows(uint64_t num_rows);

    std::vector<Indices> parts_;
    Scratch<int64_t> rows_;     // of a table with few items: the rows that occur, ascending
    Scratch<int32_t> numbers_;  // then, instead of the index of each item: its place among them
    RankBitmap bitmap_;
    size_t total_ = 0;  // items of all parts
    bool sorted_ = true;
};

}  // namespace gradsync
