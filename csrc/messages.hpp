// Packed positions, as they come from messages, as arguments from Python.
#pragma once

#include <string>
#include <vector>

#include "arrays.hpp"
#include "packed.hpp"

namespace gradsync {

constexpr size_t kPaddingBytes = 8;  // less than so many may follow

inline Format format_of(int bits) {
    if (bits != 1 && bits != 8 && bits != 16 && bits != 32 && bits != 64)
        refuse("bits must be 1, 8, 16, 32 or 64, got " + std::to_string(bits));
    return static_cast<Format>(bits);
}

template <typename A> void check_bytes(const char *what, const A &message) {
    if (message.dtype() != nb::dtype<uint8_t>()) refuse_kind(what, "uint8", message);
    check_flat(what, message);
}

template <typename A> void check_packed(const A &packed, size_t count, int bits, uint64_t size) {
    const Format format = format_of(bits);
    if (count > size) refuse("there cannot be " + std::to_string(count) + " positions in [0, " + std::to_string(size) + ")");
    check_bytes("packed", packed);
    const uint64_t nbytes = packed_nbytes(count, size, format), got = packed.shape(0);
    if (got < nbytes || got >= nbytes + kPaddingBytes)
        refuse_shape("packed", "of " + std::to_string(nbytes) + " bytes", packed);
    const size_t unit = format == Format::bitmap || format == Format::list64 ? 8 : format == Format::list32 ? 4 : 1;
    if (reinterpret_cast<uintptr_t>(packed.data()) % unit != 0)
        refuse_kind("packed", ("at an address that is a multiple of " + std::to_string(unit)).c_str(), packed);
}

inline void check_each(const char *what, size_t got, size_t expected) {
    if (got != expected)
        refuse("one of " + std::string(what) + " for each part is needed, got " + std::to_string(got) + " for " +
               std::to_string(expected));
}

inline std::vector<Packed> parts_of(const std::vector<ReadOnlyArray> &packed, const std::vector<size_t> &counts,
                                    const std::vector<int> &bits, uint64_t size) {
    check_each("counts", counts.size(), packed.size());
    check_each("bits", bits.size(), packed.size());
    std::vector<Packed> parts;
    for (size_t p = 0; p < packed.size(); ++p) {
        check_packed(packed[p], counts[p], bits[p], size);
        parts.push_back({static_cast<const char *>(packed[p].data()), counts[p], format_of(bits[p])});
    }
    return parts;
}

}  // namespace gradsync
