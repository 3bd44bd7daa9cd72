// Tensors as codes of few bits, and the scaled sum of several of them, each in one pass over what is in memory.
// gradsync.kernels.quantize defines codes, scales and layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "rounding.hpp"
#include "scalars.hpp"

namespace gradsync {

enum class ScaleOf : int { max, norm, given, none };

struct Grid {
    Rounding rounding;
    ScaleOf scale;
    float top;     // the largest level
    int bits;      // of a code: 8, 4 or 2
    size_t block;  // elements that share a scale; 0: the whole section
    size_t codes_per_byte() const { return 8 / bits; }
};

// Elements that share a scale, and where what belongs to them is.
struct Block {
    size_t begin, length;  // elements
    size_t codes, scale;   // the first byte, the place in the scales
    uint64_t seed, place;  // of the first element in its tensor
};

// The blocks of sections end to end.
class BlockLayout {
public:
    // `starts` and `seeds` are empty or one for each section.
    BlockLayout(const std::vector<uint64_t> &lengths, const std::vector<uint64_t> &starts,
                const std::vector<uint64_t> &seeds, const Grid &grid);
    size_t numel() const { return numel_; }
    size_t num_blocks() const { return num_blocks_; }
    size_t codes_nbytes() const { return codes_nbytes_; }
    size_t block_limit() const { return block_ ? block_ : numel_; }

    // Calls body(Block) for blocks [first, stop).
    template <typename Body> void each(size_t first, size_t stop, Body body) const;

private:
    struct Section {
        size_t begin, length, codes, first_block, block;
        uint64_t seed, start;
    };
    std::vector<Section> sections_;  // without the empty ones
    size_t numel_ = 0, num_blocks_ = 0, codes_nbytes_ = 0, block_, codes_per_byte_;
};

// p = x + residual, where there is one. `scales`: (num_blocks,), written unless given, unused where there are none;
// `next`: null, or gets p without what its code decodes to.
template <typename T>
void quantize(const T *x, const BlockLayout &layout, const Grid &grid, uint8_t *codes, float *scales,
              const Accumulator<T> *residual, Accumulator<T> *next, int threads);

// Only the scales.
template <typename T>
void block_scales(const T *x, const BlockLayout &layout, const Grid &grid, float *scales,
                  const Accumulator<T> *residual, int threads);

struct Codes {
    const uint8_t *codes;
    const float *scales;
};

// out = scale * sum over the parts, in their order.
template <typename T>
void dequantize(const std::vector<Codes> &parts, const BlockLayout &layout, const Grid &grid, T *out, double scale,
                int threads);

}  // namespace gradsync
