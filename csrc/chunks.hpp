// Chunks of a flat tensor: some are sent, the others are kept, and the norm of what is kept tells which to send next.
#pragma once

#include <cstddef>
#include <vector>

#include "blocks.hpp"
#include "scalars.hpp"

namespace gradsync {

constexpr size_t kNotChosen = ~size_t{0};

// p = residual + x, and x = 0. slots[c] is the place of chunk c in the payload, in chunks, or kNotChosen: what is chosen
// is written there as scale * p, zeros behind it up to the chunk's length, and left = p - payload / scale; else left = p.
// norms[c]: the sum of the magnitudes of what is left, in double, in the order of blocks.hpp. `scale` is a power of two.
template <typename T, typename Out>
void take_chunks(const Blocks &chunks, size_t chunk, T *x, const Accumulator<T> *residual,
                 const std::vector<size_t> &slots, double scale, Out *payload, Accumulator<T> *left, double *norms,
                 int threads);

}  // namespace gradsync
