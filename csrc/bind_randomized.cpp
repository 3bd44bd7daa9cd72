// The kernels that draw as Python functions; see bind.cpp.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "arrays.hpp"
#include "bind.hpp"
#include "count_sketch.hpp"
#include "hadamard.hpp"
#include "random_k.hpp"

using namespace nanobind::literals;

namespace gradsync {
namespace {

using RunTuple = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint32_t, uint32_t, uint64_t>;

void draw_k(const std::vector<RunTuple> &sections, uint64_t numel, const Array &indices, int threads) {
    check_threads(threads);
    std::vector<RunDraw> draws;
    uint64_t drawn = 0;
    for (const auto &[offset, length, count, run, runs, shift, a, b, key] : sections) {
        const bool fits = offset <= numel && length <= numel - offset && count <= runs && (count == 0 || run > 0) &&
                          (runs == 0 || run <= length / runs) && shift <= length && a < 1u << 31 && b < 1u << 31 &&
                          (count == 0 || uint64_t{a} * b >= runs);
        if (!fits) refuse("random_k: a section's draws do not fit it");
        draws.push_back({offset, length, count, run, runs, shift, a, b, key});
        drawn += count * run;
    }
    with_index_out("indices", indices, drawn, numel, [&](auto *to) {
        nb::gil_scoped_release unlocked;
        random_k(draws, to, threads);
    });
}

template <typename In, typename Out>
void rotate_as(const ReadOnlyArray &x, const std::vector<Rotated> &chunks, const Array &out, bool inverse, int threads) {
    nb::gil_scoped_release unlocked;
    hadamard(static_cast<const In *>(x.data()), static_cast<Out *>(out.data()), chunks, inverse, threads);
}

void rotate(const ReadOnlyArray &x, const std::vector<uint64_t> &lengths, const std::vector<uint64_t> &starts,
            const std::vector<uint64_t> &seeds, uint32_t chunk, const Array &out, bool inverse, int threads) {
    check_threads(threads);
    check_floating("x", x);
    check_flat("x", x);
    check_floating("out", out);
    check_flat("out", out, x.shape(0));
    if (starts.size() != lengths.size() || seeds.size() != lengths.size())
        refuse("one start and one seed for each section are needed");
    uint64_t numel = 0;
    for (uint64_t length : lengths) numel += length;
    if (numel != x.shape(0)) refuse_shape("x", "as long as its sections, " + std::to_string(numel), x);
    const std::vector<Rotated> chunks = rotated_chunks(lengths, starts, seeds, chunk);
    const nb::dlpack::dtype wide = x.itemsize() == 8 ? nb::dtype<double>() : nb::dtype<float>();
    if (inverse && x.dtype() != wide) refuse_kind("x", name_of(wide).c_str(), x);
    if (inverse ? (out.itemsize() == 8) != (x.itemsize() == 8) : out.dtype() != wide)
        refuse_kind("out", name_of(wide).c_str(), out);
    with_floating(inverse ? out.dtype() : x.dtype(), [&](auto scalar) {
        using T = decltype(scalar);
        if (inverse) rotate_as<Accumulator<T>, T>(x, chunks, out, true, threads);
        else rotate_as<T, Accumulator<T>>(x, chunks, out, false, threads);
    });
}

// The sections of a tensor of so many elements, and of their counters.
template <typename X, typename C>
std::vector<Sketched> sketched(const char *what, const X &x, const std::vector<uint64_t> &lengths,
                               const std::vector<uint64_t> &starts, const std::vector<uint64_t> &seeds,
                               const std::vector<uint32_t> &columns, uint32_t rows, const C &counters) {
    check_floating(what, x);
    check_flat(what, x);
    check_floating("counters", counters);
    if (starts.size() != lengths.size() || seeds.size() != lengths.size() || columns.size() != lengths.size())
        refuse("one start, one seed and one number of columns for each section are needed");
    if (rows == 0) refuse("rows must be positive");
    uint64_t numel = 0, needed = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
        if (columns[s] >= 1u << 31 || (columns[s] == 0 && lengths[s] > 0)) refuse("columns do not fit their section");
        numel += lengths[s];
        needed += uint64_t{columns[s]} * rows;
    }
    if (numel != x.shape(0)) refuse_shape(what, "as long as its sections, " + std::to_string(numel), x);
    check_flat("counters", counters, needed);
    const nb::dlpack::dtype wide = x.itemsize() == 8 ? nb::dtype<double>() : nb::dtype<float>();
    if (counters.dtype() != wide) refuse_kind("counters", name_of(wide).c_str(), counters);
    return sketched_sections(lengths, starts, seeds, columns, rows);
}

void sketch(const ReadOnlyArray &x, const std::vector<uint64_t> &lengths, const std::vector<uint64_t> &starts,
            const std::vector<uint64_t> &seeds, const std::vector<uint32_t> &columns, uint32_t rows,
            const Array &counters, int threads) {
    check_threads(threads);
    const auto sections = sketched("x", x, lengths, starts, seeds, columns, rows, counters);
    with_floating(x.dtype(), [&](auto scalar) {
        using T = decltype(scalar);
        nb::gil_scoped_release unlocked;
        count_sketch(static_cast<const T *>(x.data()), sections, rows, static_cast<Accumulator<T> *>(counters.data()),
                     threads);
    });
}

void estimate(const ReadOnlyArray &counters, const std::vector<uint64_t> &lengths, const std::vector<uint64_t> &starts,
              const std::vector<uint64_t> &seeds, const std::vector<uint32_t> &columns, uint32_t rows, const Array &out,
              int threads) {
    check_threads(threads);
    const auto sections = sketched("out", out, lengths, starts, seeds, columns, rows, counters);
    if (rows % 2 == 0) refuse("rows must be odd, for a median");
    with_floating(out.dtype(), [&](auto scalar) {
        using T = decltype(scalar);
        nb::gil_scoped_release unlocked;
        sketch_estimates(static_cast<const Accumulator<T> *>(counters.data()), sections, rows,
                         static_cast<T *>(out.data()), threads);
    });
}

}  // namespace

void bind_randomized(nb::module_ &m) {
    m.def("random_k", &draw_k, "sections"_a, "numel"_a, "indices"_a.noconvert(), "threads"_a);
    m.def("hadamard", &rotate, "x"_a.noconvert(), "lengths"_a, "starts"_a, "seeds"_a, "chunk"_a, "out"_a.noconvert(),
          "inverse"_a, "threads"_a);
    m.def("count_sketch", &sketch, "x"_a.noconvert(), "lengths"_a, "starts"_a, "seeds"_a, "columns"_a, "rows"_a,
          "counters"_a.noconvert(), "threads"_a);
    m.def("sketch_estimates", &estimate, "counters"_a.noconvert(), "lengths"_a, "starts"_a, "seeds"_a, "columns"_a,
          "rows"_a, "out"_a.noconvert(), "threads"_a);
}

}  // namespace gradsync
