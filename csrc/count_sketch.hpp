// Count sketches: rows of counters, each of which adds up all elements of a section with random signs. Neighbours, as
// many as `lanes`, share two draws a row. One picks as many counters side by side, and a mask: the element in lane i of
// its group goes to counter i ^ mask of these. The other's bits are the signs of what the counters get.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "scalars.hpp"

namespace gradsync {

// A section, and where its counters are.
struct Sketched {
    uint64_t begin, length, place, seed;
    uint64_t counters;  // the first one of the first row
    uint32_t columns;   // counters of a row, below 2^31
    uint32_t lanes;     // a power of two that divides them, at most 32
};

std::vector<Sketched> sketched_sections(const std::vector<uint64_t> &lengths, const std::vector<uint64_t> &starts,
                                        const std::vector<uint64_t> &seeds, const std::vector<uint32_t> &columns,
                                        uint32_t rows);

// A counter adds its elements in their order, from 0. Rows are dealt to the threads.
template <typename In>
void count_sketch(const In *x, const std::vector<Sketched> &sections, uint32_t rows, Accumulator<In> *counters,
                  int threads);

// Of each element the median of its counters with its signs; NaN where one of them is. `rows` is odd.
template <typename Out>
void sketch_estimates(const Accumulator<Out> *counters, const std::vector<Sketched> &sections, uint32_t rows, Out *out,
                      int threads);

}  // namespace gradsync
