// The kernels as a Python module. The caller owns every buffer; nothing is copied or converted on the way in
// (.noconvert(): nanobind would otherwise write into a silent copy). The GIL is free while a kernel runs.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>

#include "arrays.hpp"
#include "bind.hpp"
#include "convert.hpp"
#include "elements.hpp"
#include "messages.hpp"
#include "rows.hpp"
#include "sum_rows.hpp"

using namespace nanobind::literals;

namespace gradsync {
namespace {

// A two-phase kernel together with the arrays it points into.
struct BoundRowUnion {
    std::vector<ReadOnlyArray> arrays;
    Scratch<int64_t> unpacked;  // of messages: the indices of all, int32 where they fit
    uint64_t num_rows;
    std::optional<RowUnion> rows;

    BoundRowUnion(std::vector<ReadOnlyArray> indices, uint64_t num_rows, int threads)
        : arrays(std::move(indices)), num_rows(num_rows) {
        check_threads(threads);
        std::vector<Indices> parts;
        for (const ReadOnlyArray &array : arrays) parts.push_back(indices_of(array));
        run("sum_rows", "num_rows", num_rows, [&] { rows.emplace(std::move(parts), num_rows, threads); });
    }

    BoundRowUnion(std::vector<ReadOnlyArray> packed, const std::vector<size_t> &counts, const std::vector<int> &bits,
                  uint64_t num_rows, int threads)
        : num_rows(num_rows) {
        check_threads(threads);
        const std::vector<Packed> messages = parts_of(packed, counts, bits, num_rows);
        run("unite_messages", "num_rows", num_rows, [&] {
            if (num_rows > uint64_t{1} << 31) unpack<int64_t>(messages, threads);
            else unpack<int32_t>(messages, threads);
        });
    }

    template <typename Index> void unpack(const std::vector<Packed> &messages, int threads) {
        size_t room = PackedReader::kLanes;
        for (const Packed &message : messages) room += message.count;
        unpacked = Scratch<int64_t>((room * sizeof(Index) + sizeof(int64_t) - 1) / sizeof(int64_t));
        auto *index = reinterpret_cast<Index *>(unpacked.begin()), *const end = index + room;
        std::vector<Indices> parts;
        for (const Packed &message : messages) {
            PackedReader(message, num_rows).read(num_rows, 0, index, end - index);
            parts.push_back({index, sizeof(Index) == sizeof(int64_t), message.count});
            index += message.count;
        }
        rows.emplace(std::move(parts), num_rows, threads);
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

void narrow_into(const ReadOnlyArray &x, const Array &out, double scale, int threads) {
    check_threads(threads);
    check_floating("x", x);
    check_flat("x", x);
    check_floating("out", out);
    check_flat("out", out, x.shape(0));
    if (x.dtype().bits < 32) refuse_kind("x", "float32 or float64", x);
    if (out.dtype().bits != 16) refuse_kind("out", "bfloat16 or float16", out);
    with_floating(x.dtype(), [&](auto from) {
        with_floating(out.dtype(), [&](auto to) {
            using In = decltype(from);
            using Out = decltype(to);
            if constexpr (sizeof(In) > 2 && sizeof(Out) == 2) {
                nb::gil_scoped_release unlocked;
                narrow_values(static_cast<const In *>(x.data()), x.shape(0), scale, static_cast<Out *>(out.data()), threads);
            }
        });
    });
}

void sum_into(const std::vector<ReadOnlyArray> &parts, const Array &out, double scale, int threads) {
    check_threads(threads);
    check_floating("out", out);
    check_flat("out", out);
    for (const ReadOnlyArray &part : parts) {
        check_floating("parts", part);
        check_same_dtype("parts", part, parts[0]);
        check_flat("parts", part, out.shape(0));
    }
    if (parts.empty()) {
        std::fill_n(static_cast<char *>(out.data()), out.nbytes(), char{0});
        return;
    }
    with_floating(parts[0].dtype(), [&](auto from) {
        with_floating(out.dtype(), [&](auto to) {
            using In = decltype(from);
            using Out = decltype(to);
            std::vector<const In *> values;
            for (const ReadOnlyArray &part : parts) values.push_back(static_cast<const In *>(part.data()));
            nb::gil_scoped_release unlocked;
            sum_values(values, out.shape(0), scale, static_cast<Out *>(out.data()), threads);
        });
    });
}

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

bool has_avx2() {
#if defined(__x86_64__) && defined(__GNUC__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return false;
#endif
}

}  // namespace

void bind_kernels(nb::module_ &m) {
    m.doc() = "gradsync's CPU kernels; gradsync.kernels is the interface.";
    m.def("has_avx2", &has_avx2, "Whether this machine runs the AVX2 module.");
    m.attr("MAX_BITS") = kMaxBits;
    m.attr("MIN_SORTED_WORDS") = kMinSortedWords;
    m.attr("SORTED_WORDS_PER_ITEM") = kSortedWordsPerItem;
    nb::class_<BoundRowUnion>(m, "RowUnion")
        .def(nb::init<std::vector<ReadOnlyArray>, uint64_t, int>(), "indices"_a.noconvert(), "num_rows"_a, "threads"_a)
        .def(nb::init<std::vector<ReadOnlyArray>, const std::vector<size_t> &, const std::vector<int> &, uint64_t, int>(),
             "packed"_a.noconvert(), "counts"_a, "bits"_a, "num_rows"_a, "threads"_a)
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
    m.def("narrow", &narrow_into, "x"_a.noconvert(), "out"_a.noconvert(), "scale"_a, "threads"_a);
    m.def("sum_parts", &sum_into, "parts"_a.noconvert(), "out"_a.noconvert(), "scale"_a, "threads"_a);
    m.def("join_columns", &join, "parts"_a.noconvert(), "stripes"_a, "out"_a.noconvert(), "threads"_a);
    m.def("scatter_rows", &scatter, "indices"_a.noconvert(), "values"_a.noconvert(), "dense"_a.noconvert(),
          "accumulate"_a, "threads"_a);
    m.def("encode_bitmap", &encode, "indices"_a.noconvert(), "size"_a, "out"_a.noconvert());
    m.def("count_bits", &count_of, "words"_a.noconvert(), "threads"_a);
    m.def("decode_bitmap", &decode, "words"_a.noconvert(), "out"_a.noconvert(), "threads"_a);
    bind_chunks(m);
    bind_packed(m);
    bind_owners(m);
    bind_randomized(m);
    bind_signs(m);
    bind_top_k(m);
    bind_quantize(m);
}

}  // namespace gradsync
