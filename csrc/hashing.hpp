// Owners of single elements by hash, as in Zen (OSDI 2025): MurmurHash3's 64-bit finaliser of the index and
// a key, scaled to the number of owners.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "deal.hpp"

namespace gradsync {

constexpr uint64_t kMaxIndex = (uint64_t{1} << 63) - 1;

// MurmurHash3's 64-bit finaliser: a bijection in which each bit of the input changes each of the output half of the time.
inline uint64_t finalised(uint64_t h) {
    h = (h ^ h >> 33) * 0xff51afd7ed558ccdu;
    h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53u;
    return h ^ h >> 33;
}

class Hash {
public:
    // Into [0, range), range <= 2^32.
    Hash(uint64_t key, uint64_t range) : key_(key), range_(range) {}

    uint64_t range() const { return range_; }
    uint64_t operator()(uint64_t index) const { return (finalised(index ^ key_) >> 32) * range_ >> 32; }

private:
    uint64_t key_, range_;
};

// Throws BadIndex for a negative index, before it writes.
template <typename Out> void owners_by_hash(Indices indices, Hash owner_of, Out *out, int threads);

class HashedPartition {
public:
    // Throws BadIndex if an index is not in [0, size), NotSorted if they do not ascend.
    HashedPartition(Indices indices, uint64_t size, Hash owner_of, int threads);

    const Dealt &dealt() const { return dealt_; }
    // Per owner: its elements' indices, ascending, and their values: one of so many bytes for each element.
    template <typename Index>
    void write(const void *values, size_t value_bytes, const std::vector<Index *> &indices,
               const std::vector<void *> &outs) const;

private:
    Dealt dealt_;
};

// For each owner, all indices of [0, size) that are its own.
class OwnedByHash {
public:
    OwnedByHash(uint64_t size, Hash owner_of, int threads);

    const std::vector<size_t> &counts() const { return counts_; }
    template <typename Index> void write(const std::vector<Index *> &lists) const;

private:
    uint64_t size_;
    Hash owner_of_;
    int threads_;
    std::vector<std::vector<size_t>> begins_;  // per thread and owner: where its indices go
    std::vector<size_t> counts_;
};

// The place of each index in `owned`; both ascend. Throws std::invalid_argument for an index that is not there,
// NotSorted if they do not ascend; `out` has been written to then.
template <typename Out> void positions_in(const Indices &owned, const Indices &indices, Out *out);

}  // namespace gradsync
