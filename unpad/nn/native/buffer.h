/* Memory of the kernels. std::vector's functions are shared by all files that are linked, and one of a better
 * target would then run in all: what is used of the standard library must be inlined or compiled by it. */
#ifndef UNPAD_BUFFER_H
#define UNPAD_BUFFER_H

#include <cstdint>
#include <cstdlib>

namespace unpad {
namespace {

/* Growing buffer, aligned to cache lines; its contents are lost when it grows. */
template <class T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    T* at_least(int64_t count) {
        if (count <= capacity_) return data_;
        std::free(data_);
        data_ = (T*)std::aligned_alloc(64, ((size_t)count * sizeof(T) + 63) / 64 * 64);
        if (!data_) std::abort();
        capacity_ = count;
        return data_;
    }

    T* data() const { return data_; }

  private:
    T* data_ = nullptr;
    int64_t capacity_ = 0;
};

}  // namespace
}  // namespace unpad

#endif
