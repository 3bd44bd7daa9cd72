// Tensors end to end in a flat one, cut into blocks that share a scale, and sums over blocks. Sums have an order that
// vectors, any number of threads and a GPU can keep: of each group of 1024 addends, as 32 rows of 32 lanes, every lane
// adds its own one after the other from 0; then the upper half of the lanes is added to the lower one until one is
// left. The sums of the groups are summed in the same way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "scalars.hpp"

namespace gradsync {

constexpr size_t kLanes = 32;
constexpr size_t kGroup = kLanes * kLanes;  // addends

// Overwrites the lanes.
inline double sum_of_lanes(double *lanes) {
    for (size_t width = kLanes / 2; width > 0; width /= 2)
        for (size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}

// Of up to a group: the sum of term(value) of its elements.
template <typename T, typename Term> double sum_of_terms(const T *x, size_t count, Term term) {
    const auto at = [&](size_t i) { return term(double{widen(x[i])}); };
    double lanes[kLanes];
    if (count < kLanes) {
        for (size_t l = 0; l < kLanes; ++l) lanes[l] = l < count ? at(l) : 0;
        return sum_of_lanes(lanes);
    }
    for (size_t l = 0; l < kLanes; ++l) lanes[l] = at(l);
    size_t i = kLanes;
    for (; i + kLanes <= count; i += kLanes)
        for (size_t l = 0; l < kLanes; ++l) lanes[l] += at(i + l);
    for (size_t l = 0; i + l < count; ++l) lanes[l] += at(i + l);
    return sum_of_lanes(lanes);
}

template <typename T> double sum_of_squares(const T *x, size_t count) {
    return sum_of_terms(x, count, [](double value) { return value * value; });
}

// What the sums of groups add up to, count > 0. Overwrites them.
inline double sum_of_groups(double *sums, size_t count) {
    while (count > 1) {
        const size_t groups = (count + kGroup - 1) / kGroup;
        for (size_t g = 0; g < groups; ++g) {
            double lanes[kLanes] = {};
            const size_t begin = g * kGroup, end = std::min(count, begin + kGroup);
            for (size_t i = begin; i < end; ++i) lanes[(i - begin) % kLanes] += sums[i];
            sums[g] = sum_of_lanes(lanes);
        }
        count = groups;
    }
    return sums[0];
}

// At most kGroup elements of one block, and the block: the unit of work.
struct Piece {
    size_t index, begin, count;  // of the piece: which one it is, its elements
    size_t block, block_begin, block_count, first_piece;
    bool last;  // of the block
};

class Blocks {
public:
    // A section of `lengths` has blocks of `block` elements (0: is one block), of which the last may be shorter.
    Blocks(const std::vector<size_t> &lengths, size_t block);

    size_t numel() const { return numel_; }
    size_t count() const { return count_; }
    size_t pieces() const { return pieces_; }

    // Calls body(Piece) for pieces [first, end), in order.
    template <typename Body> void each_piece(size_t first, size_t end, Body body) const {
        if (first >= end) return;
        const auto after = [](size_t piece, const Section &section) { return piece < section.first_piece; };
        auto section = std::upper_bound(sections_.begin(), sections_.end(), first, after) - 1;
        for (size_t index = first; index < end; ++section) {
            const size_t pieces = groups_of(section->block), section_end = section->begin + section->length;
            for (const size_t stop = std::min(end, section[1].first_piece); index < stop; ++index) {
                const size_t nth = (index - section->first_piece) / pieces;
                Piece piece{};
                piece.index = index;
                piece.block = section->first_block + nth;
                piece.block_begin = section->begin + nth * section->block;
                piece.block_count = std::min(section->block, section_end - piece.block_begin);
                piece.first_piece = section->first_piece + nth * pieces;
                piece.begin = piece.block_begin + (index - piece.first_piece) * kGroup;
                piece.count = std::min(kGroup, piece.block_begin + piece.block_count - piece.begin);
                piece.last = piece.begin + piece.count == piece.block_begin + piece.block_count;
                body(piece);
            }
        }
    }

private:
    struct Section {
        size_t begin, length, block, first_block, first_piece;
    };
    static size_t groups_of(size_t count) { return (count + kGroup - 1) / kGroup; }

    std::vector<Section> sections_;  // and one behind the last
    size_t numel_ = 0, count_ = 0, pieces_ = 0;
};

}  // namespace gradsync
