#include "convert.hpp"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "rows.hpp"

namespace gradsync {
namespace {

// Calls body(begin, length) for each block of so many values.
template <typename Body> void each_block(size_t count, int threads, Body body) {
    const size_t blocks = (count + kBlock - 1) / kBlock;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; ++t) {
        for (size_t b = share_begin(blocks, t, threads); b < share_begin(blocks, t + 1, threads); ++b)
            body(b * kBlock, std::min(kBlock, count - b * kBlock));
        order_stores();
    }
}

// sums = from, or sums + from. Of one block.
template <bool first, typename In> void add_values(float *sums, const In *from, size_t count) {
    if constexpr (first) widen_row(sums, from, count);
    else add_row(sums, from, count);
}

template <bool first, typename In> void add_values(double *__restrict sums, const In *__restrict from, size_t count) {
    if constexpr (std::is_same_v<In, double>) {
        for (size_t i = 0; i < count; ++i) sums[i] = first ? from[i] : sums[i] + from[i];
    } else {
        float wide[kBlock];
        widen_row(wide, from, count);
        for (size_t i = 0; i < count; ++i) sums[i] = first ? double{wide[i]} : sums[i] + double{wide[i]};
    }
}

// A block's values in their own type; from double to 16 bits by way of float, as torch does.
template <bool stream, typename A, typename Out> void write_block(const A *sums, size_t count, Out *out) {
    if constexpr (std::is_same_v<A, Out>) {
        if constexpr (stream)
            stream_bytes(reinterpret_cast<char *>(out), reinterpret_cast<const char *>(sums), count * sizeof(Out));
        else
            std::copy(sums, sums + count, out);
    } else if constexpr (std::is_same_v<A, float>) {
        narrow_row<stream>(out, sums, count);
    } else {
        float rounded[kBlock];
        for (size_t i = 0; i < count; ++i) rounded[i] = static_cast<float>(sums[i]);
        write_block<stream>(rounded, count, out);
    }
}

// What a block's sums are made of and where they go to, by functions that alone know the types of the two.
template <typename A> struct Summands {
    std::vector<const void *> parts;
    void *out;
    bool stream;
    void (*add)(A *sums, const void *part, bool first, size_t begin, size_t count);
    void (*write)(const A *sums, const Summands &, size_t begin, size_t count);
};

template <typename In, typename A> void add_part(A *sums, const void *part, bool first, size_t begin, size_t count) {
    const In *from = static_cast<const In *>(part) + begin;
    if (first) add_values<true>(sums, from, count);
    else add_values<false>(sums, from, count);
}

template <typename Out, typename A> void write_sums(const A *sums, const Summands<A> &to, size_t begin, size_t count) {
    Out *const out = static_cast<Out *>(to.out) + begin;
    if (to.stream) write_block<true>(sums, count, out);
    else write_block<false>(sums, count, out);
}

template <typename A> void sum_blocks(const Summands<A> &all, size_t count, double scale, int threads) {
    each_block(count, threads, [&](size_t begin, size_t length) {
        A sums[kBlock];
        for (size_t p = 0; p < all.parts.size(); ++p) all.add(sums, all.parts[p], p == 0, begin, length);
        if (scale != 1)
            for (size_t i = 0; i < length; ++i) sums[i] *= static_cast<A>(scale);
        all.write(sums, all, begin, length);
    });
}

}  // namespace

template <typename In, typename Out>
void narrow_values(const In *x, size_t count, double scale, Out *out, int threads) {
    const bool stream = count * sizeof(Out) >= kStreamedBytes;
    const auto narrow_some = stream ? narrow_block<true, In, Out> : narrow_block<false, In, Out>;
    each_block(count, threads, [&](size_t begin, size_t length) {
        narrow_some(x + begin, length, static_cast<In>(scale), out + begin);
    });
}

template <typename In, typename Out>
void sum_values(const std::vector<const In *> &parts, size_t count, double scale, Out *out, int threads) {
    const bool in_place = std::find(parts.begin(), parts.end(), static_cast<const void *>(out)) != parts.end();
    const bool stream = !in_place && count * sizeof(Out) >= kStreamedBytes;  // else the lines are there already
    using A = std::conditional_t<sizeof(In) == 8 || sizeof(Out) == 8, double, float>;
    const Summands<A> all{{parts.begin(), parts.end()}, out, stream, add_part<In, A>, write_sums<Out, A>};
    sum_blocks(all, count, scale, threads);
}

template void narrow_values(const float *, size_t, double, Bfloat16 *, int);
template void narrow_values(const float *, size_t, double, Float16 *, int);
template void narrow_values(const double *, size_t, double, Bfloat16 *, int);
template void narrow_values(const double *, size_t, double, Float16 *, int);

#define INSTANTIATE(In)                                                                         \
    template void sum_values(const std::vector<const In *> &, size_t, double, float *, int);    \
    template void sum_values(const std::vector<const In *> &, size_t, double, double *, int);   \
    template void sum_values(const std::vector<const In *> &, size_t, double, Bfloat16 *, int); \
    template void sum_values(const std::vector<const In *> &, size_t, double, Float16 *, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(Bfloat16)
INSTANTIATE(Float16)
#undef INSTANTIATE

}  // namespace gradsync
