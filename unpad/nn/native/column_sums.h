/* Sums over rows, in an order that does not depend on the number of threads: SUM_ROWS rows one after the other, then
 * SUM_ROWS of those sums, and so on, as torch's sums over rows of float and double.
 */
#ifndef UNPAD_COLUMN_SUMS_H
#define UNPAD_COLUMN_SUMS_H

#include "buffer.h"
#include "columns.h"

namespace unpad {
namespace {

constexpr int64_t SUM_ROWS = 16;

template <class T>
class ColumnSums {
  public:
    using Wide = typename T::Wide;

    /* For `rows` rows that are added; 0 for none at all. */
    ColumnSums(int64_t rows, int64_t width) : rows_(rows), width_(width) {
        if (rows) blocks_ = buffer_.at_least((rows + SUM_ROWS - 1) / SUM_ROWS * width);
    }

    /* The rows of a block, from a multiple of SUM_ROWS to the next, come in order and from one thread. */
    void add(int64_t row, const typename T::Element* numbers) {
        Wide* to = blocks_ + row / SUM_ROWS * width_;
        const bool first = row % SUM_ROWS == 0;
        for_columns<T>(width_, [&](int64_t c, auto m) UNPAD_INLINE {
            const typename T::Vec x = T::load(numbers + c, m);
            T::store(to + c, first ? x : T::load(to + c, m) + x, m);
        });
    }

    /* After the last row: all sums, (width). */
    void write(Wide* total, int num_threads) const {
        const int64_t full = rows_ / SUM_ROWS, tile = 4 * T::lanes;
        const int threads = useful_threads((full + 1) * width_, num_threads);
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t start = 0; start < width_; start += tile)
            for_columns<T>(std::min(tile, width_ - start), [&](int64_t c, auto m) UNPAD_INLINE {
                typename T::Vec some = T::set(0), more = T::set(0), most = T::set(0);
                const Wide* column = blocks_ + start + c;
                for (int64_t block = 0; block < full; ++block) {
                    some = some + T::load(column + block * width_, m);
                    if ((block + 1) % SUM_ROWS) continue;
                    more = more + some;
                    some = T::set(0);
                    if ((block + 1) % (SUM_ROWS * SUM_ROWS)) continue;
                    most = most + more;
                    more = T::set(0);
                }
                const typename T::Vec rest = rows_ % SUM_ROWS ? T::load(column + full * width_, m) : T::set(0);
                T::store(total + start + c, ((rest + some) + more) + most, m);
            });
    }

  private:
    const int64_t rows_, width_;
    Buffer<Wide> buffer_;
    Wide* blocks_ = nullptr;
};

}  // namespace
}  // namespace unpad

#endif
