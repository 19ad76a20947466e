// Memory for archived tokens, in slabs. A slab has room for n_block tokens of all layers. The memory is host memory or
// a mapped file.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvtool {

// Slabs in mapped memory. The memory is anonymous or belongs to a file. If there is a file and memory is short, the
// operating system moves seldom used pages to the disk.
class slab_maps {
public:
    explicit slab_maps(size_t n_bytes);

    // Create a file at that path and unlink it at once, so that no file is left, whichever way the process ends. Throws
    // std::runtime_error on failure.
    slab_maps(const std::string & path, size_t n_bytes);
    ~slab_maps();

    slab_maps(const slab_maps &) = delete;

    bool has_file() const { return fd >= 0; }

    // allocate one more slab; throws out_of_space
    uint8_t * take();

    // return a slab's memory to the system; not for slabs of a file
    void give_back(uint8_t * slab);

    // free all slabs and truncate the file
    void clear();

private:
    const int     fd; // Descriptor of the file; -1 if there is no file.
    const size_t  size; // Bytes of a slab.
    const int64_t n_region; // Number of slabs that are mapped together, as a region.

    int64_t n_slab = 0;

    std::vector<uint8_t *> regions;
    std::vector<uint8_t *> free_slabs; // slabs that were given back
};

class store {
public:
    static constexpr int n_block = 256;

    // number of slabs that hold the tokens begin .. end - 1
    static int64_t n_slab(int64_t begin, int64_t end) { return begin < end ? (end - 1)/n_block - begin/n_block + 1 : 0; }

    store() = default;
    ~store();

    store(const store &) = delete;

    // set the bytes of a slab; no slab may exist yet
    void make(size_t n_bytes);

    // Allocate slabs in a new file at that path; no slab may exist yet. Throws std::runtime_error on failure.
    void open(const std::string & path);

    // Provide slabs for exactly the tokens begin .. end - 1. Slabs that already hold some of these tokens stay
    // unchanged. Other slabs are reused. If there is no memory, throws out_of_space and changes nothing.
    void fit(int64_t begin, int64_t end);

    // allocate the memory that `fit` will need; throws out_of_space
    void reserve(int64_t begin, int64_t end);

    // return unused slabs to the system; slabs in a file are kept
    void trim();

    void clear();

    // slab of token i
    uint8_t * at(int64_t i) const { return slabs[i/n_block - first]; }

    bool has_file() const { return maps && maps->has_file(); }

    size_t  slab_bytes() const { return size; }
    int64_t bytes()      const { return (slabs.size() + spares.size())*size; }

private:
    size_t size = 0; // bytes of a slab

    int64_t first = 0; // index of slabs[0]; token i is in the slab with index i/n_block

    std::vector<uint8_t *> slabs;
    std::vector<uint8_t *> spares;

    std::unique_ptr<slab_maps> maps;
};

} // namespace kvtool
