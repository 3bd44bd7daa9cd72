#include "blocks.hpp"

namespace gradsync {

Blocks::Blocks(const std::vector<size_t> &lengths, size_t block) {
    sections_.reserve(lengths.size() + 1);
    for (size_t length : lengths) {
        const size_t size = block > 0 ? block : std::max<size_t>(length, 1);
        sections_.push_back({numel_, length, size, count_, pieces_});
        const size_t whole = length / size, rest = length % size;
        count_ += whole + (rest > 0);
        pieces_ += whole * groups_of(size) + groups_of(rest);
        numel_ += length;
    }
    sections_.push_back({numel_, 0, 1, count_, pieces_});
}

}  // namespace gradsync
