// Arrays from Python as the kernels want them. Whatever does not fit is refused with what was got and expected: a
// TypeError for the kind of buffer (dtype, strides, alignment), a ValueError for the shape.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <vector>

#include "elements.hpp"
#include "rows.hpp"
#include "scalars.hpp"

namespace gradsync {

namespace nb = nanobind;
using Array = nb::ndarray<nb::device::cpu>;
using ReadOnlyArray = nb::ndarray<nb::ro, nb::device::cpu>;

[[noreturn]] inline void refuse(const std::string &message) { throw nb::value_error(message.c_str()); }

inline bool has_code(nb::dlpack::dtype dtype, nb::dlpack::dtype_code code) {
    return dtype.code == static_cast<uint8_t>(code) && dtype.lanes == 1;
}

inline std::string name_of(nb::dlpack::dtype dtype) {
    const char *kind = has_code(dtype, nb::dlpack::dtype_code::Float)    ? "float"
                       : has_code(dtype, nb::dlpack::dtype_code::Bfloat) ? "bfloat"
                       : has_code(dtype, nb::dlpack::dtype_code::Int)    ? "int"
                       : has_code(dtype, nb::dlpack::dtype_code::UInt)   ? "uint"
                                                                         : "dtype of another kind, bits ";
    return kind + std::to_string(dtype.bits);
}

template <typename A> std::string describe(const A &array) {
    std::string shape, strides;
    for (size_t i = 0; i < array.ndim(); ++i) {
        shape += (i ? ", " : "") + std::to_string(array.shape(i));
        strides += (i ? ", " : "") + std::to_string(array.stride(i));
    }
    return name_of(array.dtype()) + " of shape (" + shape + "), strides (" + strides + ")";
}

template <typename A> [[noreturn]] void refuse_kind(const char *what, const char *expected, const A &got) {
    throw nb::type_error((std::string(what) + " must be " + expected + ", got " + describe(got)).c_str());
}

template <typename A> [[noreturn]] void refuse_shape(const char *what, const std::string &expected, const A &got) {
    refuse(std::string(what) + " must be " + expected + ", got " + describe(got));
}

inline bool is_floating(nb::dlpack::dtype dtype) {
    return (has_code(dtype, nb::dlpack::dtype_code::Float) && (dtype.bits == 16 || dtype.bits == 32 || dtype.bits == 64)) ||
           (has_code(dtype, nb::dlpack::dtype_code::Bfloat) && dtype.bits == 16);
}

template <typename A> void check_floating(const char *what, const A &array) {
    if (!is_floating(array.dtype())) refuse_kind(what, "float32, float64, bfloat16 or float16", array);
}

template <typename A, typename B> void check_same_dtype(const char *what, const A &array, const B &first) {
    if (array.dtype() != first.dtype()) refuse_kind(what, name_of(first.dtype()).c_str(), array);
}

// Calls body(T{}) with the element type of a floating dtype.
template <typename Body> void with_floating(nb::dlpack::dtype dtype, Body body) {
    if (has_code(dtype, nb::dlpack::dtype_code::Bfloat)) body(Bfloat16{});
    else if (dtype.bits == 16) body(Float16{});
    else if (dtype.bits == 32) body(float{});
    else body(double{});
}

template <typename A> bool is_contiguous(const A &array) {
    int64_t expected = 1;
    for (size_t i = array.ndim(); i-- > 0; expected *= array.shape(i))
        if (array.shape(i) != 1 && array.stride(i) != expected) return array.size() == 0;
    return true;
}

template <typename A> void check_aligned(const char *what, const A &array) {
    if (reinterpret_cast<uintptr_t>(array.data()) % array.itemsize() != 0)
        refuse_kind(what, "at an address that is a multiple of the item size", array);
}

template <typename A> void check_flat(const char *what, const A &array) {
    if (array.ndim() != 1) refuse_shape(what, "1-D", array);
    if (!is_contiguous(array)) refuse_kind(what, "contiguous", array);
    check_aligned(what, array);
}

template <typename A> void check_flat(const char *what, const A &array, size_t count) {
    if (array.ndim() != 1 || array.shape(0) != count)
        refuse_shape(what, "of shape (" + std::to_string(count) + ",)", array);
    check_flat(what, array);
}

template <typename A> bool is_index(const A &array) {
    return array.dtype() == nb::dtype<int64_t>() || array.dtype() == nb::dtype<int32_t>();
}

template <typename A> void check_index(const char *what, const A &array) {
    if (!is_index(array)) refuse_kind(what, "int64 or int32", array);
}

// Calls body(Index *) with an output of indices below `bound`; count entries.
template <typename Body>
void with_index_out(const char *what, const Array &out, size_t count, uint64_t bound, Body body) {
    check_index(what, out);
    check_flat(what, out, count);
    if (out.dtype() == nb::dtype<int64_t>()) return body(static_cast<int64_t *>(out.data()));
    if (bound > uint64_t{1} << 31)
        refuse(std::string(what) + " of int32 cannot hold indices up to " + std::to_string(bound - 1) + ": use int64");
    body(static_cast<int32_t *>(out.data()));
}

inline Indices indices_of(const ReadOnlyArray &array) {
    check_index("indices", array);
    check_flat("indices", array);
    return {array.data(), array.dtype() == nb::dtype<int64_t>(), array.shape(0)};
}

// The (rows, dim) array as rows of T, or, for char, of bytes.
template <typename T, typename A> Rows<T> rows_of(const char *what, const A &array, size_t rows, size_t dim) {
    if (array.ndim() != 2 || array.shape(0) != rows || array.shape(1) != dim)
        refuse_shape(what, "of shape (" + std::to_string(rows) + ", " + std::to_string(dim) + ")", array);
    // Rows to be read may be one and the same; rows to be written have places of their own.
    const int64_t least = std::is_same_v<A, Array> ? static_cast<int64_t>(dim) : 0;
    if ((dim > 1 && array.stride(1) != 1) || (rows > 1 && array.stride(0) < least))
        refuse_kind(what, "rows of adjacent elements, one after the other", array);
    check_aligned(what, array);
    constexpr bool bytes = std::is_same_v<std::remove_const_t<T>, char>;
    const size_t stride = rows > 1 ? static_cast<size_t>(array.stride(0)) : dim;
    return {static_cast<T *>(array.data()), bytes ? stride * array.itemsize() : stride};
}

using StripeList = std::vector<std::pair<int64_t, int64_t>>;

// One stripe for each array: its columns [start, stop) of rows of dim. `rows` each.
template <typename T, typename A>
std::vector<Stripe<T>> stripes_of(const char *what, const std::vector<A> &arrays, const StripeList &stripes, size_t rows,
                                  size_t dim) {
    if (arrays.size() != stripes.size())
        refuse("one stripe per array is needed, got " + std::to_string(stripes.size()) + " stripes and " +
               std::to_string(arrays.size()) + " arrays");
    std::vector<Stripe<T>> result;
    for (size_t s = 0; s < stripes.size(); ++s) {
        const auto [start, stop] = stripes[s];
        if (start < 0 || stop < start || static_cast<uint64_t>(stop) > dim)
            refuse("stripe [" + std::to_string(start) + ", " + std::to_string(stop) + ") is not within the " +
                   std::to_string(dim) + " columns");
        const size_t width = stop - start;
        const size_t unit = std::is_same_v<std::remove_const_t<T>, char> ? arrays[s].itemsize() : 1;
        const Rows<T> place = rows_of<T>(what, arrays[s], rows, width);
        if (width > 0) result.push_back({place, start * unit, width * unit});
    }
    return result;
}

inline void check_owners(uint64_t owners) {
    if (owners < 1 || owners > kMaxOwners)
        refuse("the number of owners must be in [1, " + std::to_string(kMaxOwners) + "], got " + std::to_string(owners));
}

inline RotatedStripe stripe_of(uint64_t owners, uint32_t key) {
    check_owners(owners);
    return {static_cast<uint32_t>(owners), key};
}

inline void check_threads(int threads) {
    if (threads < 1) refuse("threads must be at least 1, got " + std::to_string(threads));
}

// Calls body with the GIL released; says which index was bad.
template <typename Body> void run(const char *kernel, const char *bound_name, uint64_t bound, Body body) {
    std::string message;
    try {
        nb::gil_scoped_release unlocked;
        return body();
    } catch (const BadIndex &bad) {
        message = std::string(kernel) + ": index " + std::to_string(bad.index) + " of part " + std::to_string(bad.part) +
                  " is outside [0, " + bound_name + "=" + std::to_string(bound) + ")";
    }
    refuse(message);
}

// As `run`; says also which of `what` are out of order.
template <typename Body> void run_sorted(const char *kernel, const char *what, uint64_t size, Body body) {
    std::string message;
    try {
        return run(kernel, "size", size, body);
    } catch (const NotSorted &pair) {
        message = std::string(kernel) + ": " + what + " must ascend, got " + std::to_string(pair.before) + " before " +
                  std::to_string(pair.after);
    }
    refuse(message);
}

}  // namespace gradsync
