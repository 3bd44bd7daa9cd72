#include "quantize.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "blocks.hpp"
#include "elements.hpp"
#include "rows.hpp"
#include "scratch.hpp"

namespace gradsync {

namespace {

constexpr size_t kTile = kGroup;         // elements that are worked on in the L1 cache, and summed together
constexpr size_t kStretch = 16 * kTile;  // what a thread takes of a block that is too large for
constexpr size_t kFused = 32 * kTile;    // its codes to follow its scale while a cache holds it
constexpr size_t kAhead = 1024;          // elements: so far on is fetched what memory has time for while codes are made

template <typename A> Bits<A> magnitude_bits(A value) {
    return integer_bits(value) & std::numeric_limits<Bits<A>>::max();
}

template <typename A> A value_of(Bits<A> bits) {
    A value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// x + residual into a tile. What will be needed is fetched as it goes, or the fetches would wait for each other.
template <typename T>
[[gnu::noinline]] void correct(const T *x, const Accumulator<T> *residual, size_t count, Accumulator<T> *__restrict tile) {
    using A = Accumulator<T>;
    const auto some = [&](size_t i, auto number) {
        if constexpr (std::is_same_v<T, A>)
            for (size_t j = i; j < i + number; ++j) tile[j] = residual[j] + x[j];
        else {
            widen_row(tile + i, x + i, number);
            if (residual)
                for (size_t j = i; j < i + number; ++j) tile[j] += residual[j];
        }
    };
    constexpr size_t kLine = 64 / sizeof(A);
    size_t i = 0;
    for (; i + kLine <= count; i += kLine) {
        __builtin_prefetch(x + i + kAhead);
        if (residual) __builtin_prefetch(residual + i + kAhead);
        some(i, std::integral_constant<size_t, kLine>{});
    }
    some(i, count - i);
}

// By their bits: a NaN is the largest.
template <typename A> Bits<A> largest(const A *p, size_t count, Bits<A> before) {
#pragma omp simd reduction(max : before)
    for (size_t i = 0; i < count; ++i) before = std::max(before, magnitude_bits(p[i]));
    return before;
}

// What is stored: infinity for what float32 does not hold, and zero where its inverse does not.
float stored_scale(double value, float top) {
    const float scale = static_cast<float>(value);
    if (!std::isfinite(scale)) return std::numeric_limits<float>::infinity();
    return std::isfinite(top / scale) ? scale : 0.0f;
}

// x, or x + residual. Only one function knows x's type.
template <typename A> struct Input {
    const void *x;
    const A *residual;
    const A *(*elements)(const Input &, size_t begin, size_t count, A *tile);
    // Where they lie, or in `tile`: no more than that has room for.
    const A *at(size_t begin, size_t count, A *tile) const { return elements(*this, begin, count, tile); }
};

template <typename T>
const Accumulator<T> *elements_of(const Input<Accumulator<T>> &input, size_t begin, size_t count, Accumulator<T> *tile) {
    const T *x = static_cast<const T *>(input.x) + begin;
    if constexpr (std::is_same_v<T, Accumulator<T>>)
        if (!input.residual) return x;
    correct(x, input.residual ? input.residual + begin : nullptr, count, tile);
    return tile;
}

template <typename T> Input<Accumulator<T>> input_of(const T *x, const Accumulator<T> *residual) {
    return {x, residual, elements_of<T>};
}

// Calls body(tile, its first element, elements) for elements [begin, begin + count).
template <typename A, typename Body> void each_tile(const Input<A> &input, size_t begin, size_t count, Body body) {
    A buffer[kTile];
    for (size_t done = 0; done < count; done += kTile) {
        const size_t some = std::min(kTile, count - done);
        body(input.at(begin + done, some, buffer), done, some);
    }
}

template <typename A> Bits<A> largest_of(const Input<A> &input, size_t begin, size_t count) {
    Bits<A> most = 0;
    each_tile(input, begin, count, [&](const auto *p, size_t, size_t some) { most = largest(p, some, most); });
    return most;
}

// One sum for each group.
template <typename A> void squares_of(const Input<A> &input, size_t begin, size_t count, double *sums) {
    each_tile(input, begin, count, [&](const auto *p, size_t done, size_t some) {
        sums[done / kGroup] = sum_of_squares(p, some);
    });
}

template <typename A> float scale_of(const Input<A> &input, const Block &block, const Grid &grid) {
    if (grid.scale == ScaleOf::max)
        return stored_scale(value_of<A>(largest_of(input, block.begin, block.length)), grid.top);
    double sums[kFused / kGroup];
    squares_of(input, block.begin, block.length, sums);
    return stored_scale(std::sqrt(sum_of_groups(sums, (block.length + kGroup - 1) / kGroup)), grid.top);
}

// Of no more than a tile.
template <bool keeps, typename A>
void round_as(Rounding rounding, const Numbers<A> &row, Steps<A> steps, float top, Noise noise, uint32_t low, uint8_t *codes,
              A *next) {
    const auto as = [&](auto kind) { round_each<kTile, kind(), keeps>(row, steps, top, noise, low, codes, next); };
    switch (rounding) {
        case Rounding::nearest: return as(std::integral_constant<Rounding, Rounding::nearest>{});
        case Rounding::stochastic: return as(std::integral_constant<Rounding, Rounding::stochastic>{});
        case Rounding::e4m3: return as(std::integral_constant<Rounding, Rounding::e4m3>{});
        case Rounding::e5m2: return as(std::integral_constant<Rounding, Rounding::e5m2>{});
        case Rounding::exponent: return as(std::integral_constant<Rounding, Rounding::exponent>{});
    }
}

// Elements [first, stop) of a block, no more than a tile.
template <typename A>
[[gnu::noinline]] void encode_elements(const Input<A> &input, const Block &block, size_t first, size_t stop, Steps<A> steps,
                     const Grid &grid, uint8_t *codes, A *next) {
    A buffer[kTile];
    const A *p = input.at(block.begin + first, stop - first, buffer);
    const bool draws = grid.rounding == Rounding::stochastic || grid.rounding == Rounding::exponent;
    for (size_t begin = first; begin < stop;) {
        const uint64_t place = block.place + begin;
        const size_t count = std::min<uint64_t>(stop - begin, (uint64_t{1} << 32) - (place & 0xffffffffu));
        const Noise noise = draws ? Noise(block.seed, place) : Noise();
        const auto low = static_cast<uint32_t>(place);
        const Numbers<A> row{p + (begin - first), count, p == buffer ? 0 : kAhead};
        uint8_t *to = codes + (begin - first);
        if (next) round_as<true>(grid.rounding, row, steps, grid.top, noise, low, to, next + block.begin + begin);
        else round_as<false>(grid.rounding, row, steps, grid.top, noise, low, to, static_cast<A *>(nullptr));
        begin += count;
    }
}

// Bytes [first, stop) of a block's codes: byte j has the codes of elements j, j + bytes, j + 2 bytes, ... from its
// lowest bits on.
template <typename A>
void encode_bytes(const Input<A> &input, const Block &block, size_t first, size_t stop, float scale, const Grid &grid,
                  uint8_t *codes, A *next) {
    const Steps<A> steps = grid.scale == ScaleOf::none ? Steps<A>() : Steps<A>(scale, grid.top);
    const size_t per_byte = grid.codes_per_byte(), bytes = (block.length + per_byte - 1) / per_byte;
    const auto zero = static_cast<uint8_t>(grid.top);
    uint8_t levels[kTile];
    for (size_t begin = first; begin < stop; begin += kTile) {
        const size_t count = std::min(kTile, stop - begin);
        uint8_t *__restrict to = codes + block.codes + begin;
        if (per_byte == 1) {
            encode_elements(input, block, begin, begin + count, steps, grid, to, next);
            continue;
        }
        for (size_t part = 0; part < per_byte; ++part) {
            const size_t element = part * bytes + begin;
            const size_t some = element < block.length ? std::min(count, block.length - element) : 0;
            encode_elements(input, block, element, element + some, steps, grid, levels, next);
            const int shift = static_cast<int>(part) * grid.bits;
            if (part == 0)
                for (size_t j = 0; j < some; ++j) to[j] = static_cast<uint8_t>(levels[j] + zero);
            else
                for (size_t j = 0; j < some; ++j)
                    to[j] |= static_cast<uint8_t>(static_cast<uint8_t>(levels[j] + zero) << shift);
        }
    }
}

// A part of a block, of a multiple of a group but at its end.
struct Stretch {
    size_t block, begin, count;
};

struct Stretches {
    std::vector<Block> blocks;
    std::vector<Stretch> stretches;

    // `units`: those of a block.
    template <typename Units> Stretches(const BlockLayout &layout, Units units) {
        layout.each(0, layout.num_blocks(), [&](const Block &block) {
            for (size_t begin = 0; begin < units(block); begin += kStretch)
                stretches.push_back({blocks.size(), begin, std::min(kStretch, units(block) - begin)});
            blocks.push_back(block);
        });
    }
};

// Of blocks of any length: all stretches on their own, then what they found together.
template <typename A>
void scales_by_stretch(const Input<A> &input, const BlockLayout &layout, const Grid &grid, float *scales, int threads) {
    constexpr size_t kSums = kStretch / kGroup;
    const Stretches all(layout, [](const Block &block) { return block.length; });
    const size_t count = all.stretches.size();
    const bool norm = grid.scale == ScaleOf::norm;
    Scratch<double> sums(norm ? count * kSums : 0);
    Scratch<Bits<A>> most(norm ? 0 : count);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (size_t i = 0; i < count; ++i) {
        const Stretch &stretch = all.stretches[i];
        const size_t begin = all.blocks[stretch.block].begin + stretch.begin;
        if (norm) squares_of(input, begin, stretch.count, &sums[i * kSums]);
        else most[i] = largest_of(input, begin, stretch.count);
    }
    for (size_t i = 0; i < count;) {  // only the last stretch of a block has fewer sums: they lie side by side
        const size_t first = i, block = all.stretches[i].block;
        while (i < count && all.stretches[i].block == block) ++i;
        const Block &whole = all.blocks[block];
        const double found =
            norm ? std::sqrt(sum_of_groups(&sums[first * kSums], (whole.length + kGroup - 1) / kGroup))
                 : value_of<A>(*std::max_element(&most[first], &most[first] + (i - first)));
        scales[whole.scale] = stored_scale(found, grid.top);
    }
}

// Calls body(Block) for all blocks, those side by side on one thread.
template <typename Body> void each_block(const BlockLayout &layout, int threads, Body body) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; ++t) {
        layout.each(share_begin(layout.num_blocks(), t, threads), share_begin(layout.num_blocks(), t + 1, threads), body);
        order_stores();
    }
}

bool are_small(const BlockLayout &layout, const Grid &grid) { return grid.block != 0 && layout.block_limit() <= kFused; }

}  // namespace

BlockLayout::BlockLayout(const std::vector<uint64_t> &lengths, const std::vector<uint64_t> &starts,
                         const std::vector<uint64_t> &seeds, const Grid &grid)
    : block_(grid.block), codes_per_byte_(grid.codes_per_byte()) {
    for (size_t s = 0; s < lengths.size(); ++s) {
        const size_t length = lengths[s];
        if (length == 0) continue;
        const size_t block = std::min<size_t>(block_ ? block_ : length, length), whole = length / block;
        const size_t bytes = (block + codes_per_byte_ - 1) / codes_per_byte_, rest = length % block;
        sections_.push_back({numel_, length, codes_nbytes_, num_blocks_, block, seeds.empty() ? 0 : seeds[s],
                             starts.empty() ? 0 : starts[s]});
        numel_ += length;
        num_blocks_ += whole + (rest > 0);
        codes_nbytes_ += whole * bytes + (rest + codes_per_byte_ - 1) / codes_per_byte_;
    }
}

template <typename Body> void BlockLayout::each(size_t first, size_t stop, Body body) const {
    if (first >= stop) return;
    auto section = std::upper_bound(sections_.begin(), sections_.end(), first,
                                    [](size_t number, const Section &s) { return number < s.first_block; }) - 1;
    for (size_t number = first; number < stop; ++section) {
        const Section &s = *section;
        const size_t bytes = (s.block + codes_per_byte_ - 1) / codes_per_byte_;
        for (size_t k = number - s.first_block; k * s.block < s.length && number < stop; ++k, ++number) {
            const size_t offset = k * s.block;
            body(Block{s.begin + offset, std::min(s.block, s.length - offset), s.codes + k * bytes, number, s.seed,
                       s.start + offset});
        }
    }
}

namespace {

template <typename A>
void quantize_each(const Input<A> &input, const BlockLayout &layout, const Grid &grid, uint8_t *codes, float *scales,
                   A *next, int threads) {
    const bool finds = grid.scale == ScaleOf::max || grid.scale == ScaleOf::norm;
    const size_t per_byte = grid.codes_per_byte();
    const auto bytes = [&](const Block &block) { return (block.length + per_byte - 1) / per_byte; };
    const auto scale_at = [&](const Block &block) { return grid.scale == ScaleOf::none ? 1.0f : scales[block.scale]; };
    if (are_small(layout, grid)) {
        return each_block(layout, threads, [&](const Block &block) {
            if (finds) scales[block.scale] = scale_of(input, block, grid);
            encode_bytes(input, block, 0, bytes(block), scale_at(block), grid, codes, next);
        });
    }
    if (finds) scales_by_stretch(input, layout, grid, scales, threads);
    const Stretches all(layout, bytes);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (size_t i = 0; i < all.stretches.size(); ++i) {
        const Stretch &stretch = all.stretches[i];
        const Block &block = all.blocks[stretch.block];
        encode_bytes(input, block, stretch.begin, stretch.begin + stretch.count, scale_at(block), grid, codes, next);
    }
}

template <typename A>
void find_scales(const Input<A> &input, const BlockLayout &layout, const Grid &grid, float *scales, int threads) {
    if (!are_small(layout, grid)) return scales_by_stretch(input, layout, grid, scales, threads);
    each_block(layout, threads, [&](const Block &block) { scales[block.scale] = scale_of(input, block, grid); });
}

}  // namespace

template <typename T>
void quantize(const T *x, const BlockLayout &layout, const Grid &grid, uint8_t *codes, float *scales,
              const Accumulator<T> *residual, Accumulator<T> *next, int threads) {
    quantize_each(input_of(x, residual), layout, grid, codes, scales, next, threads);
}

template <typename T>
void block_scales(const T *x, const BlockLayout &layout, const Grid &grid, float *scales,
                  const Accumulator<T> *residual, int threads) {
    find_scales(input_of(x, residual), layout, grid, scales, threads);
}

namespace {

enum class Code { whole, packed, e4m3, e5m2, exponent };

// sums = (0 or what was there) + what the codes stand for.
template <Code code, bool first, typename A>
void add_codes(const uint8_t *__restrict codes, size_t count, A step, int shift, int mask, int zero, A *__restrict sums) {
#pragma omp simd
    for (size_t i = 0; i < count; ++i) {
        A level;
        if constexpr (code == Code::whole) level = static_cast<A>(static_cast<int8_t>(codes[i]));
        else if constexpr (code == Code::packed) level = static_cast<A>((codes[i] >> shift & mask) - zero);
        else if constexpr (code == Code::e4m3) level = small_value<E4M3>(codes[i]);
        else if constexpr (code == Code::e5m2) level = small_value<E5M2>(codes[i]);
        else level = exponent_value(codes[i]);
        sums[i] = (first ? A{0} : sums[i]) + level * step;
    }
}

template <typename A>
[[gnu::noinline]] void add_codes(const Grid &grid, const uint8_t *codes, size_t count, A step, int shift, bool first, A *sums) {
    const int mask = (1 << grid.bits) - 1, zero = static_cast<int>(grid.top);
    const auto as = [&](auto kind) {
        if (first) add_codes<kind(), true>(codes, count, step, shift, mask, zero, sums);
        else add_codes<kind(), false>(codes, count, step, shift, mask, zero, sums);
    };
    if (grid.bits < 8) return as(std::integral_constant<Code, Code::packed>{});
    switch (grid.rounding) {
        case Rounding::nearest:
        case Rounding::stochastic: return as(std::integral_constant<Code, Code::whole>{});
        case Rounding::e4m3: return as(std::integral_constant<Code, Code::e4m3>{});
        case Rounding::e5m2: return as(std::integral_constant<Code, Code::e5m2>{});
        case Rounding::exponent: return as(std::integral_constant<Code, Code::exponent>{});
    }
}

// Bytes [first, stop) of a block's codes, of all parts.
template <typename T>
void decode_bytes(const std::vector<Codes> &parts, const Block &block, size_t first, size_t stop, const Grid &grid, T *out,
                  size_t numel, double scale) {
    using A = Accumulator<T>;
    const size_t per_byte = grid.codes_per_byte(), bytes = (block.length + per_byte - 1) / per_byte;
    const A factor = static_cast<A>(scale);
    A buffer[kTile];
    const bool stream = numel * sizeof(T) >= kStreamedBytes;
    for (size_t begin = first; begin < stop; begin += kTile)
        for (size_t part = 0; part < per_byte; ++part) {
            const size_t element = part * bytes + begin;
            if (element >= block.length) break;
            const size_t count = std::min({kTile, stop - begin, block.length - element});
            T *const to = out + block.begin + element;
            A *sums = buffer;
            if constexpr (std::is_same_v<T, A>)
                if (!stream) sums = to;
            if (parts.empty()) std::fill_n(sums, count, A{0});
            for (size_t n = 0; n < parts.size(); ++n) {
                const A step =
                    grid.scale == ScaleOf::none ? A{1} : Steps<A>(parts[n].scales[block.scale], grid.top).step;
                add_codes(grid, parts[n].codes + block.codes + begin, count, step, static_cast<int>(part) * grid.bits,
                          n == 0, sums);
            }
            if (scale != 1)
                for (size_t i = 0; i < count; ++i) sums[i] *= factor;
            if constexpr (!std::is_same_v<T, A>)
                stream ? narrow_row<true>(to, sums, count) : narrow_row<false>(to, sums, count);
            else if (stream)
                stream_bytes(reinterpret_cast<char *>(to), reinterpret_cast<const char *>(sums), count * sizeof(T));
        }
}

}  // namespace

template <typename T>
void dequantize(const std::vector<Codes> &parts, const BlockLayout &layout, const Grid &grid, T *out, double scale,
                int threads) {
    const size_t per_byte = grid.codes_per_byte(), numel = layout.numel();
    const auto bytes = [&](const Block &block) { return (block.length + per_byte - 1) / per_byte; };
    if (are_small(layout, grid)) {
        each_block(layout, threads, [&](const Block &block) {
            decode_bytes(parts, block, 0, bytes(block), grid, out, numel, scale);
        });
    } else {
        const Stretches all(layout, bytes);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (size_t i = 0; i < all.stretches.size(); ++i) {
            const Stretch &stretch = all.stretches[i];
            decode_bytes(parts, all.blocks[stretch.block], stretch.begin, stretch.begin + stretch.count, grid, out, numel, scale);
            order_stores();
        }
    }
}

#define INSTANTIATE(T)                                                                                              \
    template void quantize(const T *, const BlockLayout &, const Grid &, uint8_t *, float *, const Accumulator<T> *, \
                           Accumulator<T> *, int);                                                                  \
    template void block_scales(const T *, const BlockLayout &, const Grid &, float *, const Accumulator<T> *, int); \
    template void dequantize(const std::vector<Codes> &, const BlockLayout &, const Grid &, T *, double, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(Bfloat16)
INSTANTIATE(Float16)
#undef INSTANTIATE

}  // namespace gradsync
