#include "rows.hpp"

#include <algorithm>

#include "nonzero.hpp"
#include "scalars.hpp"

namespace gradsync {
namespace {

constexpr size_t kBlockBytes = 8 << 10;  // of rows being put together: stay in the first-level cache
constexpr size_t kLineBytes = 64;
constexpr size_t kAhead = 16;            // items to prefetch ahead, where rows lie anywhere in memory

template <typename Index> void scan(const Index *index, Indices &part, size_t part_number, uint64_t num_rows) {
    if (part.count == 0) return void(part.sorted = true);
    constexpr size_t kChunk = 2048;  // is seen twice while in the first-level cache
    Index descends = 0, least = index[0], greatest = index[0];
    for (size_t first = 0, stop; first < part.count; first = stop) {
        stop = std::min(part.count, first + kChunk);
        for (size_t i = std::max<size_t>(1, first); i < stop; ++i) descends |= index[i] < index[i - 1];
        if (descends == 0) greatest = index[stop - 1];
        else
            for (size_t i = first; i < stop; ++i) {
                least = std::min(least, index[i]);
                greatest = std::max(greatest, index[i]);
            }
    }
    part.sorted = descends == 0;
    if (least >= 0 && static_cast<uint64_t>(greatest) < num_rows) return;
    while (static_cast<uint64_t>(*index) < num_rows) ++index;
    throw BadIndex{part_number, *index};
}

// Calls body(item, row) for the items of the part whose rows are in [begin, end), in order; `table` has these rows, of
// row_bytes, and has them fetched before.
template <typename Body>
void for_rows_in(const Indices &part, uint64_t begin, uint64_t end, Rows<const char> table, size_t row_bytes,
                 Body body) {
    with_indices(part, [&](auto *index) {
        for (size_t item = seek(index, part, begin); item < part.count; ++item) {
            const uint64_t row = index[item], later = index[std::min(item + kAhead, part.count - 1)];
            if (later - begin < end - begin) prefetch_row(table[later], row_bytes);
            if (row - begin < end - begin) body(item, row);
            else if (part.sorted) break;
        }
    });
}

// Calls body(begin, end) with a range of rows for each thread; sorted parts are cut into equal numbers of items.
template <typename Body> void by_row_ranges(const Indices &part, uint64_t num_rows, int threads, Body body) {
    const auto cut = [&](int t) -> uint64_t {
        if (t == 0) return 0;
        if (t == threads || part.count == 0) return num_rows;
        const size_t item = share_begin(part.count, t, threads);
        return part.sorted ? with_indices(part, [&](auto *index) { return static_cast<uint64_t>(index[item]); })
                           : share_begin(num_rows, t, threads);
    };
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; ++t)
        if (cut(t) < cut(t + 1)) body(cut(t), cut(t + 1));
}

template <typename Unsigned> void mark_nonzero_rows(Rows<const char> dense, size_t num_rows, size_t dim, RankBitmap &bitmap, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; ++t) {
        with_known_dim(dim, [&](auto dim) {
            const size_t end = share_begin(bitmap.num_words(), t + 1, threads);
            for (size_t w = share_begin(bitmap.num_words(), t, threads); w < end; ++w) {
                const size_t rows = std::min(kWordBits, num_rows - w * kWordBits);
                uint64_t word = 0;
                for (size_t bit = 0; bit < rows; ++bit) {
                    const auto *row = reinterpret_cast<const Unsigned *>(dense[w * kWordBits + bit]);
                    word |= uint64_t{any_nonzero(row, dim)} << bit;
                }
                bitmap.words()[w] = word;
            }
        });
    }
}

template <size_t width> void copy_fixed(Rows<char> to, Rows<const char> from, size_t num_rows) {
    for (size_t r = 0; r < num_rows; ++r) std::memcpy(to[r], from[r], width);
}

// A width that the compiler knows costs one load and one store.
void copy_cached(Rows<char> to, Rows<const char> from, size_t width, size_t num_rows) {
    switch (width) {
    case 4: return copy_fixed<4>(to, from, num_rows);
    case 8: return copy_fixed<8>(to, from, num_rows);
    case 16: return copy_fixed<16>(to, from, num_rows);
    case 32: return copy_fixed<32>(to, from, num_rows);
    case 64: return copy_fixed<64>(to, from, num_rows);
    case 128: return copy_fixed<128>(to, from, num_rows);
    }
    for (size_t r = 0; r < num_rows; ++r) copy_bytes(to[r], from[r], width);
}

// The hardware follows few streams at once, and none across a page: fetch a part's
// block after next while this one is joined, into the second level (parts may all map to the same lines of the first).
void prefetch_block(const Stripe<const char> &part, size_t first, size_t count, size_t num_rows) {
    if (first >= num_rows || part.rows.stride != part.width) return;
    const size_t stop = std::min(num_rows, first + count) * part.width;
    for (size_t i = first * part.width; i < stop; i += 64) __builtin_prefetch(part.rows.data + i, 0, 2);
}

#if defined(__AVX2__)
constexpr size_t kVectorBytes = sizeof(__m256i);

inline int64_t load_word(const char *from) {
    int64_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

// The pieces at(0), at(1), ... of `width` bytes, as many as fill a vector.
template <size_t width, typename At> inline __m256i load_pieces(At at) {
    const auto half = [&](size_t i) {
        if constexpr (width == 16) return _mm_loadu_si128(reinterpret_cast<const __m128i *>(at(i)));
        else return _mm_set_epi64x(load_word(at(i + 1)), load_word(at(i)));
    };
    if constexpr (width == kVectorBytes) return load256(at(0));
    else return _mm256_set_m128i(half(16 / width), half(0));
}

// Narrow rows to adjacent ones, a vector at a time: single pieces would take twice as long to store.
template <size_t width, bool stream> void pack_fixed(char *to, Rows<const char> from, size_t num_rows) {
    constexpr size_t kStep = kVectorBytes / width;
    size_t r = 0;
    if (stream)
        for (; r < num_rows && reinterpret_cast<uintptr_t>(to + r * width) % kVectorBytes != 0; ++r)
            std::memcpy(to + r * width, from[r], width);
    for (; r + kStep <= num_rows; r += kStep)
        store_vector<stream>(to + r * width, load_pieces<width>([&](size_t i) { return from[r + i]; }));
    for (; r < num_rows; ++r) std::memcpy(to + r * width, from[r], width);
}

// Rows of whole lines from parts of one width that are equally far apart, line by line.
template <size_t width, bool stream>
void join_fixed(const std::vector<Stripe<const char>> &parts, size_t first, size_t count, Rows<char> out) {
    constexpr size_t kPieces = kLineBytes / width, kStep = kVectorBytes / width;
    const size_t stride = parts[0].rows.stride;
    for (size_t p = 0; p < parts.size(); p += kPieces) {
        const char *from[kPieces];
        for (size_t i = 0; i < kPieces; ++i) from[i] = parts[p + i].rows[first];
        char *to = out[first] + parts[p].begin;
        for (size_t r = 0; r < count; ++r, to += out.stride) {
            store_vector<stream>(to, load_pieces<width>([&](size_t i) { return from[i] + r * stride; }));
            store_vector<stream>(to + kVectorBytes,
                                 load_pieces<width>([&](size_t i) { return from[kStep + i] + r * stride; }));
        }
    }
}

// Calls body(width) with a constant for the widths of which some fill a vector; returns whether it has.
template <typename Body> bool with_narrow(size_t width, Body body) {
    if (width == 8) return body(std::integral_constant<size_t, 8>{}), true;
    if (width == 16) return body(std::integral_constant<size_t, 16>{}), true;
    if (width == 32) return body(std::integral_constant<size_t, 32>{}), true;
    return false;
}

// These two return whether they could.
bool pack_narrow(char *to, Rows<const char> from, size_t width, size_t num_rows, bool stream) {
    if (stream && reinterpret_cast<uintptr_t>(to) % width != 0) return false;  // no row begins with a vector
    return with_narrow(width, [&](auto known) {
        stream ? pack_fixed<known, true>(to, from, num_rows) : pack_fixed<known, false>(to, from, num_rows);
    });
}

bool join_narrow(const std::vector<Stripe<const char>> &parts, size_t first, size_t count, Rows<char> out,
                 bool stream) {
    return with_narrow(parts[0].width, [&](auto known) {
        stream ? join_fixed<known, true>(parts, first, count, out) : join_fixed<known, false>(parts, first, count, out);
    });
}
#else
bool pack_narrow(char *, Rows<const char>, size_t, size_t, bool) { return false; }
bool join_narrow(const std::vector<Stripe<const char>> &, size_t, size_t, Rows<char>, bool) { return false; }
#endif

// stream_bytes() of what can_stream() allows.
inline void stream_lines(char *to, const char *from, size_t n) {
#if defined(__AVX2__)
    for (size_t i = 0; i < n; i += kVectorBytes) store_vector<true>(to + i, load256(from + i));
#else
    copy_bytes(to, from, n);
#endif
}

// Whether pieces of these sizes, or'ed, from `data` on can be streamed one by one: whole cache lines can.
bool can_stream(const void *data, size_t sizes) {
#if defined(__AVX2__)
    return (reinterpret_cast<uintptr_t>(data) | sizes) % kLineBytes == 0;
#else
    return (void)data, (void)sizes, false;
#endif
}

}  // namespace

void stream_bytes(char *to, const char *from, size_t n) {
#if defined(__AVX2__)
    size_t i = std::min(n, -reinterpret_cast<uintptr_t>(to) % sizeof(__m256i));
    copy_bytes(to, from, i);
    for (; i + sizeof(__m256i) <= n; i += sizeof(__m256i))
        _mm256_stream_si256(reinterpret_cast<__m256i *>(to + i), load256(from + i));
    copy_bytes(to + i, from + i, n - i);
#else
    copy_bytes(to, from, n);
#endif
}

void order_stores() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

void copy_rows(Rows<char> to, Rows<const char> from, size_t width, size_t num_rows, bool stream) {
    const bool adjacent = to.stride == width;
    if (!stream || !adjacent || width >= kBlockBytes) {
        if (!adjacent || !pack_narrow(to.data, from, width, num_rows, false)) copy_cached(to, from, width, num_rows);
        return;
    }
    if (from.stride == width) return stream_bytes(to.data, from.data, width * num_rows);
    if (can_stream(to.data, width)) {
        for (size_t r = 0; r < num_rows; ++r) stream_bytes(to[r], from[r], width);
        return;
    }
    if (pack_narrow(to.data, from, width, num_rows, true)) return;
    char packed[kBlockBytes];
    const size_t block = kBlockBytes / width;
    for (size_t first = 0; first < num_rows; first += block) {
        const size_t count = std::min(block, num_rows - first);
        copy_cached({packed, width}, {from[first], from.stride}, width, count);
        stream_bytes(to[first], packed, count * width);
    }
}

template <typename Index> size_t seek(const Index *index, const Indices &part, uint64_t row) {
    if (!part.sorted || row == 0) return 0;
    const auto before = [](Index i, uint64_t row) { return static_cast<uint64_t>(i) < row; };
    return std::lower_bound(index, index + part.count, row, before) - index;
}

template size_t seek(const int32_t *, const Indices &, uint64_t);
template size_t seek(const int64_t *, const Indices &, uint64_t);

void check_indices(Indices &part, size_t part_number, uint64_t num_rows) {
    with_indices(part, [&](auto *index) { scan(index, part, part_number, num_rows); });
}

NonzeroRows::NonzeroRows(Rows<const char> dense, size_t num_rows, size_t dim, size_t itemsize, int threads)
    : dense_(dense), row_bytes_(dim * itemsize), bitmap_(num_rows, threads) {
    if (itemsize == 2) mark_nonzero_rows<uint16_t>(dense, num_rows, dim, bitmap_, threads);
    else if (itemsize == 4) mark_nonzero_rows<uint32_t>(dense, num_rows, dim, bitmap_, threads);
    else mark_nonzero_rows<uint64_t>(dense, num_rows, dim, bitmap_, threads);
    bitmap_.rank_bits();
}

void NonzeroRows::gather(const std::vector<Stripe<char>> &outs, int threads) const {
    constexpr size_t kBlockWords = 64;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; ++t) {
        const WordRange range = bitmap_.share(t, threads);
        int32_t rows[kBlockWords * kWordBits];  // of a block, from its first one on; a list can be looked ahead in
        for (size_t word = range.begin, stop; word < range.end; word = stop) {
            stop = std::min(word + kBlockWords, range.end);
            const size_t first = bitmap_.rank_of_word(word), count = bitmap_.rank_of_word(stop) - first;
            const char *const block = dense_[word * kWordBits];
            decode_words(bitmap_.words() + word, stop - word, 0, rows, count);
            for (size_t i = 0; i < count; ++i) {
                prefetch_row(block + rows[std::min(i + kAhead, count - 1)] * dense_.stride, row_bytes_);
                const char *row = block + rows[i] * dense_.stride;
                for (const Stripe<char> &out : outs) copy_bytes(out.rows[first + i], row + out.begin, out.width);
            }
        }
    }
}

void join_columns(const std::vector<Stripe<const char>> &parts, size_t num_rows, Rows<char> out, size_t row_bytes,
                  int threads) {
    if (row_bytes == 0) return;
    size_t joined = 0, widths = 0;
    bool adjacent = true;  // one part begins where the one before it ends
    bool alike = !parts.empty() && row_bytes % kLineBytes == 0;  // pieces of one width, in rows of whole lines
    for (const Stripe<const char> &part : parts) {
        adjacent = adjacent && part.begin == joined;
        alike = alike && part.width == parts[0].width && part.rows.stride == parts[0].rows.stride;
        joined += part.width;
        widths |= part.width;
    }
    // Where some of out's columns stay as they are, rows cannot be written as a whole.
    const bool whole = adjacent && joined == row_bytes && out.stride == row_bytes;
    const bool stream = whole && num_rows * row_bytes >= kStreamedBytes;
    const bool lines = stream && can_stream(out.data, widths);  // need not be put together before
    alike = alike && whole && (!stream || can_stream(out.data, row_bytes));
    const size_t block = std::max<size_t>(1, kBlockBytes / row_bytes);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const Scratch<char> packed(stream && !lines ? block * row_bytes : 0);
#pragma omp for schedule(static)
        for (size_t first = 0; first < num_rows; first += block) {
            const size_t count = std::min(block, num_rows - first);
            if (alike && join_narrow(parts, first, count, out, stream)) continue;
            if (lines) {
                for (size_t r = first; r < first + count; ++r)
                    for (const Stripe<const char> &part : parts)
                        stream_lines(out[r] + part.begin, part.rows[r], part.width);
                continue;
            }
            for (const Stripe<const char> &part : parts) prefetch_block(part, first + 2 * count, count, num_rows);
            const Rows<char> to = stream ? Rows<char>{packed.begin(), row_bytes} : Rows<char>{out[first], out.stride};
            for (const Stripe<const char> &part : parts)
                copy_cached({to.data + part.begin, to.stride}, {part.rows[first], part.rows.stride}, part.width, count);
            if (stream) stream_bytes(out[first], packed.begin(), count * row_bytes);
        }
        order_stores();
    }
}

void set_rows(const Indices &indices, Rows<const char> values, Rows<char> dense, size_t num_rows, size_t row_bytes,
              int threads) {
    const bool stream = num_rows * row_bytes >= kStreamedBytes && can_stream(dense.data, dense.stride | row_bytes);
    by_row_ranges(indices, num_rows, threads, [&](uint64_t begin, uint64_t end) {
        const size_t fetched_bytes = stream ? 0 : row_bytes;
        for_rows_in(indices, begin, end, {dense.data, dense.stride}, fetched_bytes, [&](size_t item, uint64_t row) {
            if (stream) stream_lines(dense[row], values[item], row_bytes);
            else copy_bytes(dense[row], values[item], row_bytes);
        });
        if (stream) order_stores();
    });
}

template <typename T>
void add_rows(const Indices &indices, Rows<const T> values, Rows<T> dense, size_t num_rows, size_t dim, int threads) {
    by_row_ranges(indices, num_rows, threads, [&](uint64_t begin, uint64_t end) {
        const Rows<const char> table{reinterpret_cast<const char *>(dense.data), dense.stride * sizeof(T)};
        for_rows_in(indices, begin, end, table, dim * sizeof(T), [&](size_t item, uint64_t row) {
            T *__restrict to = dense[row];
            const T *__restrict from = values[item];
            if constexpr (std::is_same_v<T, Accumulator<T>>) add_row(to, from, dim);
            else for (size_t d = 0; d < dim; ++d) to[d] = narrow<T>(widen(to[d]) + widen(from[d]));
        });
    });
}

template void add_rows(const Indices &, Rows<const float>, Rows<float>, size_t, size_t, int);
template void add_rows(const Indices &, Rows<const double>, Rows<double>, size_t, size_t, int);
template void add_rows(const Indices &, Rows<const Bfloat16>, Rows<Bfloat16>, size_t, size_t, int);
template void add_rows(const Indices &, Rows<const Float16>, Rows<Float16>, size_t, size_t, int);

}  // namespace gradsync
