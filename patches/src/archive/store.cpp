#include "store.h"

#include "out-of-space.h"

#include "../ggml/src/ggml-impl.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#if !defined(_WIN32)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace kvtool {

//
// class slab_maps
//

static out_of_space no_memory(size_t n_bytes) {
    return out_of_space("no memory for " + std::to_string(n_bytes/1024) + " KiB more of the archive");
}

#if defined(_WIN32)

slab_maps::slab_maps(size_t n_bytes) : fd(-1), size(n_bytes), n_region(1) {}

slab_maps::slab_maps(const std::string &, size_t) : fd(-1), size(0), n_region(1) {
    throw std::runtime_error("an archive in a file is not there on Windows yet");
}

slab_maps::~slab_maps() {
    clear();
}

uint8_t * slab_maps::take() {
    regions.reserve(regions.size() + 1);
    regions.push_back((uint8_t *) ::operator new(size, std::nothrow));
    if (!regions.back()) {
        regions.pop_back();
        throw no_memory(size);
    }
    return regions.back();
}

void slab_maps::give_back(uint8_t * slab) {
    regions.erase(std::find(regions.begin(), regions.end(), slab));
    ::operator delete(slab);
}

void slab_maps::clear() {
    for (uint8_t * region : regions) {
        ::operator delete(region);
    }
    regions.clear();
}

static size_t page_bytes() { return 4096; }

#else

static size_t page_bytes() {
    return sysconf(_SC_PAGESIZE);
}

static int create(const std::string & path) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) {
        throw std::runtime_error(strerror(errno));
    }
    return fd;
}

// extend a file by n bytes and reserve the disk space; returns an error number, 0 on success
static int grow(int fd, off_t n_old, off_t n) {
    int error = 0;
#if defined(__APPLE__)
    fstore_t request = { F_ALLOCATEALL, F_PEOFPOSMODE, 0, n, 0 };
    if (fcntl(fd, F_PREALLOCATE, &request) < 0 || ftruncate(fd, n_old + n) < 0) {
        error = errno;
    }
#else
    do {
        error = posix_fallocate(fd, n_old, n);
    } while (error == EINTR);
#endif
    if (error != 0 && ftruncate(fd, n_old) < 0) {
        GGML_LOG_WARN("cannot shorten the archive's file: %s\n", strerror(errno));
    }
    return error;
}

// Number of slabs of a file that are mapped by one call of mmap. Slabs are mapped together because a process may have
// only a limited number of maps (65,530 on Linux)
static constexpr int64_t n_region_of_file = 64;

// Number of bytes that a call of mmap maps. Pages without a slab are never touched, so they take no memory
static constexpr size_t region_bytes = 64u << 20;

slab_maps::slab_maps(size_t n_bytes) : fd(-1), size(n_bytes), n_region(std::max<size_t>(1, region_bytes/std::max<size_t>(1, n_bytes))) {}

slab_maps::slab_maps(const std::string & path, size_t n_bytes) : fd(create(path)), size(n_bytes), n_region(n_region_of_file) {
    if (unlink(path.c_str()) < 0) {
        const std::string why = strerror(errno);
        close(fd);
        throw std::runtime_error(why);
    }
}

slab_maps::~slab_maps() {
    clear();
    if (has_file()) {
        close(fd);
    }
}

uint8_t * slab_maps::take() {
    if (!free_slabs.empty()) {
        uint8_t * slab = free_slabs.back();
        free_slabs.pop_back();
        return slab;
    }
    if (n_slab/n_region == (int64_t) regions.size()) {
        regions.reserve(regions.size() + 1);

        // the map may extend past the end of the file; the file grows later
        void * p = mmap(nullptr, n_region*size, PROT_READ | PROT_WRITE, has_file() ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd,
                has_file() ? n_slab*size : 0);
        if (p == MAP_FAILED) {
            throw has_file() ? out_of_space(std::string("no room for the archive in the address space: ") + strerror(errno)) : no_memory(size);
        }
#if defined(MADV_HUGEPAGE)
        if (!has_file()) {
            // a step reads clusters that are far apart. With small pages, translating their addresses would take longer
            // than reading them
            madvise(p, n_region*size, MADV_HUGEPAGE);
        }
#endif
        if (has_file()) {
            // a step reads a few scattered pages. Reading ahead would push other pages out of memory
            posix_madvise(p, n_region*size, POSIX_MADV_RANDOM);
        }
        regions.push_back((uint8_t *) p);
    }
    if (has_file()) {
        if (const int error = grow(fd, n_slab*size, size)) {
            throw out_of_space(std::string("no room for the archive on the disk: ") + strerror(error));
        }
    }

    return regions.back() + (n_slab++ % n_region)*size;
}

void slab_maps::give_back(uint8_t * slab) {
#if defined(__linux__)
    madvise(slab, size, MADV_DONTNEED);
#else
    madvise(slab, size, MADV_FREE);
#endif
    free_slabs.push_back(slab);
}

void slab_maps::clear() {
    for (uint8_t * region : regions) {
        munmap(region, n_region*size);
    }
    regions.clear();
    free_slabs.clear();
    n_slab = 0;

    if (has_file() && ftruncate(fd, 0) < 0) {
        GGML_LOG_WARN("cannot empty the archive's file: %s\n", strerror(errno));
    }
}

#endif

//
// class store
//

store::~store() {
    clear();
}

void store::make(size_t n_bytes) {
    // round the size of a slab up to whole pages of the operating system
    const size_t n_page = page_bytes();

    size = (n_bytes + n_page - 1)/n_page*n_page;
    maps = std::make_unique<slab_maps>(size);
}

void store::open(const std::string & path) {
    maps = std::make_unique<slab_maps>(path, size);
}

void store::reserve(int64_t begin, int64_t end) {
    const int64_t n = n_slab(begin, end);

    spares.reserve(std::max<int64_t>(spares.size() + slabs.size(), n));
    while ((int64_t) (slabs.size() + spares.size()) < n) {
        spares.push_back(maps->take());
    }
}

void store::fit(int64_t begin, int64_t end) {
    const int64_t n_old = slabs.size();
    const int64_t i_new = begin/n_block; // index of the first slab
    const int64_t n     = n_slab(begin, end);

    if (i_new == first && n == n_old) {
        return;
    }

    std::vector<uint8_t *> fitting(n);

    reserve(begin, end);

    // the code below cannot fail, so the slabs change only if there is enough memory
    for (int64_t i = first; i < first + n_old; ++i) {
        if (i >= i_new && i < i_new + n) {
            fitting[i - i_new] = slabs[i - first];
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
    first = i_new;
}

void store::trim() {
    if (has_file()) {
        return;
    }
    while (!spares.empty()) {
        // remove it first: if give_back throws, the slab must not be in two lists
        uint8_t * slab = spares.back();
        spares.pop_back();
        maps->give_back(slab);
    }
}

void store::clear() {
    if (maps) {
        maps->clear();
    }
    slabs .clear();
    spares.clear();
}

} // namespace kvtool
