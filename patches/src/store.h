// Memory for archived tokens, in slabs: a slab has n_block tokens of all layers. It is host memory, or lies in a file.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvtool {

// Slabs in maps of memory, or of a file: what is seldom read leaves the memory for the disk.
class slab_maps {
public:
    explicit slab_maps(size_t n_bytes);

    // A new file at that path, which has lost its name when this returns: nothing is left of it, however the process ends.
    // Throws where that cannot be.
    slab_maps(const std::string & path, size_t n_bytes);
    ~slab_maps();

    slab_maps(const slab_maps &) = delete;

    bool has_file() const { return fd >= 0; }

    // one slab more; throws no_room
    uint8_t * take();

    // a slab's memory; not in a file
    void give_back(uint8_t * slab);

    // gives back all, and makes the file empty
    void clear();

private:
    const int     fd; // -1: no file
    const size_t  size; // of a slab
    const int64_t n_region; // slabs that are mapped together

    int64_t n_slab = 0;

    std::vector<uint8_t *> regions;
    std::vector<uint8_t *> empty; // given back
};

class store {
public:
    static constexpr int n_block = 256;

    // how many slabs these tokens lie in
    static int64_t n_slab(int64_t begin, int64_t end) { return begin < end ? (end - 1)/n_block - begin/n_block + 1 : 0; }

    store() = default;
    ~store();

    store(const store &) = delete;

    // from now on, slabs have room for so many bytes; there must be none yet
    void make(size_t n_bytes);

    // From now on slabs lie in a new file at that path; there must be none yet. Throws where that cannot be.
    void open(const std::string & path);

    // Has slabs for the tokens begin .. end - 1. Those that have been there stay as they are; others are used again. Throws
    // no_room where there is no memory, and then all is as it was.
    void fit(int64_t begin, int64_t end);

    // takes the memory that `fit` will need. Throws no_room.
    void reserve(int64_t begin, int64_t end);

    // gives back what is not in use, but for what lies in a file
    void trim();

    // gives everything back
    void clear();

    // the slab with token i
    uint8_t * at(int64_t i) const { return slabs[i/n_block - first]; }

    bool has_file() const { return maps && maps->has_file(); }

    size_t  slab_bytes() const { return size; }
    int64_t bytes()      const { return (slabs.size() + spares.size())*size; }

private:
    size_t size = 0; // of a slab

    int64_t first = 0; // slab of the stream: that of token i has number i/n_block

    std::vector<uint8_t *> slabs;
    std::vector<uint8_t *> spares;

    std::unique_ptr<slab_maps> maps;
};

} // namespace kvtool
