#include "sum_rows.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace gradsync {
namespace {

constexpr size_t kBlockBytes = 128 << 10;  // sums of a block of rows: stay in the second-level cache for all parts
constexpr size_t kPieceBytes = 8 << 10;    // of rounded sums on the way to the outputs: stay in the first-level cache
constexpr size_t kMinBlockedDim = 16;      // narrower rows do not pay for walking the parts block by block
constexpr size_t kMinOrderedDim = 8;       // narrower rows do not pay for ordering unsorted items by block
constexpr size_t kAhead = 48;              // items to prefetch ahead, where rows lie anywhere in memory
constexpr size_t kAheadBytes = 8 << 10;    // but no more than these
constexpr size_t kAheadInPart = 16 << 10;  // bytes to prefetch ahead in a sorted part, across pages and blocks

template <typename Index>
void mark(const Indices &part, const Index *index, WordRange range, uint64_t *words) {
    const uint64_t first_row = range.begin * kWordBits, stop_row = range.end * kWordBits;
    if (part.sorted) {
        const size_t stop = seek(index, part, stop_row);
        for (size_t item = seek(index, part, first_row); item < stop; ++item) set_bit(words, index[item]);
        return;
    }
    for (size_t item = 0; item < part.count; ++item) {
        const uint64_t row = index[item];
        if (row - first_row < stop_row - first_row) set_bit(words, row);
    }
}

// An item to be sorted: its row, and in the low bits its place among all.
constexpr int kPlaceBits = 28;
constexpr uint64_t kPlace = (uint64_t{1} << kPlaceBits) - 1;
static_assert(kMaxBits / kWordBits <= kPlace + 1 && kMaxBits <= ~uint64_t{0} >> kPlaceBits, "row and place fit a word");

// Radix sort by the rows. Stable, and so by the places too.
void sort_by_row(Scratch<uint64_t> &items, uint64_t num_rows) {
    constexpr int kDigitBits = 11;
    constexpr uint64_t kDigit = (1 << kDigitBits) - 1;
    Scratch<uint64_t> sorted(items.size());
    for (int shift = kPlaceBits; (num_rows - 1) >> (shift - kPlaceBits) != 0; shift += kDigitBits) {
        std::array<uint32_t, kDigit + 1> next{};
        for (uint64_t item : items) ++next[item >> shift & kDigit];
        uint32_t begin = 0;
        for (uint32_t &place : next) begin += std::exchange(place, begin);
        for (uint64_t item : items) sorted[next[item >> shift & kDigit]++] = item;
        std::swap(items, sorted);
    }
}

}  // namespace

RowUnion::RowUnion(std::vector<Indices> parts, uint64_t num_rows, int threads) : parts_(std::move(parts)) {
    for (const Indices &part : parts_) total_ += part.count;
    if (total_ > std::numeric_limits<uint32_t>::max())
        throw std::length_error("sum_rows: the parts have more than 2^32 - 1 rows in all: sum them in several calls");
    for (size_t p = 0; p < parts_.size(); ++p) {
        check_indices(parts_[p], p, num_rows);
        sorted_ = sorted_ && parts_[p].sorted;
    }

    check_bits(num_rows);
    if (total_ == 0) num_rows = 0;
    if (words_for(num_rows) > kMinSortedWords + kSortedWordsPerItem * total_) num_rows = number_rows(num_rows);
    bitmap_ = RankBitmap(num_rows, threads);
    // By range of rows, not of items: each word has one writer.
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; ++t) {
        const WordRange range{share_begin(bitmap_.num_words(), t, threads), share_begin(bitmap_.num_words(), t + 1, threads)};
        for (const Indices &part : parts_)
            with_indices(part, [&](auto *index) { mark(part, index, range, bitmap_.words()); });
    }
    bitmap_.rank_bits();
}

// Puts numbers in the place of all indices; returns how many. Neither the order of items nor that of rows changes.
size_t RowUnion::number_rows(uint64_t num_rows) {
    Scratch<uint64_t> items(total_);
    uint64_t place = 0;
    for (const Indices &part : parts_)
        with_indices(part, [&](auto *index) {
            for (size_t i = 0; i < part.count; ++i, ++place) items[place] = uint64_t(index[i]) << kPlaceBits | place;
        });
    if (!std::is_sorted(items.begin(), items.end())) sort_by_row(items, num_rows);

    rows_ = Scratch<int64_t>(total_);
    numbers_ = Scratch<int32_t>(total_);
    size_t count = 0;
    for (uint64_t item : items) {
        const int64_t row = item >> kPlaceBits;
        if (count == 0 || rows_[count - 1] != row) rows_[count++] = row;
        numbers_[item & kPlace] = static_cast<int32_t>(count - 1);
    }
    const int32_t *numbers = numbers_.begin();
    for (Indices &part : parts_) {
        part = {numbers, false, part.count, part.sorted};
        numbers += part.count;
    }
    return count;
}

template <typename Index> void RowUnion::write_indices(Index *out, int threads) const {
    if (rows_.size() == 0) return bitmap_.write_indices(out, threads);
    for (size_t r = 0; r < count(); ++r) out[r] = static_cast<Index>(rows_[r]);
}

template void RowUnion::write_indices(int32_t *, int) const;
template void RowUnion::write_indices(int64_t *, int) const;

// One call of sum().
template <typename T> class RowUnion::Sum {
public:
    using Acc = Accumulator<T>;
    static constexpr bool kInPlace = std::is_same_v<T, Acc>;  // sums are of the type of the outputs

    Sum(const RowUnion &rows, const std::vector<Rows<const T>> &values, size_t dim, double scale,
        const std::vector<Stripe<T>> &outs, int threads)
        : parts_(rows.parts_), bitmap_(rows.bitmap_), total_(rows.total_), values_(values), dim_(dim),
          scale_(static_cast<Acc>(scale)), outs_(outs), threads_(threads) {
        whole_ = outs.size() == 1 && outs[0].width == dim && outs[0].rows.stride == dim;
        stream_ = bitmap_.count() * dim * sizeof(T) >= kStreamedBytes && dim >= kMinBlockedDim;
        direct_ = kInPlace && whole_ && !stream_;
        const bool ordered = !rows.sorted_ && (!direct_ || dim >= kMinOrderedDim);
        const bool one_block = !ordered && direct_ && (!rows.sorted_ || dim < kMinBlockedDim);
        max_rows_ = one_block ? bitmap_.count() : std::max<size_t>(kWordBits, kBlockBytes / (dim * sizeof(Acc)));
        if (ordered) {
            while (max_rows_ & (max_rows_ - 1)) max_rows_ &= max_rows_ - 1;  // a power of two
            run_ordered();
        } else {
            run_blocked();
        }
    }

private:
    // A thread's block of sums, and a piece of it on the way to the outputs.
    struct Block {
        Scratch<Acc> sums;
        Scratch<T> rounded;
        Scratch<uint8_t> begun;  // whether a row of the block has been added to
        Scratch<Acc> zeros;      // what it is added to then
    };

    Block new_block() const {
        const size_t rows = std::min(max_rows_, bitmap_.count());
        Block block;
        if (!direct_) block.sums = Scratch<Acc>(rows * dim_);
        if (kInPlace) return block;
        block.rounded = Scratch<T>(piece_rows() * dim_);
        block.begun = Scratch<uint8_t>(rows);
        block.zeros = Scratch<Acc>(dim_);
        std::fill(block.zeros.begin(), block.zeros.end(), Acc{0});
        return block;
    }

    size_t piece_rows() const { return std::max<size_t>(1, kPieceBytes / (dim_ * sizeof(T))); }

    // Where the sums of the rows from rank `first` on grow: set to zero, or noted as not begun.
    Acc *begin_block(const Block &block, size_t first, size_t count) const {
        Acc *sums = block.sums.begin();
        if constexpr (kInPlace)
            if (direct_) sums = outs_[0].rows[first];
        if (!notes_begun(dim_)) std::fill(sums, sums + count * dim_, Acc{0});
        else std::fill(block.begun.begin(), block.begun.begin() + count, 0);
        return sums;
    }

    // Sums that are wider than what is added pay for a note of where they have begun: it saves a pass over them.
    static constexpr bool notes_begun(size_t dim) { return !kInPlace && dim >= kMinBlockedDim; }

    // The sums of a block's rows, by rank. The first row is added to zeros too: x + 0 is not x for -0.0.
    struct Growing {
        Acc *sums;
        const Acc *zeros;
        uint8_t *begun;

        template <typename Dim> void add(size_t rank, const T *row, Dim dim) const {
            Acc *const to = sums + rank * dim;
            if constexpr (!kInPlace)
                if (notes_begun(dim)) {
                    add_row(to, begun[rank] ? to : zeros, row, dim);
                    begun[rank] = true;
                    return;
                }
            add_row(to, row, dim);
        }
    };

    Growing growing(const Block &block, Acc *sums, size_t first) const {
        if constexpr (kInPlace) return {sums - first * dim_, nullptr, nullptr};
        else return {sums - first * dim_, block.zeros.begin(), block.begun.begin() - first};
    }

    void end_block(const Block &block, Acc *sums, size_t first, size_t count) const {
        const size_t step = direct_ ? count : piece_rows();
        for (size_t r = 0; r < count; r += step)
            end_piece(block, sums + r * dim_, first + r, std::min(step, count - r));
        if (stream_) order_stores();
    }

    // Scales, rounds, and spreads rows over the stripes while they are in cache.
    void end_piece(const Block &block, Acc *sums, size_t first, size_t count) const {
        if (scale_ != Acc{1})
            for (size_t i = 0; i < count * dim_; ++i) sums[i] *= scale_;
        if (direct_) return;
        const T *rounded;
        if constexpr (kInPlace) {
            rounded = sums;
        } else {
            if (whole_) return stream_ ? narrow_row<true>(outs_[0].rows[first], sums, count * dim_)
                                       : narrow_row(outs_[0].rows[first], sums, count * dim_);
            narrow_row(block.rounded.begin(), sums, count * dim_);
            rounded = block.rounded.begin();
        }
        for (const Stripe<T> &out : outs_)
            copy_rows({reinterpret_cast<char *>(out.rows[first]), out.rows.stride * sizeof(T)},
                      {reinterpret_cast<const char *>(rounded + out.begin), dim_ * sizeof(T)}, out.width * sizeof(T),
                      count, stream_);
    }

    void run_blocked() const {
        std::vector<Block> blocks(threads_);
        for (Block &block : blocks) block = new_block();
#pragma omp parallel for num_threads(threads_) schedule(static) if (threads_ > 1)
        for (int t = 0; t < threads_; ++t) sum_words(bitmap_.share(t, threads_), blocks[t]);
    }

    void sum_words(WordRange range, const Block &block) const {
        std::vector<size_t> next(parts_.size());  // per part: the first item not yet added
        for (size_t p = 0; p < parts_.size(); ++p)
            next[p] = with_indices(parts_[p], [&](auto *index) { return seek(index, parts_[p], range.begin * kWordBits); });

        for (size_t word = range.begin, stop; word < range.end; word = stop) {
            stop = bitmap_.block_end(word, range.end, max_rows_);
            const size_t first = bitmap_.rank_of_word(word), count = bitmap_.rank_of_word(stop) - first;
            if (count == 0) continue;
            Acc *const sums = begin_block(block, first, count);
            for (size_t p = 0; p < parts_.size(); ++p) {
                next[p] = with_indices(parts_[p], [&](auto *index) {
                    return add_part(parts_[p], index, next[p], {word, stop}, values_[p], growing(block, sums, first));
                });
            }
            end_block(block, sums, first, count);
        }
    }

    // Adds the items of one part whose rows are in the range; returns where a sorted part goes on.
    template <typename Index>
    size_t add_part(const Indices &part, const Index *index, size_t item, WordRange range, Rows<const T> values,
                    Growing out) const {
        return with_known_dim(dim_, [&](auto dim) {
            const size_t ahead = std::max<size_t>(1, kAheadInPart / (dim * sizeof(T))) * values.stride;
            return add_items(part, index, item, range, values, [out, dim, ahead](size_t rank, const T *row) {
                if (dim >= kMinBlockedDim) prefetch_row(row + ahead, dim * sizeof(T));
                out.add(rank, row, dim);
            });
        });
    }

    // Not inlined, and with values of its own: the loop needs all registers.
    template <typename Index, typename Add>
    [[gnu::noinline]] size_t add_items(const Indices &part, const Index *index, size_t item, WordRange range,
                                       Rows<const T> values, Add add) const {
        const uint64_t first_row = range.begin * kWordBits, num_rows = (range.end - range.begin) * kWordBits;
        const BitRanks ranks = bitmap_.ranks();
        const size_t count = part.count;
        for (; item < count; ++item) {
            const uint64_t row = index[item];
            if (row - first_row < num_rows) add(ranks[row], values[item]);
            else if (part.sorted) return item;
        }
        return part.sorted ? item : 0;
    }

    // Unsorted items are put in the order of their blocks first (stable counting sort); then each block's items are
    // fetched from wherever they are.
    struct Item {
        uint32_t place, rank;  // among all items of all parts; among the rows
    };

    void run_ordered() const {
        const Scratch<Item> items(total_);
        std::vector<size_t> ends((bitmap_.count() + max_rows_ - 1) / max_rows_);  // past each block's last item
        order_items(items, ends);

        std::vector<Block> blocks(threads_);
        for (Block &block : blocks) block = new_block();
#pragma omp parallel for num_threads(threads_) schedule(static) if (threads_ > 1)
        for (int t = 0; t < threads_; ++t)
            for (size_t b = block_at_share(ends, t); b < block_at_share(ends, t + 1); ++b)
                sum_ordered(items.begin() + (b == 0 ? 0 : ends[b - 1]), items.begin() + ends[b], b * max_rows_,
                            blocks[t]);
    }

    void order_items(const Scratch<Item> &items, std::vector<size_t> &ends) const {
        const int shift = lowest_bit(max_rows_);
        const Scratch<uint32_t> ranks(total_);
        // By share of the items: how many of each block, and then where the next one of each goes.
        std::vector<std::vector<size_t>> nexts(threads_, std::vector<size_t>(ends.size(), 0));
#pragma omp parallel for num_threads(threads_) schedule(static) if (threads_ > 1)
        for (int t = 0; t < threads_; ++t) {
            size_t *const counts = nexts[t].data();
            for_share_of_ranks(t, [&](size_t place, size_t rank) {
                ranks[place] = static_cast<uint32_t>(rank);
                ++counts[rank >> shift];
            });
        }
        size_t begin = 0;
        for (size_t b = 0; b < ends.size(); ++b) {
            for (std::vector<size_t> &next : nexts) begin += std::exchange(next[b], begin);
            ends[b] = begin;
        }
#pragma omp parallel for num_threads(threads_) schedule(static) if (threads_ > 1)
        for (int t = 0; t < threads_; ++t) {
            size_t *const next = nexts[t].data();
            const size_t stop = share_begin(total_, t + 1, threads_);
            for (size_t place = share_begin(total_, t, threads_); place < stop; ++place)
                items[next[ranks[place] >> shift]++] = {static_cast<uint32_t>(place), ranks[place]};
        }
    }

    // Calls body(place, rank) for thread t's share of the items of all parts.
    template <typename Body> void for_share_of_ranks(int t, Body body) const {
        const BitRanks ranks = bitmap_.ranks();
        const size_t begin = share_begin(total_, t, threads_), end = share_begin(total_, t + 1, threads_);
        size_t first = 0;  // item of the part, among all
        for (const Indices &part : parts_) {
            const size_t stop = std::min(end, first + part.count);
            with_indices(part, [&](auto *index) {
                for (size_t place = std::max(begin, first); place < stop; ++place)
                    body(place, ranks[index[place - first]]);
            });
            first += part.count;
        }
    }

    // Cuts the blocks so that each share has about the same number of items.
    size_t block_at_share(const std::vector<size_t> &ends, int t) const {
        if (t == threads_) return ends.size();
        return std::upper_bound(ends.begin(), ends.end(), share_begin(total_, t, threads_)) - ends.begin();
    }

    void sum_ordered(const Item *item, const Item *stop, size_t first, const Block &block) const {
        const size_t count = std::min(max_rows_, bitmap_.count() - first);
        Acc *const sums = begin_block(block, first, count);
        const Growing out = growing(block, sums, first);
        with_known_dim(dim_, [&](auto dim) {
            const size_t ahead = std::clamp<size_t>(kAheadBytes / (dim * sizeof(T)), 2, kAhead);
            Places here(*this), later(*this);
            for (size_t i = 0; i < ahead && item + i < stop; ++i) prefetch_row(later[item[i].place], dim * sizeof(T));
            for (; item < stop; ++item) {
                if (item + ahead < stop) prefetch_row(later[item[ahead].place], dim * sizeof(T));
                out.add(item->rank, here[item->place], dim);
            }
        });
        end_block(block, sums, first, count);
    }

    // The rows at ascending places among the items of all parts.
    class Places {
    public:
        explicit Places(const Sum &sum) : sum_(sum) { go_to(0); }
        const T *operator[](size_t place) {
            while (place >= end_) go_to(part_ + 1);
            return values_[place - begin_];
        }

    private:
        void go_to(size_t part) {
            part_ = part;
            begin_ = end_;
            end_ += sum_.parts_[part].count;
            values_ = sum_.values_[part];
        }

        const Sum &sum_;
        Rows<const T> values_;
        size_t part_, begin_, end_ = 0;
    };

    const std::vector<Indices> &parts_;
    const RankBitmap &bitmap_;
    const size_t total_;
    const std::vector<Rows<const T>> &values_;
    const size_t dim_;
    const Acc scale_;
    const std::vector<Stripe<T>> &outs_;
    const int threads_;
    bool stream_, whole_;  // the output is one array of whole rows
    bool direct_;          // and sums grow in it
    size_t max_rows_;
};

template <typename T>
void RowUnion::sum(const std::vector<Rows<const T>> &values, size_t dim, double scale,
                   const std::vector<Stripe<T>> &outs, int threads) const {
    if (dim > 0 && bitmap_.count() > 0) Sum<T>(*this, values, dim, scale, outs, threads);
}

template void RowUnion::sum(const std::vector<Rows<const float>> &, size_t, double, const std::vector<Stripe<float>> &, int) const;
template void RowUnion::sum(const std::vector<Rows<const double>> &, size_t, double, const std::vector<Stripe<double>> &, int) const;
template void RowUnion::sum(const std::vector<Rows<const Bfloat16>> &, size_t, double, const std::vector<Stripe<Bfloat16>> &, int) const;
template void RowUnion::sum(const std::vector<Rows<const Float16>> &, size_t, double, const std::vector<Stripe<Float16>> &, int) const;

}  // namespace gradsync
