// Items dealt to owners, in order, in two phases: counted, then written. The owner of an item follows from its index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "rows.hpp"

namespace gradsync {

constexpr uint32_t kMaxOwners = 1 << 16;

// Throws BadIndex if an index is not in [0, size), NotSorted if they do not ascend.
Indices require_sorted(Indices indices, uint64_t size, size_t part = 0);

class Dealt {
public:
    Dealt() = default;
    // owner_of(index) in [0, owners), at most kMaxOwners.
    template <typename OwnerOf>
    Dealt(const Indices &indices, uint32_t owners, int threads, OwnerOf owner_of)
        : indices_(indices), threads_(threads), owners_(indices.count), counts_(owners, 0) {
        begins_.assign(threads, std::vector<size_t>(owners, 0));
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int t = 0; t < threads; ++t) {
            with_indices(indices_, [&](auto *index) {
                size_t *const counts = begins_[t].data();
                const size_t end = begin_of(t + 1);
                for (size_t i = begin_of(t); i < end; ++i) {
                    const uint32_t owner = owner_of(static_cast<uint64_t>(index[i]));
                    owners_[i] = static_cast<uint16_t>(owner);
                    ++counts[owner];
                }
            });
        }
        for (std::vector<size_t> &begins : begins_)
            for (size_t owner = 0; owner < counts_.size(); ++owner)
                counts_[owner] += std::exchange(begins[owner], counts_[owner]);
    }

    size_t num_items() const { return indices_.count; }
    const std::vector<size_t> &counts() const { return counts_; }

    // Per owner: place_of(index) of each of its items, and its value: one of so many bytes for each item.
    template <typename Place, typename PlaceOf>
    void write(const void *values, size_t value_bytes, const std::vector<Place *> &places,
               const std::vector<void *> &outs, PlaceOf place_of) const {
        if (value_bytes == 2) write_as<uint16_t>(values, places, outs, place_of);
        else if (value_bytes == 4) write_as<uint32_t>(values, places, outs, place_of);
        else if (value_bytes == 8) write_as<uint64_t>(values, places, outs, place_of);
        else
            for_each(places, place_of, [&](size_t i, uint32_t owner, size_t to) {
                if (value_bytes)
                    std::memcpy(static_cast<char *>(outs[owner]) + to * value_bytes,
                                static_cast<const char *>(values) + i * value_bytes, value_bytes);
            });
    }

private:
    template <typename Value, typename Place, typename PlaceOf>
    void write_as(const void *values, const std::vector<Place *> &places, const std::vector<void *> &outs,
                  PlaceOf place_of) const {
        const auto *from = static_cast<const Value *>(values);
        for_each(places, place_of,
                 [&](size_t i, uint32_t owner, size_t to) { static_cast<Value *>(outs[owner])[to] = from[i]; });
    }

    // Writes the places, and calls write(item, its owner, its place there) for each item, on all threads.
    template <typename Place, typename PlaceOf, typename Write>
    void for_each(const std::vector<Place *> &places, PlaceOf place_of, Write write) const {
#pragma omp parallel for num_threads(threads_) schedule(static) if (threads_ > 1)
        for (int t = 0; t < threads_; ++t) {
            std::vector<size_t> next = begins_[t];
            with_indices(indices_, [&](auto *index) {
                const size_t end = begin_of(t + 1);
                for (size_t i = begin_of(t); i < end; ++i) {
                    const uint32_t owner = owners_[i];
                    const size_t to = next[owner]++;
                    places[owner][to] = static_cast<Place>(place_of(static_cast<uint64_t>(index[i])));
                    write(i, owner, to);
                }
            });
        }
    }

    size_t begin_of(int t) const { return share_begin(indices_.count, t, threads_); }

    Indices indices_{};
    int threads_ = 1;
    Scratch<uint16_t> owners_;                 // of each item
    std::vector<std::vector<size_t>> begins_;  // per thread and owner: where its items go
    std::vector<size_t> counts_;
};

}  // namespace gradsync
