#include "chunks.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "convert.hpp"
#include "rank_bitmap.hpp"
#include "rows.hpp"
#include "scratch.hpp"

namespace gradsync {
namespace {

template <typename T>
void correct(Accumulator<T> *__restrict p, const void *of, const Accumulator<T> *__restrict residual, size_t count) {
    const T *__restrict x = static_cast<const T *>(of);
    if constexpr (std::is_same_v<T, Accumulator<T>>)
        for (size_t i = 0; i < count; ++i) p[i] = residual[i] + x[i];
    else
        add_row(p, residual, x, count);
}

// out = scale * p; p becomes what rounding takes away. Up to a group.
template <typename A, typename Out> void send(A *__restrict p, size_t count, A scale, void *to) {
    Out *__restrict out = static_cast<Out *>(to);
    const A inverse = 1 / scale;
    if constexpr (std::is_same_v<A, Out>) {
        for (size_t i = 0; i < count; ++i) {
            out[i] = p[i] * scale;
            p[i] -= out[i] * inverse;
        }
    } else {
        float sent[kGroup];
        narrow_block<false>(p, count, scale, out);
        widen_row(sent, out, count);
        for (size_t i = 0; i < count; ++i) p[i] -= static_cast<A>(sent[i]) * inverse;
    }
}

template <bool stream, typename A> void keep(A *to, const A *p, size_t count) {
    if constexpr (stream)
        stream_bytes(reinterpret_cast<char *>(to), reinterpret_cast<const char *>(p), count * sizeof(A));
    else
        std::memcpy(to, p, count * sizeof(A));
}

// The tensor and the payload, with the functions that alone know their types.
template <typename A> struct Tensors {
    char *x, *payload;
    size_t x_itemsize, itemsize;
    void (*correct)(A *p, const void *x, const A *residual, size_t count);
    void (*send)(A *p, size_t count, A scale, void *out);
};

template <typename A>
void take_each(const Blocks &chunks, size_t chunk, const Tensors<A> &tensors, const A *residual,
               const std::vector<size_t> &slots, A scale, A *left, double *norms, int threads) {
    const bool stream = chunks.numel() * sizeof(A) >= kStreamedBytes;
    Scratch<double> sums(chunks.pieces());
    const auto each_of = [&](int t, auto body) {
        chunks.each_piece(share_begin(chunks.pieces(), t, threads), share_begin(chunks.pieces(), t + 1, threads), body);
    };
    const auto take = [&](int t) {
        each_of(t, [&](const Piece &piece) {
            A p[kGroup];
            char *const x = tensors.x + piece.begin * tensors.x_itemsize;
            tensors.correct(p, x, residual + piece.begin, piece.count);
            std::memset(x, 0, piece.count * tensors.x_itemsize);
            if (slots[piece.block] != kNotChosen) {
                char *const room = tensors.payload + slots[piece.block] * chunk * tensors.itemsize;
                tensors.send(p, piece.count, scale, room + (piece.begin - piece.block_begin) * tensors.itemsize);
                const size_t rest = chunk - piece.block_count;
                if (piece.last) std::memset(room + piece.block_count * tensors.itemsize, 0, rest * tensors.itemsize);
            }
            sums[piece.index] = sum_of_terms(p, piece.count, [](double value) { return std::fabs(value); });
            if (stream) keep<true>(left + piece.begin, p, piece.count);
            else keep<false>(left + piece.begin, p, piece.count);
        });
        order_stores();
    };
    const auto write_norms = [&](int t) {
        each_of(t, [&](const Piece &piece) {
            if (!piece.last) return;
            const size_t pieces = piece.index + 1 - piece.first_piece;
            norms[piece.block] = sum_of_groups(sums.begin() + piece.first_piece, pieces);
        });
    };
    if (threads > 1) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int t = 0; t < threads; ++t) take(t);
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int t = 0; t < threads; ++t) write_norms(t);
    } else {
        take(0);
        write_norms(0);
    }
}

}  // namespace

template <typename T, typename Out>
void take_chunks(const Blocks &chunks, size_t chunk, T *x, const Accumulator<T> *residual,
                 const std::vector<size_t> &slots, double scale, Out *payload, Accumulator<T> *left, double *norms,
                 int threads) {
    using A = Accumulator<T>;
    const Tensors<A> tensors{reinterpret_cast<char *>(x), reinterpret_cast<char *>(payload), sizeof(T), sizeof(Out),
                             correct<T>, send<A, Out>};
    take_each(chunks, chunk, tensors, residual, slots, static_cast<A>(scale), left, norms, threads);
}

#define INSTANTIATE(T, Out)                                                                                         \
    template void take_chunks(const Blocks &, size_t, T *, const Accumulator<T> *, const std::vector<size_t> &, double, \
                              Out *, Accumulator<T> *, double *, int);
INSTANTIATE(float, float)
INSTANTIATE(float, Bfloat16)
INSTANTIATE(float, Float16)
INSTANTIATE(double, double)
INSTANTIATE(double, Bfloat16)
INSTANTIATE(double, Float16)
INSTANTIATE(Bfloat16, Bfloat16)
INSTANTIATE(Float16, Float16)
#undef INSTANTIATE

}  // namespace gradsync
