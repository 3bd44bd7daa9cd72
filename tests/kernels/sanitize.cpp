// Drives every native kernel over its edges, in buffers of exactly the right size, for the address and undefined
// behaviour sanitizers to watch; results are checked against plain loops. Built and run by test_sanitizers.py.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <vector>

#include "elements.hpp"
#include "rows.hpp"
#include "sum_rows.hpp"

using namespace MODULE_NAME;

#define CHECK(condition)                                                     \
    do {                                                                     \
        if (!(condition)) {                                                  \
            std::printf("line %d: %s does not hold\n", __LINE__, #condition); \
            std::exit(1);                                                    \
        }                                                                    \
    } while (0)

static std::mt19937 random_bits(0);

static std::vector<int64_t> some_indices(size_t size, size_t count, bool sorted) {
    std::vector<int64_t> indices(size ? count : 0);
    for (int64_t &index : indices) index = random_bits() % size;
    if (!indices.empty()) indices.back() = size - 1;
    if (sorted) std::sort(indices.begin(), indices.end());
    return indices;
}

template <typename T> static void check_sum(size_t num_rows, size_t dim, bool sorted, size_t cuts, int threads) {
    std::vector<std::vector<int64_t>> indices;
    std::vector<std::vector<T>> values;
    std::vector<Indices> parts;
    std::vector<Rows<const T>> rows;
    std::map<int64_t, int> hits;
    for (size_t count : {num_rows, size_t{0}, num_rows / 3}) {
        indices.push_back(some_indices(num_rows, count, sorted));
        for (int64_t index : indices.back()) ++hits[index];
        values.emplace_back(indices.back().size() * dim, narrow<T>(1));
    }
    for (size_t p = 0; p < indices.size(); ++p) {
        parts.push_back({indices[p].data(), true, indices[p].size()});
        rows.push_back({values[p].data(), dim});
    }
    RowUnion united(parts, num_rows, threads);
    CHECK(united.bitmap().count() == hits.size());
    std::vector<int32_t> found(hits.size());
    united.bitmap().write_indices(found.data(), threads);

    std::vector<std::vector<T>> outs;
    std::vector<Stripe<T>> stripes;
    for (size_t c = 0; c < cuts; ++c) {
        const size_t begin = dim * c / cuts, width = dim * (c + 1) / cuts - begin;
        outs.emplace_back(hits.size() * width);
        if (width > 0) stripes.push_back({{outs.back().data(), width}, begin, width});
    }
    united.sum<T>(rows, dim, 2.0, stripes, threads);
    size_t rank = 0;
    for (const auto &[row, count] : hits) {
        CHECK(found[rank] == row);
        for (const Stripe<T> &stripe : stripes)
            for (size_t d = 0; d < stripe.width; ++d) CHECK(widen(stripe.rows[rank][d]) == 2 * count);
        ++rank;
    }
}

template <typename T> static void check_rows(size_t num_rows, size_t dim, int threads) {
    const size_t width = dim * sizeof(T);
    std::vector<T> dense(num_rows * dim, narrow<T>(0));
    for (size_t row = 0; row < num_rows; row += 3)
        if (dim > 0) dense[row * dim + row % dim] = narrow<T>(1);
    const auto bytes = [](auto &data) { return reinterpret_cast<char *>(data.data()); };
    NonzeroRows found({bytes(dense), width}, num_rows, dim, sizeof(T), threads);
    const size_t count = found.bitmap().count();
    CHECK(count == (dim > 0 ? (num_rows + 2) / 3 : 0));
    std::vector<int64_t> indices(count);
    std::vector<T> left(count * (dim / 2)), right(count * (dim - dim / 2)), joined(count * dim);
    found.bitmap().write_indices(indices.data(), threads);
    const size_t half = dim / 2 * sizeof(T);
    found.gather({{{bytes(left), half}, 0, half}, {{bytes(right), width - half}, half, width - half}}, threads);
    join_columns({{{bytes(left), half}, 0, half}, {{bytes(right), width - half}, half, width - half}}, count,
                 {bytes(joined), width}, width, threads);

    std::vector<T> copy(num_rows * dim, narrow<T>(0));
    Indices items{indices.data(), true, count};
    check_indices(items, 0, num_rows);
    set_rows(items, {bytes(joined), width}, {bytes(copy), width}, num_rows, width, threads);
    for (size_t i = 0; i < copy.size(); ++i) CHECK(widen(copy[i]) == widen(dense[i]));
    add_rows<T>(items, {joined.data(), dim}, {copy.data(), dim}, num_rows, dim, threads);
    for (size_t i = 0; i < copy.size(); ++i) CHECK(widen(copy[i]) == 2 * widen(dense[i]));
}

template <typename T> static void check_elements(size_t size, size_t every, int threads) {
    std::vector<T> x(size, narrow<T>(0)), values;
    for (size_t i = 0; i < size; i += every) x[i] = narrow<T>(1);
    NonzeroElements found(x.data(), size, sizeof(T), threads);
    const size_t count = found.bitmap().count();
    CHECK(count == (size + every - 1) / every);
    std::vector<int32_t> indices(count), decoded(count);
    values.resize(count);
    found.write(indices.data(), values.data(), threads);
    for (size_t i = 0; i < count; ++i) CHECK(indices[i] == int32_t(i * every) && widen(values[i]) == 1);

    std::vector<uint64_t> words(words_for(size));
    encode_bitmap({indices.data(), false, count}, size, words.data());
    CHECK(count_bits(words.data(), words.size(), threads) == count);
    decode_bitmap(words.data(), words.size(), decoded.data(), count, threads);
    CHECK(decoded == indices);

    for (uint32_t owners : {1, 3, 16}) {
        const RotatedStripe stripe(owners, 123456789);
        RotatedPartition split({indices.data(), false, count}, size, stripe, threads);
        std::vector<std::vector<int32_t>> positions;
        std::vector<std::vector<T>> outs;
        std::vector<int32_t *> to_positions;
        std::vector<void *> to_values;
        for (size_t owned : split.counts()) {
            positions.emplace_back(owned);
            outs.emplace_back(owned);
            to_positions.push_back(positions.back().data());
            to_values.push_back(outs.back().data());
        }
        split.write(values.data(), sizeof(T), to_positions, to_values);
        std::vector<int32_t> all;
        for (uint32_t owner = 0; owner < owners; ++owner) {
            std::vector<int32_t> back(positions[owner].size());
            rotated_indices(stripe, owner, positions[owner].data(), back.size(), back.data(), threads);
            all.insert(all.end(), back.begin(), back.end());
        }
        std::sort(all.begin(), all.end());
        CHECK(all == indices);
        std::vector<Indices> parts;
        std::vector<const void *> from;
        for (uint32_t owner = 0; owner < owners; ++owner) {
            parts.push_back({positions[owner].data(), false, positions[owner].size()});
            from.push_back(outs[owner].data());
        }
        std::vector<T> joined(size, T{});
        if (size > 0) std::memset(static_cast<void *>(joined.data()), 77, size * sizeof(T));
        join_rotated(stripe, parts, from, joined.data(), size, sizeof(T), threads);
        CHECK(size == 0 || std::memcmp(joined.data(), x.data(), size * sizeof(T)) == 0);
    }
}

template <typename T> static void check_all(int threads) {
    for (size_t num_rows : {0, 1, 64, 65, 1000})
        for (size_t dim : {0, 1, 5, 16, 33})
            for (bool sorted : {true, false})
                for (size_t cuts : {1, 3}) check_sum<T>(num_rows, dim, sorted, cuts, threads);
    for (size_t num_rows : {0, 1, 63, 64, 65, 1000})
        for (size_t dim : {0, 1, 7, 33, 100}) check_rows<T>(num_rows, dim, threads);
    for (size_t size : {0, 1, 63, 64, 65, 127, 128, 5000})
        for (size_t every : {1, 2, 7, 100}) check_elements<T>(size, every, threads);
}

static void check_refusals() {
    const std::vector<int64_t> bad{3, -1, 99};
    bool thrown = false;
    try {
        RowUnion({{bad.data(), true, bad.size()}}, 10, 1);
    } catch (const BadIndex &index) {
        thrown = index.part == 0 && index.index == -1;
    }
    CHECK(thrown);
    const std::vector<int32_t> unsorted{1, 5, 5, 4};
    thrown = false;
    try {
        RotatedPartition({unsorted.data(), false, 4}, 10, RotatedStripe(2, 0), 1);
    } catch (const NotSorted &pair) {
        thrown = pair.before == 5 && pair.after == 4;
    }
    CHECK(thrown);
}

// Outputs large enough to be written past the caches, at an odd address.
static void check_streams() {
    const size_t rows = kStreamedBytes / 64 + 5;
    std::vector<char> left(rows * 40, 1), right(rows * 24, 2), out(rows * 64 + 1);
    join_columns({{{left.data(), 40}, 0, 40}, {{right.data(), 24}, 40, 24}}, rows, {out.data() + 1, 64}, 64, 2);
    for (size_t i = 0; i < rows * 64; ++i) CHECK(out[i + 1] == (i % 64 < 40 ? 1 : 2));
    std::vector<char> part(rows * 40 + 3);
    copy_rows({part.data() + 3, 40}, {out.data() + 1, 64}, 40, rows, true);
    for (size_t i = 0; i < rows * 40; ++i) CHECK(part[i + 3] == 1);

    // Whole lines: every other row.
    std::vector<char> table(2 * rows * 64 + 64);
    char *const lines = table.data() + (-reinterpret_cast<uintptr_t>(table.data()) & 63);
    std::vector<int32_t> indices(rows);
    for (size_t r = 0; r < rows; ++r) indices[r] = static_cast<int32_t>(2 * r);
    set_rows({indices.data(), false, rows, true}, {out.data() + 1, 64}, {lines, 64}, 2 * rows, 64, 2);
    for (size_t i = 0; i < 2 * rows * 64; ++i) CHECK(lines[i] == (i / 64 % 2 ? 0 : i % 64 < 40 ? 1 : 2));
}

int main() {
    for (int threads : {1, 3}) {
        check_all<float>(threads);
        check_all<double>(threads);
        check_all<Bfloat16>(threads);
        check_all<Float16>(threads);
    }
    check_refusals();
    check_streams();
    return 0;
}
