#include "signs.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "rows.hpp"
#include "scratch.hpp"

namespace gradsync {
namespace {

constexpr size_t kCachedBlock = size_t{1} << 15;  // elements that are still in the cache when the block's scale is known

// Bit l: p[l] < 0, for kLanes elements.
#if defined(__AVX2__)
inline uint32_t negatives(const float *p) {
    uint32_t mask = 0;
    for (int i = 0; i < 4; ++i) {
        const __m256 below = _mm256_cmp_ps(_mm256_loadu_ps(p + 8 * i), _mm256_setzero_ps(), _CMP_LT_OQ);
        mask |= static_cast<uint32_t>(_mm256_movemask_ps(below)) << (8 * i);
    }
    return mask;
}

inline uint32_t negatives(const double *p) {
    uint32_t mask = 0;
    for (int i = 0; i < 8; ++i) {
        const __m256d below = _mm256_cmp_pd(_mm256_loadu_pd(p + 4 * i), _mm256_setzero_pd(), _CMP_LT_OQ);
        mask |= static_cast<uint32_t>(_mm256_movemask_pd(below)) << (4 * i);
    }
    return mask;
}
#else
template <typename A> uint32_t negatives(const A *p) {
    uint8_t below[kLanes];
    for (size_t l = 0; l < kLanes; ++l) below[l] = p[l] < 0;
    uint32_t mask = 0;
    for (size_t i = 0; i < kLanes; i += 8) {
        uint64_t ones = 0;  // byte l: 0 or 1
        for (size_t l = 0; l < 8; ++l) ones |= uint64_t{below[i + l]} << (8 * l);
        mask |= static_cast<uint32_t>(ones * 0x0102040810204080 >> 56) << i;  // the product gathers them on top
    }
    return mask;
}
#endif

// Bits one after the other from any bit of a byte on. The first byte gets no other bits than these; those of the last
// byte, where it is not full, are not written.
struct BitWriter {
    uint8_t *to;
    uint64_t bits = 0;
    unsigned count;  // of bits, less than 8

    BitWriter(uint8_t *words, size_t bit) : to(words + bit / 8), count(bit % 8) {}

    void append(uint32_t mask) {
        bits |= uint64_t{mask} << count;
        for (int i = 0; i < 4; ++i) to[i] = static_cast<uint8_t>(bits >> (8 * i));
        to += 4;
        bits >>= 32;
    }
    void append(uint32_t mask, size_t width) {
        bits |= uint64_t{mask} << count;
        for (count += width; count >= 8; count -= 8, bits >>= 8) *to++ = static_cast<uint8_t>(bits);
    }
};

// The kLanes bits from one bit on; beyond the last byte they are 0.
inline uint32_t read_bits(const uint8_t *words, size_t nbytes, size_t bit) {
    const uint8_t *const from = words + bit / 8;
    const size_t count = nbytes - bit / 8;
    uint64_t bits = 0;
    if (count >= 8)
        for (int i = 0; i < 8; ++i) bits |= uint64_t{from[i]} << (8 * i);  // one load
    else
        for (size_t i = 0; i < count; ++i) bits |= uint64_t{from[i]} << (8 * i);
    return static_cast<uint32_t>(bits >> (bit % 8));
}

// p = x + residual.
template <typename T> void correct(Accumulator<T> *p, const T *x, const Accumulator<T> *residual, size_t count) {
    if constexpr (std::is_same_v<T, double>)
        for (size_t i = 0; i < count; ++i) p[i] = residual[i] + x[i];
    else
        add_row(p, residual, x, count);
}

// What is packed: x, or x + residual with what the signs leave of it in `left`. Only this function knows x's type.
template <typename A> struct Input {
    const void *x;
    const A *residual;
    A *left;
    const A *(*corrected)(const Input &, size_t begin, size_t count, A *buffer);
};

// Elements from `begin` on with the residual: in place, in `left` or in the buffer.
template <typename T>
const Accumulator<T> *corrected(const Input<Accumulator<T>> &input, size_t begin, size_t count, Accumulator<T> *buffer) {
    const T *x = static_cast<const T *>(input.x) + begin;
    if (input.residual != nullptr) {
        correct(input.left + begin, x, input.residual + begin, count);
        return input.left + begin;
    }
    if constexpr (std::is_same_v<T, Accumulator<T>>) {
        return x;
    } else {
        widen_row(buffer, x, count);
        return buffer;
    }
}

// What a block's bits decode to.
template <typename A> struct Levels {
    A of[2];  // by bit
};

template <typename A> Levels<A> levels_of(SignScale scale, const float *scales) {
    if (scale == SignScale::one) return {{1, -1}};
    if (scale == SignScale::two) return {{scales[0], scales[1]}};
    return {{scales[0], -scales[0]}};
}

template <typename A> void subtract_levels(A *p, size_t count, const Levels<A> &levels) {
    const A positive = levels.of[0], negative = levels.of[1];
    for (size_t i = 0; i < count; ++i) p[i] -= p[i] < 0 ? negative : positive;
}

// Calls body(constant) with the scale as a constant.
template <typename Body> void with_scale(SignScale scale, Body body) {
    using S = SignScale;
    if (scale == S::mean) body(std::integral_constant<S, S::mean>{});
    else if (scale == S::rms) body(std::integral_constant<S, S::rms>{});
    else if (scale == S::two) body(std::integral_constant<S, S::two>{});
    else body(std::integral_constant<S, S::one>{});
}

template <typename A> class Packing {
public:
    Packing(const Blocks &blocks, SignScale scale, Input<A> input, uint8_t *words, float *scales, int threads)
        : blocks_(blocks), scale_(scale), input_(input), words_(words), scales_(scales),
          threads_(threads), sums_(scales_per_block(scale) * blocks.pieces()),
          negative_(scale == SignScale::two ? blocks.pieces() : 0), edges_(threads) {}

    void run() {
        if (blocks_.numel() % 8 != 0) words_[blocks_.numel() / 8] = 0;
#pragma omp parallel for num_threads(threads_) schedule(static) if (threads_ > 1)
        for (int t = 0; t < threads_; ++t) pack_share(t);
        for (const Edge &edge : edges_)
            if (edge.bits != 0) *edge.byte |= edge.bits;
        if (scale_ == SignScale::one) return;
#pragma omp parallel for num_threads(threads_) schedule(static) if (threads_ > 1)
        for (int t = 0; t < threads_; ++t)
            each_of(t, [&](const Piece &piece) {
                if (piece.last && !done_at_once(piece, t)) write_scales(piece);
            });
        if (input_.left == nullptr) return;
#pragma omp parallel for num_threads(threads_) schedule(static) if (threads_ > 1)
        for (int t = 0; t < threads_; ++t)
            each_of(t, [&](const Piece &piece) {
                if (!done_at_once(piece, t)) subtract_levels(input_.left + piece.begin, piece.count, levels(piece));
            });
    }

private:
    struct Edge {  // what a share has of a byte that another share writes, or none
        uint8_t *byte;
        uint8_t bits;
    };

    size_t share_at(int t) const { return share_begin(blocks_.pieces(), t, threads_); }
    template <typename Body> void each_of(int t, Body body) const {
        blocks_.each_piece(share_at(t), share_at(t + 1), body);
    }
    static size_t pieces_of(const Piece &piece) { return (piece.block_count + kGroup - 1) / kGroup; }
    // Whether share t has all of the block, and its elements still in the cache at its last piece.
    bool done_at_once(const Piece &piece, int t) const {
        return piece.block_count <= kCachedBlock && piece.first_piece >= share_at(t) &&
               piece.first_piece + pieces_of(piece) <= share_at(t + 1);
    }
    Levels<A> levels(const Piece &piece) const {
        return levels_of<A>(scale_, scales_ + piece.block * scales_per_block(scale_));
    }

    void pack_share(int t) {
        const size_t first = share_at(t), end = share_at(t + 1);
        edges_[t] = {words_, 0};
        if (first == end) return;
        size_t begin = 0;
        blocks_.each_piece(first, first + 1, [&](const Piece &piece) { begin = piece.begin; });
        BitWriter writer(words_, begin);
        A buffer[kGroup];
        each_of(t, [&](const Piece &piece) {
            const A *const p = input_.corrected(input_, piece.begin, piece.count, buffer);
            with_scale(scale_, [&](auto known) { pack_piece<known()>(p, piece, writer); });
            if (scale_ == SignScale::one) {
                if (input_.left != nullptr) subtract_levels(input_.left + piece.begin, piece.count, levels(piece));
            } else if (piece.last && done_at_once(piece, t)) {
                write_scales(piece);
                if (input_.left != nullptr) subtract_levels(input_.left + piece.block_begin, piece.block_count, levels(piece));
            }
        });
        if (writer.count > 0) edges_[t] = {writer.to, static_cast<uint8_t>(writer.bits)};
    }

    template <SignScale scale> void pack_piece(const A *p, const Piece &piece, BitWriter &writer) {
        double lanes[2][kLanes] = {};
        uint32_t negative = 0;
        size_t i = 0;
        for (; i + kLanes <= piece.count; i += kLanes) {
            const uint32_t mask = negatives(p + i);
            writer.append(mask);
            negative += popcount(mask);
            add_to<scale>(lanes, p + i);
        }
        if (i < piece.count) {
            A last[kLanes] = {};
            std::copy(p + i, p + piece.count, last);
            const uint32_t mask = negatives(last);
            writer.append(mask, piece.count - i);
            negative += popcount(mask);
            add_to<scale>(lanes, last);
        }
        for (size_t s = 0; s < scales_per_block(scale); ++s)
            sums_[s * blocks_.pieces() + piece.index] = sum_of_lanes(lanes[s]);
        if (scale == SignScale::two) negative_[piece.index] = negative;
    }

    template <SignScale scale> static void add_to(double (&lanes)[2][kLanes], const A *p) {
        if constexpr (scale == SignScale::mean)
            for (size_t l = 0; l < kLanes; ++l) lanes[0][l] += std::fabs(static_cast<double>(p[l]));
        if constexpr (scale == SignScale::rms)
            for (size_t l = 0; l < kLanes; ++l) lanes[0][l] += static_cast<double>(p[l]) * static_cast<double>(p[l]);
        if constexpr (scale == SignScale::two)
            for (size_t begin = 0; begin < kLanes; begin += kLanes / 2) {  // what registers hold of two lists
                A others[kLanes / 2], below[kLanes / 2];  // apart from the sums, so that each loop is vectorised
                for (size_t l = 0; l < kLanes / 2; ++l) others[l] = p[begin + l] < 0 ? A{0} : p[begin + l];
                for (size_t l = 0; l < kLanes / 2; ++l) below[l] = p[begin + l] < 0 ? p[begin + l] : A{0};
                for (size_t l = 0; l < kLanes / 2; ++l) lanes[0][begin + l] += static_cast<double>(others[l]);
                for (size_t l = 0; l < kLanes / 2; ++l) lanes[1][begin + l] += static_cast<double>(below[l]);
            }
    }

    void write_scales(const Piece &piece) {
        const size_t pieces = pieces_of(piece);
        double *const sums = sums_.begin() + piece.first_piece;
        const double count = static_cast<double>(piece.block_count), first = sum_of_groups(sums, pieces);
        if (scale_ == SignScale::mean) scales_[piece.block] = static_cast<float>(first / count);
        if (scale_ == SignScale::rms) scales_[piece.block] = static_cast<float>(std::sqrt(first / count));
        if (scale_ == SignScale::two) {
            size_t below = 0;
            for (size_t i = 0; i < pieces; ++i) below += negative_[piece.first_piece + i];
            const double second = sum_of_groups(sums + blocks_.pieces(), pieces);
            const auto mean = [](double sum, size_t of) { return of > 0 ? static_cast<float>(sum / of) : 0.0f; };
            scales_[2 * piece.block] = mean(first, piece.block_count - below);
            scales_[2 * piece.block + 1] = mean(second, below);
        }
    }

    const Blocks &blocks_;
    SignScale scale_;
    Input<A> input_;
    uint8_t *words_;
    float *scales_;
    int threads_;
    Scratch<double> sums_;        // of the pieces: for each scale of a block one list
    Scratch<uint32_t> negative_;  // how many elements of each piece are
    std::vector<Edge> edges_;     // by share
};

struct LaneBits {
    uint32_t of[kLanes];
    constexpr LaneBits() : of() {
        for (size_t l = 0; l < kLanes; ++l) of[l] = uint32_t{1} << l;
    }
};
constexpr LaneBits kLaneBits;

// to[0, kLanes) = factor * sum of the parts' levels by the bits from `at` on; their words have nbytes.
template <typename A>
void sum_levels(const std::vector<Signs> &parts, size_t nbytes, size_t at, const Levels<A> *levels, A factor, A *to) {
    A total[kLanes] = {};
    for (size_t p = 0; p < parts.size(); ++p) {
        const uint32_t mask = read_bits(parts[p].words, nbytes, at);
        const A positive = levels[p].of[0], negative = levels[p].of[1];
        for (size_t l = 0; l < kLanes; ++l) total[l] += mask & kLaneBits.of[l] ? negative : positive;
    }
    for (size_t l = 0; l < kLanes; ++l) to[l] = total[l] * factor;
}

#if defined(__AVX2__)
inline void sum_levels(const std::vector<Signs> &parts, size_t nbytes, size_t at, const Levels<float> *levels,
                       float factor, float *to) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 total[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (size_t p = 0; p < parts.size(); ++p) {
        const __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(read_bits(parts[p].words, nbytes, at)));
        const __m256 positive = _mm256_set1_ps(levels[p].of[0]), negative = _mm256_set1_ps(levels[p].of[1]);
        for (int v = 0; v < 4; ++v) {
            // A lane's bit becomes its sign, which is what the blend looks at.
            const __m256i up = _mm256_sub_epi32(_mm256_set1_epi32(31 - 8 * v), lane);
            const __m256 chosen = _mm256_castsi256_ps(_mm256_sllv_epi32(mask, up));
            total[v] = _mm256_add_ps(total[v], _mm256_blendv_ps(positive, negative, chosen));
        }
    }
    for (int v = 0; v < 4; ++v) _mm256_storeu_ps(to + 8 * v, _mm256_mul_ps(total[v], _mm256_set1_ps(factor)));
}

constexpr size_t kMostTabled = 8;   // parts, of which an element has a byte of signs
constexpr size_t kFewestTabled = 4;  // fewer are added up sooner than looked up

// table[b] = factor * sum of the levels, in their order, of which each is that of its bit of b.
inline void tabulate_sums(const Levels<float> *levels, size_t parts, float factor, float *table) {
    table[0] = 0;
    for (size_t p = 0; p < parts; ++p)
        for (size_t b = 0, count = size_t{1} << p; b < count; ++b) {
            table[b + count] = table[b] + levels[p].of[1];
            table[b] += levels[p].of[0];
        }
    for (size_t b = 0; b < size_t{1} << parts; ++b) table[b] *= factor;
}

// Of 32 elements the bytes of signs, from the words of eight parts: of each 8 elements, 8 bytes of 8 bits turned round.
inline __m256i bytes_by_element(__m256i words) {
    const __m256i by_four = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,  //
                                             0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i pairs = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i x = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(words, by_four), pairs);
    const auto swap = [&](auto by, int64_t mask) {
        const __m256i changed =
            _mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi64(x, by)), _mm256_set1_epi64x(mask));
        x = _mm256_xor_si256(x, _mm256_xor_si256(changed, _mm256_slli_epi64(changed, by)));
    };
    swap(std::integral_constant<int, 7>{}, 0x00aa00aa00aa00aa);
    swap(std::integral_constant<int, 14>{}, 0x0000cccc0000cccc);
    swap(std::integral_constant<int, 28>{}, 0x00000000f0f0f0f0);
    return x;
}

// to[0, count) = what the table has for the parts' bits from `at` on. Writes whole lists of kLanes.
inline void look_up_sums(const std::vector<Signs> &parts, size_t nbytes, size_t at, size_t count, const float *table,
                         float *to) {
    alignas(32) uint32_t words[kLanes][kMostTabled] = {};
    const size_t lists = (count + kLanes - 1) / kLanes;
    for (size_t p = 0; p < parts.size(); ++p) {
        if (at % 8 == 0 && at / 8 + lists * sizeof(uint32_t) <= nbytes)
            for (size_t i = 0; i < lists; ++i) std::memcpy(&words[i][p], parts[p].words + at / 8 + 4 * i, 4);
        else
            for (size_t i = 0; i < lists; ++i) words[i][p] = read_bits(parts[p].words, nbytes, at + i * kLanes);
    }
    for (size_t i = 0; i < lists; ++i) {
        const __m256i signs = bytes_by_element(_mm256_load_si256(reinterpret_cast<const __m256i *>(words[i])));
        const auto store = [&](size_t v, __m128i eight) {
            // Into zeros: what the register held before, the processor would wait for.
            const __m256 all = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
            const __m256i places = _mm256_cvtepu8_epi32(eight);
            _mm256_storeu_ps(to + i * kLanes + 8 * v,
                             _mm256_mask_i32gather_ps(_mm256_setzero_ps(), table, places, all, 4));
        };
        const __m128i lower = _mm256_castsi256_si128(signs), upper = _mm256_extracti128_si256(signs, 1);
        store(0, lower);
        store(1, _mm_srli_si128(lower, 8));
        store(2, upper);
        store(3, _mm_srli_si128(upper, 8));
    }
}
#endif

// Where sums go to. Only this function knows the type they are rounded to.
template <typename A> struct Output {
    void *out;
    bool stream;
    void (*write)(const Output &, size_t begin, const A *sums, size_t count);
};

template <typename T> void write_sums(const Output<Accumulator<T>> &output, size_t begin, const Accumulator<T> *sums, size_t count) {
    T *const out = static_cast<T *>(output.out) + begin;
    if constexpr (!std::is_same_v<T, Accumulator<T>>)
        output.stream ? narrow_row<true>(out, sums, count) : narrow_row<false>(out, sums, count);
    else if (output.stream)
        stream_bytes(reinterpret_cast<char *>(out), reinterpret_cast<const char *>(sums), count * sizeof(T));
    else
        std::copy(sums, sums + count, out);
}

template <typename A> class Unpacking {
public:
    Unpacking(const Blocks &blocks, SignScale scale, const std::vector<Signs> &parts, Output<A> output, double factor,
              int threads)
        : blocks_(blocks), scale_(scale), parts_(parts), output_(output), factor_(static_cast<A>(factor)),
          threads_(threads), levels_(parts.size() * threads) {}

    void run() {
#pragma omp parallel for num_threads(threads_) schedule(static) if (threads_ > 1)
        for (int t = 0; t < threads_; ++t) {
            Levels<A> *const levels = levels_.begin() + t * parts_.size();
            Table table;
            const size_t first = share_begin(blocks_.pieces(), t, threads_);
            const size_t end = share_begin(blocks_.pieces(), t + 1, threads_);
            blocks_.each_piece(first, end, [&](const Piece &piece) {
                for (size_t p = 0; p < parts_.size(); ++p)
                    levels[p] = levels_of<A>(scale_, parts_[p].scales + piece.block * scales_per_block(scale_));
                unpack_piece(piece, levels, table);
            });
            order_stores();
        }
    }

private:
    struct Table {  // of sums, where they are looked up
        size_t block = std::numeric_limits<size_t>::max();
        float sums[256];
    };

    void sum_piece(const Piece &piece, const Levels<A> *levels, Table &table, A *sums) {
        const size_t nbytes = (blocks_.numel() + 7) / 8;
#if defined(__AVX2__)
        if constexpr (std::is_same_v<A, float>)
            if (parts_.size() >= kFewestTabled && parts_.size() <= kMostTabled && piece.block_count >= kGroup) {
                if (table.block != piece.block) tabulate_sums(levels, parts_.size(), factor_, table.sums);
                table.block = piece.block;
                return look_up_sums(parts_, nbytes, piece.begin, piece.count, table.sums, sums);
            }
#endif
        (void)table;
        for (size_t i = 0; i < piece.count; i += kLanes)
            sum_levels(parts_, nbytes, piece.begin + i, levels, factor_, sums + i);
    }

    void unpack_piece(const Piece &piece, const Levels<A> *levels, Table &table) {
        A sums[kGroup];
        sum_piece(piece, levels, table, sums);
        output_.write(output_, piece.begin, sums, piece.count);
    }

    const Blocks &blocks_;
    SignScale scale_;
    const std::vector<Signs> &parts_;
    Output<A> output_;
    A factor_;
    int threads_;
    Scratch<Levels<A>> levels_;  // of the parts, for each thread
};

}  // namespace

template <typename T>
void pack_signs(const Blocks &blocks, SignScale scale, const T *x, const Accumulator<T> *residual, Accumulator<T> *left,
                uint8_t *words, float *scales, int threads) {
    using A = Accumulator<T>;
    Packing<A>(blocks, scale, Input<A>{x, residual, left, corrected<T>}, words, scales, threads).run();
}

template <typename T>
void unpack_signs(const Blocks &blocks, SignScale scale, const std::vector<Signs> &parts, T *out, double factor,
                  int threads) {
    using A = Accumulator<T>;
    const bool stream = blocks.numel() * sizeof(T) >= kStreamedBytes;
    Unpacking<A>(blocks, scale, parts, Output<A>{out, stream, write_sums<T>}, factor, threads).run();
}

#define INSTANTIATE(T)                                                                                            \
    template void pack_signs(const Blocks &, SignScale, const T *, const Accumulator<T> *, Accumulator<T> *,      \
                             uint8_t *, float *, int);                                                            \
    template void unpack_signs(const Blocks &, SignScale, const std::vector<Signs> &, T *, double, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(Bfloat16)
INSTANTIATE(Float16)
#undef INSTANTIATE

}  // namespace gradsync
