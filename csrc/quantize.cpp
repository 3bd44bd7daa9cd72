#include "quantize.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "blocks.hpp"
#include "draws.hpp"
#include "elements.hpp"
#include "rows.hpp"
#include "scratch.hpp"

namespace MODULE_NAME {

namespace {

constexpr size_t kTile = kGroup;         // elements that are worked on in the L1 cache, and summed together
constexpr size_t kStretch = 16 * kTile;  // what a thread takes of a block that is too large for
constexpr size_t kFused = 32 * kTile;    // its codes to follow its scale while a cache holds it
constexpr size_t kAhead = 1024;          // elements: so far on is fetched what memory has time for while codes are made

template <typename A> using Bits = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;

template <typename A> Bits<A> integer_bits(A value) {
    Bits<A> bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

template <typename A> Bits<A> magnitude_bits(A value) {
    return integer_bits(value) & std::numeric_limits<Bits<A>>::max();
}

template <typename A> A value_of(Bits<A> bits) {
    A value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// x + residual as it lies there, or in `buffer`, of at most a tile.
template <typename T>
const Accumulator<T> *corrected(const T *x, const Accumulator<T> *residual, size_t count, Accumulator<T> *buffer) {
    using A = Accumulator<T>;
    if constexpr (std::is_same_v<T, A>) {
        if (!residual) return x;
        for (size_t i = 0; i < count; ++i) buffer[i] = residual[i] + x[i];
        return buffer;
    } else {
        if (residual) {
            add_row(buffer, residual, x, count);
            return buffer;
        }
        std::fill_n(buffer, count, A{-0.0f});  // added, it changes nothing
        add_row(buffer, x, count);
        return buffer;
    }
}

// By their bits: a NaN is the largest.
template <typename A> Bits<A> largest(const A *p, size_t count, Bits<A> before) {
#pragma omp simd reduction(max : before)
    for (size_t i = 0; i < count; ++i) before = std::max(before, magnitude_bits(p[i]));
    return before;
}

float inverse_of(float scale, float top) {
    const float inverse = top / scale;
    return std::isfinite(inverse) ? inverse : 0.0f;
}

// What is stored: infinity for what float32 does not hold, and zero where its inverse does not.
float stored_scale(double value, float top) {
    const float scale = static_cast<float>(value);
    if (!std::isfinite(scale)) return std::numeric_limits<float>::infinity();
    return std::isfinite(top / scale) ? scale : 0.0f;
}

template <typename A> struct Steps {
    A inverse, step;  // levels in a unit, and back
    Steps(float scale, float top)
        : inverse(inverse_of(scale, top) == 0 ? A{0} : static_cast<A>(top) / static_cast<A>(scale)),
          step(static_cast<A>(scale) / static_cast<A>(top)) {}
    Steps() : inverse(1), step(1) {}  // without scales
};

template <typename T> struct Input {
    using A = Accumulator<T>;
    const T *x;
    const A *residual;
    const A *at(size_t begin, size_t count, A *buffer) const {
        return corrected(x + begin, residual ? residual + begin : nullptr, count, buffer);
    }
};

// Calls body(tile, its first element, elements) for elements [begin, begin + count).
template <typename T, typename Body> void each_tile(const Input<T> &input, size_t begin, size_t count, Body body) {
    Accumulator<T> buffer[kTile];
    for (size_t done = 0; done < count; done += kTile) {
        const size_t some = std::min(kTile, count - done);
        body(input.at(begin + done, some, buffer), done, some);
    }
}

template <typename T> Bits<Accumulator<T>> largest_of(const Input<T> &input, size_t begin, size_t count) {
    Bits<Accumulator<T>> most = 0;
    each_tile(input, begin, count, [&](const auto *p, size_t, size_t some) { most = largest(p, some, most); });
    return most;
}

// One sum for each group.
template <typename T> void squares_of(const Input<T> &input, size_t begin, size_t count, double *sums) {
    each_tile(input, begin, count, [&](const auto *p, size_t done, size_t some) {
        sums[done / kGroup] = sum_of_squares(p, some);
    });
}

template <typename T> float scale_of(const Input<T> &input, const Block &block, const Grid &grid) {
    if (grid.scale == ScaleOf::max)
        return stored_scale(value_of<Accumulator<T>>(largest_of(input, block.begin, block.length)), grid.top);
    double sums[kFused / kGroup];
    squares_of(input, block.begin, block.length, sums);
    return stored_scale(std::sqrt(sum_of_groups(sums, (block.length + kGroup - 1) / kGroup)), grid.top);
}

// A float to the nearest number of 8 bits with so many of them for the fraction; NaN is zero.
template <int kFraction, int kBias> uint32_t small_float(float value, float top) {
    constexpr int kDropped = 23 - kFraction;
    const float kept = value == value ? value : 0.0f;
    const float magnitude = std::min(std::fabs(kept), top);
    constexpr uint32_t kLeast = static_cast<uint32_t>(127 - kBias + 1) << 23;  // the smallest normal one
    const uint32_t power = std::max(bits_of(magnitude) & 0x7f800000u, kLeast), sign = bits_of(kept) >> 24 & 0x80;
    // Added to a float whose ulp is the code's, the magnitude becomes a whole number of these.
    const uint32_t unit = power + (static_cast<uint32_t>(kDropped) << 23);
    const uint32_t fraction = bits_of(magnitude + float_of(unit)) - unit;
    return sign | (fraction + ((power - kLeast) >> kDropped));
}

template <int kFraction, int kBias> float small_value(uint32_t code) {
    const uint32_t magnitude = code & 0x7fu;
    const float value = float_of(magnitude << (23 - kFraction)) * float_of(static_cast<uint32_t>(254 - kBias) << 23);
    // e4m3 has no infinity and one NaN; e5m2 has both as IEEE has them.
    const bool special = kFraction == 3 ? magnitude == 0x7f : magnitude >= 0x7c;
    const uint32_t as_special = kFraction == 2 && magnitude == 0x7c ? 0x7f800000u : 0x7fc00000u;
    return float_of((code & 0x80u) << 24 | (special ? as_special : bits_of(value)));
}

constexpr int32_t kExponents = 126;     // codes 1 to 126 are 2^-109 to 2^16, 0 is zero and 127 NaN
constexpr int32_t kExponentBias = 17;  // from the exponent field of a float to the code

constexpr uint32_t kLargestBits = 0x7f7fffff;  // of a finite float

// A mask, not a condition: of several of these, gcc would make a choice between all that can come of them. Below 2^31.
inline uint32_t ones_if_less(uint32_t a, uint32_t b) {
    return static_cast<uint32_t>(static_cast<int32_t>(a - b) >> 31);
}

// What is finite stays finite.
inline float in_float(float value) { return value; }
inline float in_float(double value) {
    constexpr double kMost = std::numeric_limits<float>::max();
    const double below = value > kMost ? kMost : value, within = below < -kMost ? -kMost : below;
    return static_cast<float>(value - value == 0 ? within : value);
}

inline uint32_t exponent_code(float value, uint32_t draw) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    const int32_t rounded = static_cast<int32_t>((magnitude + (draw >> 9)) >> 23) - kExponentBias;
    const auto code = static_cast<uint32_t>(std::min(std::max(rounded, 0), kExponents));
    const uint32_t signed_code = code | (bits >> 24 & 0x80u & ones_if_less(0, code));
    const uint32_t special = ones_if_less(kLargestBits, magnitude);
    return (signed_code & ~special) | (special & 0x7fu);
}

inline float exponent_value(uint32_t code) {
    const uint32_t exponent = code & 0x7fu;
    const uint32_t power = (exponent + kExponentBias) << 23 & ones_if_less(0, exponent);
    return float_of((code & 0x80u) << 24 | power | (0x7fc00000u & ones_if_less(kExponents, exponent)));
}

// Adding it to a number of far fewer bits rounds that to a whole one, ties to even.
template <typename A> constexpr A kWhole = sizeof(A) == 8 ? static_cast<A>(0x1.8p52) : static_cast<A>(0x1.8p23);

// Up with the probability that the fraction says. In 2^-24 of a level, which 32 bits hold of levels up to 127.
template <typename A> int32_t rounded_by(uint32_t noise, A level) {
    const auto fixed = static_cast<int32_t>(level * A{0x1p24f});
    return (fixed + static_cast<int32_t>(noise >> 8)) >> 24;  // to the whole one below
}

// The code of each element, and what it leaves; `low` is the place of the first. No more than a tile.
template <Rounding rounding, bool keeps, typename A>
void round_tile(const A *__restrict p, size_t count, Steps<A> steps, float top, Noise noise, uint32_t low,
                uint8_t *__restrict codes, A *__restrict next) {
    const A most = static_cast<A>(top);
    // Codes that take much arithmetic are made in lanes as wide as the numbers, so that the registers do.
    [[maybe_unused]] uint32_t wide[kTile];
#pragma omp simd
    for (uint32_t i = 0; i < static_cast<uint32_t>(count); ++i) {
        const A scaled = p[i] * steps.inverse;
        A level;
        if constexpr (rounding == Rounding::nearest || rounding == Rounding::stochastic) {
            A kept = scaled == scaled ? scaled : A{0};
            kept = kept > most ? most : kept;
            kept = kept < -most ? -most : kept;
            if constexpr (rounding == Rounding::nearest) {
                const A shifted = kept + kWhole<A>;
                level = shifted - kWhole<A>;
                codes[i] = static_cast<uint8_t>(integer_bits(shifted));  // its lowest bits are the level's
            } else {
                const int32_t whole = rounded_by(noise(low + i), kept);
                wide[i] = static_cast<uint32_t>(whole);
                level = static_cast<A>(whole);
            }
        } else if constexpr (rounding == Rounding::e4m3) {
            wide[i] = small_float<3, 7>(static_cast<float>(scaled), top);
            level = small_value<3, 7>(wide[i]);
        } else if constexpr (rounding == Rounding::e5m2) {
            wide[i] = small_float<2, 15>(static_cast<float>(scaled), top);
            level = small_value<2, 15>(wide[i]);
        } else {
            wide[i] = exponent_code(in_float(scaled), noise(low + i));
            level = exponent_value(wide[i]);
        }
        if constexpr (keeps) next[i] = p[i] - level * steps.step;
    }
    if constexpr (rounding != Rounding::nearest)
        for (size_t i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(wide[i]);
}

template <bool keeps, typename A>
void round_tile(Rounding rounding, const A *p, size_t count, Steps<A> steps, float top, Noise noise, uint32_t low,
                uint8_t *codes, A *next) {
    const auto as = [&](auto kind) { round_tile<kind(), keeps>(p, count, steps, top, noise, low, codes, next); };
    switch (rounding) {
        case Rounding::nearest: return as(std::integral_constant<Rounding, Rounding::nearest>{});
        case Rounding::stochastic: return as(std::integral_constant<Rounding, Rounding::stochastic>{});
        case Rounding::e4m3: return as(std::integral_constant<Rounding, Rounding::e4m3>{});
        case Rounding::e5m2: return as(std::integral_constant<Rounding, Rounding::e5m2>{});
        case Rounding::exponent: return as(std::integral_constant<Rounding, Rounding::exponent>{});
    }
}

// Elements [first, stop) of a block, no more than a tile.
template <typename T>
void encode_elements(const Input<T> &input, const Block &block, size_t first, size_t stop, Steps<Accumulator<T>> steps,
                     const Grid &grid, uint8_t *codes, Accumulator<T> *next) {
    using A = Accumulator<T>;
    A buffer[kTile];
    const A *p = input.at(block.begin + first, stop - first, buffer);
    const bool draws = grid.rounding == Rounding::stochastic || grid.rounding == Rounding::exponent;
    for (size_t begin = first; begin < stop;) {
        const uint64_t place = block.place + begin;
        const size_t count = std::min<uint64_t>(stop - begin, (uint64_t{1} << 32) - (place & 0xffffffffu));
        const Noise noise = draws ? Noise(block.seed, place) : Noise();
        const auto low = static_cast<uint32_t>(place);
        const A *from = p + (begin - first);
        uint8_t *to = codes + (begin - first);
        if (next) round_tile<true>(grid.rounding, from, count, steps, grid.top, noise, low, to, next + block.begin + begin);
        else round_tile<false>(grid.rounding, from, count, steps, grid.top, noise, low, to, static_cast<A *>(nullptr));
        begin += count;
    }
}

// Bytes [first, stop) of a block's codes: byte j has the codes of elements j, j + bytes, j + 2 bytes, ... from its
// lowest bits on.
template <typename T>
void encode_bytes(const Input<T> &input, const Block &block, size_t first, size_t stop, float scale, const Grid &grid,
                  uint8_t *codes, Accumulator<T> *next) {
    const Steps<Accumulator<T>> steps =
        grid.scale == ScaleOf::none ? Steps<Accumulator<T>>() : Steps<Accumulator<T>>(scale, grid.top);
    const size_t per_byte = grid.codes_per_byte(), bytes = (block.length + per_byte - 1) / per_byte;
    uint8_t levels[kTile];
    for (size_t begin = first; begin < stop; begin += kTile) {
        const size_t count = std::min(kTile, stop - begin);
        uint8_t *__restrict to = codes + block.codes + begin;
        if (per_byte == 1) {
            encode_elements(input, block, begin, begin + count, steps, grid, to, next);
            continue;
        }
        const auto zero = static_cast<uint8_t>(grid.top);
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
template <typename T>
void scales_by_stretch(const Input<T> &input, const BlockLayout &layout, const Grid &grid, float *scales, int threads) {
    using A = Accumulator<T>;
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

template <typename T>
void quantize(const T *x, const BlockLayout &layout, const Grid &grid, uint8_t *codes, float *scales,
              const Accumulator<T> *residual, Accumulator<T> *next, int threads) {
    const Input<T> input{x, residual};
    const bool finds = grid.scale == ScaleOf::max || grid.scale == ScaleOf::norm;
    const size_t per_byte = grid.codes_per_byte();
    const auto bytes = [&](const Block &block) { return (block.length + per_byte - 1) / per_byte; };
    const auto scale_at = [&](const Block &block) { return grid.scale == ScaleOf::none ? 1.0f : scales[block.scale]; };
    if (are_small(layout, grid)) {
        return each_block(layout, threads, [&](const Block &block) {
            if (const size_t later = block.begin + kAhead; later + block.length <= layout.numel()) {
                prefetch_row(x + later, block.length * sizeof(T));
                if (residual) prefetch_row(residual + later, block.length * sizeof(*residual));
            }
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

template <typename T>
void block_scales(const T *x, const BlockLayout &layout, const Grid &grid, float *scales,
                  const Accumulator<T> *residual, int threads) {
    const Input<T> input{x, residual};
    if (!are_small(layout, grid)) return scales_by_stretch(input, layout, grid, scales, threads);
    each_block(layout, threads, [&](const Block &block) { scales[block.scale] = scale_of(input, block, grid); });
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
        else if constexpr (code == Code::e4m3) level = small_value<3, 7>(codes[i]);
        else if constexpr (code == Code::e5m2) level = small_value<2, 15>(codes[i]);
        else level = exponent_value(codes[i]);
        sums[i] = (first ? A{0} : sums[i]) + level * step;
    }
}

template <typename A>
void add_codes(const Grid &grid, const uint8_t *codes, size_t count, A step, int shift, bool first, A *sums) {
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

}  // namespace MODULE_NAME
