// The kernels as a Python module. The caller owns every buffer; nothing is copied or converted on the way in
// (.noconvert(): nanobind would otherwise write into a silent copy). The GIL is free while a kernel runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "sum_rows.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace MODULE_NAME {
namespace {

using Array = nb::ndarray<nb::c_contig, nb::device::cpu>;
using ReadOnlyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

// The union together with the index arrays it points into.
struct BoundRowUnion {
    std::vector<ReadOnlyArray> arrays;
    RowUnion rows;
};

void check_threads(int threads) {
    if (threads < 1) throw nb::value_error("threads must be at least 1");
}

BoundRowUnion unite(std::vector<ReadOnlyArray> arrays, uint64_t num_rows, int threads) {
    check_threads(threads);
    std::vector<Indices> parts;
    for (const ReadOnlyArray &array : arrays) {
        const bool wide = array.dtype() == nb::dtype<int64_t>();
        if (array.ndim() != 1 || (!wide && array.dtype() != nb::dtype<int32_t>()))
            throw nb::type_error("indices must be 1-D int64 or int32 arrays");
        parts.push_back({array.data(), wide, array.shape(0)});
    }
    try {
        nb::gil_scoped_release unlocked;
        RowUnion rows(std::move(parts), num_rows, threads);
        return {std::move(arrays), std::move(rows)};
    } catch (const BadIndex &bad) {
        const std::string message = "sum_rows: index " + std::to_string(bad.index) + " of part " +
                                    std::to_string(bad.part) + " is outside [0, num_rows=" +
                                    std::to_string(num_rows) + ")";
        throw nb::value_error(message.c_str());
    }
}

void write_indices(const BoundRowUnion &self, nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out,
                   int threads) {
    check_threads(threads);
    if (out.shape(0) != self.rows.count()) throw nb::value_error("out must have one entry per row of the union");
    nb::gil_scoped_release unlocked;
    self.rows.write_indices(out.data(), threads);
}

bool is_bfloat16(nb::dlpack::dtype dtype) {
    return dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) && dtype.bits == 16 && dtype.lanes == 1;
}

template <typename In, typename Acc>
void sum_as(const BoundRowUnion &self, const std::vector<ReadOnlyArray> &values, double scale, Array &out, int threads) {
    std::vector<const In *> data;
    for (const ReadOnlyArray &array : values) data.push_back(static_cast<const In *>(array.data()));
    nb::gil_scoped_release unlocked;
    self.rows.sum(data, out.shape(1), static_cast<Acc>(scale), static_cast<Acc *>(out.data()), threads);
}

void sum(const BoundRowUnion &self, const std::vector<ReadOnlyArray> &values, double scale, Array out, int threads) {
    check_threads(threads);
    if (values.size() != self.rows.num_parts()) throw nb::value_error("one values array per part of the union is needed");
    if (out.ndim() != 2 || out.shape(0) != self.rows.count()) throw nb::value_error("out must be (rows of the union, dim)");
    if (values.empty()) return;
    const nb::dlpack::dtype dtype = values[0].dtype();
    for (size_t p = 0; p < values.size(); ++p) {
        if (values[p].dtype() != dtype) throw nb::type_error("all values must have one dtype");
        if (values[p].ndim() != 2 || values[p].shape(0) != self.rows.part_count(p) || values[p].shape(1) != out.shape(1))
            throw nb::value_error("values of a part must be (its number of indices, dim)");
    }
    const bool to_float = out.dtype() == nb::dtype<float>(), to_double = out.dtype() == nb::dtype<double>();
    if (to_float && dtype == nb::dtype<float>()) sum_as<float, float>(self, values, scale, out, threads);
    else if (to_float && is_bfloat16(dtype)) sum_as<Bfloat16, float>(self, values, scale, out, threads);
    else if (to_double && dtype == nb::dtype<double>()) sum_as<double, double>(self, values, scale, out, threads);
    else throw nb::type_error("values and out must be float32 and float32, bfloat16 and float32, or float64 and float64");
}

bool has_avx2() {
#if defined(__x86_64__) && defined(__GNUC__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("fma");
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
    nb::class_<BoundRowUnion>(m, "RowUnion")
        .def_prop_ro("count", [](const BoundRowUnion &self) { return self.rows.count(); })
        .def("write_indices", &write_indices, "out"_a.noconvert(), "threads"_a)
        .def("sum", &sum, "values"_a.noconvert(), "scale"_a, "out"_a.noconvert(), "threads"_a);
    m.def("unite", &unite, "indices"_a.noconvert(), "num_rows"_a, "threads"_a);
}
