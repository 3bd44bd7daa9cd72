#include "digest.hpp"

#include <algorithm>

#include "draws.hpp"
#include "hashing.hpp"
#include "rank_bitmap.hpp"
#include "scratch.hpp"

namespace gradsync {
namespace {

constexpr uint64_t kKeySeed = 0x6772616473796e63u;  // any; the same everywhere

struct Keys {  // odd, so that none is zero
    uint32_t first[kDigestWords], second[kDigestWords];
    Keys() {
        const Draws draw(kKeySeed, 0);
        for (uint32_t i = 0; i < kDigestWords; ++i) first[i] = draw(i) | 1, second[i] = draw(i + kDigestWords) | 1;
    }
};

const Keys &keys() {
    static const Keys made;
    return made;
}

// The bits of a floating-point number, those of one NaN for all, and of one zero.
template <typename Bits> inline Bits one_of_alike(Bits bits, Bits infinity, Bits nan) {
    const Bits magnitude = bits & static_cast<Bits>(static_cast<Bits>(~Bits{0}) >> 1);
    bits = magnitude > infinity ? nan : bits;
    return magnitude == 0 ? Bits{0} : bits;
}

template <typename T> struct BitsOf;
template <> struct BitsOf<float> {
    using Type = uint32_t;
    static Type canonical(Type bits) { return one_of_alike<Type>(bits, 0x7f800000u, 0x7fc00000u); }
};
template <> struct BitsOf<double> {
    using Type = uint64_t;
    static Type canonical(Type bits) { return one_of_alike<Type>(bits, 0x7ff0000000000000u, 0x7ff8000000000000u); }
};
template <> struct BitsOf<Bfloat16> {
    using Type = uint16_t;
    static Type canonical(Type bits) { return one_of_alike<Type>(bits, 0x7f80u, 0x7fc0u); }
};
template <> struct BitsOf<Float16> {
    using Type = uint16_t;
    static Type canonical(Type bits) { return one_of_alike<Type>(bits, 0x7c00u, 0x7e00u); }
};
template <> struct BitsOf<int64_t> {
    using Type = uint64_t;
    static Type canonical(Type bits) { return bits; }
};

// Writes the words of up to a block of elements; returns how many.
template <typename T> size_t words_of(const T *x, size_t count, uint32_t *words) {
    using Bits = typename BitsOf<T>::Type;
    constexpr size_t kSize = sizeof(Bits);
    Bits all[kDigestWords * sizeof(uint32_t) / kSize];
    for (size_t i = 0; i < count; ++i) {
        Bits bits;
        std::memcpy(&bits, x + i, kSize);
        all[i] = BitsOf<T>::canonical(bits);
    }
    if (kSize == 2 && count % 2) all[count] = 0;
    const size_t written = (count * kSize + 3) / sizeof(uint32_t);
    if (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__) std::memcpy(words, all, written * sizeof(uint32_t));
    else
        for (size_t w = 0; w < written; ++w) {
            if constexpr (kSize == 8) words[w] = static_cast<uint32_t>(all[w / 2] >> (w % 2 * 32));
            else if constexpr (kSize == 4) words[w] = all[w];
            else words[w] = uint32_t{all[2 * w]} | uint32_t{all[2 * w + 1]} << 16;
        }
    return written;
}

uint64_t digest_of_block(const uint32_t *words, size_t count, uint64_t number) {
    const Keys &key = keys();
    uint64_t first = 0, second = 0;
    for (size_t i = 0; i < count; ++i) {
        first += uint64_t{words[i]} * key.first[i];
        second += uint64_t{words[i]} * key.second[i];
    }
    return finalised(first ^ finalised(second ^ finalised(number + 1)));
}

template <typename T> constexpr size_t kElements = kDigestWords * sizeof(uint32_t) / sizeof(T);  // of a block

template <typename T> uint64_t sum_of_blocks(const void *x, size_t count, size_t begin, size_t end) {
    uint64_t sum = 0;
    uint32_t words[kDigestWords];
    for (size_t block = begin; block < end; ++block) {
        const size_t first = block * kElements<T>, here = std::min(kElements<T>, count - first);
        sum += digest_of_block(words, words_of(static_cast<const T *>(x) + first, here, words), block);
    }
    return sum;
}

}  // namespace

template <typename T> Digested digested(const T *x, size_t count) {
    return {x, count, (count + kElements<T> - 1) / kElements<T>, sum_of_blocks<T>};
}

void digest(const std::vector<Digested> &tensors, uint64_t *out, int threads) {
    size_t blocks = 0;  // of all tensors, one behind the other
    for (const Digested &tensor : tensors) blocks += tensor.blocks;
    Scratch<uint64_t> sums(threads * tensors.size());
    const auto sum_share = [&](int t) {
        const size_t begin = share_begin(blocks, t, threads), end = share_begin(blocks, t + 1, threads);
        size_t before = 0;
        for (size_t i = 0; i < tensors.size(); ++i) {
            const Digested &tensor = tensors[i];
            const size_t first = std::clamp(begin, before, before + tensor.blocks) - before;
            const size_t last = std::clamp(end, before, before + tensor.blocks) - before;
            sums[t * tensors.size() + i] = tensor.sum(tensor.x, tensor.count, first, last);
            before += tensor.blocks;
        }
    };
    if (threads > 1) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int t = 0; t < threads; ++t) sum_share(t);
    } else {
        sum_share(0);
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
        uint64_t sum = 0;
        for (int t = 0; t < threads; ++t) sum += sums[t * tensors.size() + i];
        out[i] = finalised(sum ^ finalised(tensors[i].count + 1));
    }
}

template Digested digested(const float *, size_t);
template Digested digested(const double *, size_t);
template Digested digested(const Bfloat16 *, size_t);
template Digested digested(const Float16 *, size_t);
template Digested digested(const int64_t *, size_t);

}  // namespace gradsync
