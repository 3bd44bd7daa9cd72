// The kernels on block offsets as Python functions; see bind.cpp.
#include "arrays.hpp"
#include "bind.hpp"
#include "offsets.hpp"

using namespace nanobind::literals;

namespace MODULE_NAME {
namespace {

template <typename Body> void with_format(int bits, Body body) {
    if (bits == 8) return body(Offsets8{});
    if (bits == 16) return body(Offsets16{});
    refuse("bits must be 8 or 16, got " + std::to_string(bits));
}

template <typename Format, typename A>
void check_message(const char *what, const A &message, uint64_t count, uint64_t size) {
    if (message.dtype() != nb::dtype<uint8_t>()) refuse_kind(what, "uint8", message);
    check_flat(what, message, offsets_nbytes<Format>(count, size));
}

void encode(const ReadOnlyArray &indices, uint64_t size, int bits, const Array &out) {
    const Indices items = indices_of(indices);
    with_format(bits, [&](auto format) {
        using Format = decltype(format);
        check_message<Format>("out", out, items.count, size);
        run_sorted("encode_offsets", "indices", size,
                   [&] { encode_offsets<Format>(items, size, static_cast<char *>(out.data())); });
    });
}

void decode(const ReadOnlyArray &message, uint64_t size, int bits, const Array &out) {
    if (out.ndim() != 1) refuse_shape("out", "1-D", out);
    const size_t count = out.shape(0);
    with_format(bits, [&](auto format) {
        using Format = decltype(format);
        check_message<Format>("message", message, count, size);
        with_index_out("out", out, count, size, [&](auto *to) {
            nb::gil_scoped_release unlocked;
            decode_offsets<Format>(static_cast<const char *>(message.data()), size, to, count);
        });
    });
}

}  // namespace

void bind_offsets(nb::module_ &m) {
    m.def("encode_offsets", &encode, "indices"_a.noconvert(), "size"_a, "bits"_a, "out"_a.noconvert());
    m.def("decode_offsets", &decode, "message"_a.noconvert(), "size"_a, "bits"_a, "out"_a.noconvert());
}

}  // namespace MODULE_NAME
