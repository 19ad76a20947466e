#include "store.h"

#include "error.h"

#include "llama-impl.h"

#include <algorithm>
#include <new>

namespace kvtool {

// slabs are whole pages
static constexpr size_t n_page = 4096;

store::~store() {
    clear();
}

void store::make(size_t n_bytes) {
    size = (n_bytes + n_page - 1)/n_page*n_page;
}

void store::fit(int64_t begin, int64_t end) {
    const int64_t n_old = slabs.size();
    const int64_t from  = begin/n_block;
    const int64_t n     = begin < end ? (end - 1)/n_block - from + 1 : 0;

    if (from == first && n == n_old) {
        return;
    }

    // those that stay
    const int64_t stay_0 = std::min(std::max(from, first), from + n);
    const int64_t stay_1 = std::max(std::min(from + n, first + n_old), stay_0);

    const int64_t n_new   = n - (stay_1 - stay_0);
    const int64_t n_spare = spares.size() + n_old - (stay_1 - stay_0);

    std::vector<uint8_t *> fitting(n);

    spares.reserve(std::max(n_spare, n_new));
    for (int64_t i = n_spare; i < n_new; ++i) {
        spares.push_back(take());
    }

    // nothing fails from here on
    for (int64_t i = first; i < first + n_old; ++i) {
        if (i >= stay_0 && i < stay_1) {
            fitting[i - from] = slabs[i - first];
        } else {
            spares.push_back(slabs[i - first]);
        }
    }
    for (auto & slab : fitting) {
        if (!slab) {
            slab = spares.back();
            spares.pop_back();
        }
    }

    slabs = std::move(fitting);
    first = from;
}

void store::trim() {
    for (uint8_t * slab : spares) {
        drop(slab);
    }
    spares.clear();
}

void store::clear() {
    for (uint8_t * slab : slabs) {
        drop(slab);
    }
    slabs.clear();
    trim();
}

uint8_t * store::take() {
    if (void * slab = ::operator new(size, std::nothrow)) {
        return (uint8_t *) slab;
    }
    throw no_room(format("no memory for %zu KiB more of the archive", size/1024));
}

void store::drop(uint8_t * slab) {
    ::operator delete(slab);
}

} // namespace kvtool
