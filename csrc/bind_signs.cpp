// The kernels on signs as a part of the Python module.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "arrays.hpp"
#include "bind.hpp"
#include "signs.hpp"

using namespace nanobind::literals;

namespace gradsync {
namespace {

SignScale scale_of(const std::string &name) {
    if (name == "mean") return SignScale::mean;
    if (name == "rms") return SignScale::rms;
    if (name == "two") return SignScale::two;
    if (name == "one") return SignScale::one;
    refuse("scale must be mean, rms, two or one, got " + name);
}

Blocks blocks_of(const std::vector<size_t> &lengths, size_t block, const char *what, size_t numel) {
    Blocks blocks(lengths, block);
    if (blocks.numel() != numel)
        refuse("sections have " + std::to_string(blocks.numel()) + " elements, " + what + " has " + std::to_string(numel));
    return blocks;
}

// The bits of a tensor, and its scales.
template <typename A> void check_signs(const Blocks &blocks, SignScale scale, const A &words, const A &scales) {
    if (words.dtype() != nb::dtype<uint8_t>()) refuse_kind("words", "uint8", words);
    check_flat("words", words, (blocks.numel() + 7) / 8);
    if (scales.dtype() != nb::dtype<float>()) refuse_kind("scales", "float32", scales);
    if (scale != SignScale::two) return check_flat("scales", scales, scale == SignScale::one ? 0 : blocks.count());
    if (scales.ndim() != 2 || scales.shape(0) != blocks.count() || scales.shape(1) != 2)
        refuse_shape("scales", "of shape (" + std::to_string(blocks.count()) + ", 2)", scales);
    if (!is_contiguous(scales)) refuse_kind("scales", "contiguous", scales);
    check_aligned("scales", scales);
}

void pack(const ReadOnlyArray &x, const std::vector<size_t> &lengths, const Array &words, const Array &scales,
          size_t block, const std::string &name, const std::optional<ReadOnlyArray> &residual,
          const std::optional<Array> &left, int threads) {
    check_threads(threads);
    check_floating("x", x);
    check_flat("x", x);
    const SignScale scale = scale_of(name);
    const Blocks blocks = blocks_of(lengths, block, "x", x.shape(0));
    check_signs(blocks, scale, words, scales);
    if (residual.has_value() != left.has_value()) refuse("residual and next_residual: both or neither");
    with_floating(x.dtype(), [&](auto scalar) {
        using T = decltype(scalar);
        using A = Accumulator<T>;
        const auto check = [&](const char *what, const auto &array) {
            if (array.dtype() != nb::dtype<A>()) refuse_kind(what, name_of(nb::dtype<A>()).c_str(), array);
            check_flat(what, array, x.shape(0));
        };
        if (residual) check("residual", *residual), check("next_residual", *left);
        const A *from = residual ? static_cast<const A *>(residual->data()) : nullptr;
        A *to = left ? static_cast<A *>(left->data()) : nullptr;
        nb::gil_scoped_release unlocked;
        pack_signs(blocks, scale, static_cast<const T *>(x.data()), from, to, static_cast<uint8_t *>(words.data()),
                   static_cast<float *>(scales.data()), threads);
    });
}

void unpack(const std::vector<ReadOnlyArray> &words, const std::vector<ReadOnlyArray> &scales,
            const std::vector<size_t> &lengths, const Array &out, size_t block, const std::string &name, double factor,
            int threads) {
    check_threads(threads);
    check_floating("out", out);
    check_flat("out", out);
    const SignScale scale = scale_of(name);
    const Blocks blocks = blocks_of(lengths, block, "out", out.shape(0));
    if (words.size() != scales.size() || words.empty())
        refuse("one scales array for each of some words is needed, got " + std::to_string(scales.size()) + " for " +
               std::to_string(words.size()));
    std::vector<Signs> parts;
    for (size_t p = 0; p < words.size(); ++p) {
        check_signs(blocks, scale, words[p], scales[p]);
        parts.push_back({static_cast<const uint8_t *>(words[p].data()), static_cast<const float *>(scales[p].data())});
    }
    with_floating(out.dtype(), [&](auto scalar) {
        using T = decltype(scalar);
        nb::gil_scoped_release unlocked;
        unpack_signs(blocks, scale, parts, static_cast<T *>(out.data()), factor, threads);
    });
}

}  // namespace

void bind_signs(nb::module_ &m) {
    m.def("pack_signs", &pack, "x"_a.noconvert(), "lengths"_a, "words"_a.noconvert(), "scales"_a.noconvert(), "block"_a,
          "scale"_a, "residual"_a.noconvert().none(), "next_residual"_a.noconvert().none(), "threads"_a);
    m.def("unpack_signs", &unpack, "words"_a.noconvert(), "scales"_a.noconvert(), "lengths"_a, "out"_a.noconvert(),
          "block"_a, "scale"_a, "factor"_a, "threads"_a);
}

}  // namespace gradsync
