// Drives every native kernel over its edges, in buffers of exactly the right size, for the address and undefined
// behaviour sanitizers to watch; results are checked against plain loops. Given the name of a kernel, hands it a buffer
// that is one entry short instead, which the sanitizer must notice. Built and run by test_kernels.py.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "chunks.hpp"
#include "convert.hpp"
#include "count_sketch.hpp"
#include "digest.hpp"
#include "elements.hpp"
#include "hadamard.hpp"
#include "hashing.hpp"
#include "hierarchy.hpp"
#include "norms.hpp"
#include "packed.hpp"
#include "parts.hpp"
#include "quantize.hpp"
#include "random_k.hpp"
#include "rows.hpp"
#include "signs.hpp"
#include "sum_rows.hpp"
#include "top_k.hpp"

using namespace gradsync;

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

// Rows of a part have a gap of `gap` elements between them, none after the last one.
static size_t spread(size_t rows, size_t dim, size_t gap) { return rows ? (rows - 1) * (dim + gap) + dim : 0; }

template <typename T>
static void check_sum(size_t num_rows, size_t apart, size_t dim, bool sorted, size_t cuts, size_t gap, int threads) {
    std::vector<std::vector<int64_t>> wide;
    std::vector<std::vector<int32_t>> narrow_indices;
    std::vector<std::vector<T>> values;
    std::vector<Indices> parts;
    std::vector<Rows<const T>> rows;
    std::map<int64_t, int> hits;
    for (size_t count : {num_rows, size_t{0}, num_rows / 3, num_rows / 2}) {
        wide.push_back(some_indices(num_rows, count, sorted));
        for (int64_t &index : wide.back()) index *= apart;
        narrow_indices.emplace_back(wide.back().begin(), wide.back().end());
        for (int64_t index : wide.back()) ++hits[index];
        values.emplace_back(spread(wide.back().size(), dim, gap), narrow<T>(1));
    }
    for (size_t p = 0; p < wide.size(); ++p) {
        if (p % 2) parts.push_back({narrow_indices[p].data(), false, wide[p].size()});
        else parts.push_back({wide[p].data(), true, wide[p].size()});
        rows.push_back({values[p].data(), dim + gap});
    }
    RowUnion united(parts, num_rows * apart, threads);
    CHECK(united.count() == hits.size());
    std::vector<int32_t> found(hits.size());
    united.write_indices(found.data(), threads);

    std::vector<std::vector<T>> outs;
    std::vector<Stripe<T>> stripes;
    for (size_t c = 0; c < cuts; ++c) {
        const size_t begin = dim * c / cuts, width = dim * (c + 1) / cuts - begin;
        outs.emplace_back(spread(hits.size(), width, gap));
        if (width > 0) stripes.push_back({{outs.back().data(), width + gap}, begin, width});
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

// Messages to owners, each in another format: joined again, summed, and with a bit that is wrong.
template <typename T> static void check_parts(const std::vector<T> &x, RotatedStripe stripe, int threads) {
    constexpr Format kFormats[] = {Format::bitmap, Format::offsets8, Format::offsets16, Format::list32, Format::list64};
    const uint32_t owners = stripe.owners();
    const size_t size = x.size(), runs = stripe.runs(size);
    std::vector<uint64_t> words(owners * words_for(runs)), marks(words_for(runs));
    const ElementPartition split(x.data(), size, sizeof(T), stripe, words.data(), threads);
    std::vector<std::vector<char>> messages;
    std::vector<std::vector<T>> outs;
    std::vector<PackedOut> positions;
    std::vector<Packed> parts;
    std::vector<void *> to;
    for (size_t count : split.counts()) {
        const Format format = kFormats[messages.size() % 5];
        messages.emplace_back(packed_nbytes(count, runs, format));
        outs.emplace_back(count);
        positions.push_back({messages.back().data(), format});
        parts.push_back({messages.back().data(), count, format});
        to.push_back(outs.back().data());
    }
    split.write(positions, to, threads);
    const std::vector<const void *> from(to.begin(), to.end());
    std::vector<T> joined(size, narrow<T>(7));
    join_elements(stripe, parts, from, joined.data(), size, sizeof(T), threads);
    for (size_t i = 0; i < size; ++i) CHECK(widen(joined[i]) == widen(x[i]));

    std::vector<const T *> values;
    for (const std::vector<T> &out : outs) values.push_back(out.data());
    const ElementUnion united(parts, runs, marks.data(), threads);
    for (Format format : kFormats) {
        std::vector<char> message(packed_nbytes(united.count(), runs, format));
        std::vector<T> sums(united.count());
        united.sum<T>(values, 2.0, {message.data(), format}, sums.data(), threads);
        for (const T &sum : sums) CHECK(widen(sum) >= 2 && widen(sum) <= 2 * owners);
    }
    for (std::vector<char> &message : messages) {
        const std::vector<char> right = message;
        for (int turn = 0; turn < 4 && !message.empty(); ++turn) {
            message = right;
            if (turn < 2) message[random_bits() % message.size()] ^= 1 << random_bits() % 8;
            else std::fill_n(message.begin(), message.size() / 2 + 1, static_cast<char>(turn == 2 ? 0 : 255));
            try {
                join_elements(stripe, parts, from, joined.data(), size, sizeof(T), threads);
            } catch (const std::invalid_argument &) {
            } catch (const BadIndex &) {
            }
            try {
                ElementUnion(parts, runs, marks.data(), threads);
            } catch (const std::invalid_argument &) {
            }
        }
        message = right;
    }
}

template <typename T, typename Index> static void check_elements(size_t size, size_t every, int threads) {
    std::vector<T> x(size, narrow<T>(0)), values;
    for (size_t i = 0; i < size; i += every) x[i] = narrow<T>(1);
    NonzeroElements found(x.data(), size, sizeof(T), threads);
    const size_t count = found.bitmap().count();
    CHECK(count == (size + every - 1) / every);
    constexpr bool wide = sizeof(Index) == 8;
    std::vector<Index> indices(count), decoded(count);
    values.resize(count);
    found.write(indices.data(), values.data(), threads);
    for (size_t i = 0; i < count; ++i) CHECK(indices[i] == Index(i * every) && widen(values[i]) == 1);

    std::vector<uint64_t> words(words_for(size));
    encode_bitmap({indices.data(), wide, count}, size, words.data());
    CHECK(count_bits(words.data(), words.size(), threads) == count);
    decode_bitmap(words.data(), words.size(), decoded.data(), count, threads);
    CHECK(decoded == indices);

    for (uint32_t owners : {1, 3, 16}) {
        const RotatedStripe stripe(owners, 123456789);
        RotatedPartition split({indices.data(), wide, count}, size, stripe, threads);
        std::vector<std::vector<int32_t>> positions;
        std::vector<std::vector<T>> outs;
        std::vector<int32_t *> to_positions;
        std::vector<void *> to_values;
        for (size_t owned : split.dealt().counts()) {
            positions.emplace_back(owned);
            outs.emplace_back(owned);
            to_positions.push_back(positions.back().data());
            to_values.push_back(outs.back().data());
        }
        split.write(values.data(), sizeof(T), to_positions, to_values);
        std::vector<Index> all;
        for (uint32_t owner = 0; owner < owners; ++owner) {
            std::vector<Index> back(positions[owner].size());
            rotated_indices(stripe, owner, positions[owner].data(), back.size(), back.data(), threads);
            all.insert(all.end(), back.begin(), back.end());
        }
        std::sort(all.begin(), all.end());
        CHECK(all == indices);
        check_parts(x, stripe, threads);
    }
}

// Two sections with a residual that doubles every element: k of the second and all of the first, which is empty or has
// one element; then of the second what is above a threshold.
template <typename T, typename Index> static void check_sections(const std::vector<T> &x, size_t k, int threads) {
    using Wide = Accumulator<T>;
    const size_t first = x.empty() ? 0 : 1, second = x.size() - first, kept = std::min(k, second);
    std::vector<Wide> residual, left(x.size());
    for (const T &element : x) residual.push_back(widen(element));
    std::vector<Index> indices(first + kept);
    std::vector<Bfloat16> values(first + kept);
    const Choice<T> choice{x.data(), residual.data(), left.data()};
    const std::vector<Section> sections{{first, first}, {second, kept}};
    top_k(choice, sections, indices.data(), values.data(), threads);
    Wide sum = 0, expected = 0;
    for (size_t i = 0; i < x.size(); ++i) sum += left[i], expected += 2 * residual[i];
    for (const Bfloat16 &value : values) sum += widen(value);
    CHECK(sum == expected);
    const std::vector<Wide> thresholds{0, 6};
    std::vector<int64_t> counts(2);
    count_above(residual.data(), sections, thresholds.data(), counts.data(), threads);
    const size_t count = select_above(Choice<T>{x.data()}, sections, thresholds.data(), indices.data(), values.data(), threads);
    CHECK(count == static_cast<size_t>(counts[0]) + std::min<size_t>(counts[1], kept));
    for (size_t i = counts[0]; i < count; ++i) CHECK(std::abs(widen(x[indices[i]])) > 6);
}

// Few distinct magnitudes, so that ties are cut; on both sides of the size from which a sample is taken. The last
// element alone is the largest, `repeat` at a time are equal.
template <typename T, typename Index> static void check_top_k(size_t size, size_t repeat, int threads) {
    std::vector<T> x(size);
    std::vector<std::vector<Index>> by_magnitude(10);
    for (size_t i = 0; i < size; ++i) {
        const size_t magnitude = i + 1 == size ? 9 : (size - i) / repeat % 8;
        x[i] = narrow<T>(static_cast<float>(magnitude) * (i % 2 ? 1 : -1));
        by_magnitude[magnitude].push_back(static_cast<Index>(i));
    }
    for (size_t k : {size_t{0}, size / 100, size / 3, size}) {
        std::vector<Index> indices(k), expected;
        std::vector<T> values(k);
        top_k(Choice<T>{x.data()}, {{size, k}}, indices.data(), values.data(), threads);
        for (size_t magnitude = 10; magnitude-- > 0;)
            for (size_t i = 0; i < by_magnitude[magnitude].size() && expected.size() < k; ++i)
                expected.push_back(by_magnitude[magnitude][i]);
        std::sort(expected.begin(), expected.end());
        CHECK(indices == expected);
        for (size_t i = 0; i < k; ++i) CHECK(widen(values[i]) == widen(x[indices[i]]));
        check_sections<T, Index>(x, k, threads);
    }
}

// Ones with every third negative, of which all means are 1, and what error feedback leaves of twice as much: sections
// that begin at any bit, and blocks of any length.
template <typename T> static void check_signs(const std::vector<size_t> &lengths, size_t block, int threads) {
    using A = Accumulator<T>;
    const Blocks blocks(lengths, block);
    const size_t size = blocks.numel();
    std::vector<T> x(size), out(size);
    for (size_t i = 0; i < size; ++i) x[i] = narrow<T>(i % 3 ? 1 : -1);
    for (SignScale scale : {SignScale::mean, SignScale::rms, SignScale::two, SignScale::one})
        for (bool feedback : {false, true}) {
            std::vector<A> residual(feedback ? size : 0), left(feedback ? size : 0, A{7});
            for (size_t i = 0; i < residual.size(); ++i) residual[i] = widen(x[i]);
            std::vector<uint8_t> words((size + 7) / 8, 255);
            std::vector<float> scales(blocks.count() * scales_per_block(scale), 7);
            pack_signs<T>(blocks, scale, x.data(), feedback ? residual.data() : nullptr, feedback ? left.data() : nullptr,
                          words.data(), scales.data(), threads);
            for (size_t i = 0; i < words.size() * 8; ++i) CHECK((words[i / 8] >> i % 8 & 1) == (i < size && i % 3 == 0));
            const Signs part{words.data(), scales.data()};
            unpack_signs<T>(blocks, scale, {part, part}, out.data(), 0.5, threads);
            const A decoded = feedback && scale != SignScale::one ? 2 : 1;
            for (size_t i = 0; i < size; ++i) CHECK(widen(out[i]) == decoded * widen(x[i]));
            for (size_t i = 0; i < left.size(); ++i) CHECK(left[i] == (2 - decoded) * widen(x[i]));
        }
}

template <typename T> static void check_all_signs(int threads) {
    for (size_t block : {0, 1, 5, 1000, 1024, 33000})
        for (size_t size : {0, 1, 31, 32, 33, 1025}) check_signs<T>({size / 3, 0, size - size / 3}, block, threads);
    for (size_t block : {0, 1024, 33000}) check_signs<T>({23000, 0, 47000}, block, threads);
    check_signs<T>({}, 0, threads);
    check_signs<T>({1, 1, 2, 1}, 0, threads);
}

template <typename In, typename Out> static void check_narrowed(size_t size, int threads) {
    std::vector<In> x(size);
    for (size_t i = 0; i < size; ++i) x[i] = static_cast<In>(i % 100 == 7 ? 3e38 : i % 256);
    std::vector<Out> out(size);
    narrow_values(x.data(), size, 0.5, out.data(), threads);
    for (size_t i = 0; i < size; ++i)
        CHECK(i % 100 == 7 ? widen(out[i]) > 6e4f : widen(out[i]) == static_cast<float>(i % 256) / 2);
}

template <typename In, typename Out> static void check_summed(size_t size, int threads) {
    std::vector<std::vector<In>> values;
    for (size_t p = 0; p < 3; ++p) {
        values.emplace_back(size);
        for (size_t i = 0; i < size; ++i) values[p][i] = narrow<In>(static_cast<Accumulator<In>>(i % 64 + p));
    }
    std::vector<Out> out(size);
    sum_values<In, Out>({values[0].data(), values[1].data(), values[2].data()}, size, 0.5, out.data(), threads);
    for (size_t i = 0; i < size; ++i) CHECK(static_cast<double>(widen(out[i])) == static_cast<double>(3 * (i % 64) + 3) / 2);
    if constexpr (std::is_same_v<In, Out>) {
        sum_values<In, Out>({values[0].data(), values[1].data()}, size, 1, values[1].data(), threads);
        for (size_t i = 0; i < size; ++i) CHECK(widen(values[1][i]) == static_cast<float>(2 * (i % 64) + 1));
    }
}

// From one element past where a vector would begin.
static void check_streamed_values() {
    const size_t size = kStreamedBytes / sizeof(float) + 77;
    const std::vector<Bfloat16> x(size, narrow<Bfloat16>(3));
    std::vector<float> out(size + 1, 9);
    sum_values<Bfloat16, float>({x.data(), x.data()}, size, 1, out.data() + 1, 2);
    CHECK(static_cast<size_t>(std::count(out.begin(), out.end(), 6.0f)) == size && out[0] == 9);
}

template <typename Index> static void check_offsets(size_t size, size_t every, Format format) {
    std::vector<Index> indices;
    for (size_t i = 0; i < size; i += every) indices.push_back(static_cast<Index>(i));
    std::vector<char> message(packed_nbytes(indices.size(), size, format));
    encode_offsets({indices.data(), sizeof(Index) == 8, indices.size()}, size, format, message.data());
    std::vector<Index> decoded(indices.size());
    const Packed packed{message.data(), indices.size(), format};
    decode_offsets(packed, size, decoded.data());
    CHECK(decoded == indices);
    for (char &byte : message) {  // whatever a message says, only its indices are written
        byte ^= 1 << random_bits() % 8;
        try {
            decode_offsets(packed, size, decoded.data());
        } catch (const std::invalid_argument &) {
        }
        if (random_bits() % 64 == 0) break;
    }
}

static void check_all_offsets() {
    for (size_t size : {0, 1, 255, 256, 257, 5000, 65536, 70000})
        for (size_t every : {1, 2, 7, 100, 1000})
            for (Format format : {Format::offsets8, Format::offsets16}) {
                check_offsets<int32_t>(size, every, format);
                check_offsets<int64_t>(size, every, format);
            }
}

// Owners by hash: the partition of all indices gives the owned lists, and some indices their positions in these.
template <typename Index> static void check_hashing(size_t size, uint32_t owners, int threads) {
    const Hash owner_of(987654321, owners);
    constexpr bool wide = sizeof(Index) == 8;
    std::vector<Index> all(size), hashed(size), some, positions;
    for (size_t i = 0; i < size; ++i) all[i] = static_cast<Index>(i);
    owners_by_hash({all.data(), wide, size}, owner_of, hashed.data(), threads);
    const HashedPartition split({all.data(), wide, size}, size, owner_of, threads);
    const OwnedByHash owned(size, owner_of, threads);
    CHECK(owned.counts() == split.dealt().counts());
    std::vector<std::vector<Index>> indices, lists;
    std::vector<std::vector<double>> values;
    std::vector<Index *> to_indices, to_lists;
    std::vector<void *> to_values;
    for (size_t count : owned.counts()) {
        indices.emplace_back(count), lists.emplace_back(count), values.emplace_back(count);
        to_indices.push_back(indices.back().data());
        to_lists.push_back(lists.back().data());
        to_values.push_back(values.back().data());
    }
    const std::vector<double> from(all.begin(), all.end());
    split.write(from.data(), sizeof(double), to_indices, to_values);
    owned.write(to_lists);
    CHECK(indices == lists);
    for (uint32_t owner = 0; owner < owners; ++owner) {
        for (size_t i = 0; i < lists[owner].size(); ++i) {
            CHECK(hashed[lists[owner][i]] == Index(owner) && values[owner][i] == double(lists[owner][i]));
            if (i % 3 == 0) some.push_back(lists[owner][i]);
        }
        positions.resize(some.size());
        positions_in({lists[owner].data(), wide, lists[owner].size()}, {some.data(), wide, some.size()}, positions.data());
        for (size_t i = 0; i < some.size(); ++i) CHECK(positions[i] == Index(3 * i));
        some.clear();
    }
}

// Memory of a few slots, and of enough: each index comes out once.
template <typename Index> static void check_hierarchy(size_t size, uint32_t owners, HierarchyShape shape, int threads) {
    std::vector<Index> all(size), found;
    for (size_t i = 0; i < size; ++i) all[i] = static_cast<Index>(i);
    const Hierarchy<Index> memory({all.data(), sizeof(Index) == 8, size}, Hash(1, owners), shape, {2, 3, 4}, threads);
    std::vector<std::vector<Index>> owned;
    std::vector<Index> overflow(memory.num_overflow());
    std::vector<Index *> to;
    for (size_t count : memory.counts()) owned.emplace_back(count), to.push_back(owned.back().data());
    memory.write(to, overflow.data());
    for (const auto &list : owned) found.insert(found.end(), list.begin(), list.end());
    found.insert(found.end(), overflow.begin(), overflow.end());
    std::sort(found.begin(), found.end());
    CHECK(found == all);
}

static void check_all_hashing(int threads) {
    for (size_t size : {0, 1, 5000})
        for (uint32_t owners : {1, 7})
            for (const HierarchyShape &shape : {HierarchyShape{1, 0}, HierarchyShape{100, 10}, HierarchyShape{9000, 900}}) {
                check_hierarchy<int32_t>(size, owners, shape, threads);
                check_hierarchy<int64_t>(size, owners, shape, threads);
            }

    for (size_t size : {0, 1, 100, 5000})
        for (uint32_t owners : {1, 3, 16}) {
            check_hashing<int32_t>(size, owners, threads);
            check_hashing<int64_t>(size, owners, threads);
        }
}

template <typename T> static void check_all(int threads) {
    for (size_t num_rows : {0, 1, 64, 65, 1000})
        for (size_t dim : {0, 1, 5, 16, 33})
            for (bool sorted : {true, false})
                for (size_t cuts : {1, 3})
                    for (size_t gap : {0, 3}) {
                        check_sum<T>(num_rows, 1, dim, sorted, cuts, gap, threads);
                        if (gap == 0) check_sum<T>(num_rows, 1 << 20, dim, sorted, cuts, gap, threads);
                    }
    for (size_t num_rows : {0, 1, 63, 64, 65, 1000})
        for (size_t dim : {0, 1, 7, 33, 100}) check_rows<T>(num_rows, dim, threads);
    for (size_t size : {0, 1, 63, 64, 65, 127, 128, 1500})
        for (size_t every : {1, 2, 7, 100}) {
            check_elements<T, int32_t>(size, every, threads);
            check_elements<T, int64_t>(size, every, threads);
        }
    check_all_signs<T>(threads);
    for (size_t size : {0, 1, 65, 500, 20011}) {
        check_top_k<T, int32_t>(size, 1, threads);
        check_top_k<T, int64_t>(size / 2, 100, threads);
    }
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
    const std::vector<int64_t> few{0};
    thrown = false;
    try {
        RowUnion({{few.data(), true, few.size()}}, kMaxBits + 1, 1);
    } catch (const std::length_error &) {
        thrown = true;
    }
    CHECK(thrown);
    const std::vector<int32_t> unsorted{1, 5, 5, 4};
    const std::vector<int64_t> unsorted_wide(unsorted.begin(), unsorted.end());
    for (const Indices &part : {Indices{unsorted.data(), false, 4}, Indices{unsorted_wide.data(), true, 4}}) {
        thrown = false;
        try {
            RotatedPartition(part, 10, RotatedStripe(2, 0), 1);
        } catch (const NotSorted &pair) {
            thrown = pair.before == 5 && pair.after == 4;
        }
        CHECK(thrown);
        thrown = false;
        std::vector<uint64_t> words(1);
        try {
            encode_bitmap(part, 5, words.data());
        } catch (const BadIndex &index) {
            thrown = index.index == 5;
        }
        CHECK(thrown);
    }
}

// Every number of 16 bits, and floats that round to none of them.
static void check_scalars() {
    for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
        const Bfloat16 brain{static_cast<uint16_t>(bits)};
        const Float16 half{static_cast<uint16_t>(bits)};
        const float b = widen(brain), h = widen(half);
        CHECK(b != b ? narrow<Bfloat16>(b).bits != 0 : narrow<Bfloat16>(b).bits == bits);
        CHECK(h != h ? narrow<Float16>(h).bits != 0 : narrow<Float16>(h).bits == bits);
    }
    CHECK(widen(narrow<Float16>(1e30f)) > 65504 && widen(narrow<Float16>(-1e30f)) < -65504);
    CHECK(widen(narrow<Float16>(1e-30f)) == 0 && widen(narrow<Bfloat16>(3.4e38f)) > 3e38f);
}

// Memory from the first whole cache line on.
static char *first_line(std::vector<char> &bytes) {
    return bytes.data() + (-reinterpret_cast<uintptr_t>(bytes.data()) & 63);
}

static bool repeats(const char *data, size_t rows, const std::string &row) {
    for (size_t r = 0; r < rows; ++r)
        if (std::memcmp(data + r * row.size(), row.data(), row.size()) != 0) return false;
    return true;
}

// Outputs large enough to be written past the caches: rows put together at an odd address, and rows of whole lines.
static void check_streams() {
    const size_t rows = kStreamedBytes / 64 + 5;
    std::vector<char> left(rows * 40, 1), right(rows * 24, 2), out(rows * 64 + 1);
    join_columns({{{left.data(), 40}, 0, 40}, {{right.data(), 24}, 40, 24}}, rows, {out.data() + 1, 64}, 64, 2);
    const std::string row = std::string(40, 1) + std::string(24, 2);
    CHECK(repeats(out.data() + 1, rows, row));
    // As wide in all, but some columns are in two parts and some in none.
    std::vector<char> partly(rows * 64, 9);
    join_columns({{{left.data(), 40}, 0, 40}, {{right.data(), 24}, 8, 24}}, rows, {partly.data(), 64}, 64, 2);
    CHECK(repeats(partly.data(), rows,
                  std::string(8, 1) + std::string(24, 2) + std::string(8, 1) + std::string(24, 9)));
    std::vector<char> part(rows * 40 + 3);
    copy_rows({part.data() + 3, 40}, {out.data() + 1, 64}, 40, rows, true);
    CHECK(repeats(part.data() + 3, rows, std::string(40, 1)));

    // Whole lines: every other row.
    std::vector<char> table(2 * rows * 64 + 63);
    char *const lines = first_line(table);
    std::vector<int32_t> indices(rows);
    for (size_t r = 0; r < rows; ++r) indices[r] = static_cast<int32_t>(2 * r);
    set_rows({indices.data(), false, rows, true}, {out.data() + 1, 64}, {lines, 64}, 2 * rows, 64, 2);
    CHECK(repeats(lines, rows, row + std::string(64, 0)));

    // Whole lines of two parts, side by side; then one of the parts back, and all of it.
    std::vector<char> wide(rows * 64, 3), joined(rows * 128 + 63), back(rows * 64 + 63), again(rows * 128 + 1);
    char *const both = first_line(joined);
    join_columns({{{out.data() + 1, 64}, 0, 64}, {{wide.data(), 64}, 64, 64}}, rows, {both, 128}, 128, 2);
    CHECK(repeats(both, rows, row + std::string(64, 3)));
    copy_rows({first_line(back), 64}, {both + 64, 128}, 64, rows, true);
    CHECK(repeats(first_line(back), rows, std::string(64, 3)));
    copy_rows({again.data() + 1, 128}, {both, 128}, 128, rows, true);
    CHECK(repeats(again.data() + 1, rows, row + std::string(64, 3)));
}

// Rows of a line that are cut into narrow pieces, and these put together again; from `shift` bytes past a line on.
static void check_narrow_pieces(size_t rows, size_t width, size_t shift, bool stream) {
    std::vector<char> table(rows * 64), joined(rows * 64 + 63 + shift, 9);
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<char>(i % 251);
    std::vector<std::vector<char>> pieces;
    std::vector<Stripe<const char>> parts;
    for (size_t begin = 0; begin < 64; begin += width) {
        pieces.emplace_back(rows * width + 63 + shift);
        char *const piece = first_line(pieces.back()) + shift;
        copy_rows({piece, width}, {table.data() + begin, 64}, width, rows, stream);
        parts.push_back({{piece, width}, begin, width});
    }
    join_columns(parts, rows, {first_line(joined) + shift, 64}, 64, 2);
    CHECK(std::memcmp(first_line(joined) + shift, table.data(), table.size()) == 0);
}

// An output large enough to be written past the caches, of which the owners have one element each.
static void check_streamed_elements() {
    const uint64_t size = kStreamedBytes / sizeof(float) + 5;
    const RotatedStripe stripe(3, 7);
    const std::vector<int32_t> positions{static_cast<int32_t>(size / 3) - 1};
    const float value = 2;
    std::vector<float> out(size + 1, 9);
    const std::vector<Packed> parts(3, {reinterpret_cast<const char *>(positions.data()), 1, Format::list32});
    join_elements(stripe, parts, {&value, &value, &value}, out.data() + 1, size, sizeof(float), 2);
    for (uint32_t owner = 0; owner < 3; ++owner) CHECK(out[1 + stripe.index(owner, positions[0])] == 2);
    CHECK(static_cast<uint64_t>(std::count(out.begin(), out.end(), 0.0f)) == size - 3 && out[0] == 9);
}

// Codes of all kinds with what they leave, and sums of them; blocks within a tile, of several, and of several pieces.
template <typename T> static void check_quantize(int threads) {
    using A = Accumulator<T>;
    const std::vector<uint64_t> starts{0, 5, (uint64_t{1} << 32) - 40, 0}, seeds{1, 2, 3, ~0ull};
    const Rounding whole[] = {Rounding::nearest, Rounding::stochastic};
    std::vector<Grid> grids;
    for (size_t block : {0, 3, 1500, 33000})
        for (ScaleOf scale : {ScaleOf::max, ScaleOf::norm})
            for (Rounding rounding : whole) {
                grids.push_back({rounding, scale, 127, 8, block});
                grids.push_back({rounding, scale, 7, 4, block});
                grids.push_back({rounding, scale, 1, 2, block});
            }
    grids.push_back({Rounding::nearest, ScaleOf::given, 100, 8, 0});
    grids.push_back({Rounding::e4m3, ScaleOf::max, 448, 8, 256});
    grids.push_back({Rounding::e5m2, ScaleOf::max, 57344, 8, 0});
    grids.push_back({Rounding::exponent, ScaleOf::none, 1, 8, 0});
    for (const Grid &grid : grids) {
        const uint64_t longest = grid.block == 0 || grid.block > 3000 ? 40000 : 4000;
        const BlockLayout layout({0, 1, 77, longest}, starts, seeds, grid);
        CHECK(layout.numel() == 78 + longest);
        std::vector<T> x(layout.numel()), out(layout.numel());
        for (T &value : x) value = narrow<T>(static_cast<A>(static_cast<int32_t>(random_bits()) * 0x1p-28));
        x[5] = narrow<T>(static_cast<A>(NAN));
        x[7] = narrow<T>(static_cast<A>(INFINITY));
        const std::vector<A> residual(layout.numel(), A{0.25});
        std::vector<A> left(layout.numel());
        std::vector<uint8_t> codes(layout.codes_nbytes());
        std::vector<float> scales(layout.num_blocks(), 2.0f);
        quantize<T>(x.data(), layout, grid, codes.data(), scales.data(), residual.data(), left.data(), threads);
        quantize<T>(x.data(), layout, grid, codes.data(), scales.data(), nullptr, nullptr, threads);
        if (grid.scale == ScaleOf::max) block_scales<T>(x.data(), layout, grid, scales.data(), residual.data(), threads);
        for (uint8_t &code : codes) code ^= 1 << random_bits() % 8;
        dequantize<T>({{codes.data(), scales.data()}, {codes.data(), scales.data()}}, layout, grid, out.data(), 0.5, threads);
        dequantize<T>({}, layout, grid, out.data(), 1, threads);
        for (const T &value : out) CHECK(widen(value) == 0);
    }
}

// Sums of more rows than the caches hold, into stripes of whole lines and others.
template <typename T> static void check_streamed_sum(bool sorted) {
    const size_t dim = 48, rows = kStreamedBytes / (dim * sizeof(T)) + 77;
    std::vector<int32_t> indices(rows);
    for (size_t r = 0; r < rows; ++r) indices[r] = static_cast<int32_t>(sorted ? 2 * r : 2 * (rows - 1 - r));
    std::vector<T> values(rows * dim, narrow<T>(1)), first(rows * 32), second(rows * 16), third(rows * 3);
    const std::vector<Stripe<T>> stripes{
        {{first.data(), 32}, 0, 32}, {{second.data(), 16}, 32, 16}, {{third.data(), 3}, 40, 3}};
    RowUnion united({{indices.data(), false, rows}, {indices.data() + rows / 2, false, 1}}, 2 * rows, 2);
    CHECK(united.count() == rows);
    const std::vector<Rows<const T>> parts{{values.data(), dim}, {values.data(), dim}};
    united.sum<T>(parts, dim, 0.5, stripes, 2);
    const size_t twice = sorted ? rows / 2 : rows - 1 - rows / 2;
    const std::vector<T> ones(dim, narrow<T>(1)), halves(dim, narrow<T>(0.5));
    for (const Stripe<T> &stripe : stripes)
        for (size_t r = 0; r < rows; ++r)
            CHECK(std::memcmp(stripe.rows[r], (r == twice ? ones : halves).data(), stripe.width * sizeof(T)) == 0);
}

// Calls a kernel with a buffer that is one entry short; whether there is such a kernel.
template <typename T> static void check_hadamard(int threads) {
    using A = Accumulator<T>;
    for (uint32_t chunk : {1u, 4u, 8u, 64u, 8192u}) {
        const std::vector<uint64_t> lengths{0, 1, chunk, chunk + 37, 3 * chunk - 1}, starts{0, 5, 0xfffffff0u, 33, 1};
        const auto chunks = rotated_chunks(lengths, starts, {1, 2, 3, 4, ~uint64_t{0}}, chunk);
        size_t numel = 0;
        for (uint64_t length : lengths) numel += length;
        std::vector<T> x(numel), back(numel);
        std::vector<A> there(numel);
        for (size_t i = 0; i < numel; ++i) x[i] = narrow<T>(static_cast<A>(i % 7));
        hadamard(x.data(), there.data(), chunks, false, threads);
        hadamard(there.data(), back.data(), chunks, true, threads);
        for (size_t i = 0; i < numel; ++i) CHECK(std::abs(widen(back[i]) - widen(x[i])) < 0.01);
    }
}

template <typename Index> static void check_random_k(int threads) {
    for (uint64_t run : {1, 5}) {
        const uint64_t length = 40003, runs = length / run, a = 300, b = (runs - 1) / a + 1;
        for (uint64_t count : {uint64_t{1}, runs / 3, runs}) {
            std::vector<Index> indices(count * run + 1);
            random_k<Index>({{7, length, count, run, runs, run > 1 ? length - 2 : 0, static_cast<uint32_t>(a),
                              static_cast<uint32_t>(b), 99}, {0, 1, 1, 1, 1, 0, 1, 1, 3}}, indices.data(), threads);
            CHECK(indices.back() == 0);
            std::sort(indices.begin(), indices.end());
            for (size_t i = 1; i < indices.size(); ++i) CHECK(indices[i] > indices[i - 1] && indices[i] < Index(7 + length));
        }
    }
}

template <typename T> static void check_squared_norms(int threads) {
    const std::vector<T> x(5033, narrow<T>(2));
    for (size_t block : {0, 1, 33, 1024, 2000}) {
        const Blocks blocks({0, 5001, 32}, block);
        std::vector<double> norms(blocks.count());
        squared_norms(blocks, x.data(), norms.data(), threads);
        CHECK(norms[0] == 4.0 * static_cast<double>(block > 0 ? block : 5001));
    }
}

template <typename T> static void check_digest(int threads) {
    for (size_t size : {0, 1, 2, 511, 512, 1023, 1024, 2047, 2048, 2049, 70001}) {
        std::vector<T> x(size, narrow<T>(2));
        const std::vector<double> other(777, 1.0);
        const std::vector<Digested> both{digested(x.data(), size), digested(other.data(), 777)};
        std::vector<uint64_t> before(2), after(2);
        digest(both, before.data(), threads);
        digest(both, after.data(), 1);
        CHECK(before == after);
        if (size > 0) x.back() = narrow<T>(3);
        digest(both, after.data(), threads);
        CHECK((before[0] == after[0]) == (size == 0) && before[1] == after[1]);
    }
}

template <typename T, typename Out> static void check_take_chunks(int threads) {
    using A = Accumulator<T>;
    for (size_t chunk : {1, 33, 1024, 2000}) {
        std::vector<T> x(5001, narrow<T>(1));
        const std::vector<A> residual(x.size(), 2);
        std::vector<A> left(x.size());
        const Blocks chunks({x.size()}, chunk);
        std::vector<size_t> slots(chunks.count(), kNotChosen);
        slots.front() = 0, slots.back() = 1;
        std::vector<Out> payload(2 * chunk);
        std::vector<double> norms(chunks.count());
        take_chunks(chunks, chunk, x.data(), residual.data(), slots, 0.5, payload.data(), left.data(), norms.data(), threads);
        CHECK(widen(payload.front()) == 1.5 && norms.front() == 0 && norms.back() == 0 && left.back() == 0);
        CHECK(norms[1] == 3.0 * static_cast<double>(chunk) && left[chunk] == 3 && widen(x[chunk]) == 0);
    }
}

template <typename T> static void check_count_sketch(int threads) {
    using A = Accumulator<T>;
    const std::vector<uint64_t> lengths{0, 1, 31, 2000, 777}, starts{0, 5, 7, 0xfffffff0u, 33};
    const std::vector<uint32_t> columns{0, 1, 3, 96, 20};
    for (uint32_t rows : {1u, 5u}) {
        const auto sections = sketched_sections(lengths, starts, {1, 2, 3, 4, ~uint64_t{0}}, columns, rows);
        const std::vector<T> x(2809, narrow<T>(1));
        std::vector<A> counters(120 * rows);
        std::vector<T> out(x.size());
        count_sketch(x.data(), sections, rows, counters.data(), threads);
        A total = 0;
        for (A counter : counters) total += std::abs(counter);
        CHECK(total > 0 && total <= rows * 2809);
        sketch_estimates(counters.data(), sections, rows, out.data(), threads);
        CHECK(widen(out[0]) == 1);  // alone in its counters
    }
}

static bool overrun(const std::string &kernel) {
    const std::vector<int64_t> indices{0, 1, 2}, two{0, 1};
    const std::vector<int32_t> positions{0, 1};
    const std::vector<float> values(3 * 4, 1.0f), fewer(3 * 4 - 1, 1.0f);
    std::vector<float> out(3 * 4), tight(3 * 4 - 1);
    std::vector<int32_t> found(3);
    const auto bytes = [](const std::vector<float> &data) { return reinterpret_cast<const char *>(data.data()); };
    const Rows<char> to{reinterpret_cast<char *>(out.data()), 16};
    if (kernel == "unite_rows") {
        RowUnion({{two.data(), true, 3}}, 8, 1);
    } else if (kernel == "sum_rows") {
        RowUnion({{indices.data(), true, 3}}, 8, 1).sum<float>({{fewer.data(), 4}}, 4, 1.0, {{{out.data(), 4}, 0, 4}}, 1);
    } else if (kernel == "join_columns") {
        join_columns({{{bytes(fewer), 16}, 0, 16}}, 3, to, 16, 1);
    } else if (kernel == "scatter_rows") {
        set_rows({indices.data(), true, 3, true}, {bytes(fewer), 16}, to, 3, 16, 1);
    } else if (kernel == "scatter_rows adding") {
        add_rows<float>({indices.data(), true, 3, true}, {values.data(), 4}, {tight.data(), 4}, 3, 4, 1);
    } else if (kernel == "nonzero_rows") {
        const std::vector<float> zeros(3 * 4 - 1);
        NonzeroRows({bytes(zeros), 16}, 3, 4, 4, 1);
    } else if (kernel == "nonzero_elements") {
        const std::vector<float> x(127);
        NonzeroElements(x.data(), 128, 4, 1);
    } else if (kernel == "top_k") {
        const std::vector<float> x(127);
        top_k(Choice<float>{x.data()}, {{128, 1}}, found.data(), tight.data(), 1);
    } else if (kernel == "random_k") {
        random_k<int32_t>({{0, 8, 4, 1, 8, 0, 3, 3, 1}}, found.data(), 1);
    } else if (kernel == "hadamard") {
        hadamard(tight.data(), out.data(), rotated_chunks({12}, {0}, {1}, 8), false, 1);
    } else if (kernel == "squared_norms") {
        std::vector<double> norms(1);
        squared_norms(Blocks({12}, 8), values.data(), norms.data(), 1);
    } else if (kernel == "digest") {
        std::vector<uint64_t> written(1);
        digest({digested(fewer.data(), 12)}, written.data(), 1);
    } else if (kernel == "take_chunks") {
        std::vector<float> x(12), left(12);
        std::vector<double> norms(2);
        take_chunks(Blocks({12}, 8), 8, x.data(), values.data(), {kNotChosen, 0}, 1, tight.data() + 4, left.data(), norms.data(), 1);
    } else if (kernel == "count_sketch") {
        count_sketch(fewer.data(), sketched_sections({12}, {0}, {1}, {3}, 1), 1, out.data(), 1);
    } else if (kernel == "sketch_estimates") {
        sketch_estimates(values.data(), sketched_sections({12}, {0}, {1}, {3}, 1), 1, tight.data(), 1);
    } else if (kernel == "select_above") {
        const std::vector<float> x(128), residual(128), thresholds(1, 1);
        std::vector<float> left(127);
        select_above(Choice<float>{x.data(), residual.data(), left.data()}, {{128, 1}}, thresholds.data(), found.data(),
                     tight.data(), 1);
    } else if (kernel == "count_above") {
        const std::vector<float> x(127), thresholds(1);
        std::vector<int64_t> counts(1);
        count_above(x.data(), {{128, 128}}, thresholds.data(), counts.data(), 1);
    } else if (kernel == "pack_signs") {
        std::vector<uint8_t> words(1);
        std::vector<float> scale(1);
        pack_signs<float>(Blocks({12}, 0), SignScale::mean, fewer.data(), nullptr, nullptr, words.data(), scale.data(), 1);
    } else if (kernel == "unpack_signs") {
        const std::vector<uint8_t> words(1);
        const std::vector<float> scale(1);
        unpack_signs<float>(Blocks({12}, 0), SignScale::mean, {{words.data(), scale.data()}}, out.data(), 1.0, 1);
    } else if (kernel == "narrow") {
        std::vector<Bfloat16> narrowed(11);
        narrow_values(values.data(), 12, 1.0, narrowed.data(), 1);
    } else if (kernel == "sum_parts") {
        sum_values<float, float>({values.data(), fewer.data()}, 12, 1.0, out.data(), 1);
    } else if (kernel == "encode_bitmap") {
        std::vector<uint64_t> words(2);
        encode_bitmap({indices.data(), true, 3}, 3 * kWordBits, words.data());
    } else if (kernel == "decode_bitmap") {
        const std::vector<uint64_t> words{7, 1};
        decode_bitmap(words.data(), words.size(), found.data(), 4, 1);
    } else if (kernel == "count_bits") {
        const std::vector<uint64_t> words(2);
        std::printf("%d\n", static_cast<int>(count_bits(words.data(), 3, 1)));
    } else if (kernel == "encode_offsets") {
        std::vector<char> message(packed_nbytes(3, 300, Format::offsets8) - 1);
        encode_offsets({indices.data(), true, 3}, 300, Format::offsets8, message.data());
    } else if (kernel == "decode_offsets") {
        const std::vector<char> message{0b111, 0, 1};
        decode_offsets({message.data(), 3, Format::offsets8}, 300, found.data());
    } else if (kernel == "partition_rotated") {
        std::vector<int32_t> local(3);
        RotatedPartition({indices.data(), true, 3}, 3, RotatedStripe(1, 0), 1)
            .write(values.data(), sizeof(float), {local.data()}, {tight.data() + 9});
    } else if (kernel == "partition_hashed") {
        std::vector<int32_t> mine(3);
        HashedPartition({indices.data(), true, 3}, 3, Hash(0, 1), 1)
            .write<int32_t>(values.data(), sizeof(float), {mine.data()}, {tight.data() + 9});
    } else if (kernel == "owners_by_hash") {
        owners_by_hash({two.data(), true, 3}, Hash(0, 2), found.data(), 1);
    } else if (kernel == "owned_by_hash") {
        OwnedByHash(4, Hash(0, 1), 1).write<int32_t>({found.data()});
    } else if (kernel == "hierarchical_hash") {
        Hierarchy<int64_t>({two.data(), true, 3}, Hash(0, 1), {8, 8}, {1}, 1);
    } else if (kernel == "positions_in") {
        positions_in({two.data(), true, 3}, {indices.data(), true, 3}, found.data());
    } else if (kernel == "rotated_index") {
        rotated_indices(RotatedStripe(2, 0), 0, positions.data(), 3, found.data(), 1);
    } else if (kernel == "partition_elements") {
        std::vector<uint64_t> words(1);
        std::vector<char> message(packed_nbytes(4, 4, Format::offsets8) - 1);
        ElementPartition split(values.data(), 4, sizeof(float), RotatedStripe(1, 0), words.data(), 1);
        split.write({{message.data(), Format::offsets8}}, {out.data()}, 1);
    } else if (kernel == "unite_elements") {
        std::vector<uint64_t> words(1);
        const std::vector<int32_t> first(1);
        ElementUnion({{reinterpret_cast<const char *>(first.data()), 2, Format::list32}}, 8, words.data(), 1);
    } else if (kernel == "unite_messages") {  // which unpacks each message so, behind the one before
        const std::vector<int32_t> first(1);
        std::vector<int32_t> unpacked(2 + PackedReader::kLanes);
        PackedReader({reinterpret_cast<const char *>(first.data()), 2, Format::list32}, 8)
            .read(8, 0, unpacked.data(), unpacked.size());
    } else if (kernel == "join_elements") {
        const std::vector<int32_t> first(1);
        join_elements(RotatedStripe(1, 0), {{reinterpret_cast<const char *>(first.data()), 1, Format::list32}},
                      {values.data()}, tight.data() + 9, 3, sizeof(float), 1);
    } else if (kernel == "quantize" || kernel == "block_scales" || kernel == "dequantize") {
        const Grid grid{Rounding::nearest, ScaleOf::max, 7, 4, 4};
        const BlockLayout layout({12}, {}, {}, grid);
        std::vector<uint8_t> codes(6), short_codes(5);
        std::vector<float> scales(3), short_scales(2);
        if (kernel == "quantize")
            quantize<float>(values.data(), layout, grid, short_codes.data(), scales.data(), nullptr, nullptr, 1);
        else if (kernel == "block_scales")
            block_scales<float>(values.data(), layout, grid, short_scales.data(), nullptr, 1);
        else
            dequantize<float>({{codes.data(), scales.data()}}, layout, grid, tight.data(), 1.0, 1);
    } else {
        return false;
    }
    return true;
}

int main(int argc, char **argv) {
    if (argc > 1) return overrun(argv[1]) ? 0 : 2;
    for (int threads : {1, 3}) {
        check_all<float>(threads);
        check_all<double>(threads);
        check_all<Bfloat16>(threads);
        check_all<Float16>(threads);
        check_quantize<float>(threads);
        check_quantize<double>(threads);
        check_quantize<Bfloat16>(threads);
        check_quantize<Float16>(threads);
        check_all_hashing(threads);
        check_hadamard<float>(threads);
        check_hadamard<Bfloat16>(threads);
        check_hadamard<double>(threads);
        check_squared_norms<float>(threads);
        check_squared_norms<Bfloat16>(threads);
        check_digest<float>(threads);
        check_digest<double>(threads);
        check_digest<Bfloat16>(threads);
        check_digest<Float16>(threads);
        check_take_chunks<float, float>(threads);
        check_take_chunks<float, Float16>(threads);
        check_take_chunks<double, Bfloat16>(threads);
        check_take_chunks<Bfloat16, Bfloat16>(threads);
        check_count_sketch<float>(threads);
        check_count_sketch<Float16>(threads);
        check_count_sketch<double>(threads);
        check_random_k<int32_t>(threads);
        check_random_k<int64_t>(threads);
        for (size_t size : {0, 1, 1023, 2049}) {
            check_narrowed<float, Bfloat16>(size, threads);
            check_narrowed<double, Float16>(size, threads);
            check_summed<float, float>(size, threads);
            check_summed<Bfloat16, float>(size, threads);
            check_summed<Float16, Float16>(size, threads);
            check_summed<double, Bfloat16>(size, threads);
            check_summed<Float16, double>(size, threads);
        }
    }
    check_all_offsets();
    check_refusals();
    check_scalars();
    check_streams();
    for (size_t width : {4, 8, 16, 32})
        for (size_t shift : {0, 4, 32}) {
            check_narrow_pieces(77, width, shift, false);
            check_narrow_pieces(77, width, shift, true);
        }
    for (size_t width : {8, 32}) check_narrow_pieces(kStreamedBytes / 64 + 5, width, 0, true);
    check_streamed_elements();
    check_streamed_values();
    for (bool sorted : {true, false}) {
        check_streamed_sum<float>(sorted);
        check_streamed_sum<Bfloat16>(sorted);
    }
    return 0;
}
