// Values in a narrower type, scaled on the way: what travels in 16 bits.
#pragma once

#include <cstddef>

#include "scalars.hpp"

namespace MODULE_NAME {

// out = scale * x, rounded to nearest; what is finite stays finite.
template <typename In, typename Out>
void narrow_values(const In *x, size_t count, double scale, Out *out, int threads);

}  // namespace MODULE_NAME
