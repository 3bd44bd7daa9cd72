#include "parts.hpp"

#include <algorithm>
#include <exception>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "nonzero.hpp"
#include "scalars.hpp"
#include "scratch.hpp"

namespace gradsync {
namespace {

constexpr uint64_t kChunk = 4096;  // positions of a part that are worked on at a time, in the first-level cache

// Calls body(t) for each thread; what one of them throws is thrown when all have ended.
template <typename Body> void on_threads(int threads, Body body) {
    std::vector<std::exception_ptr> thrown(threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; ++t) {
        try {
            body(t);
        } catch (...) {
            thrown[t] = std::current_exception();
        }
    }
    for (const std::exception_ptr &each : thrown)
        if (each) std::rethrow_exception(each);
}

// Thread t's share of [0, size), from and to a multiple of `step` or the end.
struct Share {
    Share(uint64_t size, uint64_t step, int t, int threads)
        : begin(std::min(size, share_begin((size + step - 1) / step, t, threads) * step)),
          end(std::min(size, share_begin((size + step - 1) / step, t + 1, threads) * step)) {}
    uint64_t begin, end;
};

void require_fit(size_t count) {
    if (count > std::numeric_limits<uint32_t>::max()) throw std::length_error("more than 2^32 - 1 entries: split the tensor");
}

}  // namespace

ElementPartition::ElementPartition(const void *x, size_t numel, size_t itemsize, RotatedStripe stripe, uint64_t *words,
                                   int threads)
    : x_(x), numel_(numel), itemsize_(itemsize), stripe_(stripe), words_(words), counts_(stripe.owners()) {
    check_bits(numel);
    if (itemsize == 2) mark<uint16_t>(threads);
    else if (itemsize == 4) mark<uint32_t>(threads);
    else mark<uint64_t>(threads);
    const size_t row_size = row_words();
    for (uint32_t owner = 0; owner < stripe.owners(); ++owner) {
        counts_[owner] = count_bits(row(owner), row_size, threads);
        require_fit(counts_[owner]);
    }
}

// Threads share whole words of the owners' rows.
template <typename Unsigned> void ElementPartition::mark(int threads) {
    const auto *x = static_cast<const Unsigned *>(x_);
    const uint64_t owners = stripe_.owners(), row_size = row_words();
    on_threads(threads, [&](int t) {
        const Share rows(row_size, 1, t, threads);
        for (uint64_t owner = 0; owner < owners; ++owner)
            std::fill(row(owner) + rows.begin, row(owner) + rows.end, 0);
        const RotatedStripe stripe = stripe_;
        uint64_t *const words = words_;
        const uint64_t end = std::min<uint64_t>(numel_, rows.end * kWordBits * owners);
        for (uint64_t first = rows.begin * kWordBits * owners; first < end; first += kWordBits) {
            const bool whole = first + kWordBits <= end;
            uint64_t mask = whole ? nonzero_mask(x + first) : nonzero_mask(x + first, end - first);
            for (; mask != 0; mask &= mask - 1) {
                const uint64_t i = first + lowest_bit(mask), q = stripe.local(i);
                set_bit(words, stripe.owner(i, q) * row_size * kWordBits + q);
            }
        }
    });
}

void ElementPartition::write(const std::vector<PackedOut> &positions, const std::vector<void *> &values,
                             int threads) const {
    if (itemsize_ == 2) write_as<uint16_t>(positions, values, threads);
    else if (itemsize_ == 4) write_as<uint32_t>(positions, values, threads);
    else write_as<uint64_t>(positions, values, threads);
    const uint32_t owners = stripe_.owners();
    const uint64_t size = stripe_.runs(numel_);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (uint32_t owner = 0; owner < owners; ++owner) write_marks(row(owner), size, counts_[owner], positions[owner]);
}

// Block by block of the tensor, in the order of the owners: an owner's elements lie apart, so that the lines of a block
// are asked for before any of them is read; each of them where most have an element, else those that do.
template <typename Unsigned>
void ElementPartition::write_as(const std::vector<PackedOut> &positions, const std::vector<void *> &values,
                                int threads) const {
    constexpr size_t kBlockBytes = 64 << 10, kLine = 64 / sizeof(Unsigned);
    const uint64_t owners = stripe_.owners(), row_size = row_words();
    const uint64_t step = std::clamp<uint64_t>(kBlockBytes / (owners * itemsize_ * kWordBits), 1, kChunk / kWordBits);
    const size_t total = std::accumulate(counts_.begin(), counts_.end(), size_t{0});
    const bool most = total * kLine > numel_;
    const auto *x = static_cast<const Unsigned *>(x_);
    on_threads(threads, [&](int t) {
        const Share share(row_size, step, t, threads);
        std::vector<Unsigned *> next;
        std::vector<PackedWriter> writers;
        for (uint32_t owner = 0; owner < owners; ++owner) {
            const size_t item = popcount(row(owner), share.begin);
            next.push_back(static_cast<Unsigned *>(values[owner]) + item);
            writers.emplace_back(positions[owner], counts_[owner], stripe_.runs(numel_), item);
        }
        const RotatedStripe stripe = stripe_;
        std::vector<size_t> found(owners);
        const Scratch<uint32_t> places(step * kWordBits * owners);
        int32_t local[kChunk];
        for (uint64_t word = share.begin; word < share.end; word += step) {
            const uint64_t some = std::min(step, share.end - word), first = word * kWordBits, base = first * owners;
            if (most)
                for (uint64_t i = base; i < std::min<uint64_t>(numel_, base + step * kWordBits * owners); i += kLine)
                    __builtin_prefetch(x + i);
            uint32_t *place = places.begin();
            for (uint32_t owner = 0; owner < owners; ++owner) {
                found[owner] = popcount(row(owner) + word, some);
                decode_words(row(owner) + word, some, 0, local, found[owner]);
                writers[owner].append(local, found[owner], first);
                for (size_t i = 0; i < found[owner]; ++i) place[i] = stripe.index(owner, first + local[i]) - base;
                if (!most)
                    for (size_t i = 0; i < found[owner]; ++i) __builtin_prefetch(x + base + place[i]);
                place += found[owner];
            }
            place = places.begin();
            for (uint32_t owner = 0; owner < owners; ++owner) {
                Unsigned *const to = next[owner];
                for (size_t i = 0; i < found[owner]; ++i) to[i] = x[base + place[i]];
                place += found[owner], next[owner] += found[owner];
            }
        }
    });
}

ElementUnion::ElementUnion(std::vector<Packed> parts, uint64_t size, uint64_t *words, int threads)
    : parts_(std::move(parts)), size_(size), words_(words) {
    check_bits(size);
    std::vector<std::vector<size_t>> begins(threads), ends(threads);  // items of each part that each thread has read
    on_threads(threads, [&](int t) {
        const Share share(size_, kChunk, t, threads);
        std::fill(words_ + words_for(share.begin), words_ + words_for(share.end), 0);
        int32_t positions[kChunk + PackedReader::kLanes];
        for (const Packed &part : parts_) {
            PackedReader reader(part, size_);
            reader.skip_to(share.begin);
            begins[t].push_back(reader.item());
            for (uint64_t begin = share.begin; begin < share.end || begin == 0; begin += kChunk) {
                const size_t found = reader.read(std::min(begin + kChunk, share.end), -static_cast<int64_t>(begin),
                                                 positions, kChunk + PackedReader::kLanes);
                uint64_t *const to = words_ + begin / kWordBits;
                for (size_t i = 0; i < found; ++i) set_bit(to, positions[i]);
            }
            ends[t].push_back(reader.item());
        }
    });
    for (int t = 1; t < threads; ++t)  // else what does not ascend was skipped
        if (begins[t] != ends[t - 1]) throw std::invalid_argument("the message is malformed: its indices do not ascend");
    count_ = count_bits(words_, words_for(size_), threads);
    require_fit(count_);
}

// Sums lie where their positions are in the chunk, and are then moved together.
template <typename T>
void ElementUnion::sum(const std::vector<const T *> &values, double scale, PackedOut positions, T *out,
                       int threads) const {
    using Acc = Accumulator<T>;
    on_threads(threads, [&](int t) {
        const Share share(size_, kChunk, t, threads);
        std::vector<PackedReader> readers;
        for (const Packed &part : parts_) {
            readers.emplace_back(part, size_);
            readers.back().skip_to(share.begin);
        }
        const size_t item = popcount(words_, words_for(share.begin));
        PackedWriter writer(positions, count_, size_, item);
        T *to = out + item;
        const auto factor = static_cast<Acc>(scale);
        int32_t local[kChunk + PackedReader::kLanes];
        Acc sums[kChunk] = {};
        for (uint64_t begin = share.begin; begin < share.end; begin += kChunk) {
            const uint64_t end = std::min(begin + kChunk, share.end);
            for (size_t p = 0; p < readers.size(); ++p) {
                const T *const from = values[p] + readers[p].item();
                const size_t found =
                    readers[p].read(end, -static_cast<int64_t>(begin), local, kChunk + PackedReader::kLanes);
                for (size_t i = 0; i < found; ++i) sums[local[i]] += widen(from[i]);
            }
            const size_t first = begin / kWordBits, num_words = words_for(end) - first;
            const size_t found = popcount(words_ + first, num_words);
            decode_words(words_ + first, num_words, 0, local, found);
            writer.append(local, found, begin);
            Acc together[kChunk];
            for (size_t i = 0; i < found; ++i) together[i] = sums[local[i]] * factor, sums[local[i]] = Acc{0};
            if constexpr (std::is_same_v<T, Acc>) std::copy(together, together + found, to);
            else narrow_row(to, together, found);
            to += found;
        }
    });
    write_marks(words_, size_, count_, positions);
}

template void ElementUnion::sum(const std::vector<const float *> &, double, PackedOut, float *, int) const;
template void ElementUnion::sum(const std::vector<const double *> &, double, PackedOut, double *, int) const;
template void ElementUnion::sum(const std::vector<const Bfloat16 *> &, double, PackedOut, Bfloat16 *, int) const;
template void ElementUnion::sum(const std::vector<const Float16 *> &, double, PackedOut, Float16 *, int) const;

// Nothing is wrong with the parts, or throws. Only the last position may be of an element beyond the tensor's end.
static void check_parts(RotatedStripe stripe, const std::vector<Packed> &parts, uint64_t runs, uint64_t size) {
    int64_t positions[kChunk + PackedReader::kLanes];
    for (size_t owner = 0; owner < parts.size(); ++owner) {
        PackedReader reader(parts[owner], runs);
        for (uint64_t begin = 0; begin < runs || begin == 0; begin += kChunk) {
            const uint64_t end = std::min(runs, begin + kChunk);
            const size_t found = reader.read(end, 0, positions, kChunk + PackedReader::kLanes);
            if (end < runs || found == 0 || static_cast<uint64_t>(positions[found - 1]) + 1 < runs) continue;
            const uint64_t last = stripe.index(owner, positions[found - 1]);
            if (last >= size) throw BadIndex{owner, static_cast<int64_t>(last)};
        }
    }
}

// Block by block, so that the lines that the owners write by turns stay in the first-level cache. Outputs that no cache
// holds are put together elsewhere: their lines need not be read before, and hardly more are written than zeros.
template <typename Value>
static void join_as(RotatedStripe stripe, const std::vector<Packed> &parts, const std::vector<const void *> &values,
                    Value *out, uint64_t size, int threads) {
    constexpr uint64_t kBlockBytes = 16 << 10, kLeast = 256;
    const uint64_t owners = stripe.owners(), runs = stripe.runs(size);
    const uint64_t block = std::clamp(kBlockBytes / (owners * sizeof(Value)) / kLeast * kLeast, kLeast, kChunk);
    const bool stream = size * sizeof(Value) >= kStreamedBytes;
    on_threads(threads, [&](int t) {
        const Share share(runs, block, t, threads);
        const Scratch<Value> joined(stream ? block * owners : 0);
        std::vector<PackedReader> readers;
        for (const Packed &part : parts) {
            readers.emplace_back(part, runs);
            readers.back().skip_to(share.begin);
        }
        int32_t positions[kChunk + PackedReader::kLanes];
        uint64_t places[kChunk];
        for (uint64_t first = share.begin; first < share.end; first += block) {
            const uint64_t stop = std::min(first + block, share.end);
            const uint64_t base = first * owners, count = std::min(stop * owners, size) - base;
            Value *const to = stream ? joined.begin() : out + base;
            std::fill(to, to + count, Value{0});
            for (uint64_t owner = 0; owner < owners; ++owner) {
                const auto *from = static_cast<const Value *>(values[owner]) + readers[owner].item();
                const size_t found = readers[owner].read(stop, 0, positions, kChunk + PackedReader::kLanes);
                // A place is computed before it is written to: a loop without stores that might alias is vectorised.
                for (size_t i = 0; i < found; ++i) places[i] = stripe.index(owner, positions[i]) - base;
                for (size_t i = 0; i < found; ++i) to[places[i]] = from[i];
            }
            if (stream)
                stream_bytes(reinterpret_cast<char *>(out + base), reinterpret_cast<const char *>(to),
                             count * sizeof(Value));
        }
        order_stores();
    });
}

void join_elements(RotatedStripe stripe, const std::vector<Packed> &parts, const std::vector<const void *> &values,
                   void *out, uint64_t size, size_t itemsize, int threads) {
    check_parts(stripe, parts, stripe.runs(size), size);
    if (itemsize == 2) join_as(stripe, parts, values, static_cast<uint16_t *>(out), size, threads);
    else if (itemsize == 4) join_as(stripe, parts, values, static_cast<uint32_t *>(out), size, threads);
    else join_as(stripe, parts, values, static_cast<uint64_t *>(out), size, threads);
}

}  // namespace gradsync
