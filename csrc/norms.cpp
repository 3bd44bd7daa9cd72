#include "norms.hpp"

#include "rank_bitmap.hpp"
#include "scratch.hpp"

namespace gradsync {

template <typename T> void squared_norms(const Blocks &blocks, const T *x, double *norms, int threads) {
    Scratch<double> sums(blocks.pieces());
    const auto each_of = [&](int t, auto body) {
        blocks.each_piece(share_begin(blocks.pieces(), t, threads), share_begin(blocks.pieces(), t + 1, threads), body);
    };
    const auto sum_pieces = [&](int t) {
        each_of(t, [&](const Piece &piece) { sums[piece.index] = sum_of_squares(x + piece.begin, piece.count); });
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
        for (int t = 0; t < threads; ++t) sum_pieces(t);
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int t = 0; t < threads; ++t) write_norms(t);
    } else {
        sum_pieces(0);
        write_norms(0);
    }
}

template void squared_norms(const Blocks &, const float *, double *, int);
template void squared_norms(const Blocks &, const double *, double *, int);
template void squared_norms(const Blocks &, const Bfloat16 *, double *, int);
template void squared_norms(const Blocks &, const Float16 *, double *, int);

}  // namespace gradsync
