#include "hierarchy.hpp"

#include <algorithm>
#include <new>

namespace gradsync {

template <typename Index>
Hierarchy<Index>::Hierarchy(Indices indices, Hash owner_of, HierarchyShape shape,
                            const std::vector<uint64_t> &rehash_keys, int threads)
    : shape_(shape), threads_(threads), asked_(owner_of.range()), counts_(owner_of.range(), 0) {
    check_indices(indices, 0, kMaxIndex);
    for (uint64_t key : rehash_keys) rehashes_.emplace_back(key, shape.slots);
    memory_ = Scratch<Slot>(owner_of.range() * (shape.slots + shape.serial));
    const auto *index = static_cast<const Index *>(indices.data);
    std::vector<std::vector<Index>> overflows(threads);
    std::vector<std::vector<size_t>> dealt(threads, counts_);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; ++t) {
        Slot *const end = memory_.begin() + share_begin(memory_.size(), t + 1, threads);
        for (Slot *slot = memory_.begin() + share_begin(memory_.size(), t, threads); slot < end; ++slot)
            new (slot) Slot(kEmpty);
    }
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; ++t) {
        const size_t begin = share_begin(indices.count, t, threads), end = share_begin(indices.count, t + 1, threads);
        insert(index + begin, end - begin, owner_of, dealt[t], overflows[t]);
    }
    for (const std::vector<size_t> &placed : dealt)
        for (size_t owner = 0; owner < counts_.size(); ++owner) counts_[owner] += placed[owner];
    for (const std::vector<Index> &overflow : overflows)
        overflow_.insert(overflow_.end(), overflow.begin(), overflow.end());
    for (const std::atomic<uint64_t> &asked : asked_) num_serial_ += asked;
}

template <typename Index>
void Hierarchy<Index>::insert(const Index *index, size_t count, Hash owner_of, std::vector<size_t> &placed,
                              std::vector<Index> &overflow) {
    constexpr size_t kBlock = 64;  // whose first slots, which lie anywhere, are fetched together
    uint32_t owners[kBlock];
    Slot *firsts[kBlock];
    for (size_t begin = 0; begin < count; begin += kBlock) {
        const size_t block = std::min(kBlock, count - begin);
        for (size_t i = 0; i < block; ++i) {
            owners[i] = static_cast<uint32_t>(owner_of(static_cast<uint64_t>(index[begin + i])));
            firsts[i] = row(owners[i]) + rehashes_[0](static_cast<uint64_t>(index[begin + i]));
            __builtin_prefetch(firsts[i], 1);
        }
        for (size_t i = 0; i < block; ++i) {
            const Index item = index[begin + i];
            const bool fits = take(*firsts[i], item) || insert_again(row(owners[i]), item) ||
                              insert_serial(row(owners[i]) + shape_.slots, asked_[owners[i]], item);
            if (fits) ++placed[owners[i]];
            else overflow.push_back(item);
        }
    }
}

template <typename Index> bool Hierarchy<Index>::take(Slot &slot, Index index) {
    Index seen = slot.load(std::memory_order_relaxed);  // a taken slot stays taken: no need to try for it
    return seen == kEmpty && slot.compare_exchange_strong(seen, index, std::memory_order_relaxed);
}

template <typename Index> bool Hierarchy<Index>::insert_again(Slot *slots, Index index) const {
    for (size_t number = 1; number < rehashes_.size(); ++number)
        if (take(slots[rehashes_[number](static_cast<uint64_t>(index))], index)) return true;
    return false;
}

template <typename Index>
bool Hierarchy<Index>::insert_serial(Slot *places, std::atomic<uint64_t> &asked, Index index) const {
    const uint64_t place = asked.fetch_add(1, std::memory_order_relaxed);
    if (place >= shape_.serial) return false;
    places[place].store(index, std::memory_order_relaxed);
    return true;
}

template <typename Index> void Hierarchy<Index>::write(const std::vector<Index *> &owned, Index *overflow) const {
#pragma omp parallel for num_threads(threads_) schedule(static) if (threads_ > 1)
    for (size_t owner = 0; owner < owned.size(); ++owner) {
        const Slot *slot = row(owner);
        // Every slot is written, and stays if it is not empty: no branch that nobody could predict.
        for (Index *to = owned[owner], *const end = to + counts_[owner]; to < end; ++slot) {
            *to = slot->load(std::memory_order_relaxed);
            to += *to != kEmpty;
        }
    }
    std::copy(overflow_.begin(), overflow_.end(), overflow);
}

template class Hierarchy<int32_t>;
template class Hierarchy<int64_t>;

}  // namespace gradsync
