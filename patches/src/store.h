// Host memory for archived tokens, in slabs: a slab has n_block tokens of all layers.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtool {

class store {
public:
    static constexpr int n_block = 256;

    store() = default;
    ~store();

    store(const store &) = delete;

    // from now on, slabs have room for so many bytes; there must be none yet
    void make(size_t n_bytes);

    // Has slabs for the tokens begin .. end - 1. Those that have been there stay as they are; others are used again. Throws
    // no_room where there is no memory, and then all is as it was.
    void fit(int64_t begin, int64_t end);

    // gives back what is not in use
    void trim();

    // gives everything back
    void clear();

    // the slab with token i
    uint8_t * at(int64_t i) const { return slabs[i/n_block - first]; }

    size_t  slab_bytes() const { return size; }
    int64_t bytes()      const { return (slabs.size() + spares.size())*size; }

private:
    size_t size = 0; // of a slab

    int64_t first = 0; // slab of the stream: that of token i has number i/n_block

    std::vector<uint8_t *> slabs;
    std::vector<uint8_t *> spares;

    uint8_t * take();
    void      drop(uint8_t * slab);
};

} // namespace kvtool
