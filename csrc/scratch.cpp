#include "scratch.hpp"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

namespace gradsync {
namespace {

constexpr size_t kMaxKeptBytes = size_t{64} << 20;  // of one array; a larger one is given back to the system
constexpr size_t kMaxKept = 12;                     // arrays

struct Kept {
    std::unique_ptr<char[]> memory;
    size_t nbytes;
};

std::mutex lock;

std::vector<Kept> &kept() {
    static std::vector<Kept> arrays;  // by size, smallest first
    return arrays;
}

bool smaller(const Kept &array, size_t nbytes) { return array.nbytes < nbytes; }

}  // namespace

ScratchBytes::ScratchBytes(size_t nbytes) : nbytes_(nbytes) {
    if (nbytes == 0) return;
    {
        const std::lock_guard<std::mutex> guard(lock);
        const auto found = std::lower_bound(kept().begin(), kept().end(), nbytes, smaller);
        if (found != kept().end() && found->nbytes / 4 <= nbytes) {
            memory_ = std::move(found->memory);
            nbytes_ = found->nbytes;
            kept().erase(found);
            return;
        }
    }
    memory_.reset(new char[nbytes]);
}

ScratchBytes &ScratchBytes::operator=(ScratchBytes &&other) {
    std::swap(memory_, other.memory_);
    std::swap(nbytes_, other.nbytes_);
    return *this;
}

ScratchBytes::~ScratchBytes() {
    if (!memory_ || nbytes_ > kMaxKeptBytes) return;
    const std::lock_guard<std::mutex> guard(lock);
    if (kept().size() == kMaxKept) kept().erase(kept().begin());
    kept().insert(std::lower_bound(kept().begin(), kept().end(), nbytes_, smaller), Kept{std::move(memory_), nbytes_});
}

}  // namespace gradsync
