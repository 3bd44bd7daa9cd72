// Zen's hierarchical hashing (OSDI 2025, algorithm 1): h0 gives an index its owner; in the owner's memory
// it takes the first slot of its rehashes h1 ... hk that is empty, or else the next place of the serial part. Slots are
// taken by compare-and-swap: the paper's write, read back and compare loses an index where two threads write one after
// the other. What finds no place is kept apart, where the paper's algorithm says nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "hashing.hpp"

namespace gradsync {

struct HierarchyShape {
    uint64_t slots, serial;  // of the parallel and the serial memory of one owner
};

// Index: int32_t or int64_t; a slot holds an index or kEmpty.
template <typename Index> class Hierarchy {
public:
    // Throws BadIndex for a negative index.
    Hierarchy(Indices indices, Hash owner_of, HierarchyShape shape, const std::vector<uint64_t> &rehash_keys,
              int threads);

    // Indices that have a place, by owner.
    const std::vector<size_t> &counts() const { return counts_; }
    size_t num_serial() const { return num_serial_; }  // had no slot in parallel memory
    size_t num_overflow() const { return overflow_.size(); }
    size_t nbytes() const { return memory_.size() * sizeof(Index) + counts_.size() * sizeof(uint64_t); }

    // In the order of the slots.
    void write(const std::vector<Index *> &owned, Index *overflow) const;

private:
    using Slot = std::atomic<Index>;
    static constexpr Index kEmpty = -1;

    Slot *row(size_t owner) const { return memory_.begin() + owner * (shape_.slots + shape_.serial); }
    // Puts indices where they belong, and counts them by owner; those that have no place go to the list.
    void insert(const Index *index, size_t count, Hash owner_of, std::vector<size_t> &placed,
                std::vector<Index> &overflow);
    // Whether the slot was empty, and now holds the index.
    static bool take(Slot &slot, Index index);
    // By the rehashes after the first.
    bool insert_again(Slot *slots, Index index) const;
    bool insert_serial(Slot *places, std::atomic<uint64_t> &asked, Index index) const;

    HierarchyShape shape_;
    std::vector<Hash> rehashes_;
    int threads_;
    Scratch<Slot> memory_;
    std::vector<std::atomic<uint64_t>> asked_;  // by owner: for a place in serial memory
    std::vector<size_t> counts_;
    std::vector<Index> overflow_;
    size_t num_serial_ = 0;
};

}  // namespace gradsync
