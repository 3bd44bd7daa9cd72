// k distinct elements by a permutation that is computed, not stored: a Feistel network over pairs (l, r) of [0, a) x
// [0, b), whose rounds add a draw to one of them, modulo its range. What it sends outside of what there is, less than one
// in sqrt(size), is sent on until it is inside.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradsync {

// Of the runs of one section, how many are drawn, and by which permutation.
struct RunDraw {
    uint64_t offset, length;  // of the section in the flat tensor
    uint64_t count;           // of runs that are drawn
    uint64_t run;             // elements of one
    uint64_t runs;            // that there are; a * b of them and more
    uint64_t shift;           // where the first one begins; the section is a ring to them
    uint32_t a, b;
    uint64_t key;
};

// Writes the elements of the runs drawn, in the order of the draws: of each section count * run.
template <typename Index> void random_k(const std::vector<RunDraw> &sections, Index *indices, int threads);

}  // namespace gradsync
