// Codes of few bits as functions of the Python module; see bind.cpp.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "bind.hpp"
#include "quantize.hpp"

using namespace nanobind::literals;

namespace gradsync {
namespace {

// Sections and a grid, as Python describes them.
struct BoundQuantizer {
    Grid grid;
    BlockLayout layout;

    BoundQuantizer(const std::vector<uint64_t> &lengths, const std::vector<uint64_t> &starts,
                   const std::vector<uint64_t> &seeds, int rounding, int scale, float top, int bits, uint64_t block)
        : grid{static_cast<Rounding>(rounding), static_cast<ScaleOf>(scale), top, bits, block},
          layout(lengths, starts, seeds, grid) {}

    template <typename A> uint8_t *codes_of(const A &codes) const {
        if (codes.dtype() != nb::dtype<uint8_t>()) refuse_kind("codes", "uint8", codes);
        check_flat("codes", codes, layout.codes_nbytes());
        return static_cast<uint8_t *>(const_cast<void *>(static_cast<const void *>(codes.data())));
    }

    template <typename A> float *scales_of(const A &scales) const {
        if (scales.dtype() != nb::dtype<float>()) refuse_kind("scales", "float32", scales);
        check_flat("scales", scales, grid.scale == ScaleOf::none ? 0 : layout.num_blocks());
        return static_cast<float *>(const_cast<void *>(static_cast<const void *>(scales.data())));
    }

    // One number in the type of sums for each element, or none at all.
    template <typename A, typename T> A *kept_of(const char *what, const std::optional<T> &array) const {
        if (!array) return nullptr;
        if (array->dtype() != nb::dtype<A>()) refuse_kind(what, sizeof(A) == 8 ? "float64" : "float32", *array);
        check_flat(what, *array, layout.numel());
        return static_cast<A *>(const_cast<void *>(static_cast<const void *>(array->data())));
    }

    void encode(const ReadOnlyArray &x, const Array &codes, const Array &scales, const std::optional<ReadOnlyArray> &residual,
                const std::optional<Array> &next_residual, int threads) const {
        with_input(x, threads, [&](auto *from) {
            using A = Accumulator<std::remove_const_t<std::remove_pointer_t<decltype(from)>>>;
            const A *before = kept_of<A>("residual", residual);
            A *next = kept_of<A>("next_residual", next_residual);
            uint8_t *to = codes_of(codes);
            float *stored = scales_of(scales);
            nb::gil_scoped_release unlocked;
            quantize(from, layout, grid, to, stored, before, next, threads);
        });
    }

    void find_scales(const ReadOnlyArray &x, const Array &scales, const std::optional<ReadOnlyArray> &residual,
                     int threads) const {
        with_input(x, threads, [&](auto *from) {
            using A = Accumulator<std::remove_const_t<std::remove_pointer_t<decltype(from)>>>;
            const A *before = kept_of<A>("residual", residual);
            float *stored = scales_of(scales);
            nb::gil_scoped_release unlocked;
            block_scales(from, layout, grid, stored, before, threads);
        });
    }

    void decode(const std::vector<ReadOnlyArray> &codes, const std::vector<ReadOnlyArray> &scales, const Array &out,
                double scale, int threads) const {
        check_threads(threads);
        if (codes.size() != scales.size())
            refuse("scales for each codes are needed, got " + std::to_string(scales.size()) + " for " +
                   std::to_string(codes.size()));
        std::vector<Codes> parts;
        for (size_t n = 0; n < codes.size(); ++n) parts.push_back({codes_of(codes[n]), scales_of(scales[n])});
        check_floating("out", out);
        check_flat("out", out, layout.numel());
        with_floating(out.dtype(), [&](auto scalar) {
            auto *to = static_cast<decltype(scalar) *>(out.data());
            nb::gil_scoped_release unlocked;
            dequantize(parts, layout, grid, to, scale, threads);
        });
    }

private:
    template <typename Body> void with_input(const ReadOnlyArray &x, int threads, Body body) const {
        check_threads(threads);
        check_floating("x", x);
        check_flat("x", x, layout.numel());
        with_floating(x.dtype(), [&](auto scalar) { body(static_cast<const decltype(scalar) *>(x.data())); });
    }
};

}  // namespace

void bind_quantize(nb::module_ &m) {
    nb::class_<BoundQuantizer>(m, "Quantizer")
        .def(nb::init<const std::vector<uint64_t> &, const std::vector<uint64_t> &, const std::vector<uint64_t> &, int, int,
                      float, int, uint64_t>(),
             "lengths"_a, "starts"_a, "seeds"_a, "rounding"_a, "scale"_a, "top"_a, "bits"_a, "block"_a)
        .def("quantize", &BoundQuantizer::encode, "x"_a.noconvert(), "codes"_a.noconvert(), "scales"_a.noconvert(),
             "residual"_a.noconvert().none(), "next_residual"_a.noconvert().none(), "threads"_a)
        .def("block_scales", &BoundQuantizer::find_scales, "x"_a.noconvert(), "scales"_a.noconvert(),
             "residual"_a.noconvert().none(), "threads"_a)
        .def("dequantize", &BoundQuantizer::decode, "codes"_a.noconvert(), "scales"_a.noconvert(), "out"_a.noconvert(),
             "scale"_a, "threads"_a);
}

}  // namespace gradsync
