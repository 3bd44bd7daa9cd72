// The kernels on chunks as a part of the Python module.
#include <type_traits>

#include "arrays.hpp"
#include "bind.hpp"
#include "chunks.hpp"

using namespace nanobind::literals;

namespace gradsync {
namespace {

std::vector<size_t> slots_of(const ReadOnlyArray &chosen, size_t chunks) {
    if (chosen.dtype() != nb::dtype<int64_t>()) refuse_kind("chosen", "int64", chosen);
    check_flat("chosen", chosen);
    const auto *numbers = static_cast<const int64_t *>(chosen.data());
    std::vector<size_t> slots(chunks, kNotChosen);
    for (size_t slot = 0; slot < chosen.shape(0); ++slot) {
        const int64_t number = numbers[slot];
        if (number < 0 || static_cast<uint64_t>(number) >= chunks)
            refuse("take_chunks: index " + std::to_string(number) + " of part 0 is outside [0, chunks=" +
                   std::to_string(chunks) + ")");
        if (slot > 0 && number <= numbers[slot - 1])
            refuse("take_chunks: chosen chunks must ascend, got " + std::to_string(numbers[slot - 1]) + " before " +
                   std::to_string(number));
        slots[number] = slot;
    }
    return slots;
}

void take(const Array &x, const ReadOnlyArray &residual, const ReadOnlyArray &chosen, const Array &payload,
          const Array &left, const Array &norms, size_t chunk, double scale, int threads) {
    check_threads(threads);
    check_floating("x", x);
    check_flat("x", x);
    if (chunk < 1) refuse("chunk must be at least 1");
    const Blocks chunks({x.shape(0)}, chunk);
    const std::vector<size_t> slots = slots_of(chosen, chunks.count());
    check_floating("payload", payload);
    check_flat("payload", payload, chosen.shape(0) * chunk);
    if (norms.dtype() != nb::dtype<double>()) refuse_kind("norms", "float64", norms);
    check_flat("norms", norms, chunks.count());
    with_floating(x.dtype(), [&](auto element) {
        using T = decltype(element);
        using A = Accumulator<T>;
        const auto check = [&](const char *what, const auto &array) {
            if (array.dtype() != nb::dtype<A>()) refuse_kind(what, name_of(nb::dtype<A>()).c_str(), array);
            check_flat(what, array, x.shape(0));
        };
        check("residual", residual), check("next_residual", left);
        with_floating(payload.dtype(), [&](auto sent) {
            using Out = decltype(sent);
            if constexpr (std::is_same_v<T, Out> || (sizeof(T) >= 4 && sizeof(Out) == 2)) {
                nb::gil_scoped_release unlocked;
                take_chunks(chunks, chunk, static_cast<T *>(x.data()), static_cast<const A *>(residual.data()), slots,
                            scale, static_cast<Out *>(payload.data()), static_cast<A *>(left.data()),
                            static_cast<double *>(norms.data()), threads);
            } else {
                refuse_kind("payload", (name_of(x.dtype()) + ", or bfloat16 or float16 of wider floats").c_str(), payload);
            }
        });
    });
}

}  // namespace

void bind_chunks(nb::module_ &m) {
    m.def("take_chunks", &take, "x"_a.noconvert(), "residual"_a.noconvert(), "chosen"_a.noconvert(),
          "payload"_a.noconvert(), "next_residual"_a.noconvert(), "norms"_a.noconvert(), "chunk"_a, "scale"_a,
          "threads"_a);
}

}  // namespace gradsync
