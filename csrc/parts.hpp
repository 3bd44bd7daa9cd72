// The non-zero elements of a tensor in messages to owners by rotated stripe, their sums there, and back: Zen's Balanced
// Parallelism (OSDI 2025, section 3) without a list of all indices anywhere. Beside the messages there is one bitmap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "elements.hpp"
#include "packed.hpp"

namespace gradsync {

// Which elements are not zero, for each owner: a row of bits of its part.
class ElementPartition {
public:
    // `words` has words_for() the stripe's runs() for each owner; they are the partition's from now on.
    ElementPartition(const void *x, size_t numel, size_t itemsize, RotatedStripe stripe, uint64_t *words, int threads);

    const RotatedStripe &stripe() const { return stripe_; }
    const std::vector<size_t> &counts() const { return counts_; }
    void write(const std::vector<PackedOut> &positions, const std::vector<void *> &values, int threads) const;

private:
    template <typename Unsigned> void mark(int threads);
    template <typename Unsigned>
    void write_as(const std::vector<PackedOut> &positions, const std::vector<void *> &values, int threads) const;
    size_t row_words() const { return words_for(stripe_.runs(numel_)); }
    uint64_t *row(uint32_t owner) const { return words_ + owner * row_words(); }

    const void *x_;
    size_t numel_, itemsize_;
    RotatedStripe stripe_;
    uint64_t *words_;
    std::vector<size_t> counts_;
};

// The positions that any of several parts of [0, size) has.
class ElementUnion {
public:
    // `words`: words_for(size), the union's from now on. Throws std::invalid_argument for a malformed part.
    ElementUnion(std::vector<Packed> parts, uint64_t size, uint64_t *words, int threads);

    size_t count() const { return count_; }
    // Writes them, and scale * the sum of the parts' values at each, in the order of the parts, rounded once.
    template <typename T>
    void sum(const std::vector<const T *> &values, double scale, PackedOut positions, T *out, int threads) const;

private:
    std::vector<Packed> parts_;
    uint64_t size_;
    uint64_t *words_;
    size_t count_;
};

// The elements of all owners where they belong in out[0, size), zero everywhere else. Throws BadIndex with an element
// that is not in [0, size), std::invalid_argument for a malformed part; both before it writes.
void join_elements(RotatedStripe stripe, const std::vector<Packed> &parts, const std::vector<const void *> &values,
                   void *out, uint64_t size, size_t itemsize, int threads);

}  // namespace gradsync
