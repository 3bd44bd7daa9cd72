// A digest of 64 bits of a tensor's elements, in order: tensors that differ in any element, or in the order of their
// elements, have different digests, but for a chance of about 2^-64. It is no protection against tensors that are made
// to have the same digest. All NaNs count as one, and both zeros.
//
// The elements' bits are words of 32 bits, the lower half of 64 bits first, two elements of 16 bits a word. Each block
// of words is a pair of sums of products with fixed keys; the finalised pairs, each mixed with its block's number, are
// added, so blocks may be taken in any order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "scalars.hpp"

namespace gradsync {

constexpr size_t kDigestWords = 1024;  // of a block: its keys fit the level-1 cache beside it

// A tensor by its memory; `sum` adds up what its blocks [begin, end) come to.
struct Digested {
    const void *x;
    size_t count, blocks;
    uint64_t (*sum)(const void *x, size_t count, size_t begin, size_t end);
};

// For float, double, Bfloat16, Float16, and int64_t, whose bits are taken as they are.
template <typename T> Digested digested(const T *x, size_t count);

// Writes one digest a tensor.
void digest(const std::vector<Digested> &tensors, uint64_t *out, int threads);

}  // namespace gradsync
