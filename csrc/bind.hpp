// What the Python modules of the kernels consist of: all of it, and the parts that have a file of their own.
#pragma once

#include <nanobind/nanobind.h>

namespace gradsync {

void bind_kernels(nanobind::module_ &m);

void bind_chunks(nanobind::module_ &m);
void bind_packed(nanobind::module_ &m);
void bind_owners(nanobind::module_ &m);
void bind_randomized(nanobind::module_ &m);
void bind_signs(nanobind::module_ &m);
void bind_top_k(nanobind::module_ &m);
void bind_quantize(nanobind::module_ &m);

}  // namespace gradsync
