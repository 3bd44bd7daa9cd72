// Kernels on single elements: bitmaps of indices, the non-zeros of a dense tensor, and the owner partition of sorted
// element indices by rotated stripe: element i = n * q + r belongs to owner (r + rho(q)) mod n, as its q-th element.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "deal.hpp"
#include "rank_bitmap.hpp"
#include "rows.hpp"

namespace gradsync {

// Sets bit i % 64 of word i / 64 for each index, and clears all other bits. Throws BadIndex before it writes.
void encode_bitmap(Indices indices, uint64_t size, uint64_t *words);

uint64_t count_bits(const uint64_t *words, size_t num_words, int threads);

// The positions of the set bits, ascending, `count` of them.
template <typename Index>
void decode_bitmap(const uint64_t *words, size_t num_words, Index *out, size_t count, int threads);

// The elements of x whose bits are set: their indices, ascending, and their values, of 2, 4 or 8 bytes.
template <typename Index>
void write_elements(const RankBitmap &bitmap, const void *x, size_t itemsize, Index *indices, void *values, int threads);

// Which elements are not zero; see NonzeroRows.
class NonzeroElements {
public:
    NonzeroElements(const void *x, size_t numel, size_t itemsize, int threads);

    const RankBitmap &bitmap() const { return bitmap_; }
    template <typename Index> void write(Index *indices, void *values, int threads) const {
        write_elements(bitmap_, x_, itemsize_, indices, values, threads);
    }

private:
    template <typename Unsigned> void mark(int threads);

    const void *x_;
    size_t numel_, itemsize_;
    RankBitmap bitmap_;
};

class RotatedStripe {
public:
    RotatedStripe(uint32_t owners, uint32_t key);

    uint32_t owners() const { return owners_; }
    // Of so many elements; each owner has at most one of a run.
    uint64_t runs(uint64_t size) const { return size / owners_ + (size % owners_ != 0); }

    // i / owners, exact for i < 2^31 * owners.
    uint64_t local(uint64_t i) const {
        return owners_ == 1 ? i : static_cast<uint64_t>(static_cast<unsigned __int128>(i) * inverse_ >> 64);
    }
    uint32_t owner(uint64_t i, uint64_t q) const {
        return wrapped(static_cast<uint32_t>(i - q * owners_) + rotation(static_cast<uint32_t>(q)) - owners_);
    }
    uint64_t index(uint32_t owner, uint32_t q) const {
        return uint64_t{q} * owners_ + wrapped(owner - rotation(q));
    }

private:
    // p in [-owners, owners) as a place in [0, owners), without a branch that nobody could predict.
    uint32_t wrapped(uint32_t p) const { return p + (owners_ & -(p >> 31)); }
    // A multiply-xorshift mix of the key and q, scaled to [0, owners): murmur3's finaliser, with the key once more between
    // its multiplications. Without that, evenly spaced q are shared out less evenly than by chance.
    uint32_t rotation(uint32_t q) const {
        uint32_t h = q ^ key_;
        h = (h ^ h >> 16) * 0x85ebca6bu ^ key_ * 0x9e3779b9u;
        h = (h ^ h >> 13) * 0xc2b2ae35u;
        h ^= h >> 16;
        return static_cast<uint32_t>(uint64_t{h} * owners_ >> 32);
    }

    uint32_t owners_, key_;
    uint64_t inverse_;
};

class RotatedPartition {
public:
    // Throws BadIndex if an index is not in [0, size), NotSorted if they do not ascend.
    RotatedPartition(Indices indices, uint64_t size, RotatedStripe stripe, int threads);

    const Dealt &dealt() const { return dealt_; }
    // Per owner: its elements' local positions, ascending, and their values: one of so many bytes for each element.
    void write(const void *values, size_t value_bytes, const std::vector<int32_t *> &positions,
               const std::vector<void *> &outs) const;

private:
    RotatedStripe stripe_;
    Dealt dealt_;
};

// All indices of elements at these positions are below it.
uint64_t rotated_bound(RotatedStripe stripe, const int32_t *positions, size_t count);

template <typename Index>
void rotated_indices(RotatedStripe stripe, uint32_t owner, const int32_t *positions, size_t count, Index *out,
                     int threads);

}  // namespace gradsync
