// Values in another type, scaled on the way: what travels in 16 bits, and sums of what came.
#pragma once

#include <cstddef>
#include <vector>

#include "scalars.hpp"

namespace MODULE_NAME {

// out = scale * x, rounded to nearest; what is finite stays finite.
template <typename In, typename Out>
void narrow_values(const In *x, size_t count, double scale, Out *out, int threads);

// out = scale * (parts[0] + parts[1] + ...), in float, or in double where either type is; rounded to nearest. There is
// a part; `out` may be one.
template <typename In, typename Out>
void sum_values(const std::vector<const In *> &parts, size_t count, double scale, Out *out, int threads);

}  // namespace MODULE_NAME
