#include "deal.hpp"

namespace gradsync {

Indices require_sorted(Indices indices, uint64_t size, size_t part) {
    check_indices(indices, part, size);
    if (indices.sorted) return indices;
    with_indices(indices, [](auto *index) {
        while (index[0] <= index[1]) ++index;
        throw NotSorted{index[0], index[1]};
    });
    return indices;
}

}  // namespace gradsync
