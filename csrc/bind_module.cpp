// The Python module of one variant of the kernels; the bindings are compiled once for all variants.
#include "bind.hpp"

NB_MODULE(MODULE_NAME, m) { gradsync::bind_kernels(m); }
