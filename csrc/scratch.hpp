// Working memory that is kept from call to call: the first touch of fresh pages costs more than most kernels.
#pragma once

#include <cstddef>
#include <memory>

namespace gradsync {

// An uninitialised array for one call or one object; its memory goes back to the process's pool, to be used again.
class ScratchBytes {
public:
    ScratchBytes() = default;
    explicit ScratchBytes(size_t nbytes);
    ScratchBytes(ScratchBytes &&) = default;
    ScratchBytes &operator=(ScratchBytes &&other);
    ~ScratchBytes();
    void *data() const { return memory_.get(); }

private:
    std::unique_ptr<char[]> memory_;
    size_t nbytes_ = 0;
};

template <typename T> class Scratch {
public:
    Scratch() = default;
    explicit Scratch(size_t count) : bytes_(count * sizeof(T)), count_(count) {}
    T *begin() const { return static_cast<T *>(bytes_.data()); }
    T *end() const { return begin() + count_; }
    T &operator[](size_t i) const { return begin()[i]; }
    size_t size() const { return count_; }

private:
    ScratchBytes bytes_;
    size_t count_ = 0;
};

}  // namespace gradsync
