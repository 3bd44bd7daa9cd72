#include "hashing.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace gradsync {

template <typename Out> void owners_by_hash(Indices indices, Hash owner_of, Out *out, int threads) {
    check_indices(indices, 0, kMaxIndex);
    with_indices(indices, [&](auto *index) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (size_t i = 0; i < indices.count; ++i) out[i] = static_cast<Out>(owner_of(static_cast<uint64_t>(index[i])));
    });
}

template void owners_by_hash(Indices, Hash, int32_t *, int);
template void owners_by_hash(Indices, Hash, int64_t *, int);

HashedPartition::HashedPartition(Indices indices, uint64_t size, Hash owner_of, int threads)
    : dealt_(require_sorted(indices, size), static_cast<uint32_t>(owner_of.range()), threads, owner_of) {}

template <typename Index>
void HashedPartition::write(const void *values, size_t value_bytes, const std::vector<Index *> &indices,
                            const std::vector<void *> &outs) const {
    dealt_.write(values, value_bytes, indices, outs, [](uint64_t index) { return index; });
}

template void HashedPartition::write(const void *, size_t, const std::vector<int32_t *> &,
                                     const std::vector<void *> &) const;
template void HashedPartition::write(const void *, size_t, const std::vector<int64_t *> &,
                                     const std::vector<void *> &) const;

OwnedByHash::OwnedByHash(uint64_t size, Hash owner_of, int threads)
    : size_(size), owner_of_(owner_of), threads_(threads), counts_(owner_of.range(), 0) {
    begins_.assign(threads, counts_);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; ++t) {
        size_t *const counts = begins_[t].data();
        const uint64_t end = share_begin(size, t + 1, threads);
        for (uint64_t i = share_begin(size, t, threads); i < end; ++i) ++counts[owner_of(i)];
    }
    for (std::vector<size_t> &begins : begins_)
        for (size_t owner = 0; owner < counts_.size(); ++owner)
            counts_[owner] += std::exchange(begins[owner], counts_[owner]);
}

template <typename Index> void OwnedByHash::write(const std::vector<Index *> &lists) const {
#pragma omp parallel for num_threads(threads_) schedule(static) if (threads_ > 1)
    for (int t = 0; t < threads_; ++t) {
        std::vector<Index *> next(lists);
        for (size_t owner = 0; owner < next.size(); ++owner) next[owner] += begins_[t][owner];
        Index **const to = next.data();
        const Hash owner_of = owner_of_;
        const uint64_t end = share_begin(size_, t + 1, threads_);
        for (uint64_t i = share_begin(size_, t, threads_); i < end; ++i) *to[owner_of(i)]++ = static_cast<Index>(i);
    }
}

template void OwnedByHash::write(const std::vector<int32_t *> &) const;
template void OwnedByHash::write(const std::vector<int64_t *> &) const;

// Where an ascending list has its items. Line by line: the hardware fetches what is read in order, and waits for each
// place that is jumped to; and a line stays until it is passed, so that no search waits for the one before it.
template <typename Owned> struct Lines {
    static constexpr size_t kItems = 64 / sizeof(Owned);
    const Owned *owned;
    size_t size, line = 0;

    // The first item that is not before `index`, which is not before the last one looked for.
    size_t seek(Owned index) {
        while (line + kItems <= size && owned[line + kItems - 1] < index) line += kItems;
        if (line + kItems > size) return std::lower_bound(owned + line, owned + size, index) - owned;
        Owned before = 0;  // as wide as what is compared
        for (size_t i = 0; i < kItems; ++i) before += owned[line + i] < index;
        return line + static_cast<size_t>(before);
    }
};

// The same by steps that grow, for few indices.
template <typename Owned> struct Leaps {
    const Owned *owned;
    size_t size, step, at = 0;

    size_t seek(Owned index) {
        size_t leap = step;
        for (; at + leap < size && owned[at + leap] < index; leap *= 2) at += leap;
        return at = std::lower_bound(owned + at, owned + std::min(at + leap, size), index) - owned;
    }
};

template <typename Places, typename Index, typename Out>
static void find_positions(Places places, const Index *index, size_t count, Out *out) {
    for (size_t i = 0; i < count; ++i) {
        using Owned = std::remove_const_t<std::remove_pointer_t<decltype(places.owned)>>;
        if (i > 0 && index[i] < index[i - 1]) throw NotSorted{index[i - 1], index[i]};
        const size_t at = places.seek(static_cast<Owned>(index[i]));
        if (at == places.size || places.owned[at] != index[i])
            throw std::invalid_argument("positions_in: index " + std::to_string(index[i]) + " is not among the " +
                                        std::to_string(places.size) + " owned");
        out[i] = static_cast<Out>(at);
    }
}

template <typename Out> void positions_in(const Indices &owned, const Indices &indices, Out *out) {
    constexpr size_t kFar = 4096;  // items between two that are looked for
    const size_t apart = owned.count / std::max<size_t>(1, indices.count);
    with_indices(owned, [&](auto *own) {
        using Owned = std::remove_const_t<std::remove_pointer_t<decltype(own)>>;
        with_indices(indices, [&](auto *index) {
            if (apart < kFar) find_positions(Lines<Owned>{own, owned.count}, index, indices.count, out);
            else find_positions(Leaps<Owned>{own, owned.count, apart}, index, indices.count, out);
        });
    });
}

template void positions_in(const Indices &, const Indices &, int32_t *);
template void positions_in(const Indices &, const Indices &, int64_t *);

}  // namespace gradsync
