// The k elements of largest magnitude, exactly. A threshold that a sample suggests leaves little more than k candidates
// after one pass over the elements; a radix select among these finds the k-th largest. A sample that misleads costs
// time, not exactness: the select then runs over all elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rank_bitmap.hpp"

namespace MODULE_NAME {

// The elements chosen, by the bits without the sign seen as an integer: NaN comes before infinity. Of equal ones, those
// with the smallest index are chosen. IEEE elements of 2, 4 or 8 bytes; k <= numel.
RankBitmap top_k(const void *x, size_t numel, size_t itemsize, size_t k, int threads);

}  // namespace MODULE_NAME
