// The kernels as a Python module. The caller owns every buffer; nothing is copied or converted on the way in
// (.noconvert(): nanobind would otherwise write into a silent copy). The GIL is free while a kernel runs.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "arrays.hpp"
#include "bind.hpp"
#include "elements.hpp"
#include "rows.hpp"
#include "sum_rows.hpp"

using namespace nanobind::literals;

namespace MODULE_NAME {
namespace {

// A two-phase kernel together with the arrays it points into.
struct BoundRowUnion {
    std::vector<ReadOnlyArray> arrays;
    uint64_t num_rows;
    std::optional<RowUnion> rows;

    BoundRowUnion(std::vector<ReadOnlyArray> indices, uint64_t num_rows, int threads)
        : arrays(std::move(indices)), num_rows(num_rows) {
        check_threads(threads);
        std::vector<Indices> parts;
        for (const ReadOnlyArray &array : arrays) parts.push_back(indices_of(array));
        run("sum_rows", "num_rows", num_rows, [&] { rows.emplace(std::move(parts), num_rows, threads); });
    }

    size_t count() const { return rows->count(); }

    void write_indices(const Array &out, int threads) const {
        check_threads(threads);
        with_index_out("out", out, count(), num_rows, [&](auto *to) {
            nb::gil_scoped_release unlocked;
            rows->write_indices(to, threads);
        });
    }

    void sum(const std::vector<ReadOnlyArray> &values, const std::vector<Array> &outs, const StripeList &stripes,
             double scale, int threads) const {
        check_threads(threads);
        if (values.size() != rows->num_parts())
            refuse("one values array per part of the union is needed, got " + std::to_string(values.size()) + " for " +
                   std::to_string(rows->num_parts()) + " parts");
        if (values.empty()) return;
        check_floating("values", values[0]);
        if (values[0].ndim() != 2) refuse_shape("values", "2-D", values[0]);
        for (const ReadOnlyArray &array : values) check_same_dtype("values", array, values[0]);
        for (const Array &array : outs) check_same_dtype("outs", array, values[0]);
        with_floating(values[0].dtype(), [&](auto scalar) {
            using T = decltype(scalar);
            const size_t dim = values[0].shape(1);
            std::vector<Rows<const T>> parts;
            for (size_t p = 0; p < values.size(); ++p)
                parts.push_back(rows_of<const T>("values", values[p], rows->part_count(p), dim));
            const auto places = stripes_of<T>("outs", outs, stripes, count(), dim);
            nb::gil_scoped_release unlocked;
            rows->sum<T>(parts, dim, scale, places, threads);
        });
    }
};

struct BoundNonzeroRows {
    ReadOnlyArray dense;
    std::optional<NonzeroRows> rows;

    BoundNonzeroRows(ReadOnlyArray array, int threads) : dense(std::move(array)) {
        check_threads(threads);
        check_floating("dense", dense);
        if (dense.ndim() != 2) refuse_shape("dense", "2-D", dense);
        const auto places = rows_of<const char>("dense", dense, dense.shape(0), dense.shape(1));
        nb::gil_scoped_release unlocked;
        rows.emplace(places, dense.shape(0), dense.shape(1), dense.itemsize(), threads);
    }

    size_t count() const { return rows->bitmap().count(); }

    void write_indices(const Array &out, int threads) const {
        check_threads(threads);
        with_index_out("out", out, count(), dense.shape(0), [&](auto *to) {
            nb::gil_scoped_release unlocked;
            rows->bitmap().write_indices(to, threads);
        });
    }

    void gather(const std::vector<Array> &outs, const StripeList &stripes, int threads) const {
        check_threads(threads);
        for (const Array &array : outs) check_same_dtype("outs", array, dense);
        const auto places = stripes_of<char>("outs", outs, stripes, count(), dense.shape(1));
        nb::gil_scoped_release unlocked;
        rows->gather(places, threads);
    }
};

struct BoundNonzeroElements {
    ReadOnlyArray x;
    std::optional<NonzeroElements> elements;

    BoundNonzeroElements(ReadOnlyArray array, int threads) : x(std::move(array)) {
        check_threads(threads);
        check_floating("x", x);
        check_flat("x", x);
        nb::gil_scoped_release unlocked;
        elements.emplace(x.data(), x.shape(0), x.itemsize(), threads);
    }

    size_t count() const { return elements->bitmap().count(); }

    void write(const Array &indices, const Array &values, int threads) const {
        check_threads(threads);
        check_same_dtype("values", values, x);
        check_flat("values", values, count());
        with_index_out("indices", indices, count(), x.shape(0), [&](auto *to) {
            nb::gil_scoped_release unlocked;
            elements->write(to, values.data(), threads);
        });
    }
};

RotatedStripe stripe_of(uint32_t owners, uint32_t key) {
    if (owners < 1 || owners > kMaxOwners)
        refuse("the number of owners must be in [1, " + std::to_string(kMaxOwners) + "], got " + std::to_string(owners));
    return {owners, key};
}

struct BoundRotatedPartition {
    ReadOnlyArray indices;
    std::optional<RotatedPartition> partition;

    BoundRotatedPartition(ReadOnlyArray array, uint64_t size, uint32_t owners, uint32_t key, int threads)
        : indices(std::move(array)) {
        check_threads(threads);
        const Indices items = indices_of(indices);
        const RotatedStripe stripe = stripe_of(owners, key);
        run_sorted("partition_rotated", "indices", size, [&] { partition.emplace(items, size, stripe, threads); });
    }

    void write(const ReadOnlyArray &values, const std::vector<Array> &positions, const std::vector<Array> &outs) const {
        const std::vector<size_t> &counts = partition->counts();
        check_floating("values", values);
        const size_t dim = values.ndim() == 2 ? values.shape(1) : 1;
        check_values("values", values, partition->num_items(), values.ndim(), dim);
        if (positions.size() != counts.size() || outs.size() != counts.size())
            refuse("one array of positions and one of values per owner are needed, got " +
                   std::to_string(positions.size()) + " and " + std::to_string(outs.size()) + " for " +
                   std::to_string(counts.size()) + " owners");
        std::vector<int32_t *> to_positions;
        std::vector<void *> to_values;
        for (size_t owner = 0; owner < counts.size(); ++owner) {
            if (positions[owner].dtype() != nb::dtype<int32_t>()) refuse_kind("positions", "int32", positions[owner]);
            check_flat("positions", positions[owner], counts[owner]);
            check_same_dtype("outs", outs[owner], values);
            check_values("outs", outs[owner], counts[owner], values.ndim(), dim);
            to_positions.push_back(static_cast<int32_t *>(positions[owner].data()));
            to_values.push_back(outs[owner].data());
        }
        nb::gil_scoped_release unlocked;
        partition->write(values.data(), dim * values.itemsize(), to_positions, to_values);
    }

    // One value, or with ndim 2 a row of values, for each of `count` elements.
    template <typename A> static void check_values(const char *what, const A &array, size_t count, size_t ndim, size_t dim) {
        if (ndim != 2) return check_flat(what, array, count);
        rows_of<std::conditional_t<std::is_same_v<A, Array>, char, const char>>(what, array, count, dim);
        if (!is_contiguous(array)) refuse_kind(what, "contiguous", array);
    }
};

void join(const std::vector<ReadOnlyArray> &parts, const StripeList &stripes, const Array &out, int threads) {
    check_threads(threads);
    if (out.ndim() != 2) refuse_shape("out", "2-D", out);
    check_floating("out", out);
    for (const ReadOnlyArray &array : parts) check_same_dtype("parts", array, out);
    const size_t rows = out.shape(0), dim = out.shape(1);
    const auto to = rows_of<char>("out", out, rows, dim);
    const auto from = stripes_of<const char>("parts", parts, stripes, rows, dim);
    nb::gil_scoped_release unlocked;
    join_columns(from, rows, to, dim * out.itemsize(), threads);
}

void scatter(const ReadOnlyArray &indices, const ReadOnlyArray &values, const Array &dense, bool accumulate, int threads) {
    check_threads(threads);
    Indices items = indices_of(indices);
    check_floating("dense", dense);
    check_same_dtype("values", values, dense);
    if (dense.ndim() != 2) refuse_shape("dense", "2-D", dense);
    const size_t rows = dense.shape(0), dim = dense.shape(1);
    run("scatter_rows", "num_rows", rows, [&] { check_indices(items, 0, rows); });
    if (!accumulate) {
        const auto from = rows_of<const char>("values", values, items.count, dim);
        const auto to = rows_of<char>("dense", dense, rows, dim);
        nb::gil_scoped_release unlocked;
        set_rows(items, from, to, rows, dim * dense.itemsize(), threads);
        return;
    }
    with_floating(dense.dtype(), [&](auto scalar) {
        using T = decltype(scalar);
        const auto from = rows_of<const T>("values", values, items.count, dim);
        const auto to = rows_of<T>("dense", dense, rows, dim);
        nb::gil_scoped_release unlocked;
        add_rows<T>(items, from, to, rows, dim, threads);
    });
}

template <typename A> void check_words(const char *what, const A &words) {
    if (words.dtype() != nb::dtype<int64_t>()) refuse_kind(what, "int64", words);
    check_flat(what, words);
}

void encode(const ReadOnlyArray &indices, uint64_t size, const Array &out) {
    const Indices items = indices_of(indices);
    check_words("out", out);
    check_flat("out", out, words_for(size));
    run("encode_bitmap", "size", size, [&] { encode_bitmap(items, size, static_cast<uint64_t *>(out.data())); });
}

uint64_t count_of(const ReadOnlyArray &words, int threads) {
    check_threads(threads);
    check_words("words", words);
    nb::gil_scoped_release unlocked;
    return count_bits(static_cast<const uint64_t *>(words.data()), words.shape(0), threads);
}

void decode(const ReadOnlyArray &words, const Array &out, int threads) {
    const uint64_t count = count_of(words, threads);
    with_index_out("out", out, count, words.shape(0) * kWordBits, [&](auto *to) {
        nb::gil_scoped_release unlocked;
        decode_bitmap(static_cast<const uint64_t *>(words.data()), words.shape(0), to, count, threads);
    });
}

void write_rotated(uint32_t owner, const ReadOnlyArray &positions, uint32_t owners, uint32_t key, const Array &out,
                   int threads) {
    check_threads(threads);
    const RotatedStripe stripe = stripe_of(owners, key);
    if (owner >= owners) refuse("owner must be below " + std::to_string(owners) + ", got " + std::to_string(owner));
    if (positions.dtype() != nb::dtype<int32_t>()) refuse_kind("positions", "int32", positions);
    check_flat("positions", positions);
    Indices items = indices_of(positions);
    run("rotated_index", "positions", uint64_t{1} << 31, [&] { check_indices(items, 0, uint64_t{1} << 31); });
    const auto *from = static_cast<const int32_t *>(positions.data());
    uint64_t bound = 0;
    for (size_t i = 0; i < items.count; ++i) bound = std::max(bound, (uint64_t(from[i]) + 1) * owners);
    with_index_out("out", out, items.count, bound, [&](auto *to) {
        nb::gil_scoped_release unlocked;
        rotated_indices(stripe, owner, from, items.count, to, threads);
    });
}

void join_elements(const std::vector<ReadOnlyArray> &positions, const std::vector<ReadOnlyArray> &values, uint32_t key,
                   const Array &out, int threads) {
    check_threads(threads);
    const RotatedStripe stripe = stripe_of(positions.size(), key);
    if (values.size() != positions.size())
        refuse("one array of values per array of positions is needed, got " + std::to_string(values.size()) + " for " +
               std::to_string(positions.size()));
    check_floating("out", out);
    check_flat("out", out);
    std::vector<Indices> parts;
    std::vector<const void *> from;
    for (size_t owner = 0; owner < positions.size(); ++owner) {
        if (positions[owner].dtype() != nb::dtype<int32_t>()) refuse_kind("positions", "int32", positions[owner]);
        parts.push_back(indices_of(positions[owner]));
        check_same_dtype("values", values[owner], out);
        check_flat("values", values[owner], parts.back().count);
        from.push_back(values[owner].data());
    }
    const uint64_t size = out.shape(0);
    run_sorted("join_rotated", "positions", size,
               [&] { join_rotated(stripe, parts, from, out.data(), size, out.itemsize(), threads); });
}

bool has_avx2() {
#if defined(__x86_64__) && defined(__GNUC__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return false;
#endif
}

}  // namespace
}  // namespace MODULE_NAME

using namespace MODULE_NAME;

NB_MODULE(MODULE_NAME, m) {
    m.doc() = "gradsync's CPU kernels; gradsync.kernels is the interface.";
    m.def("has_avx2", &has_avx2, "Whether this machine runs the AVX2 module.");
    m.attr("MAX_BITS") = kMaxBits;
    m.attr("MIN_SORTED_WORDS") = kMinSortedWords;
    m.attr("SORTED_WORDS_PER_ITEM") = kSortedWordsPerItem;
    nb::class_<BoundRowUnion>(m, "RowUnion")
        .def(nb::init<std::vector<ReadOnlyArray>, uint64_t, int>(), "indices"_a.noconvert(), "num_rows"_a, "threads"_a)
        .def_prop_ro("count", &BoundRowUnion::count)
        .def("write_indices", &BoundRowUnion::write_indices, "out"_a.noconvert(), "threads"_a)
        .def("sum", &BoundRowUnion::sum, "values"_a.noconvert(), "outs"_a.noconvert(), "stripes"_a, "scale"_a, "threads"_a);
    nb::class_<BoundNonzeroRows>(m, "NonzeroRows")
        .def(nb::init<ReadOnlyArray, int>(), "dense"_a.noconvert(), "threads"_a)
        .def_prop_ro("count", &BoundNonzeroRows::count)
        .def("write_indices", &BoundNonzeroRows::write_indices, "out"_a.noconvert(), "threads"_a)
        .def("gather", &BoundNonzeroRows::gather, "outs"_a.noconvert(), "stripes"_a, "threads"_a);
    nb::class_<BoundNonzeroElements>(m, "NonzeroElements")
        .def(nb::init<ReadOnlyArray, int>(), "x"_a.noconvert(), "threads"_a)
        .def_prop_ro("count", &BoundNonzeroElements::count)
        .def("write", &BoundNonzeroElements::write, "indices"_a.noconvert(), "values"_a.noconvert(), "threads"_a);
    nb::class_<BoundRotatedPartition>(m, "RotatedPartition")
        .def(nb::init<ReadOnlyArray, uint64_t, uint32_t, uint32_t, int>(), "indices"_a.noconvert(), "size"_a, "owners"_a,
             "key"_a, "threads"_a)
        .def_prop_ro("counts", [](const BoundRotatedPartition &self) { return self.partition->counts(); })
        .def("write", &BoundRotatedPartition::write, "values"_a.noconvert(), "positions"_a.noconvert(),
             "outs"_a.noconvert());
    m.def("join_columns", &join, "parts"_a.noconvert(), "stripes"_a, "out"_a.noconvert(), "threads"_a);
    m.def("scatter_rows", &scatter, "indices"_a.noconvert(), "values"_a.noconvert(), "dense"_a.noconvert(),
          "accumulate"_a, "threads"_a);
    m.def("encode_bitmap", &encode, "indices"_a.noconvert(), "size"_a, "out"_a.noconvert());
    m.def("count_bits", &count_of, "words"_a.noconvert(), "threads"_a);
    m.def("decode_bitmap", &decode, "words"_a.noconvert(), "out"_a.noconvert(), "threads"_a);
    m.def("join_rotated", &join_elements, "positions"_a.noconvert(), "values"_a.noconvert(), "key"_a,
          "out"_a.noconvert(), "threads"_a);
    m.def("rotated_index", &write_rotated, "owner"_a, "positions"_a.noconvert(), "owners"_a, "key"_a,
          "out"_a.noconvert(), "threads"_a);
    bind_offsets(m);
}
