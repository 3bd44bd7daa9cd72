// The sum of row-sparse parts by rank bitmap: one bit per row of the table, set where any part has that row. The rank
// of a row's bit is its place in the sorted union of the indices, so rows are added straight to where they belong: no
// dense buffer. A row is summed by one thread, in the order of the parts and then of occurrence, so the bits of the
// result do not depend on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "rank_bitmap.hpp"
#include "rows.hpp"
#include "scalars.hpp"

namespace MODULE_NAME {

// Which rows occur in any of the parts, and at which place of the sorted union each of them stands.
class RowUnion {
public:
    // Throws BadIndex. The index memory must outlive the object.
    RowUnion(std::vector<Indices> parts, uint64_t num_rows, int threads);

    const RankBitmap &bitmap() const { return bitmap_; }
    size_t num_parts() const { return parts_.size(); }
    size_t part_count(size_t part) const { return parts_[part].count; }

    // Writes scale * sum of the parts' rows, rounded once, into the stripes; values[p] has part_count(p) rows of dim.
    template <typename T>
    void sum(const std::vector<Rows<const T>> &values, size_t dim, double scale, const std::vector<Stripe<T>> &outs,
             int threads) const;

private:
    template <typename T> class Sum;

    std::vector<Indices> parts_;
    RankBitmap bitmap_;
    size_t total_ = 0;  // items of all parts
    bool sorted_ = true;
};

}  // namespace MODULE_NAME
