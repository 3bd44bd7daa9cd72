// The elements of largest magnitude, and those above a threshold, of each section of a flat tensor, exactly. A threshold
// that a sample suggests leaves little more than k candidates after one pass over the elements, which adds the residual
// on its way; a radix select among these finds the k-th largest. A sample that misleads costs time, not exactness: the
// select then runs over all elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "scalars.hpp"

namespace gradsync {

struct Section {
    size_t length, most;  // elements, and how many of them are chosen, or at most
};

// What is chosen from: p = x, or x + residual with what is not sent of it kept in `left`.
template <typename T> struct Choice {
    const T *x;
    const Accumulator<T> *residual = nullptr;
    Accumulator<T> *left = nullptr;
};

// Of each section the `most` largest by their bits without the sign: NaN comes before infinity. Of equal ones, those
// with the smallest index are chosen. Indices, in the whole tensor, ascend; values are rounded to V; most <= length.
template <typename T, typename V, typename Index>
void top_k(Choice<T> choice, const std::vector<Section> &sections, Index *indices, V *values, int threads);

// Of each section those that are not within its threshold, or the `most` largest of them. The outputs have room for the
// `most` of all sections; returns how many were written, one behind the other.
template <typename T, typename V, typename Index>
size_t select_above(Choice<T> choice, const std::vector<Section> &sections, const Accumulator<T> *thresholds,
                    Index *indices, V *values, int threads);

// How many of each section are not within its threshold: all of them if it is NaN or negative.
template <typename T>
void count_above(const T *x, const std::vector<Section> &sections, const Accumulator<T> *thresholds, int64_t *counts,
                 int threads);

}  // namespace gradsync
