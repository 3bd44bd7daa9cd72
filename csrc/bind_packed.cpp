// The kernels on packed positions, and on the messages of elements that have them, as Python classes and functions; see
// bind.cpp.
#include <nanobind/stl/vector.h>

#include <optional>

#include "arrays.hpp"
#include "bind.hpp"
#include "messages.hpp"
#include "packed.hpp"
#include "parts.hpp"

using namespace nanobind::literals;

namespace gradsync {
namespace {

PackedOut out_of(const Array &packed, size_t count, int bits, uint64_t size) {
    check_packed(packed, count, bits, size);
    return {static_cast<char *>(packed.data()), format_of(bits)};
}

void check_words(const Array &words, size_t count) {
    if (words.dtype() != nb::dtype<int64_t>()) refuse_kind("words", "int64", words);
    check_flat("words", words, count);
}

// The two-phase kernels together with the arrays that they point into.
struct BoundElementPartition {
    ReadOnlyArray x;
    Array words;
    std::optional<ElementPartition> partition;

    BoundElementPartition(ReadOnlyArray array, size_t owners, uint32_t key, Array bits, int threads)
        : x(std::move(array)), words(std::move(bits)) {
        check_threads(threads);
        check_floating("x", x);
        check_flat("x", x);
        const RotatedStripe stripe = stripe_of(owners, key);
        check_words(words, owners * words_for(stripe.runs(x.shape(0))));
        nb::gil_scoped_release unlocked;
        partition.emplace(x.data(), x.shape(0), x.itemsize(), stripe, static_cast<uint64_t *>(words.data()), threads);
    }

    const std::vector<size_t> &counts() const { return partition->counts(); }

    void write(const std::vector<Array> &packed, const std::vector<int> &bits, const std::vector<Array> &outs,
               int threads) const {
        check_threads(threads);
        check_each("packed", packed.size(), counts().size());
        check_each("bits", bits.size(), counts().size());
        check_each("outs", outs.size(), counts().size());
        const uint64_t runs = partition->stripe().runs(x.shape(0));
        std::vector<PackedOut> positions;
        std::vector<void *> values;
        for (size_t owner = 0; owner < packed.size(); ++owner) {
            positions.push_back(out_of(packed[owner], counts()[owner], bits[owner], runs));
            check_same_dtype("outs", outs[owner], x);
            check_flat("outs", outs[owner], counts()[owner]);
            values.push_back(outs[owner].data());
        }
        nb::gil_scoped_release unlocked;
        partition->write(positions, values, threads);
    }
};

struct BoundElementUnion {
    std::vector<ReadOnlyArray> arrays;
    std::vector<size_t> counts;
    uint64_t size;
    Array words;
    std::optional<ElementUnion> elements;

    BoundElementUnion(std::vector<ReadOnlyArray> packed, std::vector<size_t> lengths, const std::vector<int> &bits,
                      uint64_t size, Array marks, int threads)
        : arrays(std::move(packed)), counts(std::move(lengths)), size(size), words(std::move(marks)) {
        check_threads(threads);
        std::vector<Packed> parts = parts_of(arrays, counts, bits, size);
        check_words(words, words_for(size));
        nb::gil_scoped_release unlocked;
        elements.emplace(std::move(parts), size, static_cast<uint64_t *>(words.data()), threads);
    }

    size_t count() const { return elements->count(); }

    void sum(const std::vector<ReadOnlyArray> &values, double scale, const Array &packed, int bits, const Array &out,
             int threads) const {
        check_threads(threads);
        const PackedOut positions = out_of(packed, count(), bits, size);
        check_each("values", values.size(), arrays.size());
        check_floating("out", out);
        check_flat("out", out, count());
        with_floating(out.dtype(), [&](auto scalar) {
            using T = decltype(scalar);
            std::vector<const T *> parts;
            for (size_t p = 0; p < values.size(); ++p) {
                check_same_dtype("values", values[p], out);
                check_flat("values", values[p], counts[p]);
                parts.push_back(static_cast<const T *>(values[p].data()));
            }
            nb::gil_scoped_release unlocked;
            elements->sum<T>(parts, scale, positions, static_cast<T *>(out.data()), threads);
        });
    }
};

void join(const std::vector<ReadOnlyArray> &packed, const std::vector<size_t> &counts, const std::vector<int> &bits,
          const std::vector<ReadOnlyArray> &values, uint32_t key, const Array &out, int threads) {
    check_threads(threads);
    check_floating("out", out);
    check_flat("out", out);
    const uint64_t size = out.shape(0);
    const RotatedStripe stripe = stripe_of(packed.size(), key);
    const std::vector<Packed> parts = parts_of(packed, counts, bits, stripe.runs(size));
    check_each("values", values.size(), parts.size());
    std::vector<const void *> from;
    for (size_t p = 0; p < values.size(); ++p) {
        check_same_dtype("values", values[p], out);
        check_flat("values", values[p], counts[p]);
        from.push_back(values[p].data());
    }
    run("join_elements", "size", size,
        [&] { join_elements(stripe, parts, from, out.data(), size, out.itemsize(), threads); });
}

Format offsets_of(int bits) {
    if (bits != 8 && bits != 16) refuse("bits must be 8 or 16, got " + std::to_string(bits));
    return static_cast<Format>(bits);
}

void encode(const ReadOnlyArray &indices, uint64_t size, int bits, const Array &out) {
    const Indices items = indices_of(indices);
    const Format format = offsets_of(bits);
    check_bytes("out", out);
    check_flat("out", out, packed_nbytes(items.count, size, format));
    run_sorted("encode_offsets", "indices", size,
               [&] { encode_offsets(items, size, format, static_cast<char *>(out.data())); });
}

void decode(const ReadOnlyArray &message, uint64_t size, int bits, const Array &out) {
    if (out.ndim() != 1) refuse_shape("out", "1-D", out);
    const size_t count = out.shape(0);
    const Format format = offsets_of(bits);
    check_bytes("message", message);
    check_flat("message", message, packed_nbytes(count, size, format));
    with_index_out("out", out, count, size, [&](auto *to) {
        nb::gil_scoped_release unlocked;
        decode_offsets({static_cast<const char *>(message.data()), count, format}, size, to);
    });
}

}  // namespace

void bind_packed(nb::module_ &m) {
    m.def("encode_offsets", &encode, "indices"_a.noconvert(), "size"_a, "bits"_a, "out"_a.noconvert());
    m.def("decode_offsets", &decode, "message"_a.noconvert(), "size"_a, "bits"_a, "out"_a.noconvert());
    nb::class_<BoundElementPartition>(m, "ElementPartition")
        .def(nb::init<ReadOnlyArray, size_t, uint32_t, Array, int>(), "x"_a.noconvert(), "owners"_a, "key"_a,
             "words"_a.noconvert(), "threads"_a)
        .def_prop_ro("counts", &BoundElementPartition::counts)
        .def("write", &BoundElementPartition::write, "packed"_a.noconvert(), "bits"_a, "outs"_a.noconvert(), "threads"_a);
    nb::class_<BoundElementUnion>(m, "ElementUnion")
        .def(nb::init<std::vector<ReadOnlyArray>, std::vector<size_t>, const std::vector<int> &, uint64_t, Array, int>(),
             "packed"_a.noconvert(), "counts"_a, "bits"_a, "size"_a, "words"_a.noconvert(), "threads"_a)
        .def_prop_ro("count", &BoundElementUnion::count)
        .def("sum", &BoundElementUnion::sum, "values"_a.noconvert(), "scale"_a, "packed"_a.noconvert(), "bits"_a,
             "out"_a.noconvert(), "threads"_a);
    m.def("join_elements", &join, "packed"_a.noconvert(), "counts"_a, "bits"_a, "values"_a.noconvert(), "key"_a,
          "out"_a.noconvert(), "threads"_a);
}

}  // namespace gradsync
