// Rows of a table in memory, and kernels that find, copy and spread them. A row's elements are adjacent; rows may be
// any distance apart, so that columns of a wider tensor or of a message need no copy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "rank_bitmap.hpp"

namespace gradsync {

// Row r begins at data + r * stride, in units of T (bytes for void-like char).
template <typename T> struct Rows {
    T *data;
    size_t stride;
    T *operator[](size_t row) const { return data + row * stride; }
};

// Columns [begin, begin + width) of whole rows, and where they live as rows of their own.
template <typename T> struct Stripe {
    Rows<T> rows;
    size_t begin, width;
};

// The row or element indices of one part: int64 or int32, in any order, duplicates allowed.
struct Indices {
    const void *data;
    bool wide;  // int64, else int32
    size_t count;
    bool sorted = false;  // filled in by check_indices
};

// The first index outside the table, in the order of the parts.
struct BadIndex {
    size_t part;
    int64_t index;
};

// The first pair of neighbours that is out of order.
struct NotSorted {
    int64_t before, after;
};

// Calls body(const Index *) with the indices in their own type.
template <typename Body> auto with_indices(const Indices &part, Body body) {
    return part.wide ? body(static_cast<const int64_t *>(part.data)) : body(static_cast<const int32_t *>(part.data));
}

// The first item of a sorted part at or after `row`; of an unsorted part, the first item.
template <typename Index> size_t seek(const Index *index, const Indices &part, uint64_t row);

// Finds out whether the part is sorted. Throws BadIndex if an index is not in [0, num_rows).
void check_indices(Indices &part, size_t part_number, uint64_t num_rows);

// memcpy for short runs of a length that repeats: the branches are predicted and nothing is called.
inline void copy_bytes(char *__restrict to, const char *__restrict from, size_t n) {
    const auto both_ends = [&](auto size) {  // two overlapping pieces that together cover all
        constexpr size_t piece = decltype(size)::value;
        char head[piece], tail[piece];
        std::memcpy(head, from, piece);
        std::memcpy(tail, from + n - piece, piece);
        std::memcpy(to, head, piece);
        std::memcpy(to + n - piece, tail, piece);
    };
    if (n >= 512) std::memcpy(to, from, n);
    else if (n > 64) {
        for (size_t i = 0; i + 32 <= n; i += 32) std::memcpy(to + i, from + i, 32);
        std::memcpy(to + n - 32, from + n - 32, 32);
    } else if (n >= 32) both_ends(std::integral_constant<size_t, 32>{});
    else if (n >= 16) both_ends(std::integral_constant<size_t, 16>{});
    else if (n >= 8) both_ends(std::integral_constant<size_t, 8>{});
    else if (n >= 4) both_ends(std::integral_constant<size_t, 4>{});
    else for (size_t i = 0; i < n; ++i) to[i] = from[i];
}

// Fetches a row that lies anywhere, but of a long one only the beginning: the hardware fetches the rest. Into the
// second level, which was measured to be faster than into the first. Always inline: gcc takes a call that only fetches
// for one without effect, and drops it.
[[gnu::always_inline]] inline void prefetch_row(const void *row, size_t nbytes) {
    constexpr size_t kMaxBytes = 2048;
    const char *const bytes = static_cast<const char *>(row);
    for (size_t i = 0; i < std::min(nbytes, kMaxBytes); i += 64) __builtin_prefetch(bytes + i, 0, 2);
}

// Outputs from here on are larger than the caches: reading their lines before writing them would be a third of the
// traffic, so they are written past the caches.
constexpr size_t kStreamedBytes = size_t{32} << 20;

// memcpy of bytes that will not be read soon. Call order_stores() before another thread is told that they are there.
void stream_bytes(char *to, const char *from, size_t n);

void order_stores();

// Copies row after row, `width` bytes each. Streams, as stream_bytes() does, only where the rows of `to` are adjacent.
void copy_rows(Rows<char> to, Rows<const char> from, size_t width, size_t num_rows, bool stream);

// Which rows of a dense table have an element that is not zero; -0.0 is zero, NaN and subnormals are not.
class NonzeroRows {
public:
    // itemsize 2, 4 or 8: IEEE elements, of which only the sign bit may be set in a zero. Strides in bytes.
    NonzeroRows(Rows<const char> dense, size_t num_rows, size_t dim, size_t itemsize, int threads);

    const RankBitmap &bitmap() const { return bitmap_; }
    // Copies the rows found, in order, into the stripes (in bytes).
    void gather(const std::vector<Stripe<char>> &outs, int threads) const;

private:
    Rows<const char> dense_;
    size_t row_bytes_;
    RankBitmap bitmap_;
};

// out's columns = the parts, each with its place in a row (in bytes).
void join_columns(const std::vector<Stripe<const char>> &parts, size_t num_rows, Rows<char> out, size_t row_bytes,
                  int threads);

// dense[indices[i]] = values[i] in order, so that of equal indices the last one stays. In bytes.
void set_rows(const Indices &indices, Rows<const char> values, Rows<char> dense, size_t num_rows, size_t row_bytes,
              int threads);

// dense[indices[i]] += values[i] in order, each sum rounded to T.
template <typename T>
void add_rows(const Indices &indices, Rows<const T> values, Rows<T> dense, size_t num_rows, size_t dim, int threads);

}  // namespace gradsync
