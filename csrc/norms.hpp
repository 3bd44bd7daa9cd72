// The squares of the Euclidean norms of blocks of elements.
#pragma once

#include "blocks.hpp"
#include "scalars.hpp"

namespace gradsync {

// Squares are taken and summed in double, in the order of blocks.hpp.
template <typename T> void squared_norms(const Blocks &blocks, const T *x, double *norms, int threads);

}  // namespace gradsync
