// The choice of elements by their magnitude as Python functions; see bind.cpp.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "arrays.hpp"
#include "bind.hpp"
#include "norms.hpp"
#include "top_k.hpp"

using namespace nanobind::literals;

namespace gradsync {
namespace {

using Numbers = std::vector<uint64_t>;

std::vector<Section> sections_of(const Numbers &lengths, const Numbers &most, size_t numel) {
    if (most.size() != lengths.size())
        refuse("counts must be one for each of " + std::to_string(lengths.size()) + " sections, got " +
               std::to_string(most.size()));
    std::vector<Section> sections;
    size_t rest = numel;
    for (size_t s = 0; s < lengths.size(); ++s) {
        if (most[s] > lengths[s])
            refuse("counts must be at most the " + std::to_string(lengths[s]) + " elements of section " +
                   std::to_string(s) + ", got " + std::to_string(most[s]));
        if (lengths[s] > rest) refuse("sections must be of x's " + std::to_string(numel) + " elements, got more");
        rest -= lengths[s];
        sections.push_back({static_cast<size_t>(lengths[s]), static_cast<size_t>(most[s])});
    }
    if (rest > 0)
        refuse("sections must be of x's " + std::to_string(numel) + " elements, got " + std::to_string(numel - rest));
    return sections;
}

template <typename T> const char *accumulator_name() { return std::is_same_v<Accumulator<T>, double> ? "float64" : "float32"; }

// An array of numbers in the type that sums of T are kept in.
template <typename T, typename A> Accumulator<T> *wide_of(const char *what, const A &array, size_t count) {
    if (array.dtype() != nb::dtype<Accumulator<T>>()) refuse_kind(what, accumulator_name<T>(), array);
    check_flat(what, array, count);
    return static_cast<Accumulator<T> *>(const_cast<void *>(static_cast<const void *>(array.data())));
}

template <typename T>
Choice<T> choice_of(const ReadOnlyArray &x, const std::optional<ReadOnlyArray> &residual,
                    const std::optional<Array> &left) {
    if (residual.has_value() != left.has_value()) refuse("residual and next_residual belong together, got one of them");
    const auto *elements = static_cast<const T *>(x.data());
    if (!residual) return {elements};
    const size_t numel = x.shape(0);
    return {elements, wide_of<T>("residual", *residual, numel), wide_of<T>("next_residual", *left, numel)};
}

// Calls body(choice, indices, values) with their types.
template <typename Body>
void with_choice(const ReadOnlyArray &x, const std::vector<Section> &sections, const Array &indices, const Array &values,
                 const std::optional<ReadOnlyArray> &residual, const std::optional<Array> &left, Body body) {
    size_t room = 0;
    for (const Section &section : sections) room += section.most;
    check_floating("values", values);
    check_flat("values", values, room);
    with_floating(x.dtype(), [&](auto element) {
        using T = decltype(element);
        const Choice<T> choice = choice_of<T>(x, residual, left);
        with_floating(values.dtype(), [&](auto value) {
            using V = decltype(value);
            with_index_out("indices", indices, room, x.shape(0), [&](auto *to) {
                body(choice, to, static_cast<V *>(values.data()));
            });
        });
    });
}

void check_elements(const ReadOnlyArray &x, int threads) {
    check_threads(threads);
    check_floating("x", x);
    check_flat("x", x);
}

void choose_top_k(const ReadOnlyArray &x, const Array &indices, const Array &values, const Numbers &lengths,
                  const Numbers &counts, const std::optional<ReadOnlyArray> &residual, const std::optional<Array> &left,
                  int threads) {
    check_elements(x, threads);
    const std::vector<Section> sections = sections_of(lengths, counts, x.shape(0));
    with_choice(x, sections, indices, values, residual, left, [&](auto choice, auto *to, auto *taken) {
        nb::gil_scoped_release unlocked;
        top_k(choice, sections, to, taken, threads);
    });
}

size_t choose_above(const ReadOnlyArray &x, const ReadOnlyArray &thresholds, const Array &indices, const Array &values,
                    const Numbers &lengths, const Numbers &counts, const std::optional<ReadOnlyArray> &residual,
                    const std::optional<Array> &left, int threads) {
    check_elements(x, threads);
    const std::vector<Section> sections = sections_of(lengths, counts, x.shape(0));
    size_t count = 0;
    with_choice(x, sections, indices, values, residual, left, [&](auto choice, auto *to, auto *taken) {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(choice.x)>>;
        const auto *bounds = wide_of<T>("thresholds", thresholds, sections.size());
        nb::gil_scoped_release unlocked;
        count = select_above(choice, sections, bounds, to, taken, threads);
    });
    return count;
}

void count_each(const ReadOnlyArray &x, const ReadOnlyArray &thresholds, const Array &counts, const Numbers &lengths,
                int threads) {
    check_elements(x, threads);
    const std::vector<Section> sections = sections_of(lengths, lengths, x.shape(0));
    if (counts.dtype() != nb::dtype<int64_t>()) refuse_kind("counts", "int64", counts);
    check_flat("counts", counts, sections.size());
    with_floating(x.dtype(), [&](auto element) {
        using T = decltype(element);
        const auto *bounds = wide_of<T>("thresholds", thresholds, sections.size());
        auto *to = static_cast<int64_t *>(counts.data());
        nb::gil_scoped_release unlocked;
        count_above(static_cast<const T *>(x.data()), sections, bounds, to, threads);
    });
}

void norm_blocks(const ReadOnlyArray &x, const std::vector<size_t> &lengths, size_t block, const Array &norms,
                 int threads) {
    check_elements(x, threads);
    const Blocks blocks(lengths, block);
    if (blocks.numel() != x.shape(0))
        refuse_shape("x", "as long as its sections, " + std::to_string(blocks.numel()), x);
    if (norms.dtype() != nb::dtype<double>()) refuse_kind("norms", "float64", norms);
    check_flat("norms", norms, blocks.count());
    with_floating(x.dtype(), [&](auto element) {
        nb::gil_scoped_release unlocked;
        squared_norms(blocks, static_cast<const decltype(element) *>(x.data()), static_cast<double *>(norms.data()), threads);
    });
}

}  // namespace

void bind_top_k(nb::module_ &m) {
    m.def("top_k", &choose_top_k, "x"_a.noconvert(), "indices"_a.noconvert(), "values"_a.noconvert(), "lengths"_a,
          "counts"_a, "residual"_a.noconvert().none(), "next_residual"_a.noconvert().none(), "threads"_a);
    m.def("select_above", &choose_above, "x"_a.noconvert(), "thresholds"_a.noconvert(), "indices"_a.noconvert(),
          "values"_a.noconvert(), "lengths"_a, "counts"_a, "residual"_a.noconvert().none(),
          "next_residual"_a.noconvert().none(), "threads"_a);
    m.def("count_above", &count_each, "x"_a.noconvert(), "thresholds"_a.noconvert(), "counts"_a.noconvert(), "lengths"_a,
          "threads"_a);
    m.def("squared_norms", &norm_blocks, "x"_a.noconvert(), "lengths"_a, "block"_a, "norms"_a.noconvert(), "threads"_a);
}

}  // namespace gradsync
